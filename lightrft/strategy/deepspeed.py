"""DeepSpeed's ZeRO: partition the training state over all ranks.

Stage 1 partitions optimizer states, 2 also gradients, 3 also parameters, and 0 nothing. DeepSpeed
averages gradients over ranks; this is undone here, because every strategy sums them. Models are
partitioned in prepare(). The DeepSpeed integration of transformers stays off, because it would
partition every model that is loaded later.
"""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config.errors import ConfigError
from lightrft.config.resolve import deepspeed_problems
from lightrft.models.empty import empty_parameters, is_empty
from lightrft.models.lora import adapter_parameters
from lightrft.models.parallel.device import local_rank
from lightrft.models.weight_sync.expert_layout import is_a
from lightrft.models.weight_sync.stream import hf_parameters, stream
from lightrft.strategy.backends import zero_state
from lightrft.strategy.backends.materialize import one_by_one
from lightrft.strategy.backends.offload import (
    Offloaded,
    OffloadedTensors,
    guard_model,
    guard_optimizer,
)
from lightrft.strategy.backends.optim import follow, parameter_names
from lightrft.strategy.checkpoint.model_state import ModelState
from lightrft.strategy.strategy import StrategyBase

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

STAGE_1_AND_2 = "DeepSpeedZeroOptimizer"
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
BF16_STAGE_1 = "BF16_Optimizer"
"""Classes of ZeRO's optimizers, by name, because DeepSpeed is imported only when it is used."""


