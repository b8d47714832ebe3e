"""Public interface of a strategy, which distributes a run: every verb of it.

Users subclass it, backends implement its hooks.

A strategy has a mesh, a watchdog, the device's phases and memory, checkpoints, and the host of an
engine. Its verbs combine them, and call one another where overriding one must change the others.
"""

import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from easydict import EasyDict
from loguru import logger
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from lightrft.backends import reduce
from lightrft.backends.base import Backend
from lightrft.backends.dropout import draw_by_data_rank
from lightrft.backends.optim import create_adamw, create_lr_scheduler, parameter_names
from lightrft.batching.sample_store import MemoryStore, SampleStore
from lightrft.checkpoint.hf_export import export, export_adapter, rehearse
from lightrft.checkpoint.hf_parameters import persistent_buffers, unwrap
from lightrft.checkpoint.manager import RetentionPolicy
from lightrft.config.resolve import Arguments, as_config, check_strategy
from lightrft.config.sections import EngineSection, OptimSection, longest_sequence, sequence_layout
from lightrft.data.loader import Order
from lightrft.engine.base import Engine, EngineError
from lightrft.engine.build import build_engine, connect_engine
from lightrft.engine.loop import RequestLoop
from lightrft.engine.remote.server import EngineServer
from lightrft.engine.remote.wire import PRETRAIN
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.engine.sampling_parameters import sampling_from_dict
from lightrft.launch.heartbeat import MARGIN, SingleRankWatchdog, Watchdog
from lightrft.launch.rendezvous import adopt_node_size, join_process_group
from lightrft.models.lora import merge_adapters
from lightrft.observe.trace import Untraced
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import (
    GB,
    current_device,
    host_cores,
    memory_in_use,
    peak_memory,
    select_device,
)
from lightrft.parallel.mesh import Mesh, world_axis
from lightrft.parallel.processes import RunProcesses
from lightrft.strategy.checkpoints import NOTHING, Checkpoints, Trained, hf_folder, next_tag
from lightrft.strategy.dataloader import ResumableBatchSampler
from lightrft.strategy.device_memory import DeviceMemory, sync_and_clear_cache
from lightrft.strategy.engine_host import EngineHost, EngineStatus, as_dicts
from lightrft.strategy.phases import Phase, Phases
from lightrft.strategy.prompt_reader import PromptReader
from lightrft.strategy.shared_session import SharedSession
from lightrft.types import Completion
from lightrft.versions import TENSOR_PARALLEL, untested_versions
from lightrft.weight_sync.names import DRAFT

Models = nn.Module | Mapping[str, Any]
"""One model, or several by name: {"actor": (actor, optimizer, scheduler), "ema": ema}, each as
prepare() takes it."""
_ACTORS: WeakSet[nn.Module] = WeakSet()


NOT_NEEDED = {
    "sp_data_processor": (
        "roles divide the rows of all ranks themselves, so each rank passes its own"
    ),
    "genlen_analyser": "rollout/response_length and samples.jsonl have the lengths of responses",
}
"""Objects of LightRFT's strategies -> what does their work here."""


