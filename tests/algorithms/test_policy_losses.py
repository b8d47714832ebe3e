"""Why: losses of this family differ by a sign, a detach or a level, and all of them train.

Values and gradients are worked out by hand. In every case `ratio` and `advantage` belong to learned
tokens. The expected loss follows, and the gradient of the sum by the log-prob.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad

from algorithms.flat import (
    actor_logprobs,
    loss_and_gradient,
    make_batch,
    random_experience,
    step_denominator,
)
from lightrft.algorithms.options import options_of
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection
from lightrft.core.table import keywords

NAMES = policy_losses.names()


def run(name: str, ratios, advantages, *, masks=None, marked=None, logprobs=None, **fields):
    """Return losses and gradients of learned tokens.

    Old log-probs are -2, so log-probs are log(ratio) - 2 unless given.
    """
    batch = make_batch(masks or ["x" * len(ratios)])
    learned = batch.loss_mask
    old = torch.full((batch.num_tokens,), -2.0, dtype=torch.float64)
    now = old.clone()
    now[learned] += torch.tensor(ratios, dtype=torch.float64).log()

    if logprobs is not None:
        old = old + torch.tensor(logprobs) - now
        now = torch.tensor(logprobs, dtype=torch.float64)

    now.requires_grad_()
    given = torch.zeros(batch.num_tokens, dtype=torch.float64)
    given[learned] = torch.tensor(advantages, dtype=torch.float64)
    loss = policy_losses[name]
    marks = (
        torch.zeros(batch.num_tokens, dtype=torch.bool) if marked is None else torch.tensor(marked)
    )
    samples = {"batch": batch, "marked": marks}
    named = {name: samples[name] for name in keywords(loss).keys() & samples.keys()}
    chosen = options_of(loss, AlgorithmSection(**fields))
    values, report = loss(now, old, given, **chosen, **named)
    gradient = grad(values[learned].sum(), now)[0]
    assert not gradient[~learned].any()

    return (
        values[learned].tolist(),
        gradient[learned].tolist(),
        {key: value[learned].tolist() for key, value in report.items()},
    )


def check(result, losses, gradients):
    assert result[0] == pytest.approx(losses, abs=1e-6)
    assert result[1] == pytest.approx(gradients, abs=1e-6)


# two sequences, `p a b` and `p . c`; a and b have ratios 4 and 1, so their geometric mean is 2
MASKS = [".xx", "..x"]


def test_gspo_has_one_ratio_for_a_sequence():
    # A > 0: min(2, 1.2) and min(0.5, 0.8): clipped, free. The mean of a and b moves with half of
    # each: 2 * (0.5 + 0.5)
    check(run("gspo", [4, 1, 0.5], [1, 1, 1], masks=MASKS), [-1.2, -1.2, -0.5], [0.0, 0.0, -0.5])
    check(run("gspo", [4, 1, 0.5], [-1, -1, -1], masks=MASKS), [2.0, 2.0, 0.8], [2.0, 2.0, 0.0])


def test_gspo_bounds_are_its_own():
    report = run("gspo", [4, 1, 0.5], [1, 1, -1], masks=MASKS, eps_clip_low=0.6, eps_clip_high=1.5)[
        2
    ]
    assert report["train/ratio"] == pytest.approx([2.0, 2.0, 0.5])
    assert report["train/clip_high"] == [False] * 3 and report["train/clip_low"] == [False] * 3
    report = run("gspo", [4, 1, 0.5], [1, 1, -1], masks=MASKS)[2]
    assert report["train/clip_high"] == [True, True, False] and report["train/clip_low"] == [
        False,
        False,
        True,
    ]


def test_vespo_weighs_sequences():
    # Products of the ratios are 4 and 0.5, with k = 2, l = 3 above 0 and k = 3, l = 2 below.
    good = 4**2 * math.exp(3 * (1 - 4))
    bad = 0.5**3 * math.exp(2 * (1 - 0.5))
    losses, gradients, report = run("vespo", [4, 1, 0.5], [1, 0.5, -1], masks=MASKS)
    now = [math.log(ratio) - 2 for ratio in (4, 1, 0.5)]
    assert report["train/sequence_weight"] == pytest.approx([good, good, bad], rel=1e-12)
    weighted = [good, 0.5 * good, -bad]
    assert gradients == pytest.approx([-each for each in weighted], rel=1e-12)
    expected = [-each * logprob for each, logprob in zip(weighted, now, strict=True)]
    assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ratios", [[4, 1, 0.5], [1e4, 1e4, 1e-9], [1e-9, 1, 1e12]])
def test_vespo_is_trl_s(ratios):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    advantages = [1.0, 1.0, -2.0]
    mask = torch.tensor([[1, 1], [1, 0]])
    logs = torch.tensor([ratios[:2], [ratios[2], 7.0]], dtype=torch.float64).log()
    expected = trl.GRPOTrainer.get_gamma_weights(
        torch.tensor([[1.0], [-2.0]], dtype=torch.float64), logs, mask, None
    )
    report = run("vespo", ratios, advantages, masks=MASKS)[2]
    first, second = expected.flatten().tolist()
    assert report["train/sequence_weight"] == pytest.approx([first, first, second], rel=1e-12)


def test_gspo_token_gives_each_token_its_own_gradient():
    # advantages -1 and -3 in one sequence: losses 2 and 6; of the whole ratio each token gets half
    # of 2 + 6, of its own 2 and 6
    check(run("gspo", [4, 1, 0.5], [-1, -3, 1], masks=MASKS), [2.0, 6.0, -0.5], [4.0, 4.0, -0.5])
    check(
        run("gspo_token", [4, 1, 0.5], [-1, -3, 1], masks=MASKS), [2.0, 6.0, -0.5], [2.0, 6.0, -0.5]
    )
    check(
        run("gspo_token", [4, 1, 0.5], [1, 1, 1], masks=MASKS), [-1.2, -1.2, -0.5], [0.0, 0.0, -0.5]
    )


def test_gmpo_clips_each_token_before_the_mean():
    bounds = {"eps_clip_low": 0.4, "eps_clip_high": 0.4}
    # A > 0: log 4 is cut to 0.4, mean 0.2, exp 1.221403; only b moves, by half for each of two
    # tokens. c: log 0.5 is free
    check(
        run("gmpo", [4, 1, 0.5], [1, 1, 1], masks=MASKS, **bounds),
        [-1.221403, -1.221403, -0.5],
        [0.0, -1.221403, -0.5],
    )
    # A < 0: log 4 is free, exp(mean) 2; log 0.5 is cut to -0.4, exp 0.670320
    check(
        run("gmpo", [4, 1, 0.5], [-1, -1, -1], masks=MASKS, **bounds),
        [2.0, 2.0, 0.670320],
        [2.0, 2.0, 0.0],
    )
    report = run("gmpo", [4, 1, 0.5], [1, 1, -1], masks=MASKS, **bounds)[2]
    assert report["train/clip_high"] == [True, False, False] and report["train/clip_low"] == [
        False,
        False,
        True,
    ]


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # weights 2 (of 4), 1, 0.6 (of 0.5); loss -w A logp with logp -1, -2, -3
    result = run(
        "cispo",
        [4, 1, 0.5],
        [1, 1, -1],
        logprobs=[-1.0, -2.0, -3.0],
        eps_clip_low=0.4,
        eps_clip_high=1.0,
    )
    check(result, [2.0, 2.0, -1.8], [-2.0, -1.0, 0.6])
    assert result[2]["train/clip_high"] == [True, False, False] and result[2]["train/clip_low"] == [
        False,
        False,
        True,
    ]


def test_sapo_gates_softly():
    # r 1: 4/tau * 1/2 A; slope A. r 2, tau 1: 4 * sigmoid(1) = 2.924234, slope 4 * 0.731059 *
    # 0.268941 * 2 = 1.572895 r 0.5, A < 0, tau 1.05: 4/1.05 * sigmoid(-0.525) = 1.415938, slope 4 *
    # 0.371684 * 0.628316 * 0.5 = 0.467070
    result = run("sapo", [1, 1, 2, 0.5], [1, -1, 1, -1])
    check(result, [-2.0, 1.904762, -2.924234, 1.415938], [-1.0, 1.0, -1.572895, 0.467070])
    # tau 2 for both signs: 2 * sigmoid(2) = 1.761594, slope 4 * 0.880797 * 0.119203 * 2 = 0.839949
    both = {"sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0}
    check(run("sapo", [2, 2], [1, -1], **both), [-1.761594, 1.761594], [-0.839949, 0.839949])


def test_cpgd_clips_the_logarithm_and_adds_a_drift_term():
    # log 2 = 0.693147, log 1.2 = 0.182322, log 0.8 = -0.223144, log 1.1 = 0.095310; drift r - 1 -
    # log r, slope r - 1, times 0.1 r 2, A 1: -0.182322 + 0.030685. r 1.1, A 2: -0.190620 +
    # 0.000469. r 0.5, A -1: -0.223144 + 0.019315; A 1: 0.693147 + ...
    result = run("cpgd", [2, 1.1, 0.5, 0.5], [1, 2, -1, 1], policy_drift_coef=0.1)
    check(result, [-0.151636, -0.190151, -0.203829, 0.712462], [0.1, -1.99, -0.05, -1.05])
    assert result[2]["train/clip_high"] == [True, False, False, False]
    assert result[2]["train/clip_low"] == [False, False, True, False]
    assert result[2]["train/policy_drift"] == pytest.approx(
        [0.306853, 0.004690, 0.193147, 0.193147], abs=1e-6
    )


BOUNDS = {"eps_clip_low": 0.1, "eps_clip_high": 0.2}


def test_dppo_bounds_the_change_of_the_probability():
    # p_old is 1/2, 1/2, 1/100, 1/2, 1/2, 1/2. Gains of 0.25 and 0.15 against 0.2; a rare token at
    # ten times its probability gains 0.09 only; losses of 0.15 and 0.05 against 0.1; and a loss of
    # 0.25 that A > 0 takes back
    old = torch.tensor([0.5, 0.5, 0.01, 0.5, 0.5, 0.5], dtype=torch.float64).log()
    ratios = torch.tensor([1.5, 1.3, 10, 0.7, 0.9, 0.5], dtype=torch.float64)
    logprobs = (old + ratios.log()).requires_grad_()
    advantages = torch.tensor([1.0, 1, 1, -1, -1, 1], dtype=torch.float64)
    loss, report = policy_losses["dppo_tv"](logprobs, old, advantages, **BOUNDS)
    kept = [0.0, -1.3, -10.0, 0.0, 0.9, -0.5]
    assert loss.tolist() == pytest.approx(kept, abs=1e-9)
    assert grad(loss.sum(), logprobs)[0].tolist() == pytest.approx(kept, abs=1e-9)
    assert report["train/clip_high"].tolist() == [True, *[False] * 5]
    assert report["train/clip_low"].tolist() == [*[False] * 3, True, False, False]


def test_dppo_bounds_the_binary_divergence():
    # from 1/2 to 3/4: 0.5 log(0.5 / 0.75) + 0.5 log(0.5 / 0.25) = 0.143841; from 1/100 to 1/10:
    # 0.01 log 0.1 + 0.99 log(0.99 / 0.9) = 0.071331; from 1/2 to 1/4: the first again
    old = torch.tensor([0.5, 0.01, 0.5], dtype=torch.float64).log()
    ratios = torch.tensor([1.5, 10, 0.5], dtype=torch.float64)
    logprobs = (old + ratios.log()).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    for low, high, kept in [
        (0.143, 0.0714, [0.0, -10.0, 0.0]),
        (0.1439, 0.0713, [0.0, 0.0, 0.5]),
        (0.2, 0.1439, [-1.5, -10.0, 0.5]),
    ]:
        bounds = {"eps_clip_low": low, "eps_clip_high": high}
        loss, _ = policy_losses["dppo_kl"](logprobs, old, advantages, **bounds)
        assert loss.tolist() == pytest.approx(kept, abs=1e-9)
        gradient = grad(loss.sum(), logprobs, retain_graph=True)[0]
        assert gradient.tolist() == pytest.approx(kept, abs=1e-9)


def test_dppo_of_certain_tokens_is_finite():
    # certain before and now; certain before and at 1/2 now: log 2 by A < 0, which is outside
    old = torch.zeros(2, dtype=torch.float64)
    logprobs = torch.tensor([0.0, -0.6931471805599453], dtype=torch.float64).requires_grad_()
    loss, _ = policy_losses["dppo_kl"](logprobs, old, -torch.ones(2).double(), **BOUNDS)
    assert loss.tolist() == [1.0, 0.0] and grad(loss.sum(), logprobs)[0].tolist() == [1.0, 0.0]


def test_dro_holds_the_policy_by_a_square():
    # log 2 = 0.693147, square 0.480453: 0.5 * 0.1 * 0.480453 = 0.024023 beside -A logp with logp -1
    # and -3; slopes 0.1 log r - A
    result = run("dro", [2, 0.5], [2, -1], logprobs=[-1.0, -3.0], policy_drift_coef=0.1)
    check(result, [2.024023, -2.975977], [-1.930685, 0.930685])
    assert result[2]["train/policy_drift"] == pytest.approx([0.240227, 0.240227], abs=1e-6)


def test_stable_reinforce_bounds_ratios_and_drops_outliers():
    # r e^10 counts 1000 and has no gradient; |A| 3.1 is dropped, 3 is not; r 2 is clipped
    e = 22026.465795
    result = run("stable_reinforce", [e, 1.1, 1.1, 2], [-1, 3.1, 3, 1])
    check(result, [1000.0, 0.0, -3.3, -1.2], [0.0, 0.0, -3.3, 0.0])
    assert result[2]["train/advantages_dropped"] == [False, True, False, False]


def test_reinforce_is_the_log_prob():
    check(run("reinforce", [4, 1], [3, -2], logprobs=[-1.0, -2.0]), [3.0, -4.0], [-3.0, 2.0])


def test_kl_cov_penalises_marked_tokens():
    # r 2: -2 + 0.5 log 2, slope -2 + 0.5; r 0.5: -0.5 + 0.5 log 2, slope -0.5 - 0.5; unmarked: -0.5
    result = run("kl_cov", [2, 0.5, 0.5], [1, 1, 1], marked=[True, True, False], kl_cov_coef=0.5)
    check(result, [-1.653426, -0.153426, -0.5], [-1.5, -1.0, -0.5])


def test_the_drift_of_cpgd_is_clipped():
    """Of ratios 2, 1/2 and 1, the first counts only 0.2 and the second counts whole.

    2 - 1 - log 2 = 0.306853 counts 0.2 and learns nothing; 0.5 - 1 + log 2 = 0.193147 counts whole.
    """
    result = run("cpgd", [2, 0.5, 1], [0, 0, 0], policy_drift_coef=0.1, policy_drift_clip=0.2)
    check(result, [0.02, 0.0193147, 0.0], [0.0, -0.05, 0.0])


def test_clip_cov_keeps_clipped_tokens():
    result = run("clip_cov", [2, 1.1], [1, 1], marked=[True, True])
    check(result, [-1.2, 0.0], [0.0, 0.0])
    assert result[2]["train/cov_marked"] == [0.0, 1.0]


def test_clip_cov_drops_marked_tokens():
    check(
        run("clip_cov", [1.1, 1.1, 2], [1, 1, 1], marked=[True, False, False]),
        [0.0, -1.1, -1.2],
        [0.0, -1.1, 0.0],
    )


# -- what all of them have in common


def section(name: str, **fields) -> AlgorithmSection:
    return AlgorithmSection(policy_loss=name, **fields)


EVERYTHING = {
    "entropy_coef": 0.1,
    "use_kl_loss": True,
    "init_kl_coef": 0.2,
    "rollout_correction": "tis",
    "rollout_correction_level": "sequence",
    "off_policy_delta": 0.05,
}
MODES = [
    *("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "prompt-mean",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_update_is_the_policy_gradient(name):
    """At r = 1 every loss has the slope -A, whatever it does further away."""
    masks = [".xxx", "xx"]
    values = run(name, [1.0] * 5, [2.0, 2.0, 2.0, -1.0, -1.0], masks=masks)
    assert values[1] == pytest.approx([-2.0, -2.0, -2.0, 1.0, 1.0], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_no_advantage_no_loss(name):
    """Only the terms that hold the policy where it is remain."""
    result = run(name, [2.0, 0.5, 1.0], [0.0, 0.0, 0.0], policy_drift_coef=0.0)
    assert result[0] == [0.0] * 3 and result[1] == [0.0] * 3


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6))
def test_masked_tokens_do_not_count(name, seed):
    """Whatever stands there, the loss and the reports are the same, and there is no gradient."""
    batch = random_experience([".xx.x", "...", "x.x"], seed)
    logprobs = actor_logprobs(batch, seed + 1)
    unlearned = ~batch.loss_mask
    chosen = section(name, **EVERYTHING)
    expected, gradient, report = loss_and_gradient(chosen, batch, logprobs, step_denominator(batch))
    assert not gradient[unlearned].any()

    for column in ("advantages", "old_logprobs", "engine_logprobs"):
        setattr(
            batch,
            column,
            torch.where(unlearned, 3.7 * torch.arange(batch.num_tokens), getattr(batch, column)),
        )

    loss, again, other = loss_and_gradient(
        chosen, batch, torch.where(unlearned, 2.9, logprobs), step_denominator(batch)
    )
    assert loss == expected and again.tolist() == gradient.tolist()
    assert all(
        torch.equal(report[key][batch.loss_mask], other[key][batch.loss_mask]) for key in report
    )


@pytest.mark.parametrize("name", NAMES)
@given(
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 10**6),
    num_ranks=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_no_split_into_micro_batches_changes_anything(name, mode, seed, num_ranks, random):
    whole = random_experience([".xx.x", ".x", "...", "xxx", "..xxxx"], seed)
    logprobs = actor_logprobs(whole, seed + 1)
    denominator = step_denominator(whole)
    chosen = section(name, loss_agg_mode=mode, **EVERYTHING)
    expected, gradient, _ = loss_and_gradient(chosen, whole, logprobs, denominator)
    owners = [random.randrange(num_ranks) for _ in range(len(whole))]
    total = 0.0

    pieces = logprobs.split(whole.lengths.tolist())
    gradients = list(torch.zeros_like(logprobs).split(whole.lengths.tolist()))
    for rank in range(num_ranks):
        rows = [row for row, owner in enumerate(owners) if owner == rank]
        if rows:
            mine = torch.cat([pieces[row] for row in rows])
            loss, slopes, _ = loss_and_gradient(chosen, whole.select(rows), mine, denominator)
            total += loss
            for row, slope in zip(rows, slopes.split(whole.lengths[rows].tolist()), strict=True):
                gradients[row] = slope

    assert total == pytest.approx(expected, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-9, atol=1e-12)


def test_a_loss_that_needs_marks_says_so():
    batch = random_experience([".xx"], 0, marked=None)
    with pytest.raises(ValueError, match="needs marked in the batch"):
        policy_objective(section("kl_cov"))(batch.old_logprobs, batch, step_denominator(batch))


def loss_of_user(logprobs, old_logprobs, advantages, *, temperature_of_mine):
    return logprobs, {}


def test_a_loss_that_asks_for_too_much_is_named():
    with pytest.raises(
        ValueError, match="loss_of_user needs temperature_of_mine, which this run does not compute"
    ):
        policy_objective(section(f"{__file__}:loss_of_user"))


def test_every_field_of_a_loss_is_in_the_configuration():
    fields = {field for name in NAMES for field in keywords(policy_losses[name])} - {
        "batch",
        "marked",
    }
    assert fields == {
        *(
            "eps_clip_low",
            "eps_clip_high",
            "dual_clip",
            "policy_drift_coef",
            "policy_drift_clip",
            "kl_cov_coef",
        ),
        *("sapo_tau_positive", "sapo_tau_negative", "vespo_power", "vespo_decay"),
    }
