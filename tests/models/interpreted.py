"""Cases of test_triton.py that run in other processes."""

import torch
from torch import Tensor

from lightrft.models.logits import logprobs
from lightrft.models.logits.logprobs import Truncation, logprobs_of_logits, token_logprobs

T = 6
H = 4
UPSTREAM = torch.linspace(-1.0, 2.0, T), torch.linspace(0.5, -0.7, T)

CASES = [
    (41, 1.0, 0.7, True, None),
    (41, 60.0, 1.0, False, None),
    (2048, 60.0, 0.7, True, None),
    (5003, 1.0, 1.0, True, None),
    (5003, 60.0, 0.7, False, None),
    (2048, 1.0, 0.7, True, 2.5),
]
"""Vocabulary, size of the hidden states, temperature, whether tokens are left out, soft cap."""


def check() -> int:
    """Compare log-probs, entropy and gradients of hidden states and weight with float64.

    They are computed in three products and in four. Return the number of cases.
    """
    count = 0
    for vocabulary, scale, temperature, truncated, softcap in CASES:
        generator = torch.Generator().manual_seed(vocabulary)
        hidden = (torch.randn(T, H, generator=generator) * scale).requires_grad_()
        weight = torch.randn(vocabulary, H, generator=generator).requires_grad_()
        targets = torch.randint(vocabulary, (T, 2), generator=generator)
        targets[3] = -100
        banned = (0, 5, vocabulary - 1) if truncated else ()

        truncation = Truncation(banned=banned)
        options = {"temperature": temperature, "truncation": truncation, "softcap": softcap}
        expected = in_float64(hidden, weight, targets, banned, temperature, softcap)
        for chunk, known in ((4, None), (4, slopes), (T, None)):
            values = token_logprobs(hidden, weight, targets, chunk=chunk, upstream=known, **options)
            upstream = [UPSTREAM[0][:, None].expand(-1, 2), UPSTREAM[1]]
            found = [*values, *torch.autograd.grad(values, [hidden, weight], upstream)]
            for value, wanted in zip(found, expected, strict=True):
                # the rounding of logits of some hundreds
                assert (value - wanted).abs().max() <= 2e-6 * scale * max(
                    1.0, wanted.abs().max()
                ), (vocabulary, scale, chunk)
            count += 1

    half_precision()
    impossible()
    return count


def slopes(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    return UPSTREAM[0][rows, None].expand(-1, 2), UPSTREAM[1][rows]


def in_float64(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    banned: tuple[int, ...],
    temperature: float,
    softcap: float | None,
) -> list[Tensor]:
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits / temperature
    outside = torch.zeros(logits.shape, dtype=torch.bool)
    outside[:, list(banned)] = True
    asked = targets.clamp(min=0)
    for row in range(T):  # what is asked for stays
        outside[row, [token for token in targets[row].tolist() if token >= 0]] = False
    logp = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    inside = torch.where(outside, 0.0, logp)
    picked = torch.where(targets < 0, 0.0, inside.gather(1, asked))
    entropy = -(torch.where(outside, 0.0, inside.exp()) * inside).sum(-1)
    total = (picked * UPSTREAM[0][:, None]).sum() + (entropy * UPSTREAM[1]).sum()

    return [picked.detach(), entropy.detach(), *torch.autograd.grad(total, [hidden, weight])]


def half_precision() -> None:
    """Check that the gradient of logits loses bits only once.

    That is after the token that was asked for was added; the interpreter cuts bits off.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(T, 100, generator=generator) * 3
    targets = torch.randint(100, (T,), generator=generator)
    logits[range(T), targets] += 9.0  # so likely that 1 - p has few bits of p's
    logits = logits.bfloat16().requires_grad_()
    wide = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(wide.log_softmax(-1).gather(1, targets[:, None]).sum(), wide)
    (found,) = torch.autograd.grad(logprobs_of_logits(logits, targets)[0].sum(), logits)
    assert ((found - wanted).abs() <= 2**-7 * wanted.abs() + 1e-6).all()


def impossible() -> None:
    """Check rows where all logits of this range, or all but one, are -inf."""
    logits = torch.full((2, 3000), -torch.inf)
    logits[1, 2999] = 4.0
    local_targets = logprobs.LocalTargets(
        torch.tensor([[1], [2999]]), logprobs.VocabularyRange.full(3000)
    )
    from lightrft.models.logits import triton

    top, total, moment, picked = triton.local_sums(logits, local_targets)
    assert (
        top.tolist() == [-torch.inf, 4.0]
        and total.tolist() == [0.0, 1.0]
        and moment.tolist() == [0.0, 0.0]
    )
    assert picked.tolist() == [[-torch.inf], [4.0]]


def merged() -> None:
    """Compare merged adapters of several sizes with torch, in matrices that no tile fits."""
    from lightrft.models import peft
    from lightrft.models.logits import triton

    for height, width, rank, size in [
        (5, 7, 1, 1e-5),
        (70, 131, 4, 1e-3),
        (33, 260, 16, 0.1),
        (40, 50, 24, 0.01),
    ]:
        generator = torch.Generator().manual_seed(height)
        weight = (torch.randn(height, width, generator=generator) * 0.02).bfloat16()
        a = torch.randn(rank, width, generator=generator).bfloat16()
        b = (torch.randn(height, rank, generator=generator) * size).bfloat16()
        found = triton.merge(weight, a, b, 2.0)
        wanted = peft.merge(weight, a, b, 2.0)
        # A sum in another order is rounded elsewhere only if it lies next to its threshold.
        assert (found != wanted).float().mean() <= 1e-3
        assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-8)
        assert not torch.equal(found, weight)
        assert torch.equal(triton.merge(weight, a, torch.zeros_like(b), 2.0), weight)


def compiled() -> str:
    """Compile all kernels for an H100, for logits of any width."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightrft.models.logits import triton as kernels

    sums = {
        "logits": "*fp32",
        "top": "*fp32",
        "total": "*fp32",
        "moment": "*fp32",
        "num": "i32",
        "stride": "i32",
    }
    gradient = {"logits": "*fp32", "out": "*bf16", "targets": "*i64"}

    gradient |= dict.fromkeys(
        ("grad_logprobs", "asked_for", "largest", "total", "entropy", "grad_entropy"), "*fp32"
    )
    gradient |= dict.fromkeys(("num", "stride", "out_stride", "num_targets"), "i32")
    merge = dict.fromkeys(("weight", "a", "b", "out"), "*bf16") | {"scaling": "fp32"}
    merge |= dict.fromkeys(("height", "width", "rank"), "i32")
    merged_tile = {
        "ROWS": kernels.MERGED_ROWS,
        "COLUMNS": kernels.MERGED_COLUMNS,
        "RANK": kernels.MERGED_RANK,
    }

    texts = []
    for kernel, signature, constants in [
        (kernels._sums, sums, {"BLOCK": kernels.BLOCK}),
        (kernels._gradient, gradient, {"BLOCK": kernels.BLOCK, "BY_ENTROPY": True}),
        (kernels._merge, merge, merged_tile),
    ]:
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        texts.append(
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm[
                "ptx"
            ]
        )

    return "".join(texts)
