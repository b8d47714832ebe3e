"""Log-probs from a split vocabulary equal the whole one's, also in gradients and collectives.

The reference is torch's own autograd through dense logits, in one process.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightrft.models.logits import logprobs
from lightrft.models.logits.logprobs import (
    Truncation,
    logprobs_of_logits,
    token_logprobs,
    top_logprobs,
)
from lightrft.models.logits.vocab_parallel import VocabularyRange
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.tensor_parallel import vocabulary_shard
from marginal import MARGINAL, MARGINAL_CASES, check_marginal, marginal_inputs
from ranks import run_cases, run_ranks

T = 23
H = 8
UPSTREAM = torch.linspace(-1.0, 2.0, T), torch.linspace(0.5, -0.7, T)


class Collectives:
    """While entered, notes the name of every collective of this rank."""

    NAMES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_object")

    def __enter__(self) -> list[str]:
        self.seen = []
        self.originals = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, partial(self._note, name))
        return self.seen

    def _note(self, name: str, *args: Any, **options: Any) -> Any:
        self.seen.append(name)
        return self.originals[name](*args, **options)

    def __exit__(self, *_) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


def inputs(
    vocabulary: int, dtype: torch.dtype, num_targets: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, H, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, H, generator=generator).to(dtype)
    targets = torch.randint(
        vocabulary, (T, num_targets) if num_targets else (T,), generator=generator
    )
    targets[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def dense(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logp = ((hidden.float() @ weight.float().T) / temperature).log_softmax(-1)
    columns = targets if targets.dim() == 2 else targets[:, None]
    picked = logp.gather(-1, columns.clamp(min=0)).view(targets.shape)
    return torch.where(targets < 0, 0.0, picked), -(logp.exp() * logp).sum(-1)


def weighted(values: tuple[Tensor, Tensor], use: tuple[bool, bool]) -> Tensor:
    pairs = zip(values, UPSTREAM, use, strict=True)
    return sum(
        (value * (up if value.dim() == 1 else up[:, None])).sum()
        for value, up, used in pairs
        if used
    )


Result = tuple[list[Tensor], list[Tensor], list[str], list[str]]


def split(
    vocabulary: int, dtype: torch.dtype, use: tuple[bool, bool], num_targets: int, options: dict
) -> Result:
    """Return values, gradients of hidden states and weight, and collectives of both passes."""
    hidden, weight, targets = inputs(vocabulary, dtype, num_targets)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cut = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    with Collectives() as forward:
        values = token_logprobs(hidden, cut, targets, **options)
    with Collectives() as backward:
        weighted(values, use).backward()
    assert cut.grad.placements == cut.placements

    return (
        [value.detach() for value in values],
        [hidden.grad, cut.grad.full_tensor()],
        list(forward),
        list(backward),
    )


USES = [(True, False), (False, True), (True, True)]
TRUNCATIONS = [
    Truncation(top_k=5),
    Truncation(top_p=0.8),
    Truncation(30, 0.9),
    Truncation(30, 0.9, (3, 50, 95)),
    Truncation(banned=(0, 95)),
    Truncation(min_p=0.2),
    Truncation(min_p=0.2, banned=(3, 50, 95)),
    Truncation(30, 0.9, min_p=0.05),
]
VOCABULARIES = {2: (96, 97), 4: (96, 97)}
SEVERAL_TARGETS = {"temperature": 0.7, "chunk": 10}


@pytest.fixture(scope="module")
def results() -> Callable[[int], dict[Any, list[Result]]]:
    """Return results by number of ranks, with one start for each, and by case."""

    @cache
    def of(tp: int) -> dict[Any, list[Result]]:
        options = {"temperature": 0.7, "chunk": 7}
        cases: dict[Any, tuple] = {
            (vocabulary, use): (vocabulary, torch.float32, use, 0, options)
            for vocabulary in VOCABULARIES[tp]
            for use in USES
        }
        cases |= {
            truncation: (
                97,
                torch.float32,
                (True, True),
                2,
                SEVERAL_TARGETS | {"truncation": truncation},
            )
            for truncation in TRUNCATIONS
        }

        if tp == 4:
            cases |= {
                ("bf16", vocabulary): (vocabulary, torch.bfloat16, (True, True), 3, {})
                for vocabulary in (3, 96, 97)
            }

        return run_cases(tp, split, cases)

    return of


@pytest.mark.parametrize(
    ("tp", "vocabulary"),
    [
        pytest.param(tp, vocabulary, marks=pytest.mark.slow if tp == 4 else ())
        for tp, each in VOCABULARIES.items()
        for vocabulary in each
    ],
)
def test_values_and_gradients_equal_dense(results, tp, vocabulary):
    for use in USES:
        hidden, weight, targets = inputs(vocabulary, torch.float32)
        expected = dense(hidden, weight, targets, 0.7)
        weighted(expected, use).backward()

        for values, gradients, forward, backward in results(tp)[vocabulary, use]:
            for value, reference in zip(values, expected, strict=True):
                assert value.dtype == torch.float32
                torch.testing.assert_close(value, reference.detach(), rtol=1e-6, atol=2e-6)
            for gradient, reference in zip(gradients, (hidden.grad, weight.grad), strict=True):
                torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)
            assert forward == ["all_reduce"] * 2, (
                "the largest, then the sums, whatever the number of chunks"
            )
            assert backward == ["all_reduce"], "of the hidden states' gradient"


@pytest.mark.parametrize("vocabulary", [3, 96, 97])
def test_bf16_and_several_targets(results, vocabulary):
    """Three tokens on four ranks: one rank has none."""
    hidden, weight, targets = inputs(vocabulary, torch.bfloat16, num_targets=3)
    expected = dense(hidden, weight, targets, 1.0)
    weighted(expected, (True, True)).backward()

    found = results(4)["bf16", vocabulary]
    for values, gradients, _, _ in found:
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference.detach(), rtol=1e-6, atol=2e-6)
        for gradient, reference in zip(gradients, (hidden.grad, weight.grad), strict=True):
            assert gradient.dtype == torch.bfloat16
            # each rank's share of a hidden gradient is rounded to 2^-8 before the shares are added
            assert (gradient.float() - reference.float()).norm() <= 2**-7 * reference.float().norm()

    first = found[0][0] + found[0][1]
    for values, gradients, _, _ in found[1:]:
        assert all(
            torch.equal(mine, its) for mine, its in zip(values + gradients, first, strict=True)
        )


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_truncation_is_over_the_whole_vocabulary(results, tp, truncation):
    """Neither 23 rows nor 97 tokens divide by the number of ranks."""
    hidden, weight, targets = inputs(97, torch.float32, num_targets=2)
    expected = token_logprobs(hidden, weight, targets, temperature=0.7, truncation=truncation)
    weighted(expected, (True, True)).backward()
    for values, gradients, _, backward in results(tp)[truncation]:
        for value, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(value, reference.detach(), rtol=1e-5, atol=1e-5)
        for gradient, reference in zip(gradients, (hidden.grad, weight.grad), strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)
        assert backward == ["all_reduce"]


def at_the_edge() -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = []
    for threads, (tokens, chunk) in product((1, 2), MARGINAL_CASES):
        torch.set_num_threads(threads)
        hidden, weight, targets, upstream = marginal_inputs(tokens)
        cut = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
        values = token_logprobs(hidden, cut, targets, truncation=MARGINAL, chunk=chunk)
        grad_hidden, grad_weight = torch.autograd.grad(values, [hidden, cut], upstream)
        results.append(
            [value.detach() for value in values] + [grad_hidden, grad_weight.full_tensor()]
        )

    return results


@pytest.mark.slow
def test_the_last_token_inside_has_its_gradient():
    """The same tokens are inside in the backward pass, however many rows are computed together."""
    for results in run_ranks(2, at_the_edge):
        for (tokens, _), found in zip(2 * MARGINAL_CASES, results, strict=True):
            check_marginal(tokens, found)


def from_logits(truncation: Truncation) -> list[Tensor]:
    """Return values and the gradient of this rank's logits, some 60 and some 37 columns."""
    hidden, weight, targets = inputs(97, torch.float32)
    rank = dist.get_rank()
    columns = slice(0, 60) if rank == 0 else slice(60, 97)
    local = (hidden @ weight.T).detach()[:, columns].requires_grad_()
    vocab = VocabularyRange(columns.start, local.shape[1], Axis("tp", 2, rank, dist.group.WORLD))
    values = logprobs_of_logits(
        local, targets, local_vocab=vocab, temperature=0.7, truncation=truncation
    )
    weighted(values, (True, True)).backward()
    return [*(value.detach() for value in values), local.grad]


