"""Load-balancing loss of a mixture of experts.

It is lowest when routers use all experts equally.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lightrft.core.batch import Routing
from lightrft.core.losses import Sum


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
        columns = [local.chosen, local.probabilities, local.count[None]]
        sums = total(torch.cat(columns))
        chosen, probabilities, count = sums.split([len(column) for column in columns])
        weights = len(chosen) * chosen / count.square().clamp(min=1)
        return cls(weights, (weights * probabilities).sum())

    def share(self, routing: Routing) -> Tensor:
        """Return the contribution of some of the tokens to the loss: []."""
        return (self.weights * routing.probabilities).sum()


def routing(routers: list[tuple[Tensor, Tensor]], weight: Tensor) -> Routing:
    """Compute the routing from each layer's router logits [t, E] and chosen experts [t, k].

    `weight` [t] is the weight of each token.
    """
    probabilities = [logits.float().softmax(-1) for logits, _ in routers]
    weight = weight.float()
    # What is chosen need not be the most probable: some families add a bias to their own scores.
    chosen = [
        torch.zeros_like(layer).scatter_(1, experts, 1.0)
        for layer, (_, experts) in zip(probabilities, routers, strict=True)
    ]

    return Routing(
        chosen=sum(weight @ layer for layer in chosen),
        probabilities=sum(weight @ layer for layer in probabilities),
        count=weight.sum() * len(routers),
    )
