"""Load-balancing loss of a mixture of experts.

It is lowest when routers use all experts equally.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lightrft.algorithms.reduce import Sum
from lightrft.types import Routing


@dataclass(frozen=True, slots=True)
class Balance:
    """E sum_e f_e P_e over all tokens of an optimizer step and all layers, of all ranks.

    f_e says how often expert e is chosen, P_e is the mean probability, and E counts the experts. A
    choice has no gradient: once the f_e are known, the loss is a mean over tokens, and each
    micro-batch has a share in it. Fedus et al., arXiv 2101.03961, equations 4 to 6; over the global
    batch: arXiv 2501.11873.
    """

    weights: Tensor
    """Weights of a token's probabilities in the loss, [E] float32."""
    loss: Tensor
    """Loss over all tokens, [] float32."""

    @classmethod
    def of(cls, local: Routing, total: Sum) -> Self:
        """Compute the balance from the routing of this rank's tokens; one collective."""
        chosen, probabilities, count = total(
            torch.cat([local.chosen, local.probabilities, local.count[None]])
        ).split([len(local.chosen), len(local.probabilities), 1])
        weights = len(chosen) * chosen / count.square().clamp(min=1)
        return cls(weights, (weights * probabilities).sum())

    def share(self, routing: Routing) -> Tensor:
        """Return the contribution of some of the tokens to the loss: []."""
        return (self.weights * routing.probabilities).sum()


def routing(logits: list[Tensor], weight: Tensor, top_k: int) -> Routing:
    """Compute the routing from each layer's router logits [t, E]; `top_k` experts are chosen.

    `weight` [t] is the weight of each token.
    """
    probabilities = [layer.float().softmax(-1) for layer in logits]
    weight = weight.float()
    chosen = [
        torch.zeros_like(each).scatter_(1, each.topk(top_k, dim=-1).indices, 1.0)
        for each in probabilities
    ]

    return Routing(
        chosen=sum(weight @ each for each in chosen),
        probabilities=sum(weight @ each for each in probabilities),
        count=weight.sum() * len(logits),
    )
