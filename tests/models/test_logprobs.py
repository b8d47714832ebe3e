"""Why: everything that is learned passes through these log-probs.

Their backward pass is written by hand. The reference is torch's own autograd through the dense
logits.
"""

import math
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightrft.algorithms.kl import generalized_jsd
from lightrft.models.logits import logprobs
from lightrft.models.logits.logprobs import (
    Truncation,
    logprobs_of_logits,
    token_logprobs,
    top_logprobs,
)
from marginal import MARGINAL, MARGINAL_CASES, check_marginal, marginal_inputs
from ranks import run_ranks

T = 23
H = 8
V = 41


class Head(torch.autograd.Function):
    """Return logits in float32; the gradient of the logits has the dtype of the factors."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden.float() @ weight.float().T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        return gradient @ weight, gradient.T @ hidden


def dense(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute all logits at once, upcast and scaled as a model's head would."""
    logp = (Head.apply(hidden, weight) / temperature).log_softmax(-1)
    picked = logp.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets < 0, 0.0, picked), -(logp.exp() * logp).sum(-1)


def inputs(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(T, H, generator=generator) * scale).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(V, (T,), generator=generator),
    )


def gradients(
    function, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: tuple, **options
) -> list[Tensor]:
    values = function(hidden, weight, targets, **options)
    total = sum(
        (value * up).sum() for value, up in zip(values, upstream, strict=True) if up is not None
    )
    return list(torch.autograd.grad(total, [hidden, weight]))


def test_two_tokens_by_hand():
    # logits (1, 0) and (0, 2): log-probs -log(1 + 1/e) and -log(1 + e^2)
    hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    weight = torch.eye(2)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 0]))
    assert logprobs.tolist() == pytest.approx([-0.31326169, -2.12692801], abs=1e-6)
    # p = 0.7310586: -p log p - q log q; p = 0.1192029 and 0.8807971
    assert entropy.tolist() == pytest.approx([0.58220309, 0.36533386], abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [1, 7, T, None])
def test_values_equal_dense(chunk, temperature):
    hidden, weight, targets = inputs()
    expected = dense(hidden, weight, targets, temperature)
    values = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    for value, reference in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)


UPSTREAM = torch.linspace(-1.0, 2.0, T), torch.linspace(0.5, -0.7, T)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, T, None])
@pytest.mark.parametrize(
    "use", [(True, False), (False, True), (True, True)], ids=["logprob", "entropy", "both"]
)
def test_gradients_equal_dense(chunk, use, temperature):
    upstream = tuple(up if used else None for up, used in zip(UPSTREAM, use, strict=True))
    hidden, weight, targets = inputs()
    targets[::5] = -100
    expected = gradients(dense, hidden, weight, targets, upstream, temperature=temperature)
    actual = gradients(
        token_logprobs, hidden, weight, targets, upstream, temperature=temperature, chunk=chunk
    )
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_an_ignored_target_has_value_zero_and_no_gradient(ignored):
    hidden, weight, targets = inputs()
    targets[3:9] = ignored
    logprobs, _ = token_logprobs(hidden, weight, targets, chunk=4)
    assert logprobs[3:9].tolist() == [0.0] * 6 and (logprobs[9:] < 0).all()
    of_ignored = torch.zeros(T)
    of_ignored[3:9] = 1.0
    for gradient in gradients(token_logprobs, hidden, weight, targets, (of_ignored, None), chunk=4):
        assert not gradient.any()


def test_bf16_is_the_dense_computation_with_float32_logits():
    hidden, weight, targets = inputs(torch.bfloat16)
    expected = dense(hidden, weight, targets, 0.7)
    values = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=None)
    for value, reference in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)

    references = gradients(dense, hidden, weight, targets, UPSTREAM, temperature=0.7)
    actual = gradients(
        token_logprobs, hidden, weight, targets, UPSTREAM, temperature=0.7, chunk=None
    )
    for gradient, expected in zip(actual, references, strict=True):
        assert gradient.dtype == torch.bfloat16
        # of the rounded logit gradients autograd keeps the same bits; the products round once, to
        # 2^-8
        torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=2**-10)


