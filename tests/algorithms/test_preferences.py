"""Losses of reward models and preferences against numbers by hand.

An empty micro-batch is one of the cases.
"""

import math

import pytest
import torch

from lightrft.algorithms.preferences.dpo import DPOObjective, hinge, ipo, sigmoid
from lightrft.algorithms.preferences.kto import KTOObjective, kto, reference_point
from lightrft.algorithms.preferences.reward import (
    RewardObjective,
    bradley_terry,
    log_exp,
    rao_kupper,
)
from lightrft.config import PreferenceSection
from lightrft.core.batch import JudgedBatch
from lightrft.core.losses import Denominator
from lightrft.models.heads import local_gradients

ONE = torch.ones(1)


def of(value: float) -> torch.Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (bradley_terry(of(1.5), of(0.5), of(0.0)), math.log(1 + math.exp(-1))),
        (bradley_terry(of(1.5), of(0.5), of(0.25)), math.log(1 + math.exp(-0.75))),
        (bradley_terry(of(-100.0), of(100.0), of(0.0)), 200.0),
        (log_exp(of(0.5), of(1.5)), math.log(1 + math.e)),
        (log_exp(of(100.0), of(-100.0)), 0.0),
        # theta = 2 at equal scores: each wins with 1/3, and a tie has the rest
        (rao_kupper(of(7.0), of(7.0), of(0.0), of(0) > 0, 2.0), math.log(3)),
        (rao_kupper(of(7.0), of(7.0), of(5.0), of(1) > 0, 2.0), math.log(3)),
        # e^c = 4 e^r: wins 4 / (4 + 2)
        (rao_kupper(of(math.log(4)), of(0.0), of(0.0), of(0) > 0, 2.0), math.log(3 / 2)),
        (rao_kupper(of(math.log(8)), of(0.0), of(math.log(2)), of(0) > 0, 2.0), math.log(3 / 2)),
        (
            rao_kupper(of(math.log(4)), of(0.0), of(0.0), of(1) > 0, 2.0),
            -math.log(1 - 2 / 3 - 1 / 9),
        ),
        (sigmoid(of(3.0), of(1.0), 0.5), math.log(1 + math.exp(-1))),
        (sigmoid(of(3.0), of(1.0), 0.5, 0.25), math.log(1 + math.exp(-1)) + 0.25),
        (ipo(of(3.0), of(1.0), 0.5), 1.0),
        (hinge(of(3.0), of(1.0), 0.25), 0.5),
        (hinge(of(3.0), of(1.0), 0.75), 0.0),
        (kto(of(2.0), of(1) > 0, of(1.0), (3.0, 5.0)), 3 * (1 - 1 / (1 + math.exp(-1)))),
        (kto(of(2.0), of(0) > 0, of(1.0), (3.0, 5.0)), 5 * (1 - 1 / (1 + math.exp(1)))),
        (reference_point(torch.tensor([1.0, 4.0]))[None], 2.5),
        (reference_point(torch.tensor([1.0, -4.0]))[None], 0.0),
    ],
)
def test_losses_by_hand(loss, expected):
    assert loss.shape == (1,) and loss.item() == pytest.approx(expected, abs=1e-6)


def batch(lengths: list[int], learned: list[bool], **columns) -> JudgedBatch:
    rows = torch.arange(len(lengths))
    columns = {
        "margins": torch.zeros(len(rows)),
        "ties": rows < 0,
        "heads": rows * 0,
        "desirable": rows >= 0,
        "reference": torch.zeros(len(rows)),
    } | columns

    return JudgedBatch(
        torch.tensor(lengths),
        torch.zeros(sum(lengths), dtype=torch.int64),
        torch.tensor(learned),
        rows,
        **columns,
    )


EMPTY = batch([1], [False])
DENOMINATOR = Denominator(torch.tensor(3.0), torch.tensor(2.0))


