"""KTO: learn from single answers, good or bad, by log-probs relative to a reference.

Answers to other prompts show how far the policy has moved as a whole.
"""

from collections.abc import Sequence

from torch import Tensor

from lightrft.algorithms.preferences.kto import KTOObjective, reference_point
from lightrft.algorithms.roles.policy import Policy
from lightrft.app.run.run import Run
from lightrft.app.trainer.tasks.examples import known_denominator, local_batch
from lightrft.core.losses import sequence_sums
from lightrft.core.role import LossTerm
from lightrft.core.samples import Prompt
from lightrft.data.preferences import judged_batch, mismatched
from lightrft.strategy.batching.micro_batches import share


def term_of_answers(
    run: Run, policy: Policy, answers: Sequence[Prompt], *, max_tokens: int
) -> LossTerm:
    """Learn from single answers; the loss is the mean over all answers of a step.

    One reference point serves the whole step. It comes from pairing each prompt with the answer to
    the next one, in the order of the step.
    """
    # Mismatched answers are computed without gradients, under the limit for log-probs.
    limit = min(max_tokens, policy.max_logprob_tokens or max_tokens)
    divergence = reference_point(_log_ratios(run, policy, mismatched(answers, limit), max_tokens))
    batch, rows, _ = local_batch(run, judged_batch, answers, max_tokens=max_tokens)
    batch.reference = sequence_sums(policy.reference_logprobs(batch, rows), batch)

    device = run.strategy.device
    objective = KTOObjective(run.config.preference, divergence.to(device))
    denominator = known_denominator(0, len(answers), device)
    return LossTerm(batch, rows, objective, denominator, policy.supervised)


def _log_ratios(run: Run, policy: Policy, answers: Sequence[Prompt], max_tokens: int) -> Tensor:
    """Return log(p_policy / p_reference) of all ranks' answers, [N] float32 on the host."""
    batch, rows, _ = local_batch(run, judged_batch, answers, max_tokens=max_tokens)
    ratios = policy.logprobs(batch, rows) - policy.reference_logprobs(batch, rows)
    data = run.strategy.mesh.data
    order = share(data, batch.rows).argsort()
    sums = share(data, sequence_sums(ratios, batch))
    return sums[order]  # the same order, so the same sum, on any number of ranks