def errors_against_float64(
    device: torch.device, tokens: int, width: int, vocabulary: int
) -> dict[str, float]:
    """Return the largest error of log-probs in bfloat16, and the relative error of gradients.

    The reference is float64 of the same numbers. `rounded` has the errors for logits that were
    rounded to bfloat16 first. Logits of trained models are about as large.
    """
    generator = torch.Generator().manual_seed(1)
    hidden = (
        torch.randn(tokens, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
    )
    weight = (
        (torch.randn(vocabulary, width, generator=generator) * 5 / width**0.5)
        .to(device, torch.bfloat16)
        .requires_grad_()
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = (exact_hidden @ exact_weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    known = torch.autograd.grad(exact.sum(), [exact_hidden, exact_weight])
    logprobs, _ = token_logprobs(hidden, weight, targets)
    found = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    rounded, _ = dense(hidden, weight, targets, 1.0)

    return {
        "float32 products": (logprobs - exact).abs().max().item(),
        "rounded products": (rounded - exact).abs().max().item(),
        "gradients": max(
            ((one - other).norm() / other.norm()).item()
            for one, other in zip(found, known, strict=True)
        ),
    }


def test_bf16_gradients_are_close_to_float64_on_a_cpu():
    errors = errors_against_float64(torch.device("cpu"), 64, 128, 500)
    assert errors["gradients"] < 1e-2 and errors["float32 products"] < 0.1, errors


@pytest.mark.gpu
def test_bf16_logits_are_not_rounded_on_an_accelerator():
    """The products write what they summed in float32.

    Rounded logits, at 20 in steps of 0.125, are many times as far off.
    """
    errors = errors_against_float64(
        torch.device(torch.accelerator.current_accelerator()), 512, 1024, 20_000
    )
    assert errors["float32 products"] < 1e-3, errors
    assert (
        errors["rounded products"] > 10 * errors["float32 products"] and errors["gradients"] < 1e-2
    ), errors


def test_large_logits_stay_finite():
    hidden, weight, targets = inputs(scale=200.0)
    expected = dense(hidden, weight, targets, 1.0)
    for value, reference in zip(token_logprobs(hidden, weight, targets), expected, strict=True):
        assert value.isfinite().all()
        # logits of a thousand have steps of 1e-4
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-3)


def test_no_tokens():
    hidden, weight, targets = inputs()
    nothing = hidden[:0].detach().requires_grad_()
    logprobs, entropy = token_logprobs(nothing, weight, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    gradient = torch.autograd.grad(logprobs.sum() + entropy.sum(), [nothing, weight])
    assert gradient[0].shape == (0, H) and not gradient[1].any()


class Largest(TorchDispatchMode):
    """Remembers the most elements that any operation returned in one tensor."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max(
            [
                self.numel,
                *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)),
            ]
        )
        return result


def largest_tensor(chunk: int | None) -> int:
    tokens = 96
    width = 4
    vocabulary = 500
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with Largest() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, torch.arange(tokens), chunk=chunk)
        (logprobs.sum() + entropy.sum()).backward()
    return seen.numel


def test_all_logits_never_exist():
    assert largest_tensor(chunk=8) == 8 * 500
    # so the measure sees the backward and forward pass
    assert largest_tensor(chunk=None) == 96 * 500


def truncated(
    logits: Tensor, targets: Tensor, top_k: int, top_p: float, min_p: float = 0.0
) -> Tensor:
    """Return [T, V] log-probs of truncated sampling, row by row and token by token.

    Targets [T, K] are always kept.
    """
    rows = []
    for row, kept in zip(logits, targets.tolist(), strict=True):
        order = sorted(range(len(row)), key=(-row).tolist().__getitem__)
        likely = [
            token for token in order if row[token] - row[order[0]] >= math.log(min_p or 1e-30)
        ]
        candidates = likely[:top_k] if top_k > 0 else likely
        probabilities = row[candidates].softmax(-1).tolist()

        reached = 0.0
        nucleus = []
        for token, probability in zip(candidates, probabilities, strict=True):
            if reached >= top_p:
                break
            nucleus.append(token)
            reached += probability

        outside = torch.ones(len(row), dtype=torch.bool)
        outside[nucleus + [token for token in kept if token >= 0]] = False
        rows.append(row.masked_fill(outside, -torch.inf).log_softmax(-1))

    return torch.stack(rows)


def dense_truncated(
    hidden, weight, targets, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> tuple[Tensor, Tensor]:
    columns = targets if targets.dim() == 2 else targets[:, None]
    logp = truncated(Head.apply(hidden, weight) / temperature, columns, top_k, top_p, min_p)
    picked = torch.where(columns < 0, 0.0, logp.gather(-1, columns.clamp(min=0)))
    inside = torch.where(logp.isinf(), 0.0, logp)
    return picked.view(targets.shape), -(logp.exp() * inside).sum(-1)


TRUNCATIONS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "both": {"top_k": 9, "top_p": 0.6},
    "best": {"top_k": 1},
    "min-p": {"min_p": 0.3},
    "all three": {"min_p": 0.05, "top_k": 9, "top_p": 0.6},
}


@pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS.keys())
def test_truncated_sampling_equals_the_dense_computation(options):
    hidden, weight, targets = inputs(scale=0.5)
    values = token_logprobs(
        hidden, weight, targets, temperature=0.8, truncation=Truncation(**options), chunk=7
    )
    expected = dense_truncated(hidden, weight, targets, temperature=0.8, **options)
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=2e-6)
    expected = gradients(
        dense_truncated, hidden, weight, targets, UPSTREAM, temperature=0.8, **options
    )

    actual = gradients(
        token_logprobs,
        hidden,
        weight,
        targets,
        UPSTREAM,
        temperature=0.8,
        truncation=Truncation(**options),
        chunk=7,
    )
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", TRUNCATIONS.values(), ids=TRUNCATIONS.keys())
def test_the_kept_part_is_that_of_transformers(options):
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(3)) * 2
    warped = logits
    if "min_p" in options:
        warped = MinPLogitsWarper(options["min_p"])(None, warped)
    if "top_k" in options:
        warped = TopKLogitsWarper(options["top_k"])(None, warped)
    if "top_p" in options:
        warped = TopPLogitsWarper(options["top_p"])(None, warped)
    best = logits.argmax(-1, keepdim=True)
    assert torch.equal(Truncation(**options)(logits.clone(), best).isinf(), warped.isinf())


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=["alone", "top-k", "top-p"]
)
def test_banned_tokens_are_as_if_they_were_not_in_the_vocabulary(options):
    hidden, weight, targets = inputs(scale=0.5)
    banned = (0, 4, V - 1)
    kept = [token for token in range(V) if token not in (0, 4, V - 1)]
    targets = torch.tensor(kept)[targets.clamp(min=0) % len(kept)]
    values = token_logprobs(
        hidden, weight, targets, truncation=Truncation(banned=banned, **options), chunk=7
    )
    renumbered = torch.searchsorted(torch.tensor(kept), targets)
    expected = token_logprobs(
        hidden, weight[kept], renumbered, truncation=Truncation(**options), chunk=7
    )
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=2e-6)

    logprobs, _ = token_logprobs(
        hidden, weight, torch.full_like(targets, 4), truncation=Truncation(banned=banned, **options)
    )
    assert logprobs.isfinite().all(), (
        "a banned token that is asked for, as in a prompt, has a log-prob all the same"
    )


def test_tokens_of_equal_probability_stay_together():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    target = torch.tensor([[0]])
    for truncation in (Truncation(top_k=2), Truncation(top_p=0.5)):  # p of the first is 0.44
        kept = truncation(logits.clone(), target).isfinite()
        assert kept.tolist() == [[True, True, True, True, False]]


def test_a_target_outside_of_the_part_is_kept_and_gradients_outside_are_zero():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], requires_grad=True)
    logprobs, _ = logprobs_of_logits(logits, torch.tensor([3]), truncation=Truncation(top_k=1))
    # -log(1 + e^3): the best token and the target
    assert logprobs.item() == pytest.approx(-3.04858735, abs=1e-6)
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    assert gradient[0, 1:3].tolist() == [0.0, 0.0] and gradient[0, 3] > 0.9


def test_what_is_kept_is_what_the_definition_says():
    """A token stays where the more likely ones have less than top_p together; equal ones stay
    together.
    """
    generator = torch.Generator().manual_seed(5)
    decided = 0
    for vocabulary, scale, top_p in product(
        (1, 2, 41, 3000), (0.0, 0.1, 1.0, 5.0), (0.01, 0.5, 0.9, 0.999)
    ):
        for dtype in (torch.float32, torch.bfloat16):  # in which many are equal
            logits = (torch.randn(40, vocabulary, generator=generator) * scale).to(dtype).float()
            logits[::7, vocabulary // 2 + 1 :] = -torch.inf

            found = Truncation(top_p=top_p)(logits.clone()).isfinite()
            for row, kept in zip(logits, found, strict=True):
                values, counts = row.unique(return_counts=True)
                mass = counts.double() * (values.double() - values.max().double()).exp()
                above = (1 - mass.cumsum(0) / mass.sum()).clamp(min=0)  # of each value
                if (above - top_p).abs().min() > 1e-5:  # so that rounding does not decide
                    decided += 1
                    assert torch.equal(
                        kept, torch.isin(row, values[(above < top_p) & values.isfinite()])
                    )

    assert decided > 3000


def test_the_threshold_sorts_nothing():
    with Operations() as seen:
        Truncation(top_p=0.9)(torch.randn(3, 50))
    assert "sum" in seen.names and not seen.names & {"sort", "topk", "cumsum"}


class Operations(TorchDispatchMode):
    """Notes the name of every operation."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def test_what_a_cpu_computes_slowly_is_not_used():
    """Torch's functions for these take three to ten times as long as the ones in their place."""
    hidden, weight, targets = inputs()
    with Operations() as seen:
        values, entropy = token_logprobs(hidden, weight, targets)
        (values.sum() + entropy.sum()).backward()
        top_logprobs(hidden, weight, 5)
    assert {"mm", "topk", "log_"} <= seen.names
    assert not seen.names & {"xlogy", "special_entr", "logsumexp", "_log_softmax"}


def test_truncation_that_keeps_all_changes_nothing():
    assert not Truncation().active and not Truncation(top_k=-1).active
    hidden, weight, targets = inputs()
    expected = token_logprobs(hidden, weight, targets)
    for truncation in (Truncation(top_k=10 * V), Truncation(top_k=V)):
        for value, reference in zip(
            token_logprobs(hidden, weight, targets, truncation=truncation), expected, strict=True
        ):
            assert torch.equal(value, reference)


def several_targets() -> Tensor:
    targets = torch.randint(V, (T, 3), generator=torch.Generator().manual_seed(2))
    targets[2] = -100
    targets[5, 1] = -100
    targets[7] = 4  # the same token three times
    return targets


@pytest.mark.parametrize("options", [{}, {"top_k": 6}], ids=["all", "top-k"])
def test_several_targets_at_each_position(options):
    hidden, weight, _ = inputs()
    targets = several_targets()
    upstream = torch.linspace(-1.0, 2.0, 3 * T).view(T, 3), UPSTREAM[1]
    expected = dense_truncated(hidden, weight, targets, **options)
    values = token_logprobs(hidden, weight, targets, truncation=Truncation(**options), chunk=7)
    assert values[0].shape == (T, 3) and values[1].shape == (T,)
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=2e-6)
    expected = gradients(dense_truncated, hidden, weight, targets, upstream, **options)

    actual = gradients(
        token_logprobs, hidden, weight, targets, upstream, truncation=Truncation(**options), chunk=7
    )
    for gradient, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


def at_the_edge(threads: int) -> None:
    torch.set_num_threads(threads)
    for tokens, chunk in MARGINAL_CASES:
        hidden, weight, targets, upstream = marginal_inputs(tokens)
        values = token_logprobs(hidden, weight, targets, truncation=MARGINAL, chunk=chunk)
        actual = torch.autograd.grad(values, [hidden, weight], upstream)
        check_marginal(tokens, [*values, *actual])


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_last_token_inside_has_its_gradient(threads):
    """The same tokens are inside in the backward pass, however many rows are computed together.

    It runs in a process of its own: one that has computed with two threads cannot fork others that
    do.
    """
    run_ranks(1, at_the_edge, threads)


def test_recomputed_gradients_are_as_exact_as_those_of_float32_torch():
    """For logits of a thousand the sum in one number would be off by 6e-5.

    p is compared with float64.
    """
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(64, 50, generator=generator) * 3 + 100.0).requires_grad_()
    targets = torch.randint(50, (64,), generator=generator)
    temperature = 0.1
    values = logprobs_of_logits(logits, targets, temperature=temperature, chunk=8)
    (gradient,) = torch.autograd.grad(values, logits, [torch.ones(64), torch.ones(64)])
    scaled = (logits.detach() / temperature).double().requires_grad_()  # the same rounded numbers
    logp = scaled.log_softmax(-1)
    picked = logp.gather(-1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (wanted,) = torch.autograd.grad((picked + entropy).sum(), scaled)
    assert (gradient * temperature - wanted).abs().max() < 2e-6


def test_impossible_tokens_have_no_part_in_entropy_and_gradient():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(7))
    logits[1, 2:] = logits[2, 0] = -torch.inf
    logits.requires_grad_()
    logprobs, entropy = logprobs_of_logits(logits, torch.tensor([0, 1, 1, 5]))
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    few = logits.detach()[1, :2].clone().requires_grad_()
    logp = few.log_softmax(-1)
    assert logprobs[1].item() == pytest.approx(logp[1].item(), abs=1e-6)
    assert entropy[1].item() == pytest.approx(-(logp.exp() * logp).sum().item(), abs=1e-6)
    (wanted,) = torch.autograd.grad(logp[1] - (logp.exp() * logp).sum(), few)
    torch.testing.assert_close(
        gradient[1], torch.cat([wanted, torch.zeros(4)]), rtol=1e-5, atol=1e-6
    )
    assert entropy.isfinite().all() and gradient.isfinite().all() and gradient[2, 0] == 0
    assert (
        logprobs_of_logits(logits, torch.tensor([0, 5, 0, 5]))[0][1:3].tolist() == [-torch.inf] * 2
    )


def test_a_token_that_is_not_in_the_vocabulary_is_not_overlooked():
    logprobs, _ = logprobs_of_logits(torch.zeros(2, 3), torch.tensor([3, 2]))
    assert logprobs.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, None, 0])