def test_an_empty_micro_batch_has_no_loss_and_zero_gradients():
    for objective, values in (
        (RewardObjective(PreferenceSection(), []), torch.ones(1, requires_grad=True)),
        (DPOObjective(PreferenceSection(sft_coef=1.0)), torch.ones(1, requires_grad=True)),
        (KTOObjective(PreferenceSection(), torch.tensor(0.5)), torch.ones(1, requires_grad=True)),
    ):
        loss, report = objective(values, EMPTY, DENOMINATOR)
        loss.backward()
        assert loss == 0 and values.grad.tolist() == [0.0]
        assert all(entry.weight.sum() == 0 for entry in report.values())


def test_dpo_of_two_pairs_by_hand():
    """Sums over learned tokens are relative to the reference.

    The mean negative log-prob of the chosen answers is added.
    """
    given = batch(
        [2, 3, 2, 2],
        [False, True] + [False, True, True] + [False, True] * 2,
        reference=torch.tensor([-1.0, -2, -3, -1]),
    )
    logprobs = torch.tensor([9.0, -2, 9, -1, -2, 9, -1, 9, -4])
    loss, report = DPOObjective(PreferenceSection(beta=0.5, sft_coef=0.1))(
        logprobs, given, DENOMINATOR
    )
    ratios = [(-1.0, -1.0), (2.0, -3.0)]
    expected = (
        sum(math.log(1 + math.exp(-0.5 * (chosen - rejected))) for chosen, rejected in ratios) / 2
        + 0.1 * (2 + 1) / 3
    )
    assert loss.item() == pytest.approx(expected)
    assert report["train/margin"].values.tolist() == [0.0, 2.5] and report[
        "train/accuracy"
    ].values.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("objective", "num_sequences"),
    [
        (DPOObjective(PreferenceSection(sft_coef=0.1)), 2),
        (KTOObjective(PreferenceSection(), torch.tensor(0.5)), 1),
    ],
    ids=["dpo", "kto"],
)
def test_gradients_of_a_pair_or_an_answer_need_no_other_log_probs(objective, num_sequences):
    given = batch(
        [2, 3, 2, 2],
        [False, True] + [False, True, True] + [False, True] * 2,
        reference=torch.tensor([-1.0, -2, -3, -1]),
    )
    logprobs = torch.tensor([9.0, -2, 9, -1, -2, 9, -1, 9, -4], requires_grad=True)
    (expected,) = torch.autograd.grad(objective(logprobs, given, DENOMINATOR)[0], logprobs)

    known = local_gradients(objective, given, DENOMINATOR)
    assert known.num_sequences == num_sequences
    for start in range(0, len(given), num_sequences):
        some = given.sequence_ids // num_sequences == start // num_sequences
        found, _ = known.compute(torch.where(some, logprobs.detach(), 0.0), None)
        assert found[some].any() and torch.equal(found[some], expected[some])


@pytest.mark.parametrize(
    ("difference", "tie", "right"),
    [(0.1, True, True), (5.0, True, False), (0.1, False, True), (-1.0, False, False)],
)
def test_a_tie_is_right_where_it_is_the_likeliest_outcome(difference, tie, right):
    objective = RewardObjective(PreferenceSection(rm_loss="ties", tie_threshold=3.0), [])
    assert objective.is_right(of(difference), of(float(tie)) > 0).tolist() == [right]


def test_each_head_has_an_accuracy_of_its_own():
    given = batch([1] * 4, [True] * 4, heads=torch.tensor([1, 1, 0, 0]))
    _, report = RewardObjective(PreferenceSection(), ["kind", "short"])(
        torch.tensor([1.0, 0, 0, 1]), given, DENOMINATOR
    )
    of_heads = {
        name: (entry.values * entry.weight).sum().item() / entry.weight.sum().item()
        for name, entry in report.items()
        if "accuracy_of" in name
    }
    assert of_heads == {"train/accuracy_of_kind": 0.0, "train/accuracy_of_short": 1.0}
