"""Strategies as users write them: one from nothing, and one that changes a single hook."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft.strategy import FSDPStrategy, StrategyBase


class DataParallelStrategy(StrategyBase):
    """Plain data parallelism: every rank has the whole model; gradients are summed once per
    optimizer step.
    """

    def distribute(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        module.to(self.device)
        if self.mesh.world.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def accumulate(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        loss.backward()
        if last and self.mesh.world.size > 1:
            gradients = [
                parameter.grad for parameter in model.parameters() if parameter.grad is not None
            ]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, total in zip(
                gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(total.view_as(gradient))


class Counting(FSDPStrategy):
    """FSDP2 that keeps the norms of all steps."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.norms: list[float] = []

    def take_step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        norm = super().take_step(model, optimizer)
        self.norms.append(norm.item())
        return norm
