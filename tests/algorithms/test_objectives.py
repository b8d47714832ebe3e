"""Why: the loss that `backward` gets is put together here.

Value and gradient are checked against the sum by hand.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import grad

from algorithms.flat import actor_logprobs, random_experience, step_denominator
from lightrft.algorithms.objectives import Balanced, PtxObjective, ValueObjective, sft
from lightrft.algorithms.policy_loss import policy_losses
from lightrft.algorithms.terms import OBSERVATIONS, policy_objective
from lightrft.config import AlgorithmSection, ConfigError
from lightrft.core.batch import Batch, Experience
from lightrft.core.losses import Denominator, reach_of
from lightrft.models.balance import Balance
from lightrft.models.heads import local_gradients

LOG2 = math.log(2)
# two sequences, `p a b` and `p c`; learned are a, b, c
MASK = [False, True, True, False, True]
LOGPROBS = [0.0, -1.0, -2.0, 0.0, -0.5]
ADVANTAGES = [0.0, 2.0, 2.0, 0.0, -1.0]
DENOMINATOR = Denominator(torch.tensor(3.0), torch.tensor(2.0))


def experience(**columns: list[float]) -> Experience:
    defaults = {"advantages": ADVANTAGES, "engine_logprobs": LOGPROBS}
    return Experience(
        lengths=torch.tensor([3, 2]),
        input_ids=torch.arange(5),
        loss_mask=torch.tensor(MASK),
        rows=torch.arange(2),
        groups=torch.zeros(2, dtype=torch.int64),
        rewards=torch.zeros(2),
        **{name: torch.tensor(values) for name, values in (defaults | columns).items()},
    )


def evaluate(section: AlgorithmSection, batch: Experience, logprobs: list[float] = LOGPROBS):
    values = torch.tensor(logprobs, requires_grad=True)
    loss, report = policy_objective(section)(values, batch, DENOMINATOR)
    return loss.item(), grad(loss, values)[0].tolist(), report


def test_without_old_logprobs_the_ratio_is_one_and_its_gradient_counts():
    loss, gradient, report = evaluate(AlgorithmSection(), experience())
    assert loss == pytest.approx(-(2 + 2 - 1) / 3)
    assert gradient == pytest.approx([0.0, -2 / 3, -2 / 3, 0.0, 1 / 3])
    assert report["train/ratio"].tolist() == [1.0] * 5
    assert not report["train/clip_low"].any() and not report["train/clip_high"].any()


def test_with_old_logprobs_the_clipped_ratio():
    # ratios 2 (A 2: clipped at 1.2), 0.5 (A 2: free), 2 (A -1: free)
    old = [0.0, -1.0 - LOG2, -2.0 + LOG2, 0.0, -0.5 - LOG2]
    loss, gradient, report = evaluate(AlgorithmSection(), experience(old_logprobs=old))
    assert loss == pytest.approx((-2.4 - 1.0 + 2.0) / 3, rel=1e-6)
    assert gradient == pytest.approx([0.0, 0.0, -1 / 3, 0.0, 2 / 3], rel=1e-6)
    assert report["train/clip_high"].tolist() == [False, True, False, False, False]


def test_bounds_and_aggregation_come_from_the_configuration():
    old = [0.0, -1.0 - LOG2, -2.0, 0.0, -0.5 - math.log(8)]
    section = AlgorithmSection(
        eps_clip_high=0.5, dual_clip=3.0, loss_agg_mode="seq-mean-token-mean"
    )
    # a: 2 * 1.5, b: 2, mean 2.5; c: ratio 8, A -1, dual clip 3; two sequences
    loss, gradient, _ = evaluate(section, experience(old_logprobs=old))
    assert loss == pytest.approx((-2.5 + 3.0) / 2, rel=1e-6)
    assert gradient == pytest.approx([0.0, 0.0, -0.5, 0.0, 0.0], rel=1e-6)


def test_divergence_from_the_reference_is_added():
    reference = [0.0, -1.0 + LOG2, -2.0, 0.0, -0.5 - 1.0]  # d = log 2, 0, -1
    section = AlgorithmSection(use_kl_loss=True, init_kl_coef=0.5, kl_estimator="k3")
    loss, gradient, report = evaluate(section, experience(reference_logprobs=reference))
    k3 = [1 - LOG2, 0.0, math.exp(-1)]
    assert report["train/kl"][MASK].tolist() == pytest.approx(k3, abs=1e-6)
    assert loss == pytest.approx((-3 + 0.5 * sum(k3)) / 3, rel=1e-6)
    # of k3: 1 - exp(d) = -1, 0, 1 - 1/e
    expected = [0.0, (-2 - 0.5) / 3, -2 / 3, 0.0, (1 + 0.5 * (1 - math.exp(-1))) / 3]
    assert gradient == pytest.approx(expected, rel=1e-6)


def test_no_reference_no_divergence():
    assert "train/kl" not in evaluate(AlgorithmSection(use_kl_loss=True), experience())[2]


def test_mismatch_is_reported_between_engine_and_old_logprobs_and_has_no_gradient():
    engine = [0.0, -1.5, -2.0, 0.0, -0.5 + LOG2]
    for batch in (
        experience(engine_logprobs=engine),
        experience(engine_logprobs=engine, old_logprobs=LOGPROBS),
    ):
        moved = LOGPROBS if batch.old_logprobs is None else [value - 0.1 for value in LOGPROBS]
        report = evaluate(AlgorithmSection(), batch, moved)[2]
        assert report["engine/logprob_mismatch"].tolist() == pytest.approx(
            [0.0, 0.5, 0.0, 0.0, LOG2], abs=1e-6
        )
        assert (
            report["engine/logprob_mismatch_max"].tolist()
            == report["engine/logprob_mismatch"].tolist()
        )
        assert report["engine/logprob_mismatch_exp"].tolist() == pytest.approx(
            [1.0, math.exp(0.5), 1.0, 1.0, 2.0], abs=1e-6
        )

        assert not report["engine/logprob_mismatch"].requires_grad


def test_mismatch_uses_the_trainers_log_probs_if_the_engines_serve_as_old_ones():
    engine = [0.0, -1.5, -2.0, 0.0, -0.5 + LOG2]
    batch = experience(engine_logprobs=engine, old_logprobs=engine)
    report = evaluate(AlgorithmSection(use_engine_logprobs=True), batch)[2]
    assert report["engine/logprob_mismatch"].tolist() == pytest.approx(
        [0.0, 0.5, 0.0, 0.0, LOG2], abs=1e-6
    )
    assert report["train/ratio"].tolist() == pytest.approx(
        [1.0, math.exp(0.5), 1.0, 1.0, 0.5], abs=1e-6
    )
    later = replace(DENOMINATOR, updates_before=1)
    section = AlgorithmSection(use_engine_logprobs=True)
    _, report = policy_objective(section)(torch.tensor(LOGPROBS), batch, later)
    assert not any(name.startswith("engine/logprob_mismatch") for name in report), (
        "an update has moved the trainer's"
    )


def test_ratio_and_drift_are_reported():
    old = [0.0, -1.0 - LOG2, -2.0 + LOG2, 0.0, -0.5]  # log-ratios log 2, -log 2, 0
    report = evaluate(AlgorithmSection(), experience(old_logprobs=old))[2]
    for name in ("train/ratio", "train/ratio_min", "train/ratio_max"):
        assert report[name][MASK].tolist() == pytest.approx([2.0, 0.5, 1.0], abs=1e-6)
    # k1 of the old policy from the new: -log r; k3: r - 1 - log r
    assert report["train/drift_k1"][MASK].tolist() == pytest.approx([-LOG2, LOG2, 0.0], abs=1e-6)
    assert report["train/drift_k3"][MASK].tolist() == pytest.approx(
        [1 - LOG2, LOG2 - 0.5, 0.0], abs=1e-6
    )
    assert not any(
        values.requires_grad for name, values in report.items() if name.startswith("train/drift")
    )


def test_entropy_bonus():
    batch = experience()
    batch.entropy = torch.tensor([7.0, 1.0, 2.0, 7.0, 3.0], requires_grad=True)
    values = torch.tensor(LOGPROBS, requires_grad=True)
    loss, _ = policy_objective(AlgorithmSection(entropy_coef=0.5))(values, batch, DENOMINATOR)
    assert loss.item() == pytest.approx((-3 - 0.5 * 6) / 3)
    assert grad(loss, batch.entropy)[0].tolist() == pytest.approx(
        [0.0, -1 / 6, -1 / 6, 0.0, -1 / 6]
    )
    with pytest.raises(ValueError, match="needs entropy in the batch"):
        policy_objective(AlgorithmSection(entropy_coef=0.5))(values, experience(), DENOMINATOR)


def test_observations_add_their_likelihood_but_for_tokens_that_are_never_sampled():
    batch = experience()
    batch.set_column(OBSERVATIONS, torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0]))
    section = AlgorithmSection(observation_coef=0.1)
    loss, gradient, report = evaluate(section, batch, [0.0, -1.0, -2.0, -4.0, -0.5])
    assert loss == pytest.approx(-1.0 + 0.05 * 4) and gradient[3] == pytest.approx(-0.05)
    values, weight = report["train/observation_loss"]
    assert values.tolist() == [0, 0, 0, 4, 0] and weight.tolist() == [False] * 3 + [True, False]

    never = [0.0, -1.0, -2.0, -math.inf, -0.5]
    loss, gradient, report = evaluate(section, batch, never)
    assert loss == pytest.approx(-1.0) and gradient[3] == 0
    assert not report["train/observation_loss"].weight.any()


def test_weights_of_tokens():
    batch = experience(weights=[9.0, 0.0, 2.0, 9.0, 1.0])
    loss, gradient, _ = evaluate(AlgorithmSection(), batch)
    assert loss == pytest.approx((-4 + 1) / 3) and gradient == pytest.approx(
        [0.0, 0.0, -4 / 3, 0.0, 1 / 3]
    )


def test_divergence_that_is_in_the_reward_is_only_reported():
    reference = [0.0, -1.0 + LOG2, -2.0, 0.0, -1.5]
    loss, _, report = evaluate(
        AlgorithmSection(init_kl_coef=0.5, kl_estimator="k2"),
        experience(reference_logprobs=reference),
    )
    assert loss == pytest.approx(-1.0)
    assert report["train/kl"][MASK].tolist() == pytest.approx([LOG2**2 / 2, 0.0, 0.5], abs=1e-6)
    assert report["train/kl_k1"][MASK].tolist() == pytest.approx([-LOG2, 0.0, 1.0], abs=1e-6)
    assert report["train/kl_k3"][MASK].tolist() == pytest.approx(
        [1 - LOG2, 0.0, math.exp(-1)], abs=1e-6
    )


def test_sft_is_the_mean_of_negative_log_probs_over_learned_tokens():
    batch = Batch(
        lengths=torch.tensor([3, 2]),
        input_ids=torch.arange(5),
        loss_mask=torch.tensor(MASK),
        rows=torch.arange(2),
    )
    values = torch.tensor(LOGPROBS, requires_grad=True)
    loss, report = sft(values, batch, DENOMINATOR)
    assert loss.item() == pytest.approx(3.5 / 3) and report == {}
    assert grad(loss, values)[0].tolist() == pytest.approx([0.0, -1 / 3, -1 / 3, 0.0, -1 / 3])


def double_loss(logprobs, old_logprobs, advantages, *, eps_clip_low, eps_clip_high, dual_clip):
    return -2 * (logprobs - old_logprobs).exp() * advantages, {}


def test_a_users_own_loss():
    section = AlgorithmSection(policy_loss=f"{__file__}:double_loss")
    assert evaluate(section, experience())[0] == pytest.approx(-2.0)


# -- the critic


def mean_loss(logprobs, old_logprobs, advantages):
    return (-advantages * logprobs).mean(), {}


def bare_loss(logprobs, old_logprobs, advantages):
    return -advantages * logprobs


def mean_report(logprobs, old_logprobs, advantages):
    return -advantages * logprobs, {"mine": logprobs.mean()}


def number_report(logprobs, old_logprobs, advantages):
    return -advantages * logprobs, {"mine": 1.0}


def mean_weight(ratio):
    return ratio.mean()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"policy_loss": f"{__name__}:mean_loss"},
            r"mean_loss: its loss has shape \[\], not one value for each of the 5",
        ),
        ({"policy_loss": f"{__name__}:bare_loss"}, "bare_loss must return a pair"),
        (
            {"policy_loss": f"{__name__}:mean_report"},
            r"mean_report: the reported 'mine' has shape \[\]",
        ),
        (
            {"policy_loss": f"{__name__}:number_report"},
            "number_report: the reported 'mine' has shape",
        ),
        (
            {"rollout_correction": f"{__name__}:mean_weight"},
            r"mean_weight: its weight has shape \[\]",
        ),
    ],
)
def test_what_a_users_own_function_must_return(section, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(AlgorithmSection(**section), experience())


def value_loss(clip: float, **columns: list[float]):
    """Return the value loss of a small case.

    Learned are values of 1, 2 and 5; they were 1.5, 2 and 3, and 0, 4 and 5.25 were right.
    """
    values = torch.tensor([9.0, 1.0, 2.0, 9.0, 5.0], requires_grad=True)
    given = {"values": [8.0, 1.5, 2.0, 8.0, 3.0], "returns": [0.0, 0.0, 4.0, 0.0, 5.25]} | columns
    loss, report = ValueObjective(AlgorithmSection(value_clip=clip))(
        values, experience(**given), DENOMINATOR
    )
    return loss.item(), grad(loss, values)[0].tolist(), report


def test_value_loss_without_clip():
    loss, gradient, report = value_loss(0)
    assert loss == pytest.approx((1 + 4 + 0.0625) / 2 / 3)
    assert gradient == pytest.approx([0.0, 1 / 3, -2 / 3, 0.0, -0.25 / 3])
    assert "critic/clip" not in report


def test_value_loss_takes_the_worse_of_new_and_clipped():
    # clipped to 0.2: 1.3, 2, 3.2; squares 1.69 (worse than 1), 4, 4.2025 (worse than 0.0625)
    loss, gradient, report = value_loss(0.2)
    assert loss == pytest.approx((1.69 + 4 + 4.2025) / 2 / 3)
    assert gradient == pytest.approx([0.0, 0.0, -2 / 3, 0.0, 0.0])
    assert report["critic/clip"][torch.tensor(MASK)].tolist() == [True, False, True]


def test_a_value_loss_without_returns_is_refused():
    with pytest.raises(ValueError, match="the value loss needs values, returns in the batch"):
        ValueObjective(AlgorithmSection())(torch.zeros(5), experience(), DENOMINATOR)


MASKS = [".xx.xxx", ".x", ".xxxx"]
PENALTIES = {
    "use_kl_loss": True,
    "init_kl_coef": 0.1,
    "entropy_coef": 0.01,
    "policy_drift_coef": 0.3,
}
CORRECTED = {"rollout_correction": "tis", "rollout_correction_level": "sequence"}
SECTIONS = [
    *(AlgorithmSection(policy_loss=name, **PENALTIES) for name in policy_losses.names()),
    *(
        AlgorithmSection(loss_agg_mode=mode)
        for mode in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ),
    AlgorithmSection(dual_clip=3.0, rollout_mask="geometric", **CORRECTED),
]


@pytest.mark.parametrize(
    "section", SECTIONS, ids=lambda section: f"{section.policy_loss} {section.loss_agg_mode}"
)
def test_gradients_are_known_before_the_log_probs_of_all_tokens_are(section):
    """Gradients of some tokens or sequences, from their log-probs alone, equal autograd's."""
    batch = random_experience(MASKS, 3)
    objective = policy_objective(section)
    denominator = step_denominator(batch)
    logprobs = actor_logprobs(batch, 4).requires_grad_()
    entropy = batch.entropy.clone().requires_grad_()
    batch.entropy = entropy
    expected = grad(
        objective(logprobs, batch, denominator)[0], [logprobs, entropy], allow_unused=True
    )
    gradients = local_gradients(objective, batch, denominator)
    assert gradients.num_sequences == (
        0 if reach_of(policy_losses[section.policy_loss]) == "token" else 1
    )

    masks = [batch.loss_mask, batch.sequence_ids == 0, batch.sequence_ids != 0]
    if gradients.num_sequences == 0:
        masks.append(torch.arange(len(logprobs)) % 3 == 1)
    for some in masks:
        found = gradients.compute(
            *(torch.where(some, values.detach(), 0.0) for values in (logprobs, entropy))
        )
        for value, reference in zip(found, expected, strict=True):
            assert (value is None) == (reference is None)
            assert value is None or torch.equal(value[some], reference[some])


