"""Why: a clip on the wrong side still trains, only worse.

Values and gradients of every region are worked out by hand.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad

from lightrft.algorithms.policy_loss import policy_losses, ppo

BOUNDS = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}


def run(ratios, advantages, **options):
    """Return values, gradients by the log-probs, and reports for the given ratios.

    The old log-probs are arbitrary.
    """
    old = torch.linspace(-3.0, -1.0, len(ratios), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    loss, report = ppo(
        logprobs, old, torch.tensor(advantages, dtype=torch.float64), **(BOUNDS | options)
    )
    return (
        loss.tolist(),
        grad(loss.sum(), logprobs)[0].tolist(),
        {name: values.tolist() for name, values in report.items()},
    )


# ratio, advantage, loss, gradient = -A * ratio or 0
REGIONS = {
    "good and more likely: clipped": (1.5, 2.0, -2.4, 0.0),
    "good and less likely: free": (0.5, 2.0, -1.0, -1.0),
    "bad and more likely: free": (1.5, -2.0, 3.0, 3.0),
    "bad and less likely: clipped": (0.5, -2.0, 1.6, 0.0),
    "good, inside": (1.1, 2.0, -2.2, -2.2),
    "bad, inside": (0.9, -2.0, 1.8, 1.8),
    "good, unchanged": (1.0, 2.0, -2.0, -2.0),
    "bad, unchanged": (1.0, -2.0, 2.0, 2.0),
    "no advantage": (1.5, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("region", REGIONS)
def test_regions(region):
    ratio, advantage, value, slope = REGIONS[region]
    loss, gradient, _ = run([ratio], [advantage])
    assert loss == pytest.approx([value], abs=1e-12)
    assert gradient == pytest.approx([slope], abs=1e-12)


def test_bounds_below_and_above_are_their_own():
    loss, gradient, _ = run(
        [1.25, 1.4, 0.85, 0.5], [1.0, 1.0, -1.0, -1.0], eps_clip_low=0.1, eps_clip_high=0.28
    )
    assert loss == pytest.approx([-1.25, -1.28, 0.9, 0.9], abs=1e-12)
    assert gradient == pytest.approx([-1.25, 0.0, 0.0, 0.0], abs=1e-12)


def test_dual_clip_bounds_the_loss_of_a_bad_token_only():
    loss, gradient, report = run([5.0, 2.0, 5.0, 0.5], [-2.0, -2.0, 2.0, -2.0], dual_clip=3.0)
    assert loss == pytest.approx([6.0, 4.0, -2.4, 1.6], abs=1e-12)
    assert gradient == pytest.approx([0.0, 4.0, 0.0, 0.0], abs=1e-12)
    assert report["train/clip_dual"] == [True, False, False, False]
    assert run([5.0], [-2.0])[0] == pytest.approx([10.0], abs=1e-12)


def test_reports():
    _, _, report = run([1.5, 0.5, 1.5, 0.5, 1.0, 1.5], [2.0, 2.0, -2.0, -2.0, 1.0, 0.0])
    assert report["train/ratio"] == pytest.approx([1.5, 0.5, 1.5, 0.5, 1.0, 1.5], abs=1e-12)
    assert report["train/clip_high"] == [True, False, False, False, False, False]
    assert report["train/clip_low"] == [False, False, False, True, False, False]
    assert "train/clip_dual" not in report


@given(
    st.lists(st.tuples(st.floats(0.05, 20), st.floats(-5, 5)), min_size=1, max_size=8),
    st.sampled_from([None, 3.0]),
)
def test_is_the_equation_everywhere(tokens, dual_clip):
    ratios, advantages = (list(column) for column in zip(*tokens, strict=True))
    loss, _, _ = run(ratios, advantages, eps_clip_low=0.2, eps_clip_high=0.28, dual_clip=dual_clip)
    for value, ratio, advantage in zip(loss, ratios, advantages, strict=True):
        expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        if dual_clip is not None and advantage < 0:
            expected = min(expected, -dual_clip * advantage)
        assert math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)


def test_registered_and_takes_its_bounds_by_name():
    assert policy_losses["ppo"] is ppo
    with pytest.raises(TypeError):
        ppo(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.2, 0.2)
    with pytest.raises(ValueError, match="--policy_loss pqo: .*did you mean 'ppo'"):
        policy_losses["pqo"]
