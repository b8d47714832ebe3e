"""The load of a mixture of experts: a loss that is least when routers use all experts alike."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lightrft.algorithms.reduce import Sum
from lightrft.types import Routing


@dataclass(frozen=True, slots=True)
class Balance:
    """E sum_e f_e P_e over all tokens of an optimizer step and all layers, of all ranks.

    f_e: so often expert e is chosen; P_e: its mean probability; E experts. A choice has no gradient: once the f_e are known, the
    loss is a mean over tokens, of which each micro-batch has its share. Fedus et al., arXiv 2101.03961, equations 4 to 6; over
    the global batch: arXiv 2501.11873.
    """

    weights: Tensor
    """[E] float32, what a token's probabilities count."""
    loss: Tensor
    """[] float32."""

    @classmethod
    def of(cls, mine: Routing, total: Sum) -> Self:
        """From the routing of this rank's tokens; one collective."""
        chosen, probabilities, count = total(torch.cat([mine.chosen, mine.probabilities, mine.count[None]])).split(
            [len(mine.chosen), len(mine.probabilities), 1]
        )
        weights = len(chosen) * chosen / count.square().clamp(min=1)
        return cls(weights, (weights * probabilities).sum())

    def share(self, routing: Routing) -> Tensor:
        """What some of the tokens add to the loss: []."""
        return (self.weights * routing.probabilities).sum()


def routing(logits: list[Tensor], weight: Tensor, top_k: int) -> Routing:
    """From the logits [t, E] of each layer's router, which choose `top_k` experts; a token counts so often: weight [t]."""
    probabilities = [layer.float().softmax(-1) for layer in logits]
    weight = weight.float()
    chosen = [torch.zeros_like(each).scatter_(1, each.topk(top_k, dim=-1).indices, 1.0) for each in probabilities]
    return Routing(
        chosen=sum(weight @ each for each in chosen),
        probabilities=sum(weight @ each for each in probabilities),
        count=weight.sum() * len(logits),
    )
