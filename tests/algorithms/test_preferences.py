"""Losses of reward models and preferences against numbers by hand.

An empty micro-batch is one of the cases.
"""

import math
import sys
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft.algorithms.preferences.dpo import DPOObjective, answer_sums, hinge, ipo, orpo, sigmoid
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


LENGTHS = [[3, 5], [4, 2], [3, 3]]
"""Tokens of the chosen and the rejected answer of each pair; none comes before them."""


@pytest.mark.parametrize(
    "case",
    [
        {"loss_type": "sigmoid", "label_smoothing": 0.0, "ld_alpha": 0.3},
        {"loss_type": "hinge"},
        {"loss_type": "robust", "label_smoothing": 0.2},
        {"loss_type": "exo_pair", "label_smoothing": 0.1},
        {"loss_type": "bco_pair"},
        {"loss_type": "apo_zero"},
        {"loss_type": "apo_down", "ld_alpha": 0.5},
    ],
    ids=lambda case: case["loss_type"],
)
def test_losses_are_those_of_trl(case):
    """In float64, on the same log-probs."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    rows = [length for pair in LENGTHS for length in pair]
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        -torch.rand(sum(rows), generator=generator, dtype=torch.float64) for _ in range(2)
    )
    alpha = case.get("ld_alpha")
    theirs = trl_loss(trl.DPOTrainer, policy, reference, rows, case)

    given = batch(rows, [True] * sum(rows))
    section = PreferenceSection(
        beta=0.4,
        dpo_loss=case["loss_type"].removesuffix("_pair"),
        label_smoothing=case.get("label_smoothing", 0.0),
        ld_alpha=1.0 if alpha is None else alpha,
    )
    given.reference = answer_sums(reference, given, section.ld_alpha)
    ours, _ = DPOObjective(section)(
        policy, given, Denominator(torch.tensor(1.0), torch.tensor(len(LENGTHS)))
    )
    # TRL has the smoothing of exo_pair in float32.
    assert ours.item() == pytest.approx(theirs, rel=1e-7)


def trl_loss(trainer, policy, reference, rows: list[int], case: dict) -> float:
    """Let TRL compute its loss; it has chosen answers first, in padded rows after a prompt token."""
    order = [*range(0, len(rows), 2), *range(1, len(rows), 2)]

    def model_of(logprobs):
        pieces = logprobs.split(rows)
        padded = torch.nn.utils.rnn.pad_sequence([pieces[row] for row in order], batch_first=True)
        metrics = {"entropy": padded, "mean_logits": padded, "is_top1": padded > 0}
        return lambda **_: SimpleNamespace(log_probs=padded, **metrics)

    model = model_of(policy)
    model.training = True

    def same(value):
        return value

    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=same, gather=same)
    mask = torch.zeros(len(rows), 1 + max(rows), dtype=torch.int64)
    for index, row in enumerate(order):
        mask[index, 1 : 1 + rows[row]] = 1
    this = SimpleNamespace(
        model=model,
        ref_model=model_of(reference),
        accelerator=accelerator,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        beta=0.4,
        loss_types=[case["loss_type"]],
        loss_weights=[1.0],
        label_smoothing=case.get("label_smoothing", 0.0),
        ld_alpha=case.get("ld_alpha"),
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules[trainer.__module__]
        patch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())
        patch.setattr(module, "is_peft_model", lambda _: False)
        return trainer._compute_loss(this, model, inputs, False).item()


def test_losses_without_a_reference_are_those_of_trl():
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    values = torch.tensor([[-0.3, -1.2, -2.0], [-0.8, -0.4, -2.5]], dtype=torch.float64)
    this = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=0.4,
        label_smoothing=0.0,
        simpo_gamma=0.5,
        alpha=0.0,
    )
    for name, theirs in {"cpo": "sigmoid", "slic": "hinge", "simpo": "simpo"}.items():
        this.loss_type = theirs
        section = PreferenceSection(beta=0.4, dpo_loss=name)
        expected = CPOTrainer.cpo_loss(this, *values)[0]
        torch.testing.assert_close(DPOObjective(section).losses(*values), expected)
    expected = -ORPOTrainer.odds_ratio_loss(this, *values)[0]
    # TRL computes odds in float32.
    torch.testing.assert_close(orpo(*values, 0.4).float(), expected)


def test_losses_without_a_reference_by_hand():
    """The same sums as log-probs; means for SimPO and ORPO."""
    policy = torch.tensor([-0.1, -0.5, -0.7, -0.2, -1.5], dtype=torch.float64)
    given = batch([2, 3], [True] * 5)
    good, bad = -0.6, -2.4
    means = math.exp(good / 2), math.exp(bad / 3)
    odds = [p / (1 - p) for p in means]
    expected = {
        "cpo": math.log(1 + math.exp(-0.4 * (good - bad))),
        "slic": 1 - 0.4 * (good - bad),
        "simpo": math.log(1 + math.exp(0.5 - 0.4 * (good / 2 - bad / 3))),
        "orpo": 0.4 * math.log(1 + odds[1] / odds[0]),
    }
    for name, value in expected.items():
        objective = DPOObjective(PreferenceSection(beta=0.4, dpo_loss=name))
        one = Denominator(torch.tensor(1.0), torch.tensor(1.0))
        assert objective(policy, given, one)[0].item() == pytest.approx(value, rel=1e-12), name


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
