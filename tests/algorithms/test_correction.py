"""Why: a correction that leaks a gradient, weighs the wrong level or masks the wrong side makes the
mismatch worse.

The numbers are worked out by hand.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.flat import actor_logprobs, loss_and_gradient, random_experience, step_denominator
from lightrft.algorithms.correction import (
    corrections,
    importance_ratios,
    kept_sequences,
    off_policy,
)
from lightrft.config import AlgorithmSection

LOG2 = math.log(2)
LOG4 = math.log(4)
# `p a b` and `p c`; p_old / p_engine is 4, 1/2 | 2; what stands where nothing is learned does not
# matter
MASKS = [".xx", ".x"]
OLD = torch.tensor([9.0, -1.0, -2.0, 9.0, -1.0])
ENGINE = OLD - torch.tensor([5.0, LOG4, -LOG2, 5.0, LOG2])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [4.0, 0.5, 2.0]),
        ("sequence", [2.0, 2.0, 2.0]),  # 4 * 1/2
        ("geometric", [math.sqrt(2), math.sqrt(2), 2.0]),
    ],
)
def test_levels(level, expected):
    batch = random_experience(MASKS, 0, engine_logprobs=ENGINE)
    old = OLD.clone().requires_grad_()
    ratios = importance_ratios(old, batch, level)
    assert ratios[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-6)
    assert not ratios.requires_grad


@pytest.mark.parametrize(
    ("level", "bounds", "kept"),
    [
        ("sequence", (None, None), [True, True, True]),  # 2 and 2, not above 2
        ("sequence", (None, 1.9), [False, False, False]),
        ("geometric", (None, None), [False, False, False]),
        ("geometric", (None, 1.5), [True, True, False]),  # sqrt(2) and 2
        ("geometric", (1.5, 3.0), [False, False, True]),
    ],
)
def test_whole_sequences_are_masked_and_tokens_keep_their_weights(level, bounds, kept):
    batch = random_experience(
        MASKS, 0, old_logprobs=OLD, engine_logprobs=ENGINE, weights=None, advantages=torch.ones(5)
    )
    low, high = bounds
    chosen = section(
        rollout_correction="tis",
        rollout_correction_high=3.0,
        rollout_mask=level,
        rollout_mask_low=low,
        rollout_mask_high=high,
    )
    _, gradient, report = loss_and_gradient(chosen, batch, OLD, step_denominator(batch))
    weights = torch.tensor([-3 / 3, -0.5 / 3, -2 / 3]) * torch.tensor(kept)
    assert gradient[batch.loss_mask].tolist() == pytest.approx(weights.tolist(), rel=1e-6)
    assert report["engine/sequences_masked_share"][batch.loss_mask].tolist() == [
        not each for each in kept
    ]


def test_the_geometric_mean_masks_what_is_thousandths_away_by_default():
    batch = random_experience([".xx", ".xx", ".xx"], 0, engine_logprobs=torch.zeros(9))
    difference = torch.tensor([0.0, 0.5, -0.5, 0.0, 0.002, 0.003, 0.0, -0.002, -0.0008])
    kept = kept_sequences(difference, batch, "geometric", None, None)
    assert kept[batch.loss_mask].tolist() == [True, True, False, False, False, False]


def test_bad_sequences_that_the_policy_left_are_masked():
    """Means of log(p_engine / p) are 0.4, 0.6, 0.6 and 0.1 against 0.5; A < 0 is masked alone."""
    batch = random_experience(
        [".xx", ".xx", ".xx", ".x"],
        0,
        engine_logprobs=torch.full((11,), -1.0),
        weights=None,
        advantages=torch.tensor([9.0, -1, -1, 9, -1, 2, 9, 1, 1, 9, -1]),
    )
    distance = torch.tensor([7.0, 0.0, 0.8, 7.0, 1.2, 0.0, 7.0, 0.6, 0.6, 7.0, 0.1])
    logprobs = (-1.0 - distance).requires_grad_()
    batch.old_logprobs = logprobs.detach()
    masked = off_policy(logprobs, batch.advantages, batch, 0.5)
    assert masked.nonzero()[:, 0].tolist() == [4] and not masked.requires_grad

    chosen = section(off_policy_delta=0.5)
    _, gradient, report = loss_and_gradient(
        chosen, batch, logprobs.detach(), step_denominator(batch)
    )
    expected = [0, 1, 1, 0, 0, -2, 0, -1, -1, 0, 1]
    assert gradient.tolist() == pytest.approx([value / 7 for value in expected])
    assert torch.equal(report["train/off_policy_masked_share"], masked)


def test_truncated():
    weights = corrections["tis"](
        torch.tensor([4.0, 0.1, 2.0, torch.inf]), rollout_correction_high=2.0
    )
    assert weights.tolist() == pytest.approx([2.0, 0.1, 2.0, 2.0])


def test_masked_on_both_sides_and_the_bounds_are_inside():
    ratios = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01, torch.inf])
    weights = corrections["mis"](ratios, rollout_correction_low=0.5, rollout_correction_high=2.0)
    assert weights.tolist() == [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]
    assert corrections["icepop"] is corrections["mis"]


def section(**fields) -> AlgorithmSection:
    return AlgorithmSection(init_kl_coef=0.0, **fields)


def test_the_loss_of_each_token_is_weighed():
    """ppo with r = 1: the gradient is -A w / tokens; its metrics are checked, too."""
    batch = random_experience(
        MASKS, 0, old_logprobs=OLD, engine_logprobs=ENGINE, weights=None, advantages=torch.ones(5)
    )
    chosen = section(
        rollout_correction="mis", rollout_correction_low=0.6, rollout_correction_high=3.0
    )
    loss, gradient, report = loss_and_gradient(chosen, batch, OLD, step_denominator(batch))
    assert loss == pytest.approx(-2 / 3) and gradient.tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 0.0, -2 / 3]
    )
    chosen = section(rollout_correction="tis", rollout_correction_high=3.0)
    loss, gradient, report = loss_and_gradient(chosen, batch, OLD, step_denominator(batch))
    assert gradient.tolist() == pytest.approx([0.0, -3 / 3, -0.5 / 3, 0.0, -2 / 3], rel=1e-6)
    learned = batch.loss_mask
    assert report["engine/is_weight_mean"][learned].tolist() == pytest.approx([3.0, 0.5, 2.0])
    assert report["engine/is_weight_max"] is report["engine/is_weight_mean"]
    assert report["engine/is_weight_masked_share"][learned].tolist() == [True, False, False]


def test_samples_of_an_older_policy_are_clipped_from_the_proximal_one():
    """Decoupled PPO by hand, with behaviour 1/4, proximal 1/2, actor 0.8.

    The loss is clip(0.8 / 0.5, 0.8, 1.2) times the weight 2.
    """
    batch = random_experience(
        ["x"],
        0,
        weights=None,
        advantages=torch.ones(1),
        engine_logprobs=torch.tensor([math.log(1 / 4)]),
        old_logprobs=torch.tensor([math.log(1 / 2)]),
    )
    chosen = section(rollout_correction="tis", rollout_correction_high=5.0)
    loss, gradient, _ = loss_and_gradient(
        chosen, batch, torch.tensor([math.log(0.8)]), step_denominator(batch)
    )
    assert loss == pytest.approx(-1.2 * 2) and gradient.item() == 0.0

    loss, gradient, _ = loss_and_gradient(
        chosen, batch, torch.tensor([math.log(0.55)]), step_denominator(batch)
    )
    assert loss == pytest.approx(-1.1 * 2) and gradient.item() == pytest.approx(-1.1 * 2)


@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence", "geometric"]))
def test_an_engine_that_agrees_changes_nothing(seed, level):
    batch = random_experience([".xxx", "xx"], seed)
    batch.engine_logprobs = batch.old_logprobs
    logprobs = actor_logprobs(batch, seed)
    denominator = step_denominator(batch)
    plain = loss_and_gradient(section(), batch, logprobs, denominator)
    for name in corrections.names():
        chosen = section(rollout_correction=name, rollout_correction_level=level)
        corrected = loss_and_gradient(chosen, batch, logprobs, denominator)
        assert corrected[0] == plain[0] and corrected[1].tolist() == plain[1].tolist()


def test_without_old_logprobs_the_weight_is_of_the_actor_now_and_has_no_gradient():
    batch = random_experience(
        MASKS, 0, old_logprobs=None, engine_logprobs=ENGINE, weights=None, advantages=torch.ones(5)
    )
    chosen = section(rollout_correction="tis", rollout_correction_high=9.0)
    gradient = loss_and_gradient(chosen, batch, OLD, step_denominator(batch))[1]
    assert gradient.tolist() == pytest.approx([0.0, -4 / 3, -0.5 / 3, 0.0, -2 / 3], rel=1e-6)


def test_every_kind_is_tested_here():
    assert corrections.names() == ["icepop", "mis", "none", "tis"]


def test_none_leaves_the_loss_as_it_is():
    batch = random_experience(
        MASKS, 0, old_logprobs=OLD, engine_logprobs=ENGINE, weights=None, advantages=torch.ones(5)
    )
    found, plain = (
        loss_and_gradient(section(rollout_correction=name), batch, OLD, step_denominator(batch))
        for name in ("none", None)
    )
    assert found[0] == plain[0] and found[1].tolist() == plain[1].tolist()
