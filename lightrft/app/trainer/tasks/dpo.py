"""Direct preference optimisation: learn from the log-probs of two answers against a reference."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.algorithms.preferences.dpo import DPOObjective, answer_sums
from lightrft.algorithms.roles.policy import Policy
from lightrft.app.run.run import Run
from lightrft.app.trainer.tasks.pairs import local_pairs, pair_denominator
from lightrft.config.sections import REFERENCE_FREE
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt
from lightrft.data.preferences import CHOSEN, REJECTED
from lightrft.strategy.batching.micro_batches import share

PAIRS_AT_ONCE = 1024
"""Pairs whose reference log-probs are computed together. All at once might not fit in memory."""


@dataclass(eq=False)
class DPOTask:
    """Learns from pairs of answers; the loss is the mean over all pairs of a step."""

    run: Run
    policy: Policy
    objective: DPOObjective
    _known: dict[bytes, Tensor] = field(default_factory=dict)
    """Digest of a pair -> the reference's log-probs of both answers, [2] float32 on the CPU."""

    def __call__(self, pairs: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' pairs, with reference log-probs.

        Before the first optimizer step the policy is the reference, so they are left out.
        Other micro-batches would round them differently, and chance would decide which answer seems
        to be preferred.
        """
        batch, rows, local = local_pairs(self.run, pairs, max_tokens=max_tokens)
        section = self.objective.section
        has_learned = self.policy.scheduler.last_epoch > 0
        if not has_learned or section.dpo_loss in REFERENCE_FREE:
            batch.reference = None
        elif self.policy.reference is None:
            sums = [self._known[_digest(pairs[index])] for index in local]
            batch.reference = torch.cat([*sums, torch.zeros(0)])
        else:
            logprobs = self.policy.reference_logprobs(batch, rows)
            batch.reference = answer_sums(logprobs, batch, section.ld_alpha)

        denominator = pair_denominator(pairs, self.run.strategy.device)
        return LossTerm(batch, rows, self.objective, denominator, self.policy.supervised)

    def precompute(self, pairs: Sequence[Prompt]) -> None:
        """Keep the log-probs of the actor, before it learns, as the reference's log-probs.

        All ranks call it together.
        """
        data = self.run.strategy.mesh.data
        max_tokens = self.run.config.train.most_logprob_tokens
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            chunk = pairs[start : start + PAIRS_AT_ONCE]
            batch, rows, local = local_pairs(self.run, chunk, max_tokens=max_tokens)
            logprobs = self.policy.logprobs(batch, rows)
            sums = answer_sums(logprobs, batch, self.objective.section.ld_alpha).view(-1, 2)
            indices = share(data, torch.tensor(local, dtype=torch.int64))
            sums = share(data, sums)
            # Each row is a view, and would keep the tensor of the whole chunk in memory.
            known = zip(indices.tolist(), sums, strict=True)
            self._known |= {_digest(chunk[index]): both.clone() for index, both in known}


def _digest(pair: Prompt) -> bytes:
    """Return a digest of a pair's tokens and media; the object may be built anew for each use."""
    tokens = [pair.token_ids, *(pair.columns[name].token_ids for name in (CHOSEN, REJECTED))]
    digest = hashlib.blake2b(repr([list(ids) for ids in tokens]).encode(), digest_size=16)
    for items in pair.multi_modal.values():
        for item in items:
            digest.update(item.identity)
    return digest.digest()
