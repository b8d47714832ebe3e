"""Why: three estimators of one divergence differ in value, sign and gradient.

Only the maths tells which is which.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad

from lightrft.algorithms.kl import EntropyCoefficient, KLCoefficient, generalized_jsd, kl_estimators

# d = log p_reference - log p_actor = -1 and log 2
LOGPROBS = [-1.0, -2.0]
REFERENCE = [-2.0, -2.0 + math.log(2)]
GOLDEN = {
    "k1": ([1.0, -0.69314718], [1.0, 1.0]),
    "k2": ([0.5, 0.24022651], [1.0, -0.69314718]),  # gradient -d
    "k3": ([0.36787944, 0.30685282], [0.63212056, -1.0]),  # exp(-1); 1 - log 2; gradient 1 - exp(d)
    "k3+": ([0.36787944, 0.30685282], [1.0, -0.69314718]),  # the values of k3, the gradients of k2
}


@pytest.mark.parametrize("name", GOLDEN)
def test_values_and_gradients(name):
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    values = kl_estimators[name](logprobs, torch.tensor(REFERENCE))
    expected, slopes = GOLDEN[name]
    assert values.tolist() == pytest.approx(expected, abs=1e-6)
    assert grad(values.sum(), logprobs)[0].tolist() == pytest.approx(slopes, abs=1e-6)


@pytest.mark.parametrize("name", GOLDEN)
def test_equal_models_do_not_diverge(name):
    assert kl_estimators[name](torch.tensor([-1.5, 0.0]), torch.tensor([-1.5, 0.0])).tolist() == [
        0.0,
        0.0,
    ]


@given(st.floats(-5, 5, width=32))
def test_k3_is_never_negative_and_right_for_small_differences(difference):
    value = kl_estimators["k3"](torch.tensor(0.0), torch.tensor(difference)).item()
    assert value >= 0
    rounding = 2e-7 * abs(difference) * max(1.0, math.exp(difference))
    assert value == pytest.approx(math.expm1(difference) - difference, abs=rounding)


def test_k1_and_k3_average_to_the_divergence():
    """The mean of k1 and of k3 over the actor is KL(actor || reference).

    It is checked with 400,000 samples of a categorical distribution over 5 tokens.
    """
    actor = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.25, 0.25, 0.20, 0.20, 0.10], dtype=torch.float64)
    exact = sum(
        p * math.log(p / q) for p, q in zip(actor.tolist(), reference.tolist(), strict=True)
    )
    tokens = torch.multinomial(
        actor, 400_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )

    logprobs = actor.log()[tokens]
    reference_logprobs = reference.log()[tokens]
    for name in ("k1", "k3", "k3+"):
        values = kl_estimators[name](logprobs, reference_logprobs)
        error = values.std().item() / math.sqrt(len(values))
        assert values.mean().item() == pytest.approx(exact, abs=4 * error)
        assert 4 * error < 0.05 * exact  # the bound can tell a wrong estimator

    # biased, near
    assert (
        abs(kl_estimators["k2"](logprobs, reference_logprobs).mean().item() - exact) < 0.2 * exact
    )


@pytest.mark.parametrize("name", ["k2", "k3+"])
def test_the_expected_gradient_equals_the_gradient_of_the_divergence(name):
    """The sum over tokens of p * grad k2, with p held fixed, is the gradient of the exact KL in the
    logits.
    """
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    exact = grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0]
    through = grad(
        (logp.exp().detach() * kl_estimators[name](logp, reference)).sum(),
        logits,
        retain_graph=True,
    )[0]
    torch.testing.assert_close(through, exact, rtol=1e-12, atol=1e-12)
    through_k3 = grad((logp.exp().detach() * kl_estimators["k3"](logp, reference)).sum(), logits)[0]
    assert not torch.allclose(through_k3, exact, rtol=1e-2)


# -- the coefficient


def test_a_fixed_coefficient_stays():
    coefficient = KLCoefficient(0.1)
    coefficient.update(50.0, 1000)
    assert coefficient.value == 0.1
    coefficient.load_state_dict({"value": 7.0})
    assert coefficient.value == 0.1


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (2.2, 0.5 * (1 + 0.1 * 50 / 1000)),  # a tenth too high
        (1.8, 0.5 * (1 - 0.1 * 50 / 1000)),
        (9.0, 0.5 * (1 + 0.2 * 50 / 1000)),  # clipped at a fifth
        (0.0, 0.5 * (1 - 0.2 * 50 / 1000)),
        (2.0, 0.5),
    ],
)
def test_a_coefficient_moves_towards_its_target(divergence, expected):
    coefficient = KLCoefficient(0.5, target=2.0, horizon=1000)
    coefficient.update(divergence, 50)
    assert coefficient.value == pytest.approx(expected, rel=1e-12)


def test_a_coefficient_continues_where_another_stopped():
    first = KLCoefficient(0.5, target=2.0)
    second = KLCoefficient(0.5, target=2.0)
    first.update(9.0, 500)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value != 0.5


# -- whole distributions

TOP = [[0.5, 0.25]]
"""The teacher's two likeliest tokens; the rest has 1/4."""
ACTOR = [[0.25, 0.5]]
DIVERGENCES = {
    # 1/2 log 2 - 1/4 log 2 + 0
    0: 0.25 * math.log(2),
    # 1/4 log 1/2 + 1/2 log 2 + 0
    1: 0.25 * math.log(2),
    # both sides meet at (3/8, 3/8, 1/4): 1/2 log 4/3 + 1/4 log 2/3
    0.5: 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3),
}


