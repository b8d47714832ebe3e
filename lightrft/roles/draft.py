"""The model that drafts for the engine and learns to say what the actor says."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.algorithms.truncation import Truncation
from lightrft.core.batch import Batch
from lightrft.core.losses import Report
from lightrft.models.heads import LocalGradients, TokenLogprobs
from lightrft.roles.role import DistributedRole
from lightrft.strategy.strategy import StrategyBase


class Draft(DistributedRole):
    """Language model that learns from the responses of the actor.

    Its module is a models.heads.Actor. Responses are samples of the actor, so the mean negative
    log-prob estimates KL(actor || draft) up to a constant. The KL is zero for a model whose drafts
    are always accepted.
    """

    NAME = "draft"

    def __init__(
        self,
        strategy: StrategyBase,
        module: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        *,
        temperature: float,
        truncation: Truncation,
        **options: Any,
    ):
        """Set up the model.

        Log-probs are at the `temperature` of sampling, over the vocabulary that `truncation`
        leaves.
        """
        super().__init__(strategy, module, optimizer, scheduler, **options)
        self.temperature = temperature
        self.truncation = truncation

    def forward(
        self, batch: Batch, gradients: LocalGradients | None = None
    ) -> tuple[Tensor, Report]:
        """Return log-probs of learned tokens [T], 0 elsewhere."""
        read = TokenLogprobs(entropy=False, gradients=gradients)
        return self.module(batch, self.temperature, self.truncation, read)[0], {}
