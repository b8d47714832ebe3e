"""Why: a sample that arrives on the wrong rank, or with another's advantage, is learned wrongly and nobody notices."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightrft.batching.redistribute import all_to_all, share
from lightrft.parallel.collectives import Axis
from lightrft.types import Experience, token_index
from ranks import run_ranks


def whole(lengths: list[int]) -> Experience:
    """Numbers that tell every token, and every bit of it, from every other."""
    generator = torch.Generator().manual_seed(7)
    total = sum(lengths)
    return Experience(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        input_ids=torch.arange(total) * 3,
        loss_mask=torch.rand(total, generator=generator) < 0.5,
        rows=torch.arange(len(lengths)),
        groups=torch.randint(100, (len(lengths),), generator=generator),
        rewards=torch.randn(len(lengths), generator=generator),
        advantages=torch.randn(total, generator=generator),
        engine_logprobs=torch.randn(total, generator=generator),
    )


def take(batch: Experience, rows: list[int]) -> dict[str, torch.Tensor]:
    """Columns of the rows, cut out one sequence at a time."""
    starts = [0, *batch.lengths.cumsum(0).tolist()]
    cuts = [slice(starts[row], starts[row + 1]) for row in rows]
    per_token = {name: torch.cat([value[:0], *(value[cut] for cut in cuts)]) for name, value in batch.columns("token").items()}
    return {name: value[rows] for name, value in batch.columns("sequence").items()} | per_token


# lengths; rows that each rank holds; rows that each rank shall have, in its order
CASES = {
    "one rank": ([3, 1, 2], [[0, 1, 2]], [[2, 0, 1]]),
    "swap": ([3, 1, 2, 5], [[0, 1], [2, 3]], [[3, 2], [1, 0]]),
    "uneven": ([3, 1, 2, 5, 4], [[0], [1, 2, 3, 4]], [[4, 0, 2, 1], [3]]),
    "a rank without samples": ([3, 1, 2], [[0, 1, 2], []], [[1], [2, 0]]),
    "a rank without work": ([3, 1, 2], [[0], [1, 2]], [[2, 1, 0], []]),
    "nothing moves": ([3, 1], [[0], [1]], [[0], [1]]),
    "four ranks": ([2, 7, 1, 1, 3, 4, 2, 6, 5], [[0, 1], [2, 3, 4], [], [5, 6, 7, 8]], [[8, 0, 5], [], [7, 2], [1, 3, 6, 4]]),
}


def moved(lengths: list[int], held: list[list[int]], owners: list[list[int]]):
    """Columns that arrive on this rank, and the elements it sent to others in each exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis("data", size, rank, dist.group.WORLD if size > 1 else None)
    sent: list[int] = []
    plain = dist.all_to_all_single

    def count(output, source, output_sizes=None, input_sizes=None, **kwargs):
        if input_sizes is not None:
            sent.append(sum(input_sizes) - input_sizes[rank])
            assert source.numel() == sum(input_sizes)
        return plain(output, source, output_sizes, input_sizes, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", count):
        batch = all_to_all(axis, whole(lengths).select(held[rank]), owners)
    assert batch.old_logprobs is None and batch.reference_logprobs is None
    return batch.columns("sequence") | batch.columns("token"), sent


def refused(owners: list[list[int]]) -> str:
    axis = Axis("data", 2, dist.get_rank(), dist.group.WORLD)
    with pytest.raises(ValueError) as error:
        all_to_all(axis, whole([3, 1, 2, 5]).select([[0, 1], [2, 3]][axis.rank]), owners)
    return str(error.value)


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        ([[0, 3], [1]], "row 2 is held 1 times and named 0 times"),
        ([[0, 3, 2], [1, 2]], "row 2 is held 1 times and named 2 times"),
        ([[0, 3, 2], [1, 7]], "row 7 is held 0 times and named 1 times"),
    ],
)
def test_a_row_without_or_with_several_owners_is_an_error_on_all_ranks(owners, said):
    assert all(said in message for message in run_ranks(2, refused, owners))


@pytest.mark.parametrize("case", CASES)
def test_every_row_arrives_at_its_owner_in_its_order_bit_by_bit(case):
    lengths, held, owners = CASES[case]
    results = run_ranks(len(held), moved, lengths, held, owners)
    for (columns, sent), mine, wanted in zip(results, held, owners, strict=True):
        expected = take(whole(lengths), wanted)
        assert columns.keys() == expected.keys()
        for name, value in expected.items():
            assert columns[name].dtype == value.dtype and torch.equal(columns[name], value), name
        if len(held) > 1:
            leaving = [row for row in mine if row not in wanted]
            tokens = sum(lengths[row] for row in leaving)
            least, parts = (8 + 8 + 8 + 4) * len(leaving) + (8 + 1 + 4 + 4) * tokens, len(held) - 1
            most = least + 15 * parts * bool(leaving)
            assert len(sent) == 1 and least <= sent[0] <= most, "in one exchange, and only what must"


def shared():
    rank = dist.get_rank()
    return share(Axis("data", dist.get_world_size(), rank, dist.group.WORLD), torch.arange(rank) + 10.0 * rank)


def test_share_joins_all_ranks_in_their_order():
    """Rank r holds r values: none, 10, then 20 and 21."""
    assert [values.tolist() for values in run_ranks(3, shared)] == [[10.0, 20.0, 21.0]] * 3


def test_share_on_one_rank():
    assert share(Axis("data", 1, 0, None), torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_select_and_token_index_by_hand():
    batch = whole([2, 1, 3])
    assert batch.select([2, 0]).input_ids.tolist() == [9, 12, 15, 0, 3]
    assert token_index(batch.offsets, torch.tensor([1, 1, 0])).tolist() == [2, 2, 0, 1]
    assert batch.position_ids.tolist() == [0, 1, 0, 0, 1, 2] and batch.sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]
