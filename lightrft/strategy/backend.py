"""What distinguishes one way of distributing from another: the hooks that a strategy implements or overrides."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.engine import weights
from lightrft.parallel.grad_norm import clip_gradients, global_grad_norm
from lightrft.parallel.mesh import Mesh
from lightrft.strategy.checkpoint import Training
from lightrft.strategy.config import StrategyConfig
from lightrft.strategy.named import hf_parameters
from lightrft.strategy.offload import AwayModel, AwayOptimizer
from lightrft.strategy.optim import step


class Away(Protocol):
    """A model or an optimizer that waits in host memory, which a caller notices by an error when it is used."""

    def reload(self, device: torch.device) -> None:
        """Bring it back, the same bit by bit."""


class Backend(ABC):
    """StrategyBase calls these, never users. Two are a backend's own; the others fit parameters that are plain or DTensors.

    All ranks call every hook together.
    """

    config: StrategyConfig
    device: torch.device
    max_norm: float

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """Ranks and groups; RuntimeError before setup_distributed()."""

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in and weights travel in."""
        return torch.bfloat16 if self.config.bf16 else torch.float32

    @abstractmethod
    def distribute(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        """Distribute one module in place and point its optimizer, which has not stepped, at the new parameters."""

    @abstractmethod
    def accumulate(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        """Add the gradients of one micro-batch; after the `last` one they are summed over all ranks, never averaged."""

    def gradient_norm(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """The 2-norm of all gradients that the optimizer is about to see, over all shards: [] float32, equal on all ranks."""
        return global_grad_norm(_parameters(optimizer), self.device)

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer, norm: Tensor) -> None:
        """Clip to `max_norm` (0: not at all) by the finite `norm`, and take one step."""
        if self.max_norm > 0:
            clip_gradients(_parameters(optimizer), norm, self.max_norm)
        step(optimizer)

    def clear_gradients(self, model: nn.Module) -> None:
        """Forget all gradients, also those that the backend keeps elsewhere."""
        model.zero_grad(set_to_none=True)

    def stream(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter, bucket by bucket; see StrategyBase.full_params()."""
        return weights.stream(hf_parameters(model), dtype, self.config.weight_sync_bucket_mb * 2**20)

    def send_model_away(self, model: nn.Module) -> Away:
        """Move parameters and buffers to host memory and free their place on the device; parameters stay the same objects."""
        return AwayModel(model, self.device)

    def send_optimizer_away(self, optimizer: Optimizer) -> Away:
        """The same for the optimizer's state."""
        return AwayOptimizer(optimizer, self.device)

    def training(self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> Training:
        """What a checkpoint reads and writes. Model and optimizer are here, not away."""
        return Training(model, optimizer, scheduler, self.mesh.world, self.device)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