def test_from_logits(dtype, chunk):
    logits = (
        (torch.randn(T, V, generator=torch.Generator().manual_seed(4)) * 3)
        .to(dtype)
        .requires_grad_()
    )
    before = logits.detach().clone()
    targets = inputs()[2]
    targets[4] = -100
    values = logprobs_of_logits(logits, targets, temperature=0.7, chunk=chunk)
    reference = logits.detach().float().requires_grad_()
    logp = (reference / 0.7).log_softmax(-1)
    expected = (
        torch.where(targets < 0, 0.0, logp.gather(-1, targets.clamp(min=0)[:, None])[:, 0]),
        -(logp.exp() * logp).sum(-1),
    )

    for value, wanted in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=2e-6)

    upstream = [UPSTREAM[0], UPSTREAM[1]]
    (gradient,) = torch.autograd.grad(values, logits, upstream)
    (wanted,) = torch.autograd.grad(expected, reference, upstream)
    assert gradient.dtype == dtype
    torch.testing.assert_close(
        gradient, wanted.to(dtype), rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5
    )
    assert torch.equal(logits, before)


def test_top_logprobs():
    hidden, weight, _ = inputs()
    values, ids = top_logprobs(hidden, weight, 5, temperature=0.6)
    logp = ((hidden @ weight.T) / 0.6).log_softmax(-1)
    expected = logp.topk(5)
    assert torch.equal(ids, expected.indices) and not values.requires_grad
    torch.testing.assert_close(values, expected.values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        values, token_logprobs(hidden, weight, ids, temperature=0.6)[0], rtol=1e-6, atol=1e-6
    )


