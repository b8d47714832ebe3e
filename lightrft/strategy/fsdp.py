"""FSDP2: shard each block's parameters over the data ranks, and gather them to compute it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from lightrft.config.facts import EXPERT_FAMILIES
from lightrft.models.empty import empty_parameters
from lightrft.models.load import repeated_blocks
from lightrft.models.lora import adapter_parameters
from lightrft.models.outermost import outermost
from lightrft.models.parallel.device import local_tensor
from lightrft.models.parallel.tensor_parallel import parallelize
from lightrft.models.weight_sync.stream import hf_parameters, stream
from lightrft.strategy.backends.materialize import materialize
from lightrft.strategy.backends.offload import OffloadedModel
from lightrft.strategy.backends.optim import follow, parameter_names
from lightrft.strategy.backends.replicas import Replicas
from lightrft.strategy.strategy import StrategyBase

MOST_PADDING = 1.05
"""Most elements that a parameter may have with padding, for each of its own."""


class FSDPStrategy(StrategyBase):
    """FSDP2 over all data ranks, or within each replica of --dp_replicate.

    Gradients are summed over all ranks, not averaged. --tp_size and --sp_size work with it. If each
    rank has the whole model in float32, nothing is sharded, and Replicas sums the gradients.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._replicas: dict[nn.Module, Replicas] = {}

    def close(self) -> None:
        self._replicas.clear()
        super().close()

    def _creator(self, model: nn.Module) -> Callable[..., Optimizer]:
        name = self.config.optim.optimizer
        if name == "muon":
            from lightrft.strategy.backends.muon import create_muon

            return partial(create_muon, blocks=blocks(model))

        from lightrft.strategy.backends.bitsandbytes import create

        return partial(create, name)

    def distribute(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        """Split by tensor parallelism, shard, materialize, and let the optimizer follow."""
        names = parameter_names(module, optimizer)
        if self.mesh.tp.size > 1:
            parallelize(
                module, self.mesh.tensor, sequence=self.config.strategy.tp_sequence_parallel
            )

        experts = self._divide_experts(module) if self.mesh.ep.size > 1 else []
        if self._shards:
            self._shard(module, experts)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        materialize(
            module,
            torch.device("cpu") if self.config.strategy.fsdp_cpu_offload else self.device,
            self.mesh.world,
        )
        if not self._shards:
            module.to(self.device)  # a sharded module is on the device already
        follow(module, optimizer, names)
        if trained and not self._shards and self.mesh.replicate.size > 1:
            self._replicas[module] = Replicas(module, self.mesh.replicate)

    @cached_property
    def _shards(self) -> bool:
        """Return True if ranks divide a model, or if parameters are cast or fetched from the host.

        Otherwise the hooks and copies of FSDP2 would take time for nothing.
        """
        return (
            self.mesh.shard.size > 1
            or self.mesh.tp.size > 1
            or self.config.model.bf16
            or self.config.strategy.fsdp_cpu_offload
        )

    def _divide_experts(self, module: nn.Module) -> list[nn.Module]:
        """Divide experts over --ep_size, and return these modules."""
        from lightrft.models.parallel.expert_parallel import divide_experts

        experts = divide_experts(module, self.mesh.experts, self.mesh.ep, EXPERT_FAMILIES)
        if not experts and self.mesh.world.rank == 0:
            logger.warning("--ep_size has no effect on {}: no experts", type(module).__name__)
        return experts

    def _shard(self, module: nn.Module, experts: Sequence[nn.Module] = ()) -> None:
        """Shard divided experts, then each block, and then the rest of the module."""
        options: dict[str, Any] = {
            "mesh": self.mesh.parameters,
            # This includes the root: unsharded, its parameters are not the optimizer's.
            "reshard_after_forward": True,
            "mp_policy": self._precision(),
            "offload_policy": self._offload(),
            "shard_placement_fn": partial(shard_placement, ranks=self.mesh.parameters.shape[-1]),
        }
        for submodule in experts:
            mesh = self.mesh.expert_parameters
            of_experts: dict[str, Any] = {
                "mesh": mesh,
                "shard_placement_fn": partial(shard_placement, ranks=mesh.shape[-1]),
                # Blocks have cast the tokens, and the weights of experts keep their precision.
                "mp_policy": replace(self._precision(), cast_forward_inputs=False),
            }
            fully_shard(submodule, **options | of_experts)

        units = blocks(module)
        for block in units:
            fully_shard(block, **options)
        fully_shard(module, **options)
        if experts:
            _gather_ahead(units)

        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.set_gradient_divide_factor(1.0)
                # The alternative is a scaled sum, and gloo does not have it.
                submodule.set_force_sum_reduction_for_comms(True)

    def init_model_context(
        self, device: torch.device | str | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for empty models; prepare() reads this rank's shard from the folder."""
        return empty_parameters() if str(device or "meta") == "meta" else nullcontext()

    def accumulate(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        """Reduce gradients to shards, and after the last micro-batch the shards over replicas.

        With --reduce_gradients_once FSDP2 keeps full float32 gradients until the last one: four
        bytes per parameter on each rank. With --gather_parameters_once parameters stay gathered
        until then.
        """
        if model in self._replicas:
            self._replicas[model].backward(loss, last=last)
            return

        reduce = last or not self.config.strategy.reduce_gradients_once
        for root in outermost(model, FSDPModule) if self._shards else ():
            root.set_requires_gradient_sync(reduce)
            root.set_requires_all_reduce(last)
            # Otherwise the inputs of reductions stay allocated until the next micro-batch.
            root.set_is_last_backward(reduce)
            if self.config.strategy.gather_parameters_once:
                root.set_reshard_after_backward(last)
                # This is for the forward pass of the next micro-batch.
                root.set_reshard_after_forward(last)
        loss.backward()

    def adapter_stream(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        adapters = adapter_parameters(hf_parameters(model))
        return stream(adapters, dtype, self.bucket_limit(), self.device)

    def offload_model_state(self, model: nn.Module) -> OffloadedModel:
        return OffloadedModel(model, self.device)

    def lives_on_host(self, item: nn.Module | Optimizer) -> bool:
        return self.config.strategy.fsdp_cpu_offload

    def _precision(self) -> MixedPrecisionPolicy:
        if not self.config.model.bf16:
            return MixedPrecisionPolicy()
        half = self.config.strategy.reduce_dtype == "bf16"
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16 if half else torch.float32
        )

    def _offload(self) -> OffloadPolicy:
        if not self.config.strategy.fsdp_cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu")


def _gather_ahead(units: list[Any]) -> None:
    """Let each block gather the next one, with its experts, while it computes; and back.

    FSDP2 gathers ahead as far as the host is ahead, but that waits in each layer for the numbers of
    tokens that are exchanged. In the backward pass a block's own experts come first, because
    a recomputed block needs them at once. `units` come from blocks().
    """
    units_of = {
        block: [unit for unit in block.modules() if isinstance(unit, FSDPModule)] for block in units
    }
    for block in units:
        block.set_modules_to_backward_prefetch(units_of[block][1:])

    for later, block in pairwise(units):
        if type(later) is type(block):
            block.set_modules_to_forward_prefetch(units_of[later])
            later.set_modules_to_backward_prefetch([*units_of[later][1:], *units_of[block]])


def shard_placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """Return the dim to shard: the first one, unless its padding costs more than MOST_PADDING.

    FSDP2 pads dim 0 to a multiple of the ranks. With more ranks than experts, each rank would hold
    and gather a whole expert. Other dims are not padded, so only equal shards are possible there.
    """
    tensor = local_tensor(parameter)
    num_rows, *sizes = tensor.shape
    if -(-num_rows // ranks) * ranks <= MOST_PADDING * num_rows:
        return Shard(0)
    return Shard(next((dim for dim, size in enumerate(sizes, 1) if size % ranks == 0), 0))


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules to shard as units, innermost first.

    They are the model's no-split modules or, without any, the children of module lists. A block
    that shares a parameter with the rest of the model (tied embeddings) is left to the root, where
    it stays tied.
    """
    candidates = repeated_blocks(module)
    if not candidates:
        candidates = [
            child
            for inner in module.modules()
            if isinstance(inner, nn.ModuleList)
            for child in inner
        ]

    uses = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    # Counting uses finds tied parameters, whose names all refer to one object.
    count = {key: uses.count(key) for key in uses} if len(uses) != len(set(uses)) else {}
    return [
        block for block in reversed(candidates) if block is not module and not _shared(block, count)
    ]


def _shared(block: nn.Module, uses: dict[int, int]) -> bool:
    inside = [id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False)]
    return any(uses.get(key, 1) > inside.count(key) for key in set(inside))