def depends_on(name: str, scope: str) -> bool:
    """Return whether a token's gradient under a policy loss moves with the log-prob of another
    token, or of another sequence.
    """
    batch = random_experience(MASKS, 5, weights=None)
    section = AlgorithmSection(policy_loss=name, eps_clip_low=0.9, eps_clip_high=9.0)
    objective = policy_objective(section)
    denominator = step_denominator(batch)
    logprobs = actor_logprobs(batch, 6).requires_grad_()
    (first,) = grad(objective(logprobs, batch, denominator)[0], logprobs)
    numbers = torch.arange(len(logprobs)) if scope == "token" else batch.sequence_ids
    moved = (logprobs.detach() + 0.01 * (numbers % 2)).requires_grad_()
    (second,) = grad(objective(moved, batch, denominator)[0], moved)
    return not torch.equal(first[numbers % 2 == 0], second[numbers % 2 == 0])


def test_losses_that_treat_tokens_or_sequences_alone():
    for name in policy_losses.names():
        found = (depends_on(name, "token"), depends_on(name, "sequence"))
        assert found == ((reach_of(policy_losses[name]) == "sequence"), False)


def test_objectives_that_are_known_token_by_token():
    batch = random_experience(MASKS, 3)
    denominator = DENOMINATOR

    learned = batch.loss_mask
    balance = Balance(torch.ones(2), torch.ones(()))
    for objective in (sft, PtxObjective(0.5), Balanced(sft, balance, 0.1)):
        known = local_gradients(objective, batch, denominator)
        gradient, of_entropy = known.compute(torch.zeros(batch.num_tokens), None)
        assert known.num_sequences == 0
        assert of_entropy is None and (gradient[learned] < 0).all() and not gradient[~learned].any()

    by_name = policy_objective(AlgorithmSection(policy_loss=f"{__name__}:double_loss"))
    for objective in (double_loss, ValueObjective(AlgorithmSection()), by_name):
        assert local_gradients(objective, batch, denominator) is None


