"""Strategies with the verbs and call forms of LightRFT, OpenRLHF, NeMo-RL and verl.

The core calls `Strategy` and the parts only. Users call and override the verbs of `StrategyBase`;
a part calls an overridden verb too, so one override changes every run.
"""

import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cache, wraps
from inspect import getattr_static
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from easydict import EasyDict
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightrft.compat.sampling import sampling_from_dict
from lightrft.config.errors import ConfigError
from lightrft.config.resolve import Arguments, as_config, check_strategy
from lightrft.config.sections import OptimSection
from lightrft.engine.base import Engine
from lightrft.engine.requests import Request, Sampling
from lightrft.launch.rendezvous import adopt_node_size
from lightrft.parallel.collectives import all_gather
from lightrft.parallel.device import current_device, release_cached_memory, synchronize
from lightrft.parallel.mesh import world_axis
from lightrft.strategy.checkpoints import Checkpoints, Trained
from lightrft.strategy.dataloader import ResumableBatchSampler
from lightrft.strategy.device_memory import DeviceMemory
from lightrft.strategy.engine_host import EngineHost
from lightrft.strategy.fsdp import FSDP2
from lightrft.strategy.prompt_reader import PromptReader
from lightrft.strategy.strategy import Strategy
from lightrft.types import Completion

NOT_NEEDED = {
    "sp_data_processor": (
        "roles divide the rows of all ranks themselves, so each rank passes its own"
    ),
    "genlen_analyser": "rollout/response_length and samples.jsonl have the lengths of responses",
}
"""Objects of LightRFT's strategies -> what does their work here."""
_ACTORS: WeakSet[nn.Module] = WeakSet()


def replaces(part: str, method: str) -> Callable[[Any], Any]:
    """Mark a verb: where a subclass overrides it, the part calls the override as `method`."""

    def mark(verb: Any) -> Any:
        verb.replaces = part, method
        return verb

    return mark


