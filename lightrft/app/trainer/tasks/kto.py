"""KTO: learn from single answers, good or bad, by log-probs relative to a reference.

Answers to other prompts show how far the policy has moved as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightrft.algorithms.preferences.kto import KTOObjective, reference_point
from lightrft.algorithms.roles.policy import Policy
from lightrft.app.trainer.tasks.examples import known_denominator, plan_local_rows
from lightrft.config.sections import PreferenceSection, TrainSection
from lightrft.core.batch import JudgedBatch, Rows
from lightrft.core.losses import sequence_sums
from lightrft.core.role import LossTerm
from lightrft.core.samples import Expand, Prompt
from lightrft.data.preferences import judged_batch, mismatched
from lightrft.strategy.batching.micro_batches import share


@dataclass(eq=False)
class KTOTask:
    """Learns from single answers; the loss is the mean over all answers of a step."""

    policy: Policy
    preference: PreferenceSection
    train: TrainSection
    expand: Expand | None = None
    """Function that expands prompts with media."""

    def term(self, answers: Sequence[Prompt], *, max_tokens: int) -> LossTerm:
        """Return this rank's share of the loss on all ranks' answers.

        One reference point serves the whole step. It comes from pairing each prompt with the answer
        to the next one, in the order of the step.
        """
        # Mismatched answers are computed without gradients, under the limit for log-probs.
        limit = min(max_tokens, self.policy.max_logprob_tokens or max_tokens)
        divergence = reference_point(self._log_ratios(mismatched(answers, limit), max_tokens))
        batch, rows = self._local(answers, max_tokens)
        batch.reference = sequence_sums(self.policy.reference_logprobs(batch, rows), batch)

        device = self.policy.strategy.device
        objective = KTOObjective(self.preference, divergence.to(device))
        denominator = known_denominator(0, len(answers), device)
        return LossTerm(batch, rows, objective, denominator, self.policy.supervised)

    def _log_ratios(self, answers: Sequence[Prompt], max_tokens: int) -> Tensor:
        """Return log(p_policy / p_reference) of all ranks' answers, [N] float32 on the host."""
        batch, rows = self._local(answers, max_tokens)
        ratios = self.policy.logprobs(batch, rows) - self.policy.reference_logprobs(batch, rows)
        data = self.policy.strategy.mesh.data
        order = share(data, batch.rows).argsort()
        sums = share(data, sequence_sums(ratios, batch))
        return sums[order]  # the same order, so the same sum, on any number of ranks

    def _local(self, answers: Sequence[Prompt], max_tokens: int) -> tuple[JudgedBatch, Rows]:
        data = self.policy.strategy.mesh.data
        local_rows, rows = plan_local_rows(answers, data, self.train, max_tokens=max_tokens)
        local = [answers[row] for row in local_rows]
        return judged_batch(local, local_rows, self.expand), rows
