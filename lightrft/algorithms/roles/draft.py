"""The model that drafts for the engine and learns to say what the actor says."""

from lightrft.algorithms.roles.policy import Policy
from lightrft.core.batch import Batch
from lightrft.core.losses import Reported
from lightrft.models.heads import LocalGradients, TokenLogprobs


class Draft(Policy):
    """Policy that learns from the responses of another one, the actor.

    Responses are samples of the actor, so the mean negative log-prob estimates KL(actor || draft)
    up to a constant. The KL is zero for a model whose drafts are always accepted.
    """

    NAME = "draft"

    def forward(self, batch: Batch, gradients: LocalGradients | None = None) -> Reported:
        """Return log-probs of learned tokens [T], 0 elsewhere."""
        read = TokenLogprobs(entropy=False, gradients=gradients)
        return self.module(batch, self.temperature, self.truncation, read)[0], {}
