"""Why: everything that is learned passes through these log-probs, and their backward pass is written by hand.

The reference is torch's own autograd through the dense logits.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.models.logprobs import token_logprobs

T, H, V = 23, 8, 41


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """All logits at once, upcast and scaled as a model's head would."""
    logp = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
    picked = logp.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets < 0, 0.0, picked), -(logp.exp() * logp).sum(-1)


def inputs(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(T, H, generator=generator) * scale).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (T,), generator=generator)


def gradients(function, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: tuple, **options) -> list[Tensor]:
    values = function(hidden, weight, targets, **options)
    total = sum((value * up).sum() for value, up in zip(values, upstream, strict=True) if up is not None)
    return list(torch.autograd.grad(total, [hidden, weight]))


def test_two_tokens_by_hand():
    # logits (1, 0) and (0, 2): log-probs -log(1 + 1/e) and -log(1 + e^2)
    hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2)
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
@pytest.mark.parametrize("use", [(True, False), (False, True), (True, True)], ids=["logprob", "entropy", "both"])
def test_gradients_equal_dense(chunk, use, temperature):
    upstream = tuple(up if used else None for up, used in zip(UPSTREAM, use, strict=True))
    hidden, weight, targets = inputs()
    targets[::5] = -100
    expected = gradients(dense, hidden, weight, targets, upstream, temperature=temperature)
    actual = gradients(token_logprobs, hidden, weight, targets, upstream, temperature=temperature, chunk=chunk)
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


def test_bf16_is_the_dense_computation_of_the_same_bf16_logits():
    hidden, weight, targets = inputs(torch.bfloat16)
    expected = dense(hidden, weight, targets, 0.7)
    values = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=None)
    for value, reference in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)
    references = gradients(dense, hidden, weight, targets, UPSTREAM, temperature=0.7)
    actual = gradients(token_logprobs, hidden, weight, targets, UPSTREAM, temperature=0.7, chunk=None)
    for gradient, expected in zip(actual, references, strict=True):
        assert gradient.dtype == torch.bfloat16
        # of the rounded logit gradients autograd keeps the same bits; the products round once, to 2^-8
        torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=2**-10)


def test_large_logits_stay_finite():
    hidden, weight, targets = inputs(scale=200.0)
    expected = dense(hidden, weight, targets, 1.0)
    for value, reference in zip(token_logprobs(hidden, weight, targets), expected, strict=True):
        assert value.isfinite().all()
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-3)  # logits of a thousand have steps of 1e-4


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
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


def largest_tensor(chunk: int | None) -> int:
    tokens, width, vocabulary = 96, 4, 500
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with Largest() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, torch.arange(tokens), chunk=chunk)
        (logprobs.sum() + entropy.sum()).backward()
    return seen.numel


def test_all_logits_never_exist():
    assert largest_tensor(chunk=8) == 8 * 500
    assert largest_tensor(chunk=None) == 96 * 500  # so the measure sees the backward and forward pass