class StrategyBase(Backend):
    """Verbs of distribution.

    All ranks call every verb together, in the same order, unless its docstring states otherwise.

        strategy = get_strategy(args)
        strategy.setup_distributed()
        model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
        strategy.backward(loss, model, optimizer)
        norm = strategy.optimizer_step(optimizer, model, scheduler)
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 1.0,
        micro_train_batch_size: int | None = None,
        train_batch_size: int = 1024,
        args: Arguments = None,
    ):
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.config = as_config(args)
        self.device = current_device()
        self.undivided = set()
        self.skipped_steps = 0
        """Number of optimizer steps skipped because the gradient norm was not finite."""
        self.trace = Untraced()
        """Trace that measures `wake`, `weight_sync` and `sleep` of the engine, such as that of a
        trainer."""
        self._mesh: Mesh | None = None
        self._processes: RunProcesses | None = None
        self._watchdog: Watchdog | SingleRankWatchdog | None = None
        self._phases = Phases()
        self._memory = DeviceMemory(self)
        self._checkpoints = Checkpoints(self, self._memory.reload, self._loaded)
        self._host: EngineHost | None = None
        self._kept_awake = 0
        self._calls = 0
        """Number of generation calls for which the caller gave a dictionary of parameters; the
        default seeds derive from it."""
        self._prepared: dict[nn.Module, Trained] = {}
        """Model -> (model, optimizer, scheduler) as passed to prepare()."""

    # -- processes

    def set_seed(self, seed: int) -> None:
        """Seed Python, numpy, torch and its accelerator equally on all ranks, so that parameters
        are initialised equally.

        Prepared models nevertheless draw different dropout masks on each data rank.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        """Bind the device, join or create the process group, build the mesh, and seed.

        `num_gpu_per_node`, the same on all nodes, assigns devices to ranks if the launcher does not
        (no LOCAL_RANK). Raises ValueError for settings that cannot run, and RuntimeError for an
        environment that no launcher has set up.
        """
        check_strategy(self.config)
        section = self.config.strategy
        if section.deterministic:
            self._phases.begin_deterministic()
        timeout = timeout or timedelta(minutes=section.timeout_minutes)
        if num_gpu_per_node is not None:
            adopt_node_size(os.environ, num_gpu_per_node)
        arrival = timedelta(minutes=section.arrival_minutes)
        self._processes = join_process_group(
            select_device(), timeout, arrival, self.config.rollout.rollout_ranks
        )
        self.device = current_device()

        self._watchdog = Watchdog.start(
            self._processes, timeout, timedelta(minutes=section.phase_minutes)
        )
        sizes = {
            "dp_replicate": section.dp_replicate,
            "sp": sequence_layout(section)[0],
            "tp": section.tp_size,
        }
        self._mesh = Mesh.shared(self.device.type, **sizes, timeout=timeout + MARGIN)
        self.mesh.engine(self._size_of_engine(self.config.engine))
        self._check_batch_sizes()
        self._warn_of_versions()
        self.set_seed(self.seed)

    def close(self) -> None:
        """Close the engine, and the process group if setup_distributed() made it.

        May be called at any time.

        A checkpoint that is being written is finished first; a failure of that is logged.
        """
        self.close_checkpoints()
        self._phases.end_deterministic()
        self._mesh = None
        self._memory.forget()
        self.close_engine()

        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

        if self._processes is not None and self._processes.created:
            dist.destroy_process_group()
        self._processes = None

    def __getattr__(self, name: str) -> Any:
        """Say what to use in place of an object that LightRFT's strategies have and these need
        not.
        """
        if name in NOT_NEEDED:
            raise AttributeError(f"a strategy has no {name}: {NOT_NEEDED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def announce(self, phase: str) -> None:
        """Set the activity of this rank, which is reported if a rank fails, dies or is late; empty
        for none in particular.
        """
        if self._watchdog is not None:
            self._watchdog.enter(phase)

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> None:
        """End the processes of all ranks with this cause, reported briefly or with its traceback.

        Returns if there is one rank.

        An uncaught exception does the same automatically.
        """
        if self._watchdog is not None:
            self._watchdog.fail(error, code=code, brief=brief)

    @property
    def generates_only(self) -> bool:
        """Return True on a rank of --rollout_ranks, which has an engine and no model in
        training.
        """
        return self._processes is not None and self._processes.generates

    @property
    def _generates_elsewhere(self) -> bool:
        return (
            self._processes is not None
            and self._processes.rollout_ranks > 0
            and not self._processes.generates
        )

    def _size_of_engine(self, section: EngineSection) -> int:
        """Return the number of ranks of this world that share an engine."""
        return 1 if self._generates_elsewhere else section.engine_tp_size

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("this needs the mesh: call setup_distributed() first")
        return self._mesh

    @classmethod
    def get_rank(cls) -> int:
        """Return this process's rank; before the process group exists, the launcher's RANK, or
        0.
        """
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))

    @classmethod
    def is_rank_0(cls) -> bool:
        return cls.get_rank() == 0

    @classmethod
    def print(cls, *message: object) -> None:
        """Log on rank 0 only."""
        if cls.is_rank_0():
            logger.opt(depth=1).info("{}", " ".join(str(part) for part in message))

    @classmethod
    def report_memory(cls, prefix: str = "") -> dict[str, float]:
        """Return memory in use and peak memory in GB of this rank's accelerator, or of the process
        on a CPU.

        Rank 0 logs its own. Other ranks need not call it.
        """
        device = current_device()
        memory = {
            "memory/in_use_gb": memory_in_use(device) / GB,
            "memory/peak_gb": peak_memory(device) / GB,
        }
        cls.print(
            f"{prefix} memory:".lstrip(),
            *(f"{name.split('/')[1]} {value:.2f}" for name, value in memory.items()),
        )
        return memory

    # -- collectives

    def all_reduce(self, data: Any, op: reduce.Op = "mean") -> Any:
        """Reduce a number, a tensor, or a flat dict of both over all data ranks; return a new
        object of equal type and device.

        The dtype is kept too, but the mean of integers is a float. Ranks of one data replica hold
        the same values and count once. A dict is reduced in one collective and must have the same
        keys and shapes on all ranks.
        """
        return reduce.all_reduce(data, op, self._data())

    def all_gather(self, data: Any) -> Any:
        """Gather from all data ranks, in order: concatenate tensors along the first dim (0-dim
        too), list numbers, dicts by key.

        First dims may differ between ranks. Intended for metrics and plans: everything is sent
        through the host.
        """
        return reduce.all_gather(data, self._data())

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
        """Build a data loader with batches of `batch_size` rows **per data rank**, reshuffled every
        epoch.

        `consumed_samples` counts rows of all ranks since the start of training: the first iteration
        continues there. A batch is a list of rows, or the result of `collate_fn` on it. Without
        drop_last the last list may be shorter, or empty, on some ranks, but all ranks have the same
        number of batches. A custom `sampler`, identical on all ranks, replaces `shuffle`: each time
        it is iterated it yields the row indices of an epoch in order, which are then divided among
        the ranks. `replay_buffer` is another name of `dataset`.
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

    def data_order(self, num_rows: int) -> Order:
        """Return the order in which a run draws the rows of its data: epoch after epoch, each
        reshuffled by the seed.
        """
        return Order(num_rows, self.seed)

    def sample_store(self) -> SampleStore:
        """Return an empty store for the samples of a step, which all ranks build together."""
        axes = self.mesh.data, self.mesh.model_parallel
        if self.config.strategy.sample_store == "memory":
            return MemoryStore(*axes)
        from lightrft.batching.transfer_queue import TransferQueueStore

        return TransferQueueStore(*axes, self.mesh.world)

    # -- models and optimizers

    def init_model_context(
        self, device: torch.device | str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for making a model that prepare() distributes, so that no rank's host
        memory ever holds it whole.

            with strategy.init_model_context():
                actor = Actor(load_model(config.model))
            actor = strategy.prepare(actor)

        Use it for models whose weights come from a Hugging Face folder. The context has no effect
        in a backend that does not support it, or with a `device` other than meta.
        """
        return nullcontext()

    def create_optimizer(
        self,
        model: nn.Module,
        lr: float,
        betas: Sequence[float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> Optimizer:
        """Build AdamW over the parameters that require a gradient; it may be called before or after
        prepare().
        """
        return create_adamw(model, lr, tuple(betas), weight_decay, eps)

    def create_scheduler(
        self,
        optimizer: Optimizer,
        kind: Literal["cosine", "constant"],
        warmup_steps: int,
        total_steps: int,
    ) -> LRScheduler:
        """Build a schedule: linear warm-up, then a cosine to 10 % of the peak at `total_steps`, or
        constant.
        """
        return create_lr_scheduler(optimizer, kind, warmup_steps, total_steps)

    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Distribute modules in place.

        Each argument is a module, (module, optimizer), (module, optimizer, scheduler) or None.

        Returns its arguments: a single one as itself, several as a tuple. An existing optimizer
        stays the same object and trains the distributed parameters. With `is_rlhf` the first module
        that has an optimizer becomes the actor.
        """
        pairs = [
            (*item, None)[:3] if isinstance(item, tuple | list) else (item, None, None)
            for item in models_or_pairs
        ]
        for module, optimizer, scheduler in pairs:
            if module is not None:
                self._prepare(module, optimizer, scheduler)

        if is_rlhf:
            _ACTORS.update(
                [
                    module
                    for module, optimizer, _ in pairs
                    if module is not None and optimizer is not None
                ][:1]
            )

        return models_or_pairs[0] if len(models_or_pairs) == 1 else models_or_pairs

    def prepare_models_and_optimizers(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_models: Any,
        initial_model: nn.Module | None,
        args: Arguments,
        max_steps: int,
    ) -> tuple[Trained, Trained, Any, nn.Module | None]:
        """Prepare all roles of a run, with optimizers and schedules over `max_steps` optimizer
        steps made from `args`.

        `reward_models` is one frozen module, a list of them, or None. Returns (actor, optimizer,
        scheduler), the same for the critic (three times None without one), the reward models and
        the initial model as they were given.
        """
        optim = as_config(args).optim
        roles = ((actor, optim.learning_rate), (critic, optim.critic_learning_rate))
        trained = [self._with_optimizer(model, rate, optim, max_steps) for model, rate in roles]
        frozen = [
            *(reward_models if isinstance(reward_models, list | tuple) else [reward_models]),
            initial_model,
        ]
        self.prepare(*trained, *frozen, is_rlhf=True)
        return *trained, reward_models, initial_model

    def prepare_reward_model(self, model: nn.Module, args: Arguments, max_steps: int) -> Trained:
        """Prepare a reward model for training, with optimizer and schedule; its rate is
        --learning_rate.
        """
        optim = as_config(args).optim
        return self.prepare(self._with_optimizer(model, optim.learning_rate, optim, max_steps))

    def backward(
        self,
        loss: Tensor,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        last: bool = True,
    ) -> None:
        """Add the gradients of one micro-batch.

        `loss` is this rank's share of the global mean: gradients are summed over ranks and
        micro-batches and never divided. They are summed over all ranks with the `last` micro-batch
        of an optimizer step. All ranks have the same number of micro-batches. A loss that is not
        finite makes the gradients, and thereby the norm on all ranks, not finite: see
        optimizer_step().
        """
        self._memory.check_loaded(model)
        (self._memory.unsummed.discard if last else self._memory.unsummed.add)(model)
        # each of these ranks computes its whole loss
        share = 1 / self.mesh.sp.size if model in self.undivided else 1
        self.accumulate(loss * torch.where(loss.detach().isfinite(), share, torch.nan), model, last)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None = None,
        name: str = "model",
    ) -> Tensor:
        """Clip by one global norm, step, advance the schedule, clear the gradients.

        Returns the norm before clipping: [].

        If the norm or a loss is not finite, all ranks skip the step and the schedule, which is
        counted in `skipped_steps`.
        """
        if model in self._memory.unsummed:
            raise RuntimeError(
                f"optimizer_step({name}) after backward(last=False): gradients were not summed over"
                " the ranks yet"
            )

        self._memory.check_loaded(optimizer, model)
        with (
            host_cores()
            if self.device.type != "cpu" and self.lives_on_host(optimizer)
            else nullcontext()
        ):
            norm = self.take_step(model, optimizer)

        if torch.isfinite(norm):
            if scheduler is not None:
                scheduler.step()
        else:
            self.skipped_steps += 1
            if self.is_rank_0():
                logger.warning(
                    "{}: gradient norm is {}, step skipped ({} so far)",
                    name,
                    norm.item(),
                    self.skipped_steps,
                )

        self.clear_gradients(model)
        return norm

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the Hugging Face model inside a role's wrapper, or the module itself."""
        return unwrap(model)

    def full_params(
        self, model: nn.Module, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the transformers model, full tensor in `dtype`) of every parameter, tied
        ones once, bucket by bucket.

        Adapters are merged into their layers; persistent buffers follow, unchanged. A tensor is
        valid until the next one is requested. dtype None: bfloat16 with --bf16, else float32. An
        offloaded model is loaded back first.
        """
        self.reload_model(model)
        unwrapped = unwrap(model)
        return merge_adapters(
            unwrapped, chain(self.stream(model, dtype or self.dtype), persistent_buffers(unwrapped))
        )

    @torch.no_grad()
    def moving_average(self, model: nn.Module, model_ema: nn.Module, beta: float = 0.992) -> None:
        """Update model_ema <- beta * model_ema + (1 - beta) * model, parameter by parameter, on
        each rank for its own part.

        Both must have been prepared. Do not freeze `model_ema` before prepare(), so that it keeps
        float32, in which small updates are not lost.
        """
        with self._loaded(model, model_ema):
            self.lerp(model, model_ema, 1 - beta)

    # -- device memory

    @property
    def phase(self) -> Phase:
        return self._phases.current

    def enter(
        self, phase: Phase, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Enter `phase`: load what it needs to the device, after offloading everything else with
        --offload_idle.

        TRAIN needs the model in training and its optimizer, LOGPROB the model that computes
        log-probs, REFIT the actor, GENERATE none. The engine is not moved here: its own verbs wake
        it and put it to sleep. Raises PhaseError for illegal transitions. With --overlap, models
        compute log-probs while the engine generates, and the phase stays GENERATE.
        """
        if self.config.rollout.overlap and (self.phase, phase) == (Phase.GENERATE, Phase.LOGPROB):
            return

        self._phases.enter(phase)
        self._memory.register(model, optimizer)
        if self.config.strategy.offload_idle:
            for other in self._memory.models:
                if other is not model:
                    self.offload_model(other)
            for other in self._memory.optimizers:
                if other is not optimizer:
                    self.maybe_offload_optimizer(other)

        if model is not None:
            self.reload_model(model)
        if optimizer is not None:
            self.maybe_load_optimizer(optimizer)

    def offload_model(self, model: nn.Module) -> None:
        """Move a prepared model to host memory and free its device memory; parameters stay the same
        objects.

        Raises RuntimeError if it holds gradients; using an offloaded model raises one too. An
        offloaded model is left as it is.
        """
        self._memory.offload_model(model)

    def reload_model(self, model: nn.Module) -> None:
        """Move an offloaded model back to the device, bit-identical; do nothing for one that is not
        offloaded.
        """
        self._memory.reload(model)

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> None:
        """Move the optimizer's state to host memory, unless it is there already."""
        self._memory.offload_optimizer(optimizer)

    def maybe_load_optimizer(
        self, optimizer: Optimizer, device: torch.device | int | str | None = None
    ) -> None:
        """Move an offloaded optimizer back to the device, bit-identical; do nothing for one that is
        not offloaded.

        `device` is accepted for code of LightRFT: an optimizer returns to the device of this rank.
        """
        self._memory.reload(optimizer)

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Wait until this device has finished and all ranks have called this, then release cached
        memory.
        """
        sync_and_clear_cache()

    # -- engine

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
        """Return metrics of occupied memory before and after the engine's last sleep, in 1e9 bytes;
        empty if it never slept.
        """
        return self._host.memory if self._host else {}

    @property
    def engine_status(self) -> EngineStatus:
        """Return WAKEUP if the engine can generate; SLEEPED otherwise, and until an engine
        exists.
        """
        return self._host.status if self._host else EngineStatus.SLEEPED

    def setup_inference_engine(
        self,
        args: Arguments = None,
        engine_type: str | None = None,
        actor: nn.Module | None = None,
        *,
        draft: nn.Module | None = None,
    ) -> Engine:
        """Build the engine.

        With an actor it receives its weights and sleeps, if allowed; else it stays awake with
        --pretrain's.

        The actor is remembered: its weights refill an engine that dropped its own when it slept.
        Without an actor the engine keeps its weights while it sleeps. `draft` is a trained model of
        --speculative draft, whose weights follow the actor's in every stream.
        """
        config = self.config if args is None else as_config(args)
        check_strategy(config)
        section = (
            config.engine
            if engine_type is None
            else replace(config.engine, engine_type=engine_type)
        )

        with self._emptied_device():  # vLLM and SGLang reserve a share of free memory at start
            axis = self.mesh.engine(self._size_of_engine(section))
            build = (
                partial(connect_engine, self._processes)
                if self._generates_elsewhere
                else build_engine
            )
            engine = build(
                section,
                model_path=config.model.pretrain,
                dtype=self.dtype,
                device=self.device,
                axis=axis,
                max_model_len=longest_sequence(config),
                # vLLM accepts 32 bits only
                seed=derived_seed(self.seed, self.mesh.world.rank // axis.size) % 2**31,
                trust_remote_code=config.model.trust_remote_code,
                from_stream=actor is not None,
                streams_draft=draft is not None
                or (self.generates_only and config.optim.draft_learning_rate > 0),
            )

        self._host = EngineHost(
            engine,
            axis=axis,
            mesh=self.mesh,
            device=self.device,
            sleeps=section.enable_engine_sleep,
        )
        self._host.draft = draft

        if actor is None:
            self.wakeup_inference_engine()
        else:
            self.update_engine_weights(actor)
            self.maybe_sleep_inference_engine()

        return self.engine

    @contextmanager
    def engine_awake(self, actor: nn.Module | None = None) -> Iterator[Engine]:
        """Wake the engine with the newest weights of `actor` for the duration of the context;
        afterwards it sleeps, if allowed.

        See wakeup_inference_engine(), which is called first, and maybe_sleep_inference_engine(),
        which is called last.
        """
        self.wakeup_inference_engine(actor)
        self._kept_awake += 1
        try:
            yield self.engine
        except BaseException:
            self._kept_awake -= 1
            # an engine that was left in the middle cannot sleep, and the cause is told
            with suppress(EngineError):
                self.maybe_sleep_inference_engine()
            raise

        self._kept_awake -= 1
        self.maybe_sleep_inference_engine()

    def wakeup_inference_engine(self, actor: nn.Module | None = None) -> None:
        """Wake the weights, stream the newest ones of `actor` in by update_engine_weights(), then
        wake the cache.

        Without an actor the engine keeps its weights; if they are not valid, it receives those of
        the actor it last received weights from. Cached memory is freed first. An engine that is
        already awake stays awake.
        """
        host = self._engine_host()
        host.actor = actor if actor is not None else host.actor

        source = actor if host.engine.weights_valid else host.actor
        if source is None:
            self.enter(Phase.REFIT)
            with self.trace.phase("wake"):
                host.wake_weights()
        else:
            self.update_engine_weights(source)

        # with --offload_idle this frees the actor's memory for the cache
        self.enter(Phase.GENERATE)
        with self.trace.phase("wake"):
            host.engine.wake("kv_cache")

    def maybe_sleep_inference_engine(self) -> None:
        """End the engine's phases, and put it to sleep with --enable_engine_sleep."""
        with self.trace.phase("sleep"):
            self._engine_host().sleep()
        self._phases.leave_engine()

    def update_engine_weights(self, actor: nn.Module) -> None:
        """Stream the actor's weights into the engine under the next version; caches computed with
        the old ones are dropped.
        """
        host = self._engine_host()
        host.actor = actor
        self.enter(Phase.REFIT, actor)
        with self.trace.phase("wake"):
            host.wake_weights()
        with self.trace.phase("weight_sync"):
            host.update_weights(partial(self._engine_weights, actor))
            self.sync_and_clear_cache()
        if host.status is EngineStatus.WAKEUP:
            self.enter(Phase.GENERATE)

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

        The number of prompts may differ by rank and may be 0.

        Prompts are token ids, text, or `requests`, each with its media and its own sampling. If
        both ids and text are given, the text is used if there are media, else the ids. Both have
        one placeholder for each image. Images are one list for each prompt (None: no images), or a
        flat list with the number of images of each prompt in `images_num`; so are videos (arrays
        [T, H, W, 3], lists of PIL images) and audio clips (paths of .wav files, (waveform, sampling
        rate)). Placeholders of a prompt without images are removed. Some ranks may have images and
        others none.

        Ranks that share an engine gather their prompts. The seed must be equal on all ranks;
        replicas derive different ones from it. With a dictionary as `sampling_params` results have
        the form of engine_generate_local(), and samples differ from call to call unless the
        dictionary has a seed.

        A sleeping engine is woken. With `sleep_engine` it sleeps afterwards, if allowed, but not
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
        generation = self.open_generation(sampling)
        generation.add(requests)
        by_index = dict(generation.to_the_end())
        completions = [by_index[index] for index in range(len(requests))]
        if sleep_engine and not self._kept_awake:
            self.maybe_sleep_inference_engine()

        return (
            completions
            if isinstance(sampling_params, Sampling)
            else as_dicts(requests, completions)
        )

    def open_generation(
        self, sampling: Sampling, *, shared: bool = False
    ) -> RequestLoop | SharedSession:
        """Return a loop of the engine, to which each rank adds requests while others decode, and
        which can be aborted.

        All ranks call this together; a sleeping engine is woken and stays awake. With `shared` a
        rank can add requests at a time at which others add none.
        """
        if self.engine_status is EngineStatus.SLEEPED:
            self.wakeup_inference_engine()
        return self._engine_host().open(sampling, shared=shared)

    def engine_generate_local(
        self,
        sampling_params: Sampling | Mapping[str, Any],
        prompt_token_ids: list[list[int]] | None = None,
        multi_modal_inputs: list[dict[str, Any]] | None = None,
    ) -> list[EasyDict]:
        """Return one EasyDict per sample; a prompt's samples are adjacent.

        Ranks that share an engine pass the same prompts.

        Prompts are either token ids or `{"prompt": text, "multi_modal_data": {"image": [image]}}`,
        which may have `prompt_token_ids` instead of `prompt`, and `video` and `audio` in addition
        to `image`. The prompt's ids in the result are those that were passed, without expanded
        placeholders.
        """
        requests = self._reader().local_requests(prompt_token_ids, multi_modal_inputs)
        return as_dicts(
            requests, self._engine_host().generate(self._sampling(sampling_params), requests)
        )

    def engine_lags(self, version: int | None = None) -> None:
        """Mark the weights of an engine that has an actor as outdated, so that it needs a new
        stream.

        `version`, if given, becomes the version of the weights.
        """
        if self._host is not None:
            self._host.invalidate_weights(version)

    def serve_engine(self) -> None:
        """Build the engine of this rank, which only generates, and serve it until the ranks that
        train close theirs.
        """
        assert self._processes is not None
        self.announce("")  # the ranks that train load their models first
        pretrain = self._processes.store.get(PRETRAIN).decode()
        self.announce("start_engine")
        self.setup_inference_engine(
            replace(self.config, model=replace(self.config.model, pretrain=pretrain))
        )
        in_flight = self.config.rollout.weight_update == "in_flight"
        EngineServer(
            self.engine, self._processes, self.device, self.announce, in_flight=in_flight
        ).serve()

    def close_engine(self) -> None:
        """Close the engine, if there is one."""
        host = self._host
        self._host = None
        if host is not None:
            host.engine.close()

    # -- checkpoints and Hugging Face folders

    def save_ckpt(
        self,
        model: Models,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: Mapping[str, Any] = NOTHING,
        save_latest: bool = True,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        parts: Mapping[str, Stateful] = NOTHING,
        hf_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        async_save: bool = False,
    ) -> Path:
        """Write everything needed to continue to `save_dir/tag`, or to the next free
        `save_dir/saveN` if there is no tag.

        `client_state` is the caller's own and contains JSON types only. A model is saved with the
        optimizer and schedule that prepare() received with it, unless others are passed. `parts`
        are objects with state_dict(), which all ranks call together, and load_state_dict(): rank
        0's state is written and all ranks load it. `hf_model` is also written as a Hugging Face
        folder, `save_dir/tag/hf`. With `async_save` this returns as soon as everything is copied to
        host memory, if that has twice the room; finish_ckpt() raises the error if writing fails. At
        most `max_num` checkpoints and `max_mem` GB of them are kept. A checkpoint without
        `save_latest` is loaded only by its tag. Raises CheckpointError on all ranks if one rank
        cannot write (disk full); existing checkpoints are then untouched.
        """
        self.finish_ckpt()
        models = self._by_name(model, optimizer, scheduler)
        folder = Path(save_dir) / (tag or self.mesh.world.broadcast(next_tag(Path(save_dir))))
        hf = None if hf_model is None else self.save_model(hf_model, tokenizer, hf_folder(folder))
        state = {
            "client": dict(client_state),
            "skipped_steps": self.skipped_steps,
            "weight_version": self.weight_version,
        }
        retention = RetentionPolicy(max_num, max_mem, save_latest)
        self._checkpoints.save(
            models,
            folder,
            state=state,
            parts=parts,
            retention=retention,
            hf=hf,
            in_background=async_save,
        )

        return folder

    def finish_ckpt(self, *, wait: bool = True) -> bool:
        """Return True if no checkpoint is being written; with `wait`, wait for that.

        A failed write raises here, on all ranks.
        """
        return self._checkpoints.finish(wait=wait)

    def load_ckpt(
        self,
        model: Models,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        parts: Mapping[str, Stateful] = NOTHING,
        check: Callable[[Path, dict[str, Any]], None] | None = None,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Restore `load_dir/tag`, or the newest undamaged checkpoint; return its path and
        client_state, or (None, {}).

        A checkpoint can be loaded on a different number of ranks than saved it. `check` receives
        path and client_state before anything is loaded, and may raise. Models and parts must be
        those that were saved; with load_module_only a subset of the models is enough, and only
        their parameters are changed. Without load_module_strict, parameters that are not in the
        checkpoint keep their values.
        """
        self.finish_ckpt()
        checkpoint = self._checkpoints.load(
            self._by_name(model, optimizer, scheduler),
            Path(load_dir),
            tag,
            parts=parts,
            check=check,
            strict=load_module_strict,
            module_only=load_module_only,
            optimizers=load_optimizer_states,
            schedulers=load_lr_scheduler_states,
        )
        if checkpoint is None:
            return None, {}

        path, state = checkpoint
        if not load_module_only:
            self.skipped_steps = state["skipped_steps"]
        self.engine_lags(None if load_module_only else state["weight_version"])

        return path, state["client"]

    def close_checkpoints(self) -> None:
        """Wait until the checkpoint being written is complete or has failed, then end the
        background writer.
        """
        self._checkpoints.close()

    def rehearse_save(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Write a model's folder without the weights into a temporary folder, and read it back.

        Raises ConfigError on all ranks if save_model() could not write it.
        """
        rehearse(
            unwrap(model),
            tokenizer,
            self.dtype,
            self._world(),
            trust_remote_code=self.config.model.trust_remote_code,
        )

    def save_model(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        folder: str | Path,
        dtype: torch.dtype | None = None,
    ) -> Path:
        """Write a Hugging Face folder that from_pretrained can load.

        Ranks write its files, of at most 5 GB each, in turn.

        dtype None: bfloat16 with --bf16, else float32. An existing model in `folder` is replaced.
        """
        stream = self.full_params(model, dtype)
        return export(
            unwrap(model), stream, tokenizer, Path(folder), dtype or self.dtype, self._world()
        )

    def save_adapter(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path
    ) -> Path:
        """Write only the adapters, in float32, as a folder that peft's PeftModel.from_pretrained
        loads onto their base model.

        Raises ValueError if other parameters of the model are trained too. An existing adapter in
        `folder` is replaced.
        """
        self.reload_model(model)
        stream = self.stream(model, torch.float32)
        return export_adapter(unwrap(model), stream, tokenizer, Path(folder), self._world())

    # -- names of opendilab/LightRFT

    @property
    def inference_engine(self) -> Engine | None:
        """Return the engine on this rank; None until setup_inference_engine()."""
        return self._host.engine if self._host else None

    @property
    def inference_engine_type(self) -> str:
        return self.engine_name

    @property
    def inference_engine_status(self) -> EngineStatus:
        return self.engine_status

    @property
    def engine_mp_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that share an engine; None if each rank has its
        own.
        """
        return self.mesh.engine(self._size_of_engine(self.config.engine)).group

    @property
    def engine_dp_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks with this rank's index in all engines; None if
        there is one engine.
        """
        return self.mesh.engine_replicas(self._size_of_engine(self.config.engine)).group

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that divide a sequence; None without sequence
        parallelism.
        """
        return self.mesh.sp.group

    # -- internals

    def _world(self) -> Axis:
        return self._mesh.world if self._mesh else world_axis()

    def _data(self) -> Axis:
        return self._mesh.data if self._mesh else Axis("data", 1, 0, None)

    def _check_batch_sizes(self) -> None:
        micro = self.micro_train_batch_size
        data = self.mesh.data.size
        if micro is not None and self.train_batch_size % (micro * data):
            raise ValueError(
                f"train_batch_size {self.train_batch_size} is not a multiple of "
                f"micro_train_batch_size {micro} x data-parallel size {data} = {micro * data}"
            )

    def _warn_of_versions(self) -> None:
        untested = untested_versions(TENSOR_PARALLEL) if self.mesh.tp.size > 1 else []
        if untested and self.is_rank_0():
            logger.warning(
                "--tp_size is not tested with {}: compare first steps with --tp_size 1",
                ", ".join(untested),
            )

    @contextmanager
    def _loaded(self, *items: nn.Module | Optimizer | None) -> Iterator[bool]:
        """Reload items for the duration of the context, and offload them again.

        Yields True if any had been offloaded.
        """
        offloaded = [item for item in items if item in self._memory.offloaded]
        for item in offloaded:
            self._memory.reload(item)
        yield bool(offloaded)
        for item in offloaded:
            if isinstance(item, nn.Module):
                self.offload_model(item)
            elif item is not None:
                self.maybe_offload_optimizer(item)

    @contextmanager
    def _emptied_device(self) -> Iterator[None]:
        """Enter REFIT with an empty device: inside, models and optimizers are in host memory, with
        or without --offload_idle.

        A model with gradients stays. Cached memory is released too. Without --offload_idle
        everything that was on the device is loaded back afterwards.
        """
        memory = self._memory
        resident = [
            item for item in (*memory.models, *memory.optimizers) if item not in memory.offloaded
        ]
        self._phases.enter(Phase.REFIT)

        for model in memory.models:
            if not memory.holds_gradients(model):
                self.offload_model(model)

        for optimizer in memory.optimizers:
            self.maybe_offload_optimizer(optimizer)
        self.sync_and_clear_cache()
        try:
            yield
        finally:
            for item in resident if not self.config.strategy.offload_idle else ():
                memory.reload(item)

    def _prepare(
        self, module: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> None:
        trained = any(parameter.requires_grad for parameter in module.parameters())
        parameter_names(module, optimizer)
        self.make_ready(module)
        self.distribute(module, optimizer)
        self._memory.register(module, optimizer)
        if trained:
            draw_by_data_rank(module, self.mesh.data, self.device)
        self._prepared[module] = (module, optimizer, scheduler)

    def _with_optimizer(
        self, model: nn.Module | None, rate: float, optim: OptimSection, max_steps: int
    ) -> Trained:
        if model is None:
            return None, None, None
        optimizer = self.create_optimizer(model, rate, optim.adam_betas, optim.l2)
        warmup = round(optim.lr_warmup_ratio * max_steps)
        return (
            model,
            optimizer,
            self.create_scheduler(optimizer, optim.lr_scheduler, warmup, max_steps),
        )

    def _by_name(
        self, model: Models, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> dict[str, Trained]:
        if isinstance(model, nn.Module):
            _, its_optimizer, its_scheduler = self._prepared.get(model, (model, None, None))
            return {"model": (model, optimizer or its_optimizer, scheduler or its_scheduler)}
        return {name: self._as_trained(item) for name, item in model.items()}

    def _as_trained(self, item: Any) -> Trained:
        if isinstance(item, nn.Module):
            return self._prepared.get(item, (item, None, None))
        module, optimizer, scheduler = (*item, None, None)[:3]
        return module, optimizer, scheduler

    def _sampling(self, parameters: Sampling | Mapping[str, Any]) -> Sampling:
        if isinstance(parameters, Sampling):
            return parameters
        self._calls += 1
        return sampling_from_dict(parameters, seed=self.seed * 1_000_003 + self._calls)

    def _reader(self) -> PromptReader:
        return PromptReader(
            self._engine_host().engine.vocabulary,
            special_tokens=not self.config.data.apply_chat_template,
        )

    def _engine_weights(self, actor: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a stream: the actor's, then those of the model that drafts, if it is
        trained.
        """
        yield from self.full_params(actor)
        if (draft := self._engine_host().draft) is not None:
            yield from ((DRAFT + name, tensor) for name, tensor in self.full_params(draft))

    def _engine_host(self) -> EngineHost:
        if self._host is None:
            raise RuntimeError("there is no engine: call setup_inference_engine() first")
        return self._host


def is_actor(model: nn.Module) -> bool:
    """Return True if prepare(is_rlhf=True) or prepare_models_and_optimizers() registered `model` as
    the policy of a run.
    """
    return model in _ACTORS
