"""Why: who takes the core out learns by its role, so a step must be the gradient step by hand."""

import torch
from torch import nn

from lightrft.core.batch import Experience, TrainingPlan
from lightrft.core.losses import PolicyObjective, gspo, ppo
from lightrft.core.metrics import Metrics
from lightrft.core.policy import LogitsPolicy
from lightrft.core.role import Learner
from lightrft.core.strategy import Alone, OneProcess

TOKENS = torch.tensor([3, 1, 4, 1, 5, 2, 0])
LEARNED = torch.tensor([False, True, True, False, False, True, True])
ADVANTAGES = torch.tensor([0.0, 2.0, 2.0, 0.0, 0.0, -1.0, 0.5])


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6).sin())

    def forward(self, batch):
        return self.table[batch.input_ids]


def experience() -> Experience:
    return Experience(
        lengths=torch.tensor([4, 3]),
        input_ids=TOKENS,
        loss_mask=LEARNED,
        rows=torch.arange(2),
        groups=torch.zeros(2, dtype=torch.int64),
        advantages=ADVANTAGES,
        engine_logprobs=torch.full((7,), -1.5),
    )


def test_two_micro_batches_take_the_step_by_hand():
    module = Bigrams()
    policy = LogitsPolicy(
        OneProcess(None, max_norm=1e9), module, torch.optim.SGD(module.parameters(), lr=0.5)
    )
    plan = TrainingPlan(experience(), [[[0], [1], []]])
    metrics = Metrics()
    before = policy.logprobs(plan.experience, plan.microbatches)
    (loss,) = Learner("actor", policy, PolicyObjective(ppo)).learn(plan, metrics)

    twin = Bigrams()
    table = twin.table.log_softmax(-1)
    logprobs = table[TOKENS[:-1], TOKENS[1:]][LEARNED[1:]]
    torch.testing.assert_close(before[LEARNED], logprobs)
    # Without old log-probs the ratio is 1: the gradient is -A of each log-prob, over 4 tokens.
    expected = -(ADVANTAGES[LEARNED] * (logprobs - logprobs.detach() + 1)).sum() / 4
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(module.table.detach(), twin.table.detach() - 0.5 * twin.table.grad)

    row = metrics.reduce(Alone())
    rows = table.detach()[TOKENS[:-1]][LEARNED[1:]]
    assert abs(row["train/entropy"] + float((rows.exp() * rows).sum()) / 4) < 1e-5
    mismatch = (logprobs.detach() + 1.5).abs()
    assert abs(row["engine/logprob_mismatch_max"] - float(mismatch.max())) < 1e-5
    assert row["train/ratio"] == 1 and row["train/drift_k3"] == 0


def test_a_loss_names_the_columns_that_it_reads():
    batch = experience()
    logprobs = torch.full((7,), -1.0)
    denominator = LogitsPolicy(OneProcess(None), Bigrams()).denominator(batch, [[0, 1]])
    loss, _ = PolicyObjective(gspo, [], eps_clip_high=0.5)(logprobs, batch, denominator)
    assert loss.item() == -float(ADVANTAGES[LEARNED].sum()) / 4