class DeepSpeedStrategy(StrategyBase):
    """ZeRO of DeepSpeed over all ranks; setup_distributed() imports deepspeed.

    An optimizer must be passed to prepare() with its module, because ZeRO rebuilds both together.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._engines: dict[nn.Module, DeepSpeedEngine] = {}
        self._trained: dict[Optimizer, nn.Module] = {}
        self._group_names: dict[nn.Module, list[list[str]]] = {}
        self._holding: set[nn.Module] = set()
        """Models that hold gradients; ZeRO keeps most of them outside the parameters' `grad`."""

    def setup_distributed(
        self, timeout: timedelta | None = None, num_gpu_per_node: int | None = None
    ) -> None:
        if problems := deepspeed_problems(self.config):
            raise ConfigError("; ".join(problems))
        super().setup_distributed(timeout, num_gpu_per_node)
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        import deepspeed.ops

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        os.environ.setdefault("LOCAL_RANK", str(local_rank()))
        # Otherwise every start compiles an op for a collective that is not used here.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed()  # adopts the existing process group
        self._cut = init_device_mesh(self.device.type, (self.mesh.world.size,))

    def close(self) -> None:
        engines = self._engines
        self._engines = {}
        self._trained = {}
        self._group_names = {}
        self._holding.clear()
        for engine in engines.values():
            engine.destroy()
        super().close()

    def distribute(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        """Pass both to a DeepSpeed engine.

        Without an optimizer only ZeRO-3 has something to partition.
        """
        if optimizer is None and self.config.strategy.zero_stage < 3:
            module.to(self.device)
            return

        import deepspeed

        names = parameter_names(module, optimizer)
        config = zero_state.engine_config(
            self.config, module, optimizer is not None, self.device, self.max_norm
        )
        self._group_names[module] = names

        if self.config.strategy.zero_stage == 3:
            self._cut_one_by_one(module, config)
            follow(module, optimizer, names)

        # The bfloat16 optimizer of stage 1 prints when it is created.
        with redirect_stdout(io.StringIO()):
            engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=config, dist_init_required=False
            )

        self._engines[module] = engine
        if optimizer is not None:
            self._trained[optimizer] = module
        _enter_through(module, engine)

    def init_model_context(
        self, device: torch.device | str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for empty models under ZeRO-3; prepare() reads and partitions them."""
        empty = self.config.strategy.zero_stage == 3 and str(device or "meta") == "meta"
        return empty_parameters() if empty else nullcontext()

    def accumulate(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        engine = self._trained_engine(model)
        self._holding.add(model)
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss * self.mesh.world.size)

    def take_step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """Let DeepSpeed clip by the same norm and step.

        It skips the step by itself if the norm is not finite.
        """
        engine = self._trained_engine(model)
        if self.config.strategy.zero_stage == 0:
            return super().take_step(model, optimizer)
        engine.optimizer.clip_grad = self.max_norm
        engine.step()
        return torch.as_tensor(
            engine.get_global_grad_norm(), dtype=torch.float32, device=self.device
        )

    def clear_gradients(self, model: nn.Module) -> None:
        super().clear_gradients(model)
        self._holding.discard(model)
        if self.config.strategy.zero_stage == 0:
            return

        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        zero = self._trained_engine(model).optimizer
        zero.zero_grad()
        # zero_grad() leaves what stages 1 and 2 have averaged, and the count of micro-steps.
        if is_a(zero, STAGE_1_AND_2):
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
            zero.micro_step_id = INITIAL_MICRO_STEP_ID

        if self.config.strategy.adam_offload:
            zero.reset_cpu_buffers()

    # -- parameters and memory

    def stream(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters, gathered from the partitions of all ranks.

        In a bfloat16 run, float32 parameters come from the master weights.
        """
        return self._full(model, list(hf_parameters(model)), dtype)

    def adapter_stream(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return self._full(model, list(adapter_parameters(hf_parameters(model))), dtype)

    def _full(
        self, model: nn.Module, named: list[tuple[str, nn.Parameter]], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        masters = dtype == torch.float32 and self.config.model.bf16 and model in self._group_names
        if masters and self._group_names[model]:
            yield from self._masters(model, named)
            return
        shards = ((name, self._as_shard(parameter)) for name, parameter in named)
        tensors = stream(shards, dtype, self.bucket_limit(), self.device)
        for (_, parameter), (name, tensor) in zip(named, tensors, strict=True):
            yield name, tensor.view(zero_state.whole_shape(parameter))

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return zero_state.whole_shape(parameter)

    def lerp(self, model: nn.Module, target: nn.Module, weight: float) -> None:
        for parameter, goal in zip(model.parameters(), target.parameters(), strict=True):
            shard = zero_state.local_shard(goal)
            shard.data.lerp_(zero_state.local_shard(parameter).to(shard), weight)
        if target in self._engines:
            self._engines[target].optimizer.empty_partition_cache()

    def offload_model_state(self, model: nn.Module) -> OffloadedTensors:
        return OffloadedTensors(self._model_tensors(model), self.device, guard_model(model))

    def offload_optimizer_state(self, optimizer: Optimizer) -> Offloaded:
        if self.config.strategy.zero_stage == 0:
            return super().offload_optimizer_state(optimizer)

        model = self._trained[optimizer]
        zero = self._engines[model].optimizer
        partitions = self._partitions(model).flats
        moments = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        gradients = zero.fp32_groups_gradients_flat if is_a(zero, BF16_STAGE_1) else []
        # Some masters are views of the parameters, and those move with the model.
        models = {tensor.untyped_storage().data_ptr() for tensor in self._model_tensors(model)}
        separate = [
            tensor
            for tensor in (*partitions, *moments, *gradients)
            if tensor.untyped_storage().data_ptr() not in models
        ]

        return OffloadedTensors(
            separate, self.device, guard_optimizer(optimizer), scratch=_scratch(zero)
        )

    def holds_gradients(self, model: nn.Module) -> bool:
        return model in self._holding

    def lives_on_host(self, item: nn.Module | Optimizer) -> bool:
        if isinstance(item, nn.Module):
            return self.config.strategy.param_offload
        return self.config.strategy.adam_offload

    def training(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> ModelState:
        if model not in self._engines or self.config.strategy.zero_stage == 0:
            return super().training(model, optimizer, scheduler)

        return zero_state.ZeroModelState(
            model,
            optimizer,
            scheduler,
            self.mesh.world,
            self.device,
            partitions=self._partitions(model),
            group_names=self._group_names[model],
            follow=partial(self._copy_masters, model),
        )

    # -- internals

    def _cut_one_by_one(self, module: nn.Module, config: dict[str, Any]) -> None:
        """Partition one parameter at a time, so that the device never holds the whole model.

        If the model is empty, the host does not hold it either: each parameter is read here.
        """
        import deepspeed
        from deepspeed.utils import groups

        dtype = torch.bfloat16 if config["bf16"]["enabled"] else next(module.parameters()).dtype
        if is_empty(module):
            parameters = one_by_one(module, dtype, self.mesh.world)
        else:
            parameters = _cast(module.parameters(), dtype)
        options = {}
        if self.config.strategy.param_offload:
            options = {"remote_device": "cpu", "pin_memory": self.device.type != "cpu"}
        # This is the group of --zpg, if it exists.
        options["zero_param_parallel_group"] = groups._get_zero_param_intra_parallel_group()

        container = _ParameterContainer(parameters)
        deepspeed.zero.Init(module=container, config_dict_or_path=config, dtype=dtype, **options)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.device)

    def _trained_engine(self, model: nn.Module) -> "DeepSpeedEngine":
        if not self._group_names.get(model):
            raise RuntimeError(
                f"{type(model).__name__} has no optimizer under DeepSpeed: pass both to prepare(),"
                " as a pair"
            )
        return self._engines[model]

    def _partitions(self, model: nn.Module) -> zero_state.Partitions:
        zero = self._engines[model].optimizer
        groups = flats = ()
        if is_a(zero, STAGE_3):
            groups = zero.fp16_groups
            flats = zero.fp32_partitioned_groups_flat
        elif is_a(zero, STAGE_1_AND_2):
            groups = zero.bit16_groups
            flats = zero.single_partition_of_fp32_groups
        elif is_a(zero, BF16_STAGE_1):
            groups = zero.bf16_groups
            flats = zero.fp32_groups_flat_partition
        by_parameter = self.config.strategy.zero_stage == 3
        return zero_state.Partitions(groups, flats, self.mesh.world.rank, by_parameter)

    def _copy_masters(self, model: nn.Module) -> None:
        """Copy loaded master weights into the parameters."""
        zero = self._engines[model].optimizer
        if is_a(zero, STAGE_1_AND_2) or is_a(zero, BF16_STAGE_1):
            zero.update_lp_params()
            return

        if is_a(zero, STAGE_3):
            for shard, master in zip(
                zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True
            ):
                shard.data.copy_(master.data)
            zero.invalidate_secondary_tensor()

        zero.empty_partition_cache()

    def _masters(
        self, model: nn.Module, named: list[tuple[str, nn.Parameter]]
    ) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for optimizer, trained in self._trained.items():
            # Masters belong to the optimizer's state, which may be offloaded.
            if trained is model:
                self.maybe_load_optimizer(optimizer)
        has_master = {parameter for group, _ in self._partitions(model) for parameter in group}
        for name, parameter in named:
            if parameter in has_master:
                yield name, safe_get_full_fp32_param(parameter)
            else:
                shard = [(name, self._as_shard(parameter))]
                ((_, full),) = stream(shard, torch.float32, self.bucket_limit())
                yield name, full.view(zero_state.whole_shape(parameter))

    def _as_shard(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's partition as a shard of the flattened parameter, without padding."""
        shard = zero_state.local_shard(parameter)
        if shard is parameter:
            return parameter

        num_elements = zero_state.whole_shape(parameter).numel()
        num_local = max(0, min(shard.numel(), num_elements - self.mesh.world.rank * shard.numel()))
        local = shard.detach()[:num_local].to(self.device)

        whole = {"shape": torch.Size([num_elements]), "stride": (1,)}
        return DTensor.from_local(local, self._cut, [Shard(0)], run_check=False, **whole)

    def _model_tensors(self, model: nn.Module) -> list[Tensor]:
        if model in self._engines and self.config.strategy.zero_stage == 3:
            self._engines[model].optimizer.empty_partition_cache()
        return [zero_state.local_shard(parameter) for parameter in model.parameters()] + list(
            model.buffers()
        )


def _scratch(zero: Any) -> list[Tensor]:
    """Return the gradient buffers that ZeRO-3 keeps allocated even if there are no gradients."""
    if not is_a(zero, STAGE_3):
        return []
    return [
        zero.grad_partitions_flat_buffer,
        *(bucket.buffer for bucket in zero.ipg_buckets.values()),
    ]


class _ParameterContainer(nn.Module):
    """Module that passes parameters to zero.Init one by one, as they are created."""

    def __init__(self, created: Iterator[nn.Parameter]):
        super().__init__()
        self.created = created

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.created


def _cast(parameters: Iterator[nn.Parameter], dtype: torch.dtype) -> Iterator[nn.Parameter]:
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
        yield parameter


def _enter_through(module: nn.Module, engine: "DeepSpeedEngine") -> None:
    """Route calls of the module through the engine, and let the engine call the module.

    The module stays the same object.
    """
    cls = type(module)
    # The engine calls the module itself, and that inner call must not go to the engine again.
    inside = False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return cls.__call__(self, *args, **kwargs)
        inside = True
        try:
            return engine(*args, **kwargs)
        finally:
            inside = False

    module.__class__ = type(
        cls.__name__,
        (cls,),
        {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__},
    )
