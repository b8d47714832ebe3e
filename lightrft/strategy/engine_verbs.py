"""The verbs of the engine on the same devices: who wakes it, with whose weights, and when it sleeps."""

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
    """A part of StrategyBase. Ranks that share an engine call every verb together."""

    seed: int

    def __init__(self) -> None:
        super().__init__()
        self._host: EngineHost | None = None
        self._engine_actor: nn.Module | None = None
        self._kept_awake = 0
        self._calls = 0
        """How often samples were drawn without a seed of the caller's."""
        self.engine_clock: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        """Called around `wake`, `weight_sync` and `sleep`, such as Trace.phase; nothing is measured without one."""

    @property
    def engine(self) -> Engine:
        return self._engine_host().engine

    @property
    def engine_name(self) -> str:
        """hf, vllm, ...; none until an engine exists."""
        return self._host.name if self._host else "none"

    @property
    def weight_version(self) -> int:
        """Of the engine's weights: one more with each stream, unless engine_lags() took it back; 0 without an engine."""
        return self._host.engine.version if self._host else 0

    @property
    def engine_memory(self) -> dict[str, float]:
        """What the engine's last sleep gave back, as metrics in 1e9 bytes; empty where it does not sleep."""
        return self._host.memory if self._host else {}

    @property
    def engine_status(self) -> EngineStatus:
        """SLEEPED until an engine exists."""
        return self._host.status if self._host else EngineStatus.SLEEPED

    def setup_inference_engine(
        self, args: Arguments = None, engine_type: str | None = None, actor: nn.Module | None = None
    ) -> Engine:
        """Build the engine. With an actor it gets those weights and sleeps, if it may; else it stays awake with --pretrain's.

        The actor is remembered: it refills an engine whose sleep dropped the weights. An engine without one keeps them.
        """
        config = self.config if args is None else StrategyConfig.from_args(args)
        config = replace(config, engine_type=engine_type or config.engine_type)
        config.check()
        with self._emptied_device():  # vLLM and SGLang take their share of what is free when they start
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
        """The engine ready to generate with the newest weights of `actor`; asleep again afterwards if it may sleep.

        See wakeup_inference_engine(), which it calls first, and maybe_sleep_inference_engine(), which it calls last.
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

        Without an actor the engine keeps its weights, and takes those of the actor it was set up with if it has none. Cached
        memory is freed first; an engine that is awake stays awake.
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
        self.enter(Phase.GENERATE)  # the actor's place is for the cache
        with self.engine_clock("wake"):
            host.engine.wake("kv_cache")

    def maybe_sleep_inference_engine(self) -> None:
        """The engine's phases end, and it sleeps if --enable_engine_sleep."""
        with self.engine_clock("sleep"):
            self._engine_host().sleep(keep_weights=self._engine_actor is None)
        self._phases.leave_engine()

    def update_engine_weights(self, actor: nn.Module) -> None:
        """Stream the actor's weights into the engine under the next version; what was cached with the old ones is dropped."""
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
        """Return `n` completions of each of this rank's own prompts, in order; numbers of prompts may differ, also be 0.

        Prompts are token ids, or text, or `requests`, each with its media and its own sampling. Of ids and text together, text is
        read where there are media, else the ids. Both have one placeholder for each image. Images come in a list for each prompt
        (None: it has none), or flat with the number of each prompt in `images_num`; so do videos (arrays [T, H, W, 3], lists of
        PIL images) and clips of sound (paths of .wav files, (waveform, sampling rate)). A prompt without images loses its
        placeholders. Ranks may have images or not: each prompt carries its own to whatever engine answers it.
        Ranks that share an engine gather their prompts. The seed is equal on all ranks; replicas draw differently. With a
        dictionary as `sampling_params`, which draws anew in every call unless it has a seed, results are those of
        engine_generate_local().
        An engine that sleeps is woken. With `sleep_engine` it sleeps afterwards, if it may, but not inside engine_awake().
        With `as_completed` this returns an iterator over (index, completions) of the prompts, each as soon as it is complete,
        which has to be read to its end on all ranks; the engine stays awake.
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
        """One EasyDict for each sample, a prompt's samples side by side. Ranks that share an engine pass the same prompts.

        They come in one of two ways: as token ids, or as `{"prompt": text, "multi_modal_data": {"image": [image]}}`, where
        `prompt_token_ids` may stand instead of `prompt`, and `video` and `audio` beside `image`. Ids that are given back are
        those that were given: unexpanded.
        """
        requests = self._reader().local_requests(prompt_token_ids, multi_modal_inputs)
        return as_dicts(requests, self._engine_host().generate(self._sampling(sampling_params), requests))

    def engine_lags(self, version: int | None = None) -> None:
        """The actor's weights have changed behind the engine's back: it needs a new stream, and has had `version` of them."""
        if self._host is not None and self._engine_actor is not None:
            self._host.engine.weights_valid = False
            self._host.engine.version = self._host.engine.version if version is None else version

    def close_engine(self) -> None:
        """Also when there is none."""
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
