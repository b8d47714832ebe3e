"""Define the hooks that say how a strategy distributes models, and seed what dropout draws."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config.sections import Config, sequence_layout
from lightrft.core.metrics import Untraced
from lightrft.models.lora import adopt_layers, is_adapter, keep_adapters_apart
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.parallel.processes import RunProcesses
from lightrft.models.parallel.recompute import recompute
from lightrft.models.parallel.sequence_parallel import (
    NoSequenceParallel,
    SequenceParallel,
    set_sequence_parallel,
)
from lightrft.models.parallel.ulysses import Ulysses
from lightrft.models.parallel.zigzag import Zigzag
from lightrft.models.weight_sync.stream import bucket_limit, hf_parameters, stream, unwrap
from lightrft.strategy.backends import offload
from lightrft.strategy.backends.optim import clip_gradients, global_grad_norm, step
from lightrft.strategy.checkpoint.model_state import ModelState

Stream = Iterator[tuple[str, Tensor]]
"""Names and full tensors of a model, each valid until the next one is requested."""
SEQUENCES: dict[str, type[SequenceParallel]] = {"ulysses": Ulysses, "zigzag": Zigzag}
"""Value of --sp_impl -> class that divides the tokens of a batch among ranks."""


class Verbs(Protocol):
    """Verbs of a strategy that its aspects call too, so that an override counts everywhere."""

    memory: Any
    """Part that moves models, see strategy/device_memory.py."""

    def enter(self, phase: Any, model: Any = None, optimizer: Any = None) -> None: ...

    def offload_model(self, model: nn.Module) -> None: ...

    def reload_model(self, model: nn.Module) -> None: ...

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> None: ...

    def maybe_load_optimizer(self, optimizer: Optimizer) -> None: ...

    @classmethod
    def sync_and_clear_cache(cls) -> None: ...

    def full_params(self, model: nn.Module, dtype: Any = None) -> Stream: ...

    def adapter_params(self, model: nn.Module, *, base: bool) -> Stream: ...

    def expert_params(self, model: nn.Module) -> Stream: ...

    def save_model(self, model: nn.Module, tokenizer: Any, folder: Any) -> Any: ...

    def wakeup_inference_engine(self, actor: nn.Module | None = None) -> None: ...

    def maybe_sleep_inference_engine(self) -> None: ...

    def update_engine_weights(self, actor: nn.Module) -> None: ...

    def open_generation(self, sampling: Any) -> Any: ...


class Backend(Verbs, ABC):
    """Hooks that a strategy and its aspects call; users never call them.

    All ranks call every hook together. A backend must implement distribute() and accumulate(). The
    other hooks fit parameters that are plain tensors or DTensors.
    """

    config: Config
    seed: int
    max_norm: float
    device: torch.device
    dtype: torch.dtype
    """Dtype of computation and of transferred weights."""
    processes: RunProcesses | None
    """All processes of the run; None before setup_distributed()."""
    trace: Untraced
    """Trace that times the engine's phases."""
    skipped_steps: int
    """Number of optimizer steps that were skipped because the gradient norm was not finite."""
    unsplit_models: set[nn.Module]
    """Models without support for sequence parallelism; each rank computes whole sequences."""
    adapters_apart: bool = False
    """True once an engine holds the adapters beside the weights; models then compute so too."""

    # -- the run

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """Return the mesh of ranks and groups; raise RuntimeError before setup_distributed()."""

    @property
    @abstractmethod
    def world(self) -> Axis:
        """Return the axis of all ranks, also before setup_distributed()."""

    @abstractmethod
    def announce(self, phase: str) -> None:
        """Set what this rank is doing, for the report if a rank fails, dies or is late."""

    @abstractmethod
    def state_dict(self) -> dict[str, int]:
        """Return the counters that every checkpoint of the run contains."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the counters of a checkpoint; empty if only parameters were loaded."""

    # -- distributing a model

    def make_ready(self, module: nn.Module) -> None:
        """Set up kernels, activation recomputation, sequence parallelism and parameter dtypes.

        Trained parameters become float32, frozen ones get the dtype of computation. Buffers keep
        the precision that they have.
        """
        if self.config.model.fused_kernels == "liger":
            from lightrft.models.logits.liger_kernel import fuse

            fuse(module, self.device)

        adopt_layers(module)
        if self.adapters_apart:
            keep_adapters_apart(module)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if trained and self.config.model.fp8_training:
            from lightrft.strategy.backends.torchao import use_float8

            use_float8(module, self.device)
        if trained and self.config.model.gradient_checkpointing:
            recompute(module, self.config.model.gradient_checkpointing_policy)

        sequence = self.sequence
        if sequence.multiple > 1 and not set_sequence_parallel(
            module, sequence, tp=self.mesh.tp.size
        ):
            self.unsplit_models.add(module)

        for parameter in module.parameters():
            # The optimizer updates float32 values, even if computation is in bfloat16.
            if parameter.is_floating_point():
                dtype = torch.float32 if parameter.requires_grad else self.dtype
                parameter.data = parameter.data.to(dtype)

    @abstractmethod
    def distribute(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        """Distribute one module in place, and point the optimizer at the new parameters.

        Both have been checked, the optimizer has not stepped yet, and make_ready() has been called.
        """

    @property
    def sequence(self) -> SequenceParallel:
        """Return the object that divides a batch among the ranks of a data replica."""
        kind = NoSequenceParallel
        if self.mesh.sp.size > 1:
            kind = SEQUENCES[sequence_layout(self.config.strategy)[1]]
        return kind(
            self.mesh.sp,
            shards=self.mesh.tp.size if self.config.strategy.tp_sequence_parallel else 1,
        )

    # -- a training step

    @abstractmethod
    def accumulate(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        """Add the gradients of one micro-batch; after the `last` one, sum them over all ranks.

        They are never averaged.
        """

    def take_step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """Clip all gradients by one norm and step, unless the norm is not finite.

        A `max_norm` of 0 does not clip. Returns the norm before clipping: [] float32, equal on all
        ranks.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        norm = global_grad_norm(parameters, self.device)

        # The norm covers all ranks, so either all of them step or none does.
        if torch.isfinite(norm):
            if self.max_norm > 0:
                clip_gradients(parameters, norm, self.max_norm)
            step(optimizer)

        return norm

    def clear_gradients(self, model: nn.Module) -> None:
        """Clear all gradients, including those that the backend keeps outside the parameters."""
        model.zero_grad(set_to_none=True)

    # -- weights

    def stream(
        self, model: nn.Module, dtype: torch.dtype, divided: DeviceMesh | None = None
    ) -> Stream:
        """Yield (Hugging Face name, full tensor) of every parameter, bucket by bucket.

        Adapters and buffers are not merged or added here; see StrategyBase.full_params(). Experts
        stay `divided` over the ranks of this mesh.
        """
        parameters = hf_parameters(model)
        if not self.config.model.load_in_4bit:
            return stream(parameters, dtype, self.bucket_limit(), self.device, divided)
        from lightrft.models.four_bits.linear import dense_stream

        gather = partial(stream, limit=self.bucket_limit(), device=self.device)
        return dense_stream(unwrap(model), parameters, dtype, gather)

    def adapter_stream(self, model: nn.Module, dtype: torch.dtype) -> Stream:
        """Yield what stream() yields of adapters; a backend may gather nothing else."""
        return ((name, tensor) for name, tensor in self.stream(model, dtype) if is_adapter(name))

    def bucket_limit(self) -> int:
        """Return the bytes of one bucket of stream(), equal on all ranks."""
        return bucket_limit(self.config.engine.weight_sync_bucket_mb, self.mesh.world, self.device)

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape that stream() yields for a parameter that may be partitioned."""
        if parameter.dtype != torch.uint8:
            return parameter.shape
        from lightrft.models.four_bits.linear import matrix_shape

        return matrix_shape(parameter.shape)

    def lerp(self, model: nn.Module, target: nn.Module, weight: float) -> None:
        """Move the parameters of `target` towards the parameters of `model` by a factor `weight`.

        Both models are distributed in the same way.
        """
        for parameter, goal in zip(model.parameters(), target.parameters(), strict=True):
            if not goal.is_floating_point():
                continue  # frozen bytes of --load_in_4bit
            goal.detach().lerp_(parameter.detach().to(goal.dtype), weight)

    # -- memory and checkpoints

    def holds_gradients(self, model: nn.Module) -> bool:
        """Return True if the model has gradients, wherever the backend keeps them."""
        return any(parameter.grad is not None for parameter in model.parameters())

    def lives_on_host(self, item: nn.Module | Optimizer) -> bool:
        """Return True if the item is always in host memory, so there is nothing to offload."""
        return False

    def offload_model_state(self, model: nn.Module) -> offload.Offloaded:
        """Move parameters and buffers to host memory, and free the device memory.

        Parameters stay the same objects.
        """
        return offload.OffloadedTensors(
            [*model.parameters(), *model.buffers()], self.device, offload.guard_model(model)
        )

    def offload_optimizer_state(self, optimizer: Optimizer) -> offload.Offloaded:
        """Move the optimizer's state to host memory, and free the device memory."""
        return offload.OffloadedOptimizer(optimizer, self.device)

    def training(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> ModelState:
        """Return the state that a checkpoint reads and writes.

        Model and optimizer must not be offloaded.
        """
        return ModelState(model, optimizer, scheduler, self.mesh.world, self.device)


def draw_by_data_rank(module: nn.Module, data: Axis, device: torch.device) -> None:
    """Make `module` draw different random numbers on each data rank in training.

    The ranks of a data replica draw equal ones. The seed of a forward pass comes from torch's own
    generator. It advances equally on all ranks, so modules made later are initialised equally, and
    checkpoints contain it, so a resumed run draws the same numbers.
    """
    rng_states: list[tuple[Any, Any]] = []
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)

    def begin(*_: Any) -> None:
        # Evaluation draws nothing, and must not advance the generator either.
        if module.training:
            seed = int(torch.randint(2**62, ())) + data.rank
            rng_states.append(
                (torch.get_rng_state(), accelerator and accelerator.get_rng_state(device))
            )
            # torch.manual_seed() would also store a pending seed for every device type that was
            # never used, each with a stack trace. That takes longer than many layers.
            torch.default_generator.manual_seed(seed)
            if accelerator:
                accelerator.manual_seed(seed)

    def end(*_: Any) -> None:
        if rng_states:
            host, device_state = rng_states.pop()
            torch.set_rng_state(host)
            if accelerator:
                accelerator.set_rng_state(device_state, device)

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)
