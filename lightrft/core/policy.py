"""A policy whose module returns logits: enough to learn, where the vocabulary is small."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.core.batch import Batch, Rows
from lightrft.core.losses import Reported
from lightrft.core.role import Role


class LogitsPolicy(Role):
    """Log-probs and updates of an actor, a module that returns logits [T, V] of a batch.

    The engine samples with temperature 1, because the log-probs are of that distribution.
    """

    NAME = "policy"

    def logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """Return log p of every learned token under the actor, 0 elsewhere: [T] on the host."""
        return self.infer(lambda share: self.read(share)[0], batch, rows)

    def forward(self, batch: Batch) -> Reported:
        """Return log-probs of learned tokens [T], 0 elsewhere; store the entropy in the batch."""
        logprobs, batch.entropy = self.read(batch)
        return logprobs, {"train/entropy": batch.entropy.detach()}

    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropy of the learned tokens, 0 elsewhere: [T], [T]."""
        tokens = batch.learned_tokens.to(batch.input_ids.device)
        # Each position predicts the next token; the first one of a sequence is never learned.
        distribution = F.log_softmax(self.module(batch)[tokens - 1].float(), dim=-1)
        logprobs = distribution.gather(-1, batch.input_ids[tokens, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        zeros = torch.zeros(batch.num_tokens, device=logprobs.device)
        return zeros.index_put((tokens,), logprobs), zeros.index_put((tokens,), entropy)