def test_banned_tokens_are_not_among_the_likeliest():
    hidden, weight, _ = inputs()
    banned = (0, 7, 8, 40)
    values, ids = top_logprobs(hidden, weight, V, temperature=0.6, banned=banned)
    logits = ((hidden @ weight.T) / 0.6).detach()
    logits[:, [*banned]] = -torch.inf
    torch.testing.assert_close(values, logits.log_softmax(-1).topk(V).values, rtol=1e-6, atol=1e-6)
    assert torch.equal(ids[:, : V - 4], logits.topk(V - 4).indices)


@pytest.mark.parametrize("chunk", [4, None], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0], ids=str)
def test_a_teachers_whole_distribution(beta, chunk):
    """The divergence over all V tokens, with gradients that are known in the forward pass and
    without, is the one of float64.
    """
    hidden, weight, _ = inputs()
    generator = torch.Generator().manual_seed(3)
    of_teacher = torch.randn(T, V, generator=generator)
    top, ids = of_teacher.log_softmax(-1).topk(V)

    p = of_teacher.double().softmax(-1)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    q = (exact[0] @ exact[1].T / 0.7).softmax(-1)
    m = beta * p + (1 - beta) * q
    kl = {0.0: p * (p / q).log(), 1.0: q * (q / p).log()}
    both = beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()
    expected = kl.get(beta, both).sum(-1)
    slopes = torch.autograd.grad(expected.mean(), exact)

    def upstream(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            value = generalized_jsd(leaf, top[rows], beta).sum() / T
        return torch.autograd.grad(value, leaf)[0], None

    for known in (None, upstream):
        options = {"temperature": 0.7, "chunk": chunk, "upstream": known}
        logprobs, _ = token_logprobs(hidden, weight, ids, **options)
        value = generalized_jsd(logprobs, top, beta)
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=2e-6)
        for found, slope in zip(
            torch.autograd.grad(value.mean(), [hidden, weight]), slopes, strict=True
        ):
            torch.testing.assert_close(found.double(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "truncation", [Truncation(), Truncation(top_k=6, top_p=0.9)], ids=["all", "truncated"]
)
def test_chunk_sizes_agree(truncation):
    hidden, weight, targets = inputs()
    upstream = [up.clone() for up in UPSTREAM]
    results = []
    for chunk in (1, 7, T, None, 0):
        values = token_logprobs(hidden, weight, targets, truncation=truncation, chunk=chunk)
        results.append([*values, *torch.autograd.grad(values, [hidden, weight], upstream)])
    for result in results[1:]:
        for tensor, reference in zip(result, results[0], strict=True):
            assert ((tensor - reference).abs() <= 1e-6 * reference.abs().max()).all()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"top_k": 6, "top_p": 0.9}], ids=["all", "truncated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fits_into_a_chunk_is_not_computed_again(dtype, options):
    hidden, weight, _ = inputs(dtype, scale=0.5)
    targets = several_targets()
    upstream = torch.linspace(-1.0, 2.0, 3 * T).view(T, 3)
    expected = gradients(
        dense_truncated, hidden, weight, targets, (upstream, None), temperature=0.7, **options
    )
    logprobs, _ = token_logprobs(
        hidden, weight, targets, temperature=0.7, truncation=Truncation(**options), chunk=T
    )

    for products in (2, 2 + 1):  # the first time the gradient takes the place of what was kept
        with Products() as seen:
            actual = torch.autograd.grad(logprobs, [hidden, weight], upstream, retain_graph=True)
        assert seen.count == products
        for gradient, reference in zip(actual, expected, strict=True):
            exact = (
                {"rtol": 1e-5, "atol": 1e-5}
                if dtype == torch.float32
                else {"rtol": 2**-7, "atol": 2**-10}
            )
            torch.testing.assert_close(gradient, reference, **exact)


def slopes(
    rows: slice, logprobs: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of objective(); each token's depends on its own values alone."""
    up = UPSTREAM[0][rows]
    per = UPSTREAM[1][rows]
    shape = (-1,) + (1,) * (logprobs.dim() - 1)
    return up.view(shape) * logprobs.exp(), None if entropy is None else 2 * per * entropy


def objective(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    up = UPSTREAM[0].view((-1,) + (1,) * (logprobs.dim() - 1))
    return (up * logprobs.exp()).sum() + (
        0.0 if entropy is None else (UPSTREAM[1] * entropy.square()).sum()
    )


def learned(times: float = 1.0, **options) -> tuple[list[Tensor], int]:
    """Return values and gradients of the objective, `times` as large, and count products."""
    hidden, weight, targets = inputs(options.pop("dtype", torch.float32))
    targets = options.pop("targets", targets)
    targets[::5] = -100

    with Products() as seen:
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, temperature=0.7, chunk=8, **options
        )
        found = torch.autograd.grad(times * objective(logprobs, entropy), [hidden, weight])

    return [
        value.detach() for value in (logprobs, entropy, *found) if value is not None
    ], seen.count


KNOWN = {
    "all": {},
    "log-prob": {"entropy": False},
    "truncated": {"truncation": Truncation(top_k=6, top_p=0.9)},
    "several": {"targets": torch.arange(3 * T).view(T, 3) % V},
}


@pytest.mark.parametrize("options", KNOWN.values(), ids=KNOWN.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_known_in_the_forward_pass_is_the_same_in_three_products(dtype, options):
    """Each chunk takes one product whenever it computes logits, and two for gradients."""
    known, three = learned(dtype=dtype, upstream=slopes, **options)
    again, four = learned(dtype=dtype, **options)
    chunks = 3
    assert (three, four) == (3 * chunks, 4 * chunks)
    for value, reference in zip(known, again, strict=True):
        assert value.dtype == reference.dtype
        if value.shape[0] == T and value.shape[-1] != H:  # log-probs and entropy
            assert torch.equal(value, reference)
        near = 3e-7 if dtype == torch.float32 else 2**-8
        assert (value - reference).abs().max() <= near * max(1.0, reference.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 6, "top_p": 0.9}], ids=["all", "truncated"])
@pytest.mark.parametrize("chunk", [8, T], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_soft_capped_logits(known, chunk, truncation, dtype):
    """Each way from the logits to the gradient multiplies by the slope of the cap."""
    hidden, weight, targets = inputs(dtype)
    options = {"upstream": slopes} if known else {}
    values = token_logprobs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        chunk=chunk,
        softcap=1.5,
        truncation=Truncation(**truncation),
        **options,
    )
    found = torch.autograd.grad(objective(*values), [hidden, weight])

    capped = 1.5 * (Head.apply(hidden, weight) / 1.5).tanh() / 0.7
    all_kept = {"top_k": V, "top_p": 1.0}
    logp = truncated(capped, targets[:, None], **(truncation or all_kept))
    inside = torch.where(logp.isinf(), 0.0, logp)
    expected = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * inside).sum(-1)
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)

    references = torch.autograd.grad(objective(*expected), [hidden, weight])
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 0.02}
    for gradient, reference in zip(found, references, strict=True):
        torch.testing.assert_close(gradient, reference, **near)


