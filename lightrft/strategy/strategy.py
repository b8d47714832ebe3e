"""Distribute a run: train models on all ranks, with aspects for memory, files and the engine."""

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from itertools import chain
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from easydict import EasyDict
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from lightrft.config.errors import ConfigError
from lightrft.config.resolve import Arguments, as_config, check_strategy
from lightrft.config.sections import SUPERVISED, OptimSection, sequence_layout
from lightrft.core.batch import Batch, Rows
from lightrft.core.engine import Request
from lightrft.core.metrics import Untraced
from lightrft.core.order import Order
from lightrft.core.samples import Completion
from lightrft.engine.base import Engine
from lightrft.engine.requests import Sampling
from lightrft.models.launch.heartbeat import COLLECTIVE_MARGIN, SingleRankWatchdog, Watchdog
from lightrft.models.launch.rendezvous import adopt_node_size, join_process_group
from lightrft.models.lora import merge_adapters, set_rate_of_factors, split_adapters
from lightrft.models.parallel.collectives import Axis, Op, all_gather, all_reduce
from lightrft.models.parallel.device import current_device, grow_segments, host_cores, select_device
from lightrft.models.parallel.mesh import Mesh, process_rank, world_axis
from lightrft.models.parallel.processes import RunProcesses
from lightrft.models.weight_sync.stream import persistent_buffers, unwrap
from lightrft.strategy.backends.base import Backend, draw_by_data_rank
from lightrft.strategy.backends.optim import (
    create_adamw,
    create_lr_scheduler,
    create_sgd,
    parameter_names,
)
from lightrft.strategy.batching.micro_batches import B, find_shared_prefixes, redistribute
from lightrft.strategy.batching.planner import MIN_SAVING
from lightrft.strategy.batching.sample_store import MemoryStore
from lightrft.strategy.call_forms import as_dicts, sampling_from_dict
from lightrft.strategy.checkpoints import Checkpoints, Trained
from lightrft.strategy.dataloader import ResumableBatchSampler
from lightrft.strategy.device_memory import DeviceMemory, memory_report
from lightrft.strategy.engine_host import EngineHost
from lightrft.strategy.prompt_reader import PromptReader
from lightrft.versions import TENSOR_PARALLEL_VERSIONS, untested_versions

ALONE = Axis("data", 1, 0, None)
"""Axis of data before setup_distributed()."""
_ACTORS: WeakSet[nn.Module] = WeakSet()


class Verb:
    """Method of a strategy that one of its aspects does, with the signature that it has there."""

    def __new__(cls, aspect: str, method: Callable[..., Any]) -> Any:
        return super().__new__(cls)

    def __init__(self, aspect: str, method: Callable[..., Any]):
        self.aspect = aspect
        self.method = method

    def __get__(self, strategy: Any, owner: type | None = None) -> Any:
        if strategy is not None:
            return self.method.__get__(getattr(strategy, self.aspect))
        return wraps(self.method)(
            lambda strategy, *args, **kwargs: self.__get__(strategy)(*args, **kwargs)
        )


def reads(aspect: str, attribute: str) -> Any:
    """Return a property of a strategy that reads an attribute of an aspect."""
    return property(lambda self: getattr(getattr(self, aspect), attribute))


