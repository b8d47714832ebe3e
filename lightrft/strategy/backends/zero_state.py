"""Configure DeepSpeed, and read ZeRO's partitions: the masters and moments that a rank updates."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft.config.sections import Config
from lightrft.strategy.checkpoint.model_state import ModelState, frozen_names
from lightrft.strategy.checkpoint.zero_fragment import Fragment

ZERO_BUCKET = 50_000_000
"""Gradient elements per reduction, and parameter elements per prefetch."""


def engine_config(
    settings: Config, module: nn.Module, trains: bool, device: torch.device, max_norm: float
) -> dict[str, Any]:
    """Build the configuration of deepspeed.initialize() for a module that it `trains` or not.

    ZeRO-3 keeps vectors whole: gathering them costs more than it saves.
    """
    config = settings.strategy
    bf16 = settings.model.bf16 and (trains or next(module.parameters()).dtype == torch.bfloat16)
    pinned = device.type != "cpu"
    vectors = [parameter.numel() for parameter in module.parameters() if parameter.ndim < 2]
    gradients = config.reduce_dtype if bf16 else "fp32"
    on_host = {"optimizer": trains and config.adam_offload, "param": config.param_offload}

    return {
        "train_micro_batch_size_per_gpu": 1,  # unused: losses are shares of the global mean
        "gradient_clipping": max_norm,
        "steps_per_print": sys.maxsize,
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "communication_data_type": gradients,
        "data_types": {"grad_accum_dtype": gradients},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own AdamW on the host needs no compiler
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": config.overlap_comm,
            "reduce_bucket_size": ZERO_BUCKET,
            "stage3_prefetch_bucket_size": ZERO_BUCKET,
            "stage3_param_persistence_threshold": max(vectors, default=0),
            "zero_hpz_partition_size": config.zpg,
            **{
                f"offload_{name}": {"device": "cpu" if so else "none", "pin_memory": pinned}
                for name, so in on_host.items()
            },
        },
    }


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Contiguous elements of a flattened parameter, and where a flat partition has the masters."""

    parameter: nn.Parameter
    start: int
    flat: Tensor
    offset: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice's elements of a flat partition, or of a moment of it."""
        return tensor.detach()[self.offset : self.offset + self.length]


@dataclass
class Partitions:
    """This rank's part of a model's training state: a flat float32 master for each group."""

    groups: Sequence[Sequence[nn.Parameter]]
    flats: Sequence[Tensor]
    rank: int
    by_parameter: bool
    """True if each parameter is partitioned (ZeRO-3). Lower stages partition a group like one
    tensor."""

    def __iter__(self) -> Iterator[tuple[Sequence[nn.Parameter], Tensor]]:
        return zip(self.groups, self.flats, strict=True)

    def pieces(self) -> Iterator[FlatSlice]:
        cut = self._cut_parameters if self.by_parameter else self._cut_group
        for group, flat in self:
            yield from (piece for piece in cut(group, flat) if piece.length > 0)

    def _cut_parameters(self, group: Sequence[nn.Parameter], flat: Tensor) -> Iterator[FlatSlice]:
        offset = 0
        for parameter in group:
            size = parameter.ds_tensor.numel()
            start = self.rank * size
            length = min(size, parameter.ds_numel - start)
            yield FlatSlice(parameter, start, flat, offset, length)
            offset += size

    def _cut_group(self, group: Sequence[nn.Parameter], flat: Tensor) -> Iterator[FlatSlice]:
        first = self.rank * flat.numel()
        before = 0
        for parameter in group:
            start = max(first - before, 0)
            stop = min(first + flat.numel() - before, parameter.numel())
            yield FlatSlice(parameter, start, flat, before + start - first, stop - start)
            before += parameter.numel()


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter that ZeRO-3 may have partitioned."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_shard(parameter: Tensor) -> Tensor:
    """Return what a rank stores of a parameter: a padded partition under ZeRO-3, else all."""
    return getattr(parameter, "ds_tensor", parameter)


@dataclass
class ZeroModelState(ModelState):
    """Model state with masters in place of parameters.

    So checkpoints are the same for all ZeRO stages and FSDP2.
    """

    partitions: Partitions = field(kw_only=True)
    group_names: list[list[str]] = field(kw_only=True)
    """Names of the parameters in each of the optimizer's groups; these now have flat partitions."""
    follow: Callable[[], None] = field(kw_only=True)
    """Function that copies the masters into the model's parameters."""

    def tensors(self, *, module_only: bool = False) -> dict[str, Any]:
        pieces = {piece.parameter: piece for piece in self.partitions.pieces()}
        # Frozen parameters come from --pretrain again, so checkpoints leave them out.
        frozen = frozen_names(self.model)
        values = self.model.state_dict(keep_vars=True)
        state = {
            "model": {
                name: self._master(value, pieces)
                for name, value in values.items()
                if name not in frozen
            }
        }

        if self.optimizer is not None and not module_only:
            groups = zip(self.optimizer.param_groups, self.group_names, strict=True)
            state["optimizer"] = {
                "state": self._moments(pieces),
                "param_groups": [dict(group) | {"params": names} for group, names in groups],
            }

        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Apply a loaded state.

        Fragments are views, so masters and moments already contain the loaded values.
        """
        self.follow()
        if "optimizer" not in state:
            return
        loaded = state["optimizer"]
        # A group without a saved state is as before the first step; old moments would be wrong.
        names = self._names()
        for group, flat in self.partitions:
            if not any(names[parameter] in loaded["state"] for parameter in group):
                self.optimizer.state.pop(flat, None)
        for group, saved in zip(self.optimizer.param_groups, loaded["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _master(self, value: Tensor, pieces: dict[Tensor, FlatSlice]) -> Tensor | Fragment:
        if value in pieces:
            return _fragment(pieces[value], pieces[value].flat)
        if any(value is parameter for group, _ in self.partitions for parameter in group):
            return Fragment(whole_shape(value), 0, torch.empty(0))
        shard = local_shard(value)
        shape = whole_shape(value)
        if shard is value:
            return value
        start = min(self.partitions.rank * shard.numel(), shape.numel())
        return Fragment(shape, start, shard.detach()[: shape.numel() - start])

    def _moments(self, pieces: dict[Tensor, FlatSlice]) -> dict[str, dict[str, Any]]:
        """Return parameter name -> the optimizer's state for this rank's shard of it."""
        moments: dict[str, dict[str, Any]] = {}
        names = self._names()
        for group, flat in self.partitions:
            begin(self.optimizer, flat)
            items = self.optimizer.state[flat].items()
            state = {key: value for key, value in items if isinstance(value, Tensor)}

            for parameter in group:
                piece = pieces.get(parameter, FlatSlice(parameter, 0, flat, 0, 0))
                moments[names[parameter]] = {
                    key: _fragment(piece, value) if value.ndim else value
                    for key, value in state.items()
                }

        return moments

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}


def begin(optimizer: Optimizer, flat: Tensor) -> None:
    """Give a flat partition the optimizer state of before the first step, unless it has one."""
    if optimizer.state.get(flat):
        return

    # A step at rate 0 makes the optimizer create the state; then the values are set to 0.
    groups = optimizer.param_groups
    gradient = flat.grad
    flat.grad = torch.zeros_like(flat)
    optimizer.param_groups = [groups[0] | {"params": [flat], "lr": 0.0}]

    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        flat.grad = gradient

    for value in optimizer.state[flat].values():
        if isinstance(value, Tensor):
            value.zero_()


def _fragment(piece: FlatSlice, tensor: Tensor) -> Fragment:
    return Fragment(whole_shape(piece.parameter), piece.start, piece.of(tensor))