def verb(part: str, method: Callable) -> Callable:
    """Return a method of a strategy that calls `method` of a part."""

    @wraps(method)
    def call(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        return method(getattr(self, part), *args, **kwargs)

    return replaces(part, method.__name__)(call)


def reads(part: str, attribute: str) -> Any:
    """Return a property of a strategy that reads an attribute of a part."""
    return property(lambda self: getattr(getattr(self, part), attribute))


class StrategyBase(Strategy):
    """A strategy with every verb that users and other tools call. Users subclass it.

    A verb that differs from the core only in the name has the core's docstring.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

        for name, own in vars(StrategyBase).items():
            replaced = getattr(own, "replaces", None)
            if replaced is not None and getattr_static(type(self), name) is not own:
                part, method = replaced
                setattr(getattr(self, part), method, getattr(self, name))

    def __getattr__(self, name: str) -> Any:
        """Say what does the work of an object that LightRFT's strategies have."""
        if name in NOT_NEEDED:
            raise AttributeError(f"a strategy has no {name}: {NOT_NEEDED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- processes

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        """Bind the device, join or create the process group, build the mesh, and seed.

        `num_gpu_per_node`, the same on all nodes, assigns devices to ranks if the launcher does not
        (no LOCAL_RANK). Raises ValueError for settings that cannot run, and RuntimeError for an
        environment that no launcher has set up.
        """
        if num_gpu_per_node is not None:
            adopt_node_size(os.environ, num_gpu_per_node)
        super().setup_distributed(timeout)

    @property
    def engine_mp_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share an engine; None if each rank has its own."""
        return self.host.axis_of(self.config.engine).group

    @property
    def engine_dp_group(self) -> dist.ProcessGroup | None:
        """Return the group of this rank's equals in all engines; None if there is one engine."""
        return self.mesh.engine_replicas(self.host.axis_of(self.config.engine).size).group

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that divide a sequence; None if none do."""
        return self.mesh.sp.group

    def all_gather(self, data: Any) -> Any:
        """Gather from all data ranks, in order; everything is sent through the host.

        Tensors are concatenated along the first dim (0-dim ones too), numbers are listed, dicts are
        gathered by key. First dims may differ between ranks. Meant for metrics and plans.
        """
        return all_gather(data, self._data)

    # -- data

    def setup_dataloader(
        self,
        dataset: Dataset | None = None,
        batch_size: int = 1,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list], Any] | None = None,
        drop_last: bool = True,
        sampler: Collection[int] | None = None,
        consumed_samples: int = 0,
        *,
        replay_buffer: Dataset | None = None,
    ) -> DataLoader:
        """Build a data loader with batches of `batch_size` rows **per data rank**.

        The rows are reshuffled every epoch. `consumed_samples` counts rows of all ranks since the
        start of training: the first iteration continues there. A batch is a list of rows, or the
        result of `collate_fn` on it. Without drop_last the last list may be shorter, or empty, on
        some ranks, but all ranks have the same number of batches.

        A custom `sampler`, identical on all ranks, replaces `shuffle`: each time it is iterated it
        yields the row indices of an epoch in order, to be divided among the ranks. `replay_buffer`
        is another name of `dataset`.
        """
        if (dataset is None) == (replay_buffer is None):
            raise TypeError("setup_dataloader() takes a dataset, also called replay_buffer")

        dataset = replay_buffer if dataset is None else dataset
        batches = ResumableBatchSampler(
            dataset,
            batch_size,
            self.mesh.data,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self.seed,
            consumed_samples=consumed_samples,
            rows=sampler,
        )

        return DataLoader(
            dataset, batch_sampler=batches, collate_fn=collate_fn or list, pin_memory=pin_memory
        )

    # -- models

    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Distribute modules in place.

        Each argument is a module, (module, optimizer), (module, optimizer, scheduler) or None.
        Returns its arguments: a single one as itself, several as a tuple. An optimizer stays the
        same object, and trains the distributed parameters. With `is_rlhf` the first module that has
        an optimizer becomes the actor, see is_actor().
        """
        prepared = super().prepare(*models_or_pairs)
        if is_rlhf:
            pairs = [item for item in models_or_pairs if isinstance(item, tuple | list)]
            trained = [pair[0] for pair in pairs if None not in pair[:2]]
            _ACTORS.update(trained[:1])
        return prepared

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: Any,
        initial_model: nn.Module | None,
        args: Arguments,
        max_steps: int,
    ) -> tuple[Trained, Trained, Any, nn.Module | None]:
        """Prepare all roles of a run, with optimizers and schedules over `max_steps` steps.

        `args` has the settings of the optimizers. `reward_models` is one frozen module, a list of
        them, or None. Returns (actor, optimizer, scheduler), the same for the critic (three times
        None without one), the reward models and the initial model as they were given.
        """
        optim = as_config(args).optim
        roles = ((actor, optim.learning_rate), (critic, optim.critic_learning_rate))
        trained = [self._with_optimizer(model, rate, optim, max_steps) for model, rate in roles]

        several = isinstance(reward_models, list | tuple)
        frozen = [*(reward_models if several else [reward_models]), initial_model]
        self.prepare(*trained, *frozen, is_rlhf=True)

        return *trained, reward_models, initial_model

    def prepare_reward_model(self, model: nn.Module, args: Arguments, max_steps: int) -> Trained:
        """Prepare a reward model for training, with an optimizer of --learning_rate."""
        optim = as_config(args).optim
        return self.prepare(self._with_optimizer(model, optim.learning_rate, optim, max_steps))

    def _with_optimizer(
        self, model: nn.Module | None, rate: float, optim: OptimSection, max_steps: int
    ) -> Trained:
        if model is None:
            return None, None, None

        optimizer = self.create_optimizer(model, rate, optim.adam_betas, optim.l2)
        warmup = round(optim.lr_warmup_ratio * max_steps)
        scheduler = self.create_scheduler(optimizer, optim.lr_scheduler, warmup, max_steps)
        return model, optimizer, scheduler

    # -- device memory

    enter = verb("memory", DeviceMemory.enter)
    offload_model = verb("memory", DeviceMemory.offload_model)
    reload_model = verb("memory", DeviceMemory.reload_model)
    maybe_offload_optimizer = verb("memory", DeviceMemory.offload_optimizer)

    phase = reads("memory", "phase")

    @replaces("memory", "reload_optimizer")
    def maybe_load_optimizer(
        self, optimizer: Optimizer, device: torch.device | int | str | None = None
    ) -> None:
        """Move an optimizer back to the device, bit-identical, if it is offloaded.

        `device` is accepted for code of LightRFT: an optimizer returns to the device of this rank.
        """
        DeviceMemory.reload_optimizer(self.memory, optimizer)

    @replaces("memory", "clear_cache")
    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Wait until the device is done and all ranks are here, then release cached memory."""
        device = current_device()
        synchronize(device)
        world_axis().barrier()
        release_cached_memory(device)

    @replaces("memory", "report")
    @classmethod
    def report_memory(cls, prefix: str = "") -> dict[str, float]:
        """Return the memory in use and the peak in GB, of the accelerator or of this process.

        Rank 0 also logs its own. Other ranks need not call this.
        """
        return DeviceMemory.report(prefix)

    # -- checkpoints and Hugging Face folders

    save_ckpt = verb("checkpoints", Checkpoints.save)
    load_ckpt = verb("checkpoints", Checkpoints.load)
    finish_ckpt = verb("checkpoints", Checkpoints.finish)
    close_checkpoints = verb("checkpoints", Checkpoints.close)
    save_model = verb("checkpoints", Checkpoints.save_model)
    save_adapter = verb("checkpoints", Checkpoints.save_adapter)
    rehearse_save = verb("checkpoints", Checkpoints.rehearse_save)

    # -- engine

    @replaces("host", "start")
    def setup_inference_engine(
        self,
        args: Arguments = None,
        engine_type: str | None = None,
        actor: nn.Module | None = None,
        *,
        draft: nn.Module | None = None,
    ) -> Engine:
        """Build the engine of `args`, or of the strategy's configuration.

        With an actor it receives the actor's weights and sleeps, if it may. The actor is
        remembered, because an engine may drop the weights while it sleeps. Without an actor the
        engine has the weights of --pretrain and stays awake. `draft` is the trained model of
        --speculative draft; each stream contains it too.
        """
        config = self.config if args is None else as_config(args)
        check_strategy(config)
        return EngineHost.start(self.host, config, engine_type, actor, draft=draft)

    engine_awake = verb("host", EngineHost.awake)
    wakeup_inference_engine = verb("host", EngineHost.wake)
    maybe_sleep_inference_engine = verb("host", EngineHost.sleep)
    update_engine_weights = verb("host", EngineHost.update_weights)
    engine_lags = verb("host", EngineHost.invalidate_weights)
    open_generation = verb("host", EngineHost.open)
    serve_engine = verb("host", EngineHost.serve)
    close_engine = verb("host", EngineHost.close)

    engine = reads("host", "engine")

    @property
    def inference_engine(self) -> Engine | None:
        """Return the engine on this rank; None until setup_inference_engine()."""
        return self.host.engine if self.host.is_started else None

    engine_name = reads("host", "name")
    """hf, vllm, ...; "none" until an engine exists."""
    inference_engine_type = reads("host", "name")
    engine_status = reads("host", "status")
    """WAKEUP if the engine can generate; SLEEPED if not, or without an engine."""
    inference_engine_status = reads("host", "status")
    weight_version = reads("host", "version")
    """Version of the engine's weights; 0 without an engine."""
    engine_memory = reads("host", "sleep_memory")
    """Metrics of the memory occupied before and after the engine's last sleep."""

    def gather_and_generate(
        self,
        sampling_params: Sampling | Mapping[str, Any],
        all_prompt_token_ids: list[list[int]] | None = None,
        all_prompts: list[str] | None = None,
        all_images: list | None = None,
        sleep_engine: bool = True,
        images_num: list[int] | None = None,
        all_videos: list | None = None,
        videos_num: list[int] | None = None,
        *,
        all_audios: list | None = None,
        audios_num: list[int] | None = None,
        requests: list[Request] | None = None,
    ) -> list[list[Completion]] | list[EasyDict]:
        """Return `n` completions of each of this rank's prompts, in order.

        The number of prompts may differ by rank and may be 0. Prompts are token ids, text, or
        `requests`, each with its media and its own sampling. If both ids and text are given, the
        text is used if there are media, else the ids. Both have one placeholder for each image.

        Images are one list for each prompt (None: no images), or a flat list with the number of
        images of each prompt in `images_num`; so are videos (arrays [T, H, W, 3], lists of PIL
        images) and audio clips (paths of .wav files, (waveform, sampling rate)). Placeholders of a
        prompt without images are removed. Some ranks may have images and others none.

        Ranks that share an engine gather their prompts. The seed must be equal on all ranks;
        replicas derive different ones from it. With a dictionary as `sampling_params` results have
        the form of engine_generate_local(), and samples differ from call to call unless the
        dictionary has a seed.

        A sleeping engine is woken. With `sleep_engine` it sleeps afterwards, if it may, but not
        inside engine_awake().
        """
        media = {
            "images": (all_images, images_num),
            "videos": (all_videos, videos_num),
            "audios": (all_audios, audios_num),
        }
        sampling = self._sampling(sampling_params)
        if requests is None:
            requests = self._reader().requests(all_prompt_token_ids, all_prompts, media)
        completions = self.host.generate(sampling, requests, sleep_after=sleep_engine)

        if isinstance(sampling_params, Sampling):
            return completions
        return _as_dicts(requests, completions)

    def engine_generate_local(
        self,
        sampling_params: Sampling | Mapping[str, Any],
        prompt_token_ids: list[list[int]] | None = None,
        multi_modal_inputs: list[dict[str, Any]] | None = None,
    ) -> list[EasyDict]:
        """Return one EasyDict per sample; the samples of a prompt are adjacent.

        The engine must be awake, and ranks that share an engine pass the same prompts. Prompts are
        either token ids or `{"prompt": text, "multi_modal_data": {"image": [image]}}`; these may
        have `prompt_token_ids` instead of `prompt`, and `video` and `audio` in addition to `image`.
        The prompt's ids in the result are as passed, without expanded placeholders.
        """
        requests = self._reader().local_requests(prompt_token_ids, multi_modal_inputs)
        sampling = self.host.replica_sampling(self._sampling(sampling_params))
        return _as_dicts(requests, self.host.engine.generate(requests, sampling))

    _calls = 0
    """Number of generation calls with a dictionary of parameters; default seeds derive from it."""

    def _sampling(self, parameters: Sampling | Mapping[str, Any]) -> Sampling:
        if isinstance(parameters, Sampling):
            return parameters
        self._calls += 1
        return sampling_from_dict(parameters, seed=self.seed * 1_000_003 + self._calls)

    def _reader(self) -> PromptReader:
        special_tokens = not self.config.data.apply_chat_template
        return PromptReader(self.host.engine.vocabulary, special_tokens=special_tokens)


class FSDPStrategy(StrategyBase, FSDP2):
    """FSDP2, with every verb."""


def __getattr__(name: str) -> Any:
    """Import DeepSpeed only when DeepSpeedStrategy is accessed."""
    if name == "DeepSpeedStrategy":
        return _deepspeed_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _deepspeed_strategy() -> type[StrategyBase]:
    try:
        from lightrft.strategy.deepspeed import ZeRO
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ConfigError(
            "--strategy deepspeed: DeepSpeed is not installed: `pip install deepspeed`, or shard"
            " with FSDP2: --fsdp"
        ) from None
    return _with_every_verb(ZeRO)


@cache
def _with_every_verb(zero: type[Strategy]) -> type[StrategyBase]:
    about = {"__module__": __name__, "__doc__": "ZeRO of DeepSpeed, with every verb."}
    return type("DeepSpeedStrategy", (StrategyBase, zero), about)


def is_actor(model: nn.Module) -> bool:
    """Return True for a run's policy.

    prepare(is_rlhf=True) and prepare_models_and_optimizers() say which model that is.
    """
    return model in _ACTORS


def _as_dicts(requests: list[Request], completions: list[list[Completion]]) -> list[EasyDict]:
    """Return one dictionary for each sample; the samples of a prompt are adjacent."""
    return [
        EasyDict(
            prompt_token_ids=list(request.token_ids),
            output_token_ids=sample.token_ids,
            output_logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            weight_version=sample.weight_version,
        )
        for request, samples in zip(requests, completions, strict=True)
        for sample in samples
    ]