def test_the_likeliest_tokens_of_soft_capped_logits():
    hidden, weight, _ = inputs()
    logp = (1.5 * (hidden @ weight.T / 1.5).tanh() / 0.7).log_softmax(-1)
    values, ids = top_logprobs(hidden, weight, 5, temperature=0.7, softcap=1.5)
    assert torch.equal(ids, logp.topk(5).indices)
    torch.testing.assert_close(values, logp.topk(5).values)


LENGTHS = [3, 1, 3, 7, 9]
"""Learned tokens of five sequences, T together."""


def loss_of_sequences(logprobs: Tensor, entropy: Tensor | None, lengths: list[int]) -> Tensor:
    """Sum a loss whose gradients at a token depend on its whole sequence."""
    sequences = zip(logprobs.split(lengths), entropy.split(lengths), strict=True)
    return sum(
        values.mean().exp() * position + (values * others).mean()
        for position, (values, others) in enumerate(sequences, start=1)
    )


def known_after_a_sequence(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of loss_of_sequences() for the rows of whole sequences."""
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    assert rows.start in starts and rows.stop in [*starts, T], "only a piece of a sequence"
    whole = [torch.zeros(T).index_put((torch.arange(T)[rows],), x) for x in (logprobs, entropy)]
    inputs = [x.requires_grad_() for x in whole]
    with torch.enable_grad():
        grads = torch.autograd.grad(loss_of_sequences(*inputs, LENGTHS), inputs)
    return grads[0][rows], grads[1][rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"truncation": Truncation(top_k=6, top_p=0.9)}])
@pytest.mark.parametrize(
    ("trained_head", "products"),
    [
        # Chunks of 4 rows: 3 + 1 together, 3 alone, 7 in two chunks and 9 in three. The logits of
        # these two are computed again.
        (False, 2 + 2 + 2 * 3 + 3 * 3),
        # The weight's gradient has as many elements as 8 rows of logits, so a chunk may have 8:
        # 3 + 1 + 3, 7, and 9 in two.
        (True, 3 + 3 + 2 * 4),
    ],
)
def test_gradients_of_sequences_are_known_when_a_chunk_has_whole_sequences(
    trained_head, products, options, dtype
):
    hidden, weight, targets = inputs(dtype, scale=0.5)
    weight = weight.detach().requires_grad_(trained_head)
    learned = [hidden, weight] if trained_head else [hidden]

    with Products() as seen:
        known = token_logprobs(
            hidden,
            weight,
            targets,
            chunk=4,
            upstream=known_after_a_sequence,
            units=LENGTHS,
            **options,
        )
        found = torch.autograd.grad(loss_of_sequences(*known, LENGTHS), learned)
    assert seen.count == products

    dense_options = {"top_k": 6, "top_p": 0.9} if options else {"top_k": V, "top_p": 1.0}
    reference = dense_truncated(hidden, weight, targets, temperature=1.0, **dense_options)
    expected = torch.autograd.grad(loss_of_sequences(*reference, LENGTHS), learned)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.01}
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact, **near)


@pytest.mark.parametrize("known", [True, False])
def test_a_frozen_head_has_no_product_for_its_gradient(known):
    """Adapters leave the head frozen: each chunk has one product less."""
    hidden, weight, targets = inputs()
    upstream = {"upstream": slopes} if known else {}
    with Products() as seen:
        values = token_logprobs(hidden, weight.detach(), targets, chunk=8, **upstream)
        torch.autograd.grad(objective(*values), [hidden])
    chunks = 3
    assert seen.count == (2 if known else 3) * chunks


def test_a_known_gradient_follows_the_factor_of_the_loss():
    """A strategy multiplies the loss; the values stay the same."""
    once = learned(upstream=slopes)[0]
    twice = learned(2.0, upstream=slopes)[0]
    for index, (value, other) in enumerate(zip(once, twice, strict=True)):
        assert torch.equal(other, value if index < 2 else 2 * value)


def test_a_gradient_that_was_announced_otherwise_is_refused():
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=8, upstream=slopes)
    with pytest.raises(RuntimeError, match="not the `upstream` of the forward pass"):
        (logprobs.sum() + entropy.sum()).backward(retain_graph=True)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=8, upstream=slopes)
    with pytest.raises(RuntimeError, match="not the `upstream` of the forward pass"):
        objective(logprobs, None).backward()  # without the entropy
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=8, upstream=slopes)
    objective(logprobs, entropy).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        objective(logprobs, entropy).backward()


def test_a_gradient_of_zeros_is_known_too():
    hidden, weight, targets = inputs()
    logprobs, _ = token_logprobs(
        hidden, weight, targets, chunk=8, upstream=lambda *_: (torch.zeros_like(_[1]), None)
    )
    for gradient in torch.autograd.grad(0 * logprobs.sum(), [hidden, weight]):
        assert not gradient.any()


def test_entropy_is_computed_where_it_is_asked_for():
    hidden, weight, targets = inputs()
    with Operations() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=8, entropy=False)
    assert entropy is None and "clone" not in seen.names
    assert torch.equal(logprobs, token_logprobs(hidden, weight, targets, chunk=8)[0])
    gradient = torch.autograd.grad(logprobs, hidden, UPSTREAM[0])[0]
    assert torch.equal(
        gradient,
        gradients(token_logprobs, hidden, weight, targets, (UPSTREAM[0], None), chunk=8)[0],
    )


def test_the_weight_gradient_of_bf16_is_summed_in_float32():
    # 512 chunks that add 1 each: bfloat16 stops counting at 256
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk=1)
    (gradient,) = torch.autograd.grad(logprobs, weight, 2 * torch.ones(512))
    assert gradient.tolist() == [[512.0], [-512.0]]


@pytest.mark.slow
def test_memory_of_the_host_stays_within_a_few_chunks():
    """Measured in a process of its own: 8192 tokens of 32,000 are 1,049 MB of logits.

    The automatic chunk is 134 MB. There are one or two at the peak, by what the allocator returns.
    """
    result = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 400e6


MEASURE_PEAK = """
import resource, torch
from lightrft.models.logits.logprobs import token_logprobs
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
hidden, weight = torch.randn(8192, 16, requires_grad=True), torch.randn(32000, 16, requires_grad=True)
token_logprobs(hidden[:8], weight, torch.arange(8))[0].sum().backward()  # what the first call loads is not counted
before = peak()
logprobs, entropy = token_logprobs(hidden, weight, torch.arange(8192))
(logprobs.sum() + 0.1 * entropy.detach().sum()).backward()
print(peak() - before)
"""


@pytest.mark.parametrize("known", [False, True])
def test_chunks_take_the_memory_of_earlier_ones_only_when_it_is_free(known):
    """Backward passes may come later than the next forward passes, and then these need their own.

    What has been given back is used again, by a smaller chunk too.
    """
    hidden, weight, targets = inputs()
    ones = lambda rows, logprobs, entropy: (torch.ones_like(logprobs), None)  # noqa: E731
    options = {"entropy": False, "upstream": ones, "chunk": 5} if known else {}
    expected = [
        gradients(dense, hidden, weight, targets, (torch.ones(T), None), temperature=1.0),
        gradients(dense, hidden[:9], weight, targets[:9], (torch.ones(9), None), temperature=1.0),
    ]

    logprobs._spare.clear()
    for _ in range(2):
        first, _ = token_logprobs(hidden, weight, targets, **options)
        second, _ = token_logprobs(hidden[:9], weight, targets[:9], **options)
        found = [torch.autograd.grad(values.sum(), [hidden, weight]) for values in (first, second)]
        for mine, (of_hidden, of_weight) in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[0][: len(of_hidden)], of_hidden, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine[1], of_weight, rtol=1e-5, atol=1e-6)
        (spare,) = logprobs._spare

    memory = spare.data_ptr()
    token_logprobs(hidden[:3], weight, targets[:3])[0].sum().backward()
    logits = torch.randn(5, V, requires_grad=True)
    logprobs_of_logits(logits, targets[:5])[0].sum().backward()
    assert logprobs._spare[0].data_ptr() == memory


def test_memory_of_unusual_chunks_is_not_kept(monkeypatch):
    """A longer sequence than a chunk has, tensors that have no memory, or of inference mode."""
    logprobs._spare.clear()
    monkeypatch.setattr(logprobs, "HOST_CHUNK", 5 * V)
    hidden, weight, targets = inputs()
    token_logprobs(hidden, weight, targets, chunk=6)[0].sum().backward()
    assert not logprobs._spare
    token_logprobs(hidden, weight, targets)[0].sum().backward()
    (spare,) = logprobs._spare
    assert len(spare) == 5 * V

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        unusual = [fake.from_tensor(each) for each in (hidden, weight, targets)]
        token_logprobs(*unusual)[0].sum().backward()
    assert [each is spare for each in logprobs._spare] == [True]

    logprobs._spare.clear()
    with torch.inference_mode():
        token_logprobs(hidden, weight, targets)
    assert not logprobs._spare


def test_one_gradient_of_logits_exists_at_a_time():
    """At the peak a logit of a chunk takes 4 bytes and its bfloat16 gradient 2.

    What has the size of the weight takes about 1 here.
    """
    tokens = 256
    vocabulary = 4096
    size = 8
    chunk = 64
    logprobs._spare.clear()  # the tracker does not see memory that is there already
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, size, dtype=torch.bfloat16, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(hidden, weight)

    with tracker:
        ones = lambda rows, logprobs, entropy: (torch.ones_like(logprobs), None)  # noqa: E731
        targets = torch.zeros(tokens, dtype=torch.int64)
        token_logprobs(hidden, weight, targets, chunk=chunk, entropy=False, upstream=ones)[
            0
        ].sum().backward()

    peak = sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())
    assert 6 < peak / (chunk * vocabulary) < 7.5