@pytest.mark.parametrize("beta", DIVERGENCES)
def test_tokens_that_nobody_names_count_as_one(beta):
    value = generalized_jsd(torch.tensor(ACTOR).log(), torch.tensor(TOP).log(), beta)
    assert value.tolist() == pytest.approx([DIVERGENCES[beta]], rel=1e-5)


def test_a_teacher_names_the_rest_too():
    """KL(teacher || actor) over (1/2, rest 1/2) and (1/4, rest 3/4)."""
    value = generalized_jsd(torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log(), 0)
    assert value.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3)], rel=1e-5)


@pytest.mark.parametrize("sharpness", [1, 3], ids=str)
@pytest.mark.parametrize("beta", [0, 0.3, 1], ids=str)
def test_all_tokens_give_the_divergence_of_the_paper(beta, sharpness):
    """Compared with float64, values and gradients of the logits, with two columns of no token."""
    generator = torch.Generator().manual_seed(0)
    logits, of_teacher = sharpness * torch.randn(2, 7, 300, generator=generator)
    p = of_teacher.double().softmax(-1)
    exact = logits.double().requires_grad_()
    q = exact.softmax(-1)
    middle = beta * p + (1 - beta) * q
    expected = {0: (p * (p / q).log()).sum(-1), 1: (q * (q / p).log()).sum(-1)}.get(
        beta,
        beta * (p * (p / middle).log()).sum(-1) + (1 - beta) * (q * (q / middle).log()).sum(-1),
    )

    logits.requires_grad_()
    top, ids = of_teacher.log_softmax(-1).topk(300)
    none = torch.full((7, 2), -math.inf)
    candidates = torch.cat([logits.log_softmax(-1).gather(1, ids), torch.zeros(7, 2)], dim=1)
    value = generalized_jsd(candidates, torch.cat([top, none], dim=1), beta)

    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    slopes = grad(value.sum(), logits)[0].double()
    torch.testing.assert_close(slopes, grad(expected.sum(), exact)[0], rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 30), st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
def test_some_of_the_tokens_never_diverges_more_than_all(seed, k, beta):
    logits, of_teacher = 3 * torch.randn(
        2, 1, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    top, ids = of_teacher.log_softmax(-1).topk(30)
    candidates = logits.log_softmax(-1).gather(1, ids)
    divergence = generalized_jsd(candidates[:, :k], top[:, :k], beta).item()
    assert -1e-9 <= divergence <= generalized_jsd(candidates, top, beta).item() + 2e-5


def test_the_entropy_coefficient_follows_the_paper():
    """It is raised below the target, and does nothing above it while it sinks."""
    coefficient = EntropyCoefficient(0.01, target=2.0, step=0.005)
    values = []
    for entropy in (1.5, 1.0, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 1.0):
        coefficient.update(entropy)
        values.append(coefficient.value)
    assert values == pytest.approx([0.01, 0.015, 0.02, 0, 0, 0, 0, 0, 0])
    assert coefficient.adapted == pytest.approx(0.005)

    other = EntropyCoefficient(0.01, target=2.0)
    other.load_state_dict(coefficient.state_dict())
    assert other.adapted == coefficient.adapted

    fixed = EntropyCoefficient(0.3)
    fixed.update(0.0)
    assert fixed.value == 0.3
