"""Verbs of the engine on the same devices: setup, waking, weight updates, generation and sleep."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from easydict import EasyDict
from torch import nn

from lightrft.backends.config import Arguments, StrategyConfig
from lightrft.engine.base import Engine, Request, Sampling
from lightrft.strategy.compatible_names import sampling_of
from lightrft.strategy.engine_host import EngineHost, EngineStatus, as_dicts
from lightrft.strategy.model_verbs import ModelVerbs
from lightrft.strategy.phases import Phase
from lightrft.strategy.prompt_reader import PromptReader
from lightrft.types import Completion


class EngineVerbs(ModelVerbs):
    """Part of StrategyBase with the verbs of the engine. Ranks that share an engine call every verb together."""

    seed: int

    def __init__(self) -> None:
        super().__init__()
        self._host: EngineHost | None = None
        self._engine_actor: nn.Module | None = None
        self._kept_awake = 0
        self._calls = 0
        """Number of generation calls for which the caller gave a dictionary of parameters; the default seeds derive from it."""
        self.engine_clock: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        """Context manager around `wake`, `weight_sync` and `sleep`, such as Trace.phase; the default measures nothing."""

    @property
    def engine(self) -> Engine:
        return self._engine_host().engine

    @property
    def engine_name(self) -> str:
        """Return hf, vllm, ...; "none" until an engine exists."""
        return self._host.name if self._host else "none"

    @property
    def weight_version(self) -> int:
        """Return the version of the engine's weights; 0 without an engine.

        It grows by one with each stream; engine_lags() may set it back.
        """
        return self._host.engine.version if self._host else 0

    @property
    def engine_memory(self) -> dict[str, float]:
        """Return metrics of occupied memory before and after the engine's last sleep, in 1e9 bytes; empty if it never slept."""
        return self._host.memory if self._host else {}

    @property
    def engine_status(self) -> EngineStatus:
        """Return WAKEUP if the engine can generate; SLEEPED otherwise, and until an engine exists."""
        return self._host.status if self._host else EngineStatus.SLEEPED

    def setup_inference_engine(
        self, args: Arguments = None, engine_type: str | None = None, actor: nn.Module | None = None
    ) -> Engine:
        """Build the engine. With an actor it receives its weights and sleeps, if allowed; else it stays awake with --pretrain's.

        The actor is remembered: its weights refill an engine that dropped its own when it slept. Without an actor the engine
        keeps its weights while it sleeps.
        """
        config = self.config if args is None else StrategyConfig.from_args(args)
        config = replace(config, engine_type=engine_type or config.engine_type)
        config.check()
        with self._emptied_device():  # vLLM and SGLang reserve a share of free memory at start
            self._host = EngineHost.build(config, mesh=self.mesh, dtype=self.dtype, device=self.device, seed=self.seed,
                                          from_stream=actor is not None)
        if actor is None:
            self.wakeup_inference_engine()
        else:
            self.update_engine_weights(actor)
            self.maybe_sleep_inference_engine()
        return self.engine

    @contextmanager
    def engine_awake(self, actor: nn.Module | None = None) -> Iterator[Engine]:
        """Wake the engine with the newest weights of `actor` for the duration of the context; afterwards it sleeps, if allowed.

        See wakeup_inference_engine(), which is called first, and maybe_sleep_inference_engine(), which is called last.
        """
        self.wakeup_inference_engine(actor)
        self._kept_awake += 1
        try:
            yield self.engine
        finally:
            self._kept_awake -= 1
            self.maybe_sleep_inference_engine()

    def wakeup_inference_engine(self, actor: nn.Module | None = None) -> None:
        """Wake the weights, stream the newest ones of `actor` in by update_engine_weights(), then wake the cache.

        Without an actor the engine keeps its weights; if they are not valid, it receives those of the actor it last received
        weights from. Cached memory is freed first. An engine that is already awake stays awake.
        """
        host = self._engine_host()
        self._engine_actor = actor if actor is not None else self._engine_actor
        source = actor if host.engine.weights_valid else self._engine_actor
        if source is None:
            self.enter(Phase.REFIT)
            with self.engine_clock("wake"):
                host.wake_weights()
        else:
            self.update_engine_weights(source)
        self.enter(Phase.GENERATE)  # with --offload_idle this frees the actor's memory for the cache
        with self.engine_clock("wake"):
            host.engine.wake("kv_cache")

    def maybe_sleep_inference_engine(self) -> None:
        """End the engine's phases, and put it to sleep with --enable_engine_sleep."""
        with self.engine_clock("sleep"):
            self._engine_host().sleep(keep_weights=self._engine_actor is None)
        self._phases.leave_engine()

    def update_engine_weights(self, actor: nn.Module) -> None:
        """Stream the actor's weights into the engine under the next version; caches computed with the old ones are dropped."""
        host, self._engine_actor = self._engine_host(), actor
        self.enter(Phase.REFIT, actor)
        with self.engine_clock("wake"):
            host.wake_weights()
        with self.engine_clock("weight_sync"):
            host.update_weights(lambda: self.full_params(actor))
            self.sync_and_clear_cache()
        if host.status is EngineStatus.WAKEUP:
            self.enter(Phase.GENERATE)

    def gather_and_generate(
        self, sampling_params: Sampling | Mapping[str, Any], all_prompt_token_ids: list[list[int]] | None = None,
        all_prompts: list[str] | None = None, all_images: list | None = None, sleep_engine: bool = True,
        images_num: list[int] | None = None, all_videos: list | None = None, videos_num: list[int] | None = None, *,
        all_audios: list | None = None, audios_num: list[int] | None = None,
        requests: list[Request] | None = None, as_completed: bool = False,
    ) -> list[list[Completion]] | list[EasyDict] | Iterator[tuple[int, list[Completion]]]:  # fmt: skip
        """Return `n` completions of each of this rank's prompts, in order. The number of prompts may differ by rank and may be 0.

        Prompts are token ids, text, or `requests`, each with its media and its own sampling. If both ids and text are given, the
        text is used if there are media, else the ids. Both have one placeholder for each image. Images are one list for each
        prompt (None: no images), or a flat list with the number of images of each prompt in `images_num`; so are videos (arrays
        [T, H, W, 3], lists of PIL images) and audio clips (paths of .wav files, (waveform, sampling rate)). Placeholders of a
        prompt without images are removed. Some ranks may have images and others none.

        Ranks that share an engine gather their prompts. The seed must be equal on all ranks; replicas derive different ones from
        it. With a dictionary as `sampling_params` results have the form of engine_generate_local(), and samples differ from call
        to call unless the dictionary has a seed.

        A sleeping engine is woken. With `sleep_engine` it sleeps afterwards, if allowed, but not inside engine_awake().
        With `as_completed` this returns an iterator over (index, completions) of the prompts, each as soon as it is complete,
        which must be read to its end on all ranks; the engine stays awake.
        """
        media = {"images": (all_images, images_num), "videos": (all_videos, videos_num), "audios": (all_audios, audios_num)}
        sampling = self._sampling(sampling_params)
        if requests is None:
            requests = self._reader().requests(all_prompt_token_ids, all_prompts, media)
        if self.engine_status is EngineStatus.SLEEPED:
            self.wakeup_inference_engine()
        finished = self._engine_host().stream(sampling, requests)
        if as_completed:
            return finished
        found = dict(finished)
        completions = [found[index] for index in range(len(requests))]
        if sleep_engine and not self._kept_awake:
            self.maybe_sleep_inference_engine()
        return completions if isinstance(sampling_params, Sampling) else as_dicts(requests, completions)

    def engine_generate_local(
        self, sampling_params: Sampling | Mapping[str, Any], prompt_token_ids: list[list[int]] | None = None,
        multi_modal_inputs: list[dict[str, Any]] | None = None,
    ) -> list[EasyDict]:  # fmt: skip
        """Return one EasyDict per sample; a prompt's samples are adjacent. Ranks that share an engine pass the same prompts.

        Prompts are either token ids or `{"prompt": text, "multi_modal_data": {"image": [image]}}`, which may have
        `prompt_token_ids` instead of `prompt`, and `video` and `audio` in addition to `image`. The prompt's ids in the result are
        those that were passed, without expanded placeholders.
        """
        requests = self._reader().local_requests(prompt_token_ids, multi_modal_inputs)
        return as_dicts(requests, self._engine_host().generate(self._sampling(sampling_params), requests))

    def engine_lags(self, version: int | None = None) -> None:
        """Mark the weights of an engine that has an actor as outdated, so that it needs a new stream.

        `version`, if given, becomes the version of the weights.
        """
        if self._host is not None and self._engine_actor is not None:
            self._host.engine.weights_valid = False
            self._host.engine.version = self._host.engine.version if version is None else version

    def close_engine(self) -> None:
        """Close the engine, if there is one."""
        host, self._host, self._engine_actor = self._host, None, None
        if host is not None:
            host.engine.close()

    def _sampling(self, parameters: Sampling | Mapping[str, Any]) -> Sampling:
        if isinstance(parameters, Sampling):
            return parameters
        self._calls += 1
        return sampling_of(parameters, seed=self.seed * 1_000_003 + self._calls)

    def _reader(self) -> PromptReader:
        return PromptReader(self._engine_host().engine.vocabulary, special_tokens=not self.config.apply_chat_template)

    def _engine_host(self) -> EngineHost:
        if self._host is None:
            raise RuntimeError("there is no engine: call setup_inference_engine() first")
        return self._host