def test_logits_that_ranks_divide_are_those_of_one():
    cases = {"all": (Truncation(),), "truncated": (Truncation(30, 0.9),)}
    for name, results in run_cases(2, from_logits, cases).items():
        hidden, weight, targets = inputs(97, torch.float32)
        logits = (hidden @ weight.T).detach().requires_grad_()
        if name == "all":
            expected = dense(logits, torch.eye(97), targets, 0.7)
        else:
            expected = token_logprobs(
                logits, torch.eye(97), targets, temperature=0.7, truncation=cases[name][0]
            )
        weighted(expected, (True, True)).backward()

        gradient = torch.cat([result[2] for result in results], 1)
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-6)
        for logprobs_, entropy, _ in results:
            torch.testing.assert_close(logprobs_, expected[0].detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropy, expected[1].detach(), rtol=1e-5, atol=1e-5)


def likeliest(vocabulary: int, k: int) -> tuple[Tensor, Tensor, list[str]]:
    logprobs.HOST_CHUNK = 7 * vocabulary
    hidden, weight, _ = inputs(vocabulary, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cut = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    with Collectives() as seen:
        values, ids = top_logprobs(hidden, cut, k, temperature=0.6)
    assert [len(tensor) for tensor in top_logprobs(hidden[:0], cut, k)] == [0, 0]
    return values, ids, list(seen)


def test_the_likeliest_tokens_of_all_ranks():
    """Some ranks have fewer tokens than asked for, one has none; there are several chunks."""
    cases = (97, 5), (96, 40), (3, 3)
    for (vocabulary, k), results in run_cases(4, likeliest, {case: case for case in cases}).items():
        hidden, weight, _ = inputs(vocabulary, torch.float32)
        expected = ((hidden @ weight.T) / 0.6).log_softmax(-1).topk(k)
        for values, ids, seen in results:
            assert torch.equal(ids, expected.indices) and not values.requires_grad
            torch.testing.assert_close(values, expected.values, rtol=1e-6, atol=1e-6)
            assert seen == ["all_gather_into_tensor"] * 3, "whatever the number of chunks"


def edge_cases() -> list:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    hidden, weight, targets = inputs(97, torch.float32)
    cut = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    nothing = token_logprobs(hidden[:0], cut, targets[:0])
    large, _ = token_logprobs(hidden * 200, cut, targets)
    hidden.data[3, 2] = torch.nan
    poisoned, _ = token_logprobs(hidden, cut, targets)
    shard = vocabulary_shard(cut)

    return [
        [len(value) for value in nothing],
        large.isfinite().all().item(),
        poisoned.isnan().nonzero().tolist(),
        (shard.first, len(shard.weight), shard.size),
    ]


def test_edges():
    results = run_ranks(4, edge_cases)
    assert [result[:3] for result in results] == [[[0, 0], True, [[3]]]] * 4
    assert [result[3] for result in results] == [
        (0, 25, 97),
        (25, 25, 97),
        (50, 25, 97),
        (75, 22, 97),
    ]
