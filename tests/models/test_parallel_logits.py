"""Log-probs from logits that are split over vocabulary and sequence equal the whole ones.

Values, gradients and collectives are compared. The reference is torch's own log_softmax and
autograd of all logits in one process.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightrft.algorithms.truncation import Truncation
from lightrft.models.logprobs import logprobs_of_logits
from lightrft.models.parallel_logits import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    parallel_logprobs_and_entropy,
    parallel_top_logprobs,
)
from models.test_vocab_parallel import Collectives
from ranks import run_ranks

B = 3
S = 14
V = 97
LENGTHS = [8, 16, 4, 0, 24]
WIDTH = 17
"""Width of the unpacked rows: the last sequence is longer, others are shorter."""


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    # S = 14 tokens, padded to a multiple of 2 x 2
    padded = torch.randn(B, 16, V, generator=generator) * 3
    packed = torch.randn(1, sum(LENGTHS), V, generator=generator) * 3
    target = torch.randint(V, (B, S), generator=generator)
    target[1, 5] = -100

    return {
        "padded": padded.to(dtype),
        "target": target,
        "packed": packed.to(dtype),
        "packed_target": torch.randint(V, (1, sum(LENGTHS)), generator=generator),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
        "up": torch.randn(B, S - 1, generator=generator),
        "packed_up": torch.randn(len(LENGTHS), WIDTH - 1, generator=generator),
    }


def expected(dtype: torch.dtype, temperature: float) -> dict[str, Tensor]:
    """Return values and gradients by whole logits in float32, one sequence after the other."""
    given = inputs(dtype)
    padded = given["padded"].float().requires_grad_()
    packed = given["packed"].float().requires_grad_()
    target = given["target"][:, 1:, None]
    values = (
        (padded / temperature).log_softmax(-1)[:, : S - 1].gather(-1, target.clamp(min=0))[..., 0]
    )
    values = torch.where(target[..., 0] < 0, 0.0, values)

    rows = []
    for begin, end in zip(
        given["cu_seqlens"][:-1].tolist(), given["cu_seqlens"][1:].tolist(), strict=True
    ):
        logp = (packed[0, begin:end] / temperature).log_softmax(-1)
        found = logp[:-1].gather(-1, given["packed_target"][0, begin + 1 : end, None])[
            : WIDTH - 1, 0
        ]
        rows.append(torch.nn.functional.pad(found, (0, WIDTH - 1 - len(found))))

    unpacked = torch.stack(rows)
    (values * given["up"]).sum().backward()
    (unpacked * given["packed_up"]).sum().backward()

    return {
        "values": values.detach(),
        "unpacked": unpacked.detach(),
        "padded": padded.grad,
        "packed": packed.grad,
    }


def bounds(rank: int, size: int) -> tuple[int, int]:
    """Return parts that differ in size."""
    edges = {1: [0, V], 2: [0, 60, V]}[size]
    return edges[rank], edges[rank + 1]


def of_this_rank(whole: Tensor, cp: int, rank: int, lengths: list[int]) -> Tensor:
    """Return this rank's chunks of sequences, end to end along dim 1.

    It is a loop over sequences and chunks.
    """
    kept = []
    for sequence in whole.split(lengths, dim=1):
        chunks = sequence.chunk(2 * cp, dim=1) if sequence.shape[1] else [sequence] * 2 * cp
        kept += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(kept, dim=1)


def split(tp: int, cp: int, dtype: torch.dtype, options: dict) -> dict:
    """Return values, gradients of the rank's logits, what is expected, and collectives of both
    passes.
    """
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    tp_group = mesh["tp"].get_group()
    cp_group = mesh["cp"].get_group()
    first, end = bounds(mesh["tp"].get_local_rank(), tp)
    given = inputs(dtype)
    wanted = expected(dtype, options["temperature"])
    found = {}
    cases = {
        "padded": ([16], from_parallel_logits_to_logprobs, (), "target", "up"),
        "packed": (
            LENGTHS,
            from_parallel_logits_to_logprobs_packed_sequences,
            (given["cu_seqlens"], WIDTH),
            "packed_target",
            "packed_up",
        ),
    }

    for name, (lengths, function, where, target, up) in cases.items():
        mine = of_this_rank(given[name], cp, mesh["cp"].get_local_rank(), lengths)[..., first:end]
        mine = mine.contiguous().requires_grad_()
        before = mine.detach().clone()

        ids = given[target].clone()
        with Collectives() as forward:
            values = function(
                mine,
                ids,
                *where,
                first,
                end,
                tp_group,
                False,
                cp_group if cp > 1 else None,
                **options,
            )

        with Collectives() as backward:
            (values * given[up]).sum().backward()
        assert torch.equal(mine.detach(), before) and torch.equal(ids, given[target])
        gradient = of_this_rank(wanted[name], cp, mesh["cp"].get_local_rank(), lengths)[
            ..., first:end
        ]
        silent = function(
            mine, ids, *where, first, end, tp_group, True, cp_group if cp > 1 else None, **options
        )
        assert not silent.requires_grad and torch.equal(silent, values)
        found[name] = values.detach(), mine.grad, gradient, list(forward), list(backward)

    return found


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_whole_logits(tp, cp):
    for dtype, options in [
        (torch.float32, {"temperature": 0.7, "chunk_size": 5}),
        (torch.bfloat16, {"temperature": 1.0}),
    ]:
        wanted = expected(dtype, options["temperature"])
        for found in run_ranks(tp * cp, split, tp, cp, dtype, options):
            for name, reference in (("padded", wanted["values"]), ("packed", wanted["unpacked"])):
                values, gradient, wanted_gradient, forward, backward = found[name]
                assert values.dtype == torch.float32 and gradient.dtype == dtype
                torch.testing.assert_close(values, reference, rtol=1e-6, atol=5e-6)
                bound = 1e-5 if dtype == torch.float32 else 2**-8
                torch.testing.assert_close(gradient.float(), wanted_gradient, rtol=bound, atol=1e-5)
                gathers = ["all_gather_into_tensor"] * (cp > 1)
                assert forward == ["all_reduce"] * (2 * (tp > 1)) + gathers and not backward


def alone(tp: int) -> list[Tensor]:
    """Return entropy, several targets, a truncation, and the likeliest tokens."""
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    first, end = bounds(mesh.get_local_rank(), tp)
    logits = inputs()["padded"].flatten(0, 1)[:, first:end].contiguous().requires_grad_()
    where = first, end, mesh.get_group()
    targets = torch.arange(3 * len(logits)).view(-1, 3) % V
    results = []

    for truncation in (Truncation(), Truncation(top_k=9, top_p=0.9)):
        values = parallel_logprobs_and_entropy(logits, targets, *where, truncation=truncation)
        (gradient,) = torch.autograd.grad([value.sum() for value in values], logits)
        results += [value.detach() for value in values] + [gradient]

    results += parallel_top_logprobs(logits, 5, *where, temperature=0.6)
    with pytest.raises(
        ValueError, match="the 98 most likely tokens were requested, but the vocabulary has 97"
    ):
        parallel_top_logprobs(logits, 98, *where)

    with pytest.raises(ValueError, match=f"has {end - first + 1}"):
        parallel_logprobs_and_entropy(logits, targets, first, end + 1, mesh.get_group())
    dist.barrier()
    return results


def test_entropy_truncation_and_the_likeliest_tokens():
    logits = inputs()["padded"].flatten(0, 1).requires_grad_()
    targets = torch.arange(3 * len(logits)).view(-1, 3) % V
    wanted = []

    for truncation in (Truncation(), Truncation(top_k=9, top_p=0.9)):
        values = logprobs_of_logits(logits, targets, truncation=truncation)
        (gradient,) = torch.autograd.grad([value.sum() for value in values], logits)
        wanted += [value.detach() for value in values] + [gradient]

    best = (logits.detach() / 0.6).log_softmax(-1).topk(5)
    for rank, found in enumerate(run_ranks(2, alone, 2)):
        first, end = bounds(rank, 2)
        for place, (value, reference) in enumerate(zip(found[:6], wanted, strict=True)):
            reference = reference[:, first:end] if place % 3 == 2 else reference
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[6], best.values, rtol=1e-6, atol=2e-6)
        assert torch.equal(found[7], best.indices)


def test_what_does_not_fit_is_said():
    logits = torch.zeros(1, 6, 5)
    target = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="the logits have 6 tokens in each row, but the targets have 8"
    ):
        from_parallel_logits_to_logprobs(logits, target, 0, 5, None)

    with pytest.raises(
        ValueError, match="cu_seqlens_padded ends at 8, but there are 8 targets and logits of 6"
    ):
        from_parallel_logits_to_logprobs_packed_sequences(
            logits, target, torch.tensor([0, 3, 8]), 5, 0, 5, None
        )
