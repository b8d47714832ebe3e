"""Direct preference optimisation: the log-probs of two answers, relative to those of a reference
model.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.algorithms.preferences.dpo import DPOObjective
from lightrft.algorithms.reduce import sequence_sums
from lightrft.batching.redistribute import share
from lightrft.config.sections import PreferenceSection, TrainSection
from lightrft.data.preferences import CHOSEN, REJECTED
from lightrft.roles.policy import Policy
from lightrft.roles.role import LossTerm
from lightrft.trainer.tasks.pairs import local_pairs, pair_denominator
from lightrft.types import Expand, Prompt

PAIRS_AT_ONCE = 1024
"""Number of pairs whose reference log-probs are computed together: data may be larger than memory.
"""


class DPOTask:
    """Pairs of answers; the loss is the mean over all pairs of a step."""

    def __init__(
        self,
        policy: Policy,
        preference: PreferenceSection,
        train: TrainSection,
        expand: Expand | None = None,
    ):
        """Set up the task. `expand` is for prompts with media."""
        self.policy = policy
        self.train = train
        self.objective = DPOObjective(preference)
        self.expand = expand
        self._known: dict[bytes, Tensor] = {}
        """Digest of a pair -> the reference's log-probs of both answers, [2] float32 on the host.
        """

    def term(self, pairs: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' pairs, with the reference's log-probs
        of its answers.

        They are left out before the first optimizer step, while the policy is the reference.
        Computed in other micro-batches they are rounded differently, and it would be chance which
        answer of a pair seems to be preferred.
        """
        strategy = self.policy.strategy
        batch, rows, local = local_pairs(
            pairs, strategy.mesh.data, self.train, max_tokens=max_tokens, expand=self.expand
        )

        has_learned = self.policy.scheduler.last_epoch > 0
        if not has_learned:
            batch.reference = None
        elif self.policy.reference is None:
            sums = [self._known[_digest(pairs[place])] for place in local]
            batch.reference = torch.cat([*sums, torch.zeros(0)])
        else:
            batch.reference = sequence_sums(self.policy.reference_logprobs(batch, rows), batch)

        return LossTerm(
            batch,
            rows,
            self.objective,
            pair_denominator(pairs, strategy.device),
            self.policy.supervised,
        )

    def precompute(self, pairs: Sequence[Prompt]) -> None:
        """Keep the log-probs of the actor, which has not learned yet, as those of the reference.

        All ranks call it together.
        """
        data = self.policy.strategy.mesh.data
        train = self.train
        max_tokens = train.max_tokens_per_logprob_microbatch or train.max_tokens_per_microbatch
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = pairs[start : start + PAIRS_AT_ONCE]
            batch, rows, local = local_pairs(
                part, data, train, max_tokens=max_tokens, expand=self.expand
            )
            sums = sequence_sums(self.policy.logprobs(batch, rows), batch).view(-1, 2)
            places = share(data, torch.tensor(local, dtype=torch.int64))
            sums = share(data, sums)
            self._known |= {
                _digest(part[place]): both.clone()
                for place, both in zip(places.tolist(), sums, strict=True)
            }


def _digest(pair: Prompt) -> bytes:
    """Return a digest of the tokens and the media of a pair, which may be built anew each time that
    it is needed.
    """
    tokens = [pair.token_ids, *(pair.columns[name].token_ids for name in (CHOSEN, REJECTED))]
    digest = hashlib.blake2b(repr([list(ids) for ids in tokens]).encode(), digest_size=16)
    for items in pair.multi_modal.values():
        for item in items:
            digest.update(item.identity)
    return digest.digest()