@pytest.mark.parametrize(
    ("fields", "num_sequences"),
    [
        ({}, 0),
        ({"rollout_correction": "tis"}, 0),
        ({"rollout_correction": "tis", "rollout_mask": "geometric"}, 1),
        (CORRECTED, 1),
        ({"rollout_mask": "sequence"}, 1),
        ({"policy_loss": "gspo", "rollout_correction": "mis"}, 1),
        ({"rollout_correction": f"{__name__}:correction_of_user"}, None),
        ({"policy_loss": "gspo", "rollout_correction": f"{__name__}:correction_of_user"}, None),
    ],
)
def test_corrections_by_the_current_log_probs_join_tokens_of_a_sequence(fields, num_sequences):
    """Without old log-probs the current ones stand for them."""
    batch = random_experience(MASKS, 3, old_logprobs=None)
    objective = policy_objective(AlgorithmSection(**fields))
    known = local_gradients(objective, batch, step_denominator(batch))
    assert (known and known.num_sequences) == num_sequences
    if known is None:
        return

    logprobs = (
        batch.engine_logprobs + torch.linspace(-0.2, 0.3, batch.num_tokens)
    ).requires_grad_()
    (expected,) = grad(objective(logprobs, batch, step_denominator(batch))[0], logprobs)
    first = batch.sequence_ids == 0
    found, _ = known.compute(torch.where(first, logprobs.detach(), 0.0), None)
    assert torch.equal(found[first], expected[first])


def correction_of_user(ratio: torch.Tensor) -> torch.Tensor:
    """A user's correction may look at all tokens."""
    return ratio / ratio.mean()
