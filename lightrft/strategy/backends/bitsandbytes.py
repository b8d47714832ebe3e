"""Take steps of optimizers of bitsandbytes with states that are sharded like the parameters."""

from collections import defaultdict
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit, Lion
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightrft.models.parallel.device import local_tensor
from lightrft.strategy.backends.optim import decay_groups

SCALED = 256
"""Values of a state of 8 bits that have a common scale."""
LEAST_ELEMENTS = 4096
"""Smaller parameters have states of 32 bits, as in bitsandbytes."""
MAPS = {"1": "dynamic", "2": "udynamic"}
"""Number of a state -> its map from 8 bits to values."""


def create(
    name: str, model: nn.Module, lr: float, betas: tuple[float, float], decay: float, eps: float
) -> Optimizer:
    """Build lion (arXiv 2302.06675) or adamw_8bit (arXiv 2110.02861); only matrices decay."""
    groups = decay_groups(model, decay)
    if name == "lion":
        return Shardwise(Lion(groups, lr, betas), "1", quantize=False)
    return Shardwise(AdamW8bit(groups, lr, betas, eps), "12", quantize=True)


class Shardwise(Optimizer):
    """Take steps of an optimizer of bitsandbytes on this rank's shards.

    The states do not depend on the number of ranks. A quantized state has a
    scale for each 256 values of a row. Vectors, matrices with fewer than 4,096 values, and rows
    that are no multiple of 256 have states of 32 bits.
    """

    def __init__(self, inner: Optimizer, numbers: str, *, quantize: bool):
        """Train what `inner` has; `numbers` name its states."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._numbers = numbers
        self._quantize = quantize

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step. Raises ValueError if ranks divide rows into parts that do not fit."""
        inner = self._inner
        inner.param_groups = []
        inner.state = defaultdict(dict)
        for group in self.param_groups:
            shards = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= self._first_state(parameter)
                shard = _shard(parameter)
                if shard.numel():
                    inner.state[shard] = self._on_shard(state)
                    shards.append(shard)
                state["step"] += 1
            inner.param_groups.append(group | {"params": shards})

        inner.step()  # changes all states through views

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. torch casts it to the type of the parameter, and codes have 8 bits."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for number in self._numbers if "absmax1" in state else ():
                state[f"state{number}"] = state[f"state{number}"].to(torch.uint8)

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return zeros in the layout of the parameter, and the scales of quantized ones."""
        fits = parameter.ndim > 1 and parameter.shape[-1] % SCALED == 0
        quantize = self._quantize and fits and parameter.numel() >= LEAST_ELEMENTS
        dtype = torch.uint8 if quantize else torch.float32
        state: dict[str, Any] = {"step": 0}
        for number in self._numbers:
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
            if quantize:
                state[f"absmax{number}"] = _scales(parameter)
        return state

    def _on_shard(self, state: dict[str, Any]) -> dict[str, Any]:
        found = {name: local_tensor(value) for name, value in state.items() if name != "step"}
        for number in self._numbers if "absmax1" in state else ():
            found[f"absmax{number}"] = found[f"absmax{number}"].view(-1)
            codes = found[f"state{number}"]
            found[f"qmap{number}"] = self._inner.name2qmap[MAPS[number]].to(codes.device)
        return found | {"step": state["step"]}


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's values of a parameter, and of its gradient."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    shard = nn.Parameter(local_tensor(parameter).detach())
    shard.grad = local_tensor(gradient)
    return shard


def _scales(parameter: nn.Parameter) -> Tensor:
    """Return zeros for a parameter [..., n], divided like it: [..., n / 256]."""
    *rows, width = local_tensor(parameter).shape
    if width % SCALED:
        raise ValueError(
            f"--optimizer adamw_8bit: a matrix {list(parameter.shape)} is divided into rows of"
            f" {width} values, no multiple of {SCALED}; use a smaller --tp_size, or adamw"
        )

    zeros = local_tensor(parameter).new_zeros(*rows, width // SCALED)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size([*parameter.shape[:-1], parameter.shape[-1] // SCALED])
    layout = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(zeros, parameter.device_mesh, parameter.placements, **layout)