class StrategyBase(Backend):
    """Every verb of a run on all ranks. The hooks of Backend say how a model is distributed.

        strategy = get_strategy(args)
        strategy.setup_distributed()
        model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
        strategy.backward(loss, model, optimizer)
        norm = strategy.optimizer_step(optimizer, model, scheduler)

    Runs and the three aspects (`memory`, `host` of the engine, `checkpoints`) call the verbs of the
    strategy, so a subclass overrides any of them as Python overrides methods. All ranks call every
    verb together, in the same order, unless its docstring says otherwise.
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
        self.dtype = torch.bfloat16 if self.config.model.bf16 else torch.float32
        self.processes: RunProcesses | None = None
        self.trace = Untraced()
        self.skipped_steps = 0
        self.unsplit_models: set[nn.Module] = set()
        self._mesh: Mesh | None = None
        self.data = ALONE
        """The axis of the ranks with different samples."""
        self.activity = ("", 0.0)
        """Phase that was announced last, and the monotonic time when it began."""
        self._watchdog: Watchdog | None = None
        """Watchdog of several ranks."""
        self._local_watchdog: SingleRankWatchdog | None = None

        self.memory = DeviceMemory(self)
        # Whoever changes the stream of full_params() gets that stream in the engine.
        always_full = type(self).full_params is not StrategyBase.full_params
        self.host = EngineHost(self, always_full=always_full)
        self.checkpoints = Checkpoints(self)

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "weight_version": self.host.version}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped_steps = state.get("skipped_steps", self.skipped_steps)
        self.engine_lags(state.get("weight_version"))

    # -- processes

    def set_seed(self, seed: int) -> None:
        """Seed Python, numpy and torch equally on all ranks, so that parameters start equal.

        Prepared models still draw different dropout masks on each data rank.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        """Bind the device, join or create the process group, build the mesh, and seed.

        `timeout` limits a collective; None takes --timeout_minutes. `num_gpu_per_node`, the same on
        all nodes, assigns devices to ranks if the launcher does not (no LOCAL_RANK). Raises
        ValueError for settings that cannot run, and RuntimeError for an environment that no
        launcher has set up.
        """
        if num_gpu_per_node is not None:
            adopt_node_size(os.environ, num_gpu_per_node)
        check_strategy(self.config)
        section = self.config.strategy
        if section.deterministic:
            self.memory.phases.begin_deterministic()

        timeout = timeout or timedelta(minutes=section.timeout_minutes)
        arrival = timedelta(minutes=section.arrival_minutes)
        self.processes = join_process_group(
            select_device(), timeout, arrival, self.config.rollout.rollout_ranks
        )
        self.device = current_device()
        if self.config.command in SUPERVISED:  # others leave it to the engine
            grow_segments(self.device)
        phase_limit = timedelta(minutes=section.phase_minutes)
        if self.processes.size > 1:
            self._watchdog = Watchdog(self.processes, limit=timeout, phase_limit=phase_limit)
        else:
            self._local_watchdog = SingleRankWatchdog(phase_limit, lambda: self.activity)

        self._mesh = Mesh.shared(
            self.device.type,
            dp_replicate=section.dp_replicate,
            sp=sequence_layout(section)[0],
            tp=section.tp_size,
            ep=section.ep_size,
            timeout=timeout + COLLECTIVE_MARGIN,
        )
        self.data = self._mesh.data
        # This is here because all ranks have to create the engine's group together.
        self.host.axis_of(self.config.engine)
        self._check_batch_sizes()
        self._warn_of_versions()
        self.set_seed(self.seed)

    def close(self) -> None:
        """Close the engine, and the process group if setup_distributed() created it.

        May be called at any time. A checkpoint that is being written is finished first; if that
        fails, the error is logged.
        """
        self.close_checkpoints()
        self.memory.phases.end_deterministic()
        self._mesh = None
        self.data = ALONE
        self.memory.forget()
        self.close_engine()

        # The watchdog outlives what may hang, and ends before the groups that it watches.
        for watchdog in (self._watchdog, self._local_watchdog):
            if watchdog is not None:
                watchdog.close()
        self._watchdog = self._local_watchdog = None

        if self.processes is not None and self.processes.created:
            dist.destroy_process_group()
        self.processes = None

    def announce(self, phase: str) -> None:
        """Set what this rank is doing, for the report if a rank fails, dies or is late.

        An empty phase stands for nothing in particular. Ranks need not call this together.
        """
        self.activity = phase, time.monotonic()
        if self._watchdog is not None:
            self._watchdog.enter(phase)

    def fail(self, error: BaseException, *, code: int = 1, brief: bool = False) -> None:
        """End the processes of all ranks with this cause, `brief` or with the traceback.

        Returns if there is one rank. One rank may call it alone. An uncaught exception does the
        same automatically.
        """
        if self._watchdog is not None:
            self._watchdog.fail(error, code=code, brief=brief)

    @property
    def generates_only(self) -> bool:
        """Return True on a rank of --rollout_ranks: it has an engine and trains no model."""
        return self.processes is not None and self.processes.generates

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("this needs the mesh: call setup_distributed() first")
        return self._mesh

    @property
    def world(self) -> Axis:
        return self._mesh.world if self._mesh else world_axis()

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

    get_rank = staticmethod(process_rank)

    @classmethod
    def is_rank_0(cls) -> bool:
        return cls.get_rank() == 0

    @classmethod
    def print(cls, *message: object) -> None:
        """Log on rank 0 only."""
        if cls.is_rank_0():
            logger.opt(depth=1).info("{}", " ".join(str(item) for item in message))

    def all_reduce(self, data: Any, op: Op = "mean") -> Any:
        """Reduce a number, a tensor, or a flat dict of both over all data ranks.

        Returns a new object of equal type and device. The dtype is kept too, but the mean of
        integers is a float. Ranks of one data replica hold the same values and count once. A dict
        is reduced in one collective; all ranks must give the same keys and shapes.
        """
        return all_reduce(data, op, self.data)

    def begin_sum(self, data: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor over all data ranks, and return a function that waits for the sum.

        A strategy that overrides all_reduce() sums with that.
        """
        if type(self).all_reduce is not StrategyBase.all_reduce:
            return partial(self.all_reduce, data, "sum")
        return self.data.begin_sum(data.clone())

    def all_gather(self, data: Any) -> Any:
        """Gather from all data ranks, in order; everything is sent through the host.

        Tensors are concatenated along the first dim (0-dim ones too), numbers are listed, dicts are
        gathered by key. First dims may differ between ranks. Meant for metrics and plans.
        """
        return all_gather(data, self.data)

    # -- data

    def setup_dataloader(
        self,
        dataset: Dataset[Any] | None = None,
        batch_size: int = 1,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = True,
        sampler: Collection[int] | None = None,
        consumed_samples: int = 0,
        *,
        replay_buffer: Dataset[Any] | None = None,
    ) -> DataLoader[Any]:
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

        data: Any = replay_buffer if dataset is None else dataset
        batches = ResumableBatchSampler(
            data,
            batch_size,
            self.mesh.data,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self.seed,
            consumed_samples=consumed_samples,
            row_order=sampler,
        )

        return DataLoader(
            data, batch_sampler=batches, collate_fn=collate_fn or list, pin_memory=pin_memory
        )

    def data_order(self, num_rows: int) -> Order:
        """Return the order of a run's rows: epoch after epoch, each reshuffled by the seed."""
        return Order(num_rows, self.seed)

    def sample_store(self) -> MemoryStore:
        """Return an empty store for the samples of a step."""
        axes = self.mesh.data, self.mesh.model_parallel
        if self.config.strategy.sample_store == "memory":
            return MemoryStore(*axes)
        from lightrft.strategy.batching.transfer_queue import TransferQueueStore

        return TransferQueueStore(*axes, self.mesh.world)

    def redistribute(
        self, batch: B, *, minibatch_size: int | None, units: Tensor | None = None, **limits: Any
    ) -> tuple[B, list[Rows]]:
        """Send each sequence to the rank that computes it.

        `limits` on micro-batches are `max_tokens`, and optionally `max_sequences` and `batching`;
        see batching.micro_batches.redistribute().
        """
        store = self.sample_store() if self.mesh.world.size > 1 else None
        received, minibatches = redistribute(
            store, batch, minibatch_size=minibatch_size, units=units, **limits
        )
        if store is not None:
            store.clear(received.rows.tolist())
        return received, minibatches

    def compute_tokens(
        self,
        batch: Batch,
        owners: list[list[int]],
        compute: Callable[[Batch, list[Rows]], dict[str, Tensor]],
        **limits: Any,
    ) -> dict[str, Tensor]:
        """Compute columns of tokens where redistribute() sends them, and return them for `batch`.

        `owners` has the rows of each rank's batch. `compute` gets the sequences that were sent to
        this rank, and the micro-batches of its only step, or none without any row.
        """
        store = self.sample_store()
        received, steps = redistribute(store, batch, **limits)
        outputs = compute(received, steps)
        store.put(received.rows, received.lengths, tokens=outputs)
        store.move(owners, list(outputs))
        columns = store.get(batch.rows, list(outputs))
        store.clear(batch.rows.tolist())
        return {name: columns[name] for name in outputs}

    def to_device(self, batch: B) -> B:
        """Copy a micro-batch to the device; models compute each prefix that sequences share once."""
        shared = find_shared_prefixes(
            batch.input_ids, batch.lengths, batch.media, min_saving=MIN_SAVING
        )
        return replace(batch, shared=shared).to(self.device)

    # -- models and optimizers

    def init_model_context(
        self, device: torch.device | str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for making a model that no rank's host memory ever holds whole.

            with strategy.init_model_context():
                actor = Actor(load_model(config.model))
            actor = strategy.prepare(actor)

        Use it for models whose weights come from a Hugging Face folder. It has no effect with a
        `device` other than meta, or if the backend does not support it.
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
        """Build AdamW over the parameters that require a gradient, before or after prepare().

        FSDP2 builds what --optimizer says. Raises ConfigError if this strategy cannot.
        """
        plain = {"adamw": create_adamw, "sgd": create_sgd}
        create = plain.get(self.config.optim.optimizer) or self._creator(model)
        optimizer = create(model, lr, (betas[0], betas[1]), weight_decay, eps)
        if self.config.model.lora_lr_ratio != 1:
            set_rate_of_factors(optimizer, model, lr * self.config.model.lora_lr_ratio)
        return optimizer

    def _creator(self, model: nn.Module) -> Callable[..., Optimizer]:
        """Return the function that builds --optimizer as create_adamw() builds AdamW."""
        name = type(self).__name__
        optimizer = self.config.optim.optimizer
        raise ConfigError(f"--optimizer {optimizer} needs FSDP2: {name} is another strategy")

    def create_scheduler(
        self, optimizer: Optimizer, kind: str, warmup_steps: int, total_steps: int
    ) -> LRScheduler:
        """Build a schedule: linear warm-up, then a `kind` of --lr_scheduler with its options."""
        return create_lr_scheduler(optimizer, kind, warmup_steps, total_steps, self.config.optim)

    def prepare(self, *models_or_pairs: Any, is_rlhf: bool = False) -> Any:
        """Distribute modules in place.

        Each argument is a module, (module, optimizer), (module, optimizer, scheduler) or None.
        Returns its arguments: a single one as itself, several as a tuple. An optimizer stays the
        same object, and trains the distributed parameters. With `is_rlhf` the first module that has
        an optimizer becomes the actor, see is_actor().
        """
        for item in models_or_pairs:
            several = isinstance(item, tuple | list)
            module, optimizer, scheduler = (*item, None)[:3] if several else (item, None, None)
            if module is None:
                continue

            trained = any(parameter.requires_grad for parameter in module.parameters())
            parameter_names(module, optimizer)  # raises for parameters of another model
            self.make_ready(module)
            self.distribute(module, optimizer)

            self.memory.register(module, optimizer)
            self.checkpoints.prepared[module] = (module, optimizer, scheduler)
            if trained:
                draw_by_data_rank(module, self.mesh.data, self.device)

        if is_rlhf:
            pairs = [item for item in models_or_pairs if isinstance(item, tuple | list)]
            _ACTORS.update([pair[0] for pair in pairs if None not in pair[:2]][:1])
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
        """Prepare all roles of a run, with optimizers and schedules over `max_steps` steps.

        `args` has the settings of the optimizers. `reward_models` is one frozen module, a list of
        them, or None. Returns (actor, optimizer, scheduler), the same for the critic (three times
        None without one), the reward models and the initial model as they were given.
        """
        optim = as_config(args).optim
        trained_actor = with_optimizer(self, actor, optim.learning_rate, optim, max_steps)
        trained_critic = with_optimizer(self, critic, optim.critic_learning_rate, optim, max_steps)

        several = isinstance(reward_models, list | tuple)
        frozen = [*(reward_models if several else [reward_models]), initial_model]
        self.prepare(trained_actor, trained_critic, *frozen, is_rlhf=True)

        return trained_actor, trained_critic, reward_models, initial_model

    def prepare_reward_model(self, model: nn.Module, args: Arguments, max_steps: int) -> Trained:
        """Prepare a reward model for training, with an optimizer of --learning_rate."""
        optim = as_config(args).optim
        return self.prepare(with_optimizer(self, model, optim.learning_rate, optim, max_steps))

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
        micro-batches and never divided. The sum over ranks comes with the `last` micro-batch of an
        optimizer step. All ranks have the same number of micro-batches. A loss that is not finite
        makes the norm on all ranks not finite, see optimizer_step().
        """
        self.memory.check_loaded(model)
        (self.memory.unsummed.discard if last else self.memory.unsummed.add)(model)

        # Ranks that share a sequence without splitting it each compute the whole loss.
        share = 1 / self.mesh.sp.size if model in self.unsplit_models else 1
        self.accumulate(loss * torch.where(loss.detach().isfinite(), share, torch.nan), model, last)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        scheduler: LRScheduler | None = None,
        name: str = "model",
    ) -> Tensor:
        """Clip by one global norm, step, advance the schedule, and clear the gradients.

        Returns the norm before clipping: []. If the norm or a loss is not finite, all ranks skip
        the step and the schedule, and `skipped_steps` grows.
        """
        if model in self.memory.unsummed:
            raise RuntimeError(
                f"optimizer_step({name}) after backward(last=False): gradients were not summed over"
                " the ranks yet"
            )

        self.memory.check_loaded(optimizer, model)
        # A step on the host may use all of this rank's cores, not only torch's few threads.
        steps_on_host = self.device.type != "cpu" and self.lives_on_host(optimizer)
        with host_cores() if steps_on_host else nullcontext():
            norm = self.take_step(model, optimizer)

        if torch.isfinite(norm):
            if scheduler is not None:
                scheduler.step()
        else:
            self.skipped_steps += 1
            if self.is_rank_0():
                logger.warning(
                    f"{name}: gradient norm is {norm.item()}, step skipped ({self.skipped_steps} so"
                    " far)"
                )

        self.clear_gradients(model)
        return norm

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the Hugging Face model inside a role's wrapper, or the module itself."""
        return unwrap(model)

    def full_params(
        self, model: nn.Module, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the transformers model, full tensor in `dtype`) of every parameter.

        Tied parameters come once, adapters are merged into their layers, and persistent buffers
        follow unchanged. A tensor is valid until the next one is requested. dtype None: bfloat16
        with --bf16, else float32. An offloaded model is loaded back first.
        """
        self.reload_model(model)
        unwrapped = unwrap(model)
        stream = chain(self.stream(model, dtype or self.dtype), persistent_buffers(unwrapped))
        if "peft_config" in vars(unwrapped):  # peft sets it when it adds adapters
            return merge_adapters(unwrapped, stream)
        return stream

    def expert_params(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield full_params() for an engine whose ranks divide the experts as --ep_size does.

        Stacked experts come as DTensors with the experts of this rank.
        """
        self.reload_model(model)
        unwrapped = unwrap(model)
        stream = self.stream(model, self.dtype, self.mesh.experts)
        return merge_adapters(unwrapped, chain(stream, persistent_buffers(unwrapped)))

    def adapter_params(self, model: nn.Module, *, base: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream of `model` for an engine that holds adapters beside the weights.

        With `base` it has everything that full_params() has, but frozen matrices instead of merged
        ones, and the adapters by peft's names. Otherwise it has the adapters alone.
        """
        self.reload_model(model)
        unwrapped = unwrap(model)
        if not base:
            return split_adapters(unwrapped, self.adapter_stream(model, self.dtype))
        stream = self.stream(model, self.dtype)
        return split_adapters(unwrapped, chain(stream, persistent_buffers(unwrapped)))

    @torch.no_grad()
    def moving_average(self, model: nn.Module, model_ema: nn.Module, beta: float = 0.992) -> None:
        """Update model_ema <- beta * model_ema + (1 - beta) * model, on each rank for its part.

        Buffers that are saved with the weights, such as the biases of routers, follow too.

        Both must have been prepared. Do not freeze `model_ema` before prepare(): it then keeps
        float32, and small updates are not lost.
        """
        with self.memory.loaded(model, model_ema):
            self.lerp(model, model_ema, 1 - beta)
            followers = dict(persistent_buffers(model_ema))
            for name, buffer in persistent_buffers(model):
                goal = followers[name]
                if goal.is_floating_point():
                    goal.lerp_(buffer.to(goal), 1 - beta)
                else:
                    goal.copy_(buffer)

    # -- device memory

    enter = Verb("memory", DeviceMemory.enter)
    offload_model = Verb("memory", DeviceMemory.offload_model)
    reload_model = Verb("memory", DeviceMemory.reload_model)
    maybe_offload_optimizer = Verb("memory", DeviceMemory.offload_optimizer)
    maybe_load_optimizer = Verb("memory", DeviceMemory.reload_optimizer)
    phase = reads("memory", "phase")

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Wait until the device is done and all ranks are here, then release cached memory."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if dist.is_initialized():
            dist.barrier()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    report_memory = staticmethod(memory_report)

    # -- checkpoints and Hugging Face folders

    save_ckpt = Verb("checkpoints", Checkpoints.save)
    load_ckpt = Verb("checkpoints", Checkpoints.load)
    finish_ckpt = Verb("checkpoints", Checkpoints.finish)
    close_checkpoints = Verb("checkpoints", Checkpoints.close)
    save_model = Verb("checkpoints", Checkpoints.save_model)
    save_adapter = Verb("checkpoints", Checkpoints.save_adapter)
    rehearse_save = Verb("checkpoints", Checkpoints.rehearse_save)

    # -- engine

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
        return self.host.start(config, engine_type, actor, draft=draft)

    engine_awake = Verb("host", EngineHost.awake)
    wakeup_inference_engine = Verb("host", EngineHost.wake)
    maybe_sleep_inference_engine = Verb("host", EngineHost.sleep)
    update_engine_weights = Verb("host", EngineHost.update_weights)
    engine_lags = Verb("host", EngineHost.invalidate_weights)
    open_generation = Verb("host", EngineHost.open)
    serve_engine = Verb("host", EngineHost.serve)
    close_engine = Verb("host", EngineHost.close)

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
        all_images: list[Any] | None = None,
        sleep_engine: bool = True,
        images_num: list[int] | None = None,
        all_videos: list[Any] | None = None,
        videos_num: list[int] | None = None,
        *,
        all_audios: list[Any] | None = None,
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
        return as_dicts(requests, completions)

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
        return as_dicts(requests, self.host.engine.generate(requests, sampling))

    # -- internals

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

    def _check_batch_sizes(self) -> None:
        micro = self.micro_train_batch_size
        data = self.mesh.data.size
        if micro is not None and self.train_batch_size % (micro * data):
            raise ValueError(
                f"train_batch_size {self.train_batch_size} is not a multiple of "
                f"micro_train_batch_size {micro} x data-parallel size {data} = {micro * data}"
            )

    def _warn_of_versions(self) -> None:
        untested = untested_versions(TENSOR_PARALLEL_VERSIONS) if self.mesh.tp.size > 1 else []
        if untested and self.is_rank_0():
            logger.warning(
                "--tp_size is not tested with {}: compare first steps with --tp_size 1",
                ", ".join(untested),
            )


def with_optimizer(
    strategy: StrategyBase, model: nn.Module | None, rate: float, optim: OptimSection, steps: int
) -> Trained:
    """Return a model that is not prepared yet with the optimizer and the schedule of a run."""
    if model is None:
        return None, None, None

    optimizer = strategy.create_optimizer(model, rate, optim.adam_betas, optim.l2)
    warmup = round(optim.lr_warmup_ratio * steps)
    scheduler = strategy.create_scheduler(optimizer, optim.lr_scheduler, warmup, steps)
    return model, optimizer, scheduler


def is_actor(model: nn.Module) -> bool:
    """Return True for a run's policy.

    prepare(is_rlhf=True) and prepare_models_and_optimizers() say which model that is.
    """
    return model in _ACTORS
