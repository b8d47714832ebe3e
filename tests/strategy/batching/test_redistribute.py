"""Why: a sample on the wrong rank, or with another's advantage, is learned wrongly.

Nobody would notice.
"""

from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightrft.core.batch import Experience, token_index
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.micro_batches import get_batch, put_batch, share
from lightrft.strategy.batching.sample_store import MemoryStore
from ranks import run_ranks


def whole(lengths: list[int]) -> Experience:
    """Return numbers that tell every token, and every bit of it, from every other."""
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
    """Return columns of the rows, cut out one sequence at a time."""
    starts = [0, *batch.lengths.cumsum(0).tolist()]
    cuts = [slice(starts[row], starts[row + 1]) for row in rows]
    per_token = {
        name: torch.cat([value[:0], *(value[cut] for cut in cuts)])
        for name, value in batch.columns("token").items()
    }
    return {name: value[rows] for name, value in batch.columns("sequence").items()} | per_token


# lengths; rows that each rank holds; rows that each rank shall have, in its order
CASES = {
    "one rank": ([3, 1, 2], [[0, 1, 2]], [[2, 0, 1]]),
    "swap": ([3, 1, 2, 5], [[0, 1], [2, 3]], [[3, 2], [1, 0]]),
    "uneven": ([3, 1, 2, 5, 4], [[0], [1, 2, 3, 4]], [[4, 0, 2, 1], [3]]),
    "a rank without samples": ([3, 1, 2], [[0, 1, 2], []], [[1], [2, 0]]),
    "a rank without work": ([3, 1, 2], [[0], [1, 2]], [[2, 1, 0], []]),
    "nothing moves": ([3, 1], [[0], [1]], [[0], [1]]),
    "four ranks": (
        [2, 7, 1, 1, 3, 4, 2, 6, 5],
        [[0, 1], [2, 3, 4], [], [5, 6, 7, 8]],
        [[8, 0, 5], [], [7, 2], [1, 3, 6, 4]],
    ),
}


def axes_of(replica: int) -> dict[str, Axis]:
    """Return the axes of this rank; `replica` neighbours have the same samples."""
    size = dist.get_world_size() // replica
    groups = {
        "data": [range(rank, replica * size, replica) for rank in range(replica)],
        "replica": [range(rank, rank + replica) for rank in range(0, replica * size, replica)],
    }

    axes = {}
    for name, all_ranks in groups.items():
        for ranks in all_ranks:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                axes[name] = Axis(
                    name,
                    len(ranks),
                    ranks.index(dist.get_rank()),
                    group if len(ranks) > 1 else None,
                )

    return axes


def moved(lengths: list[int], held: list[list[int]], owners: list[list[int]], replica: int = 1):
    """Return the columns that arrive on this rank.

    Also the collectives of each axis, and the bytes sent to others.
    """
    counts: Counter[str] = Counter()
    sent: list[int] = []
    rank = dist.get_rank() // replica
    axes = axes_of(replica)

    def counted(name: str):
        plain = getattr(dist, name)

        def call(*args, group=None, **kwargs):
            counts[next(axis for axis, each in axes.items() if each.group is group)] += 1
            if name == "all_to_all_single":
                sent.append(sum(args[3]) - args[3][rank])
            return plain(*args, group=group, **kwargs)

        return mock.patch.object(dist, name, call)

    store = MemoryStore(axes["data"], axes["replica"])
    columns = {}
    # the first gather of a number of rows that nobody expects takes two collectives
    for _ in range(2):
        counts.clear(), sent.clear()
        store.clear(range(len(lengths)))
        names = (
            "all_gather_into_tensor",
            "all_to_all_single",
            "broadcast",
            "broadcast_object_list",
            "all_gather_object",
        )

        batch = whole(lengths).select(held[rank])
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(counted(name))
            put_batch(store, batch if store.leads else batch.select([]))
            rows = store.rows()
            store.move(owners)

        arrived = get_batch(store, owners[rank], batch)
        assert arrived.old_logprobs is None and arrived.reference_logprobs is None
        columns = arrived.columns("sequence") | arrived.columns("token")

    assert sorted(rows.ids.tolist()) == list(range(len(lengths)))
    return columns, dict(counts), sum(sent)


@pytest.mark.parametrize("case", CASES)
def test_every_row_arrives_at_its_owner_in_its_order_bit_by_bit(case):
    """In two collectives, and nothing more than necessary is sent."""
    lengths, held, owners = CASES[case]
    results = run_ranks(len(held), moved, lengths, held, owners)
    for (columns, counts, sent), mine, wanted in zip(results, held, owners, strict=True):
        assert_equal(columns, take(whole(lengths), wanted))
        leaving = [row for row in mine if row not in wanted]
        least = (8 + 4) * len(leaving) + (8 + 1 + 4 + 4) * sum(lengths[row] for row in leaving)
        num_others = len(held) - 1
        assert least <= sent <= least + 7 * num_others * bool(leaving)
        assert counts == ({"data": 2} if len(held) > 1 else {})


def test_the_leader_of_a_replica_reads_for_its_siblings():
    """Four ranks are two replicas of two.

    Leaders move the rows, and their siblings receive all of them in three collectives.
    """
    lengths, held, owners = CASES["uneven"]
    results = run_ranks(4, moved, lengths, held, owners, 2)
    for rank, (columns, counts, _) in enumerate(results):
        assert_equal(columns, take(whole(lengths), owners[rank // 2]))
        assert all(value.is_contiguous() for value in columns.values())
        assert counts == ({"data": 2, "replica": 2} if rank % 2 == 0 else {"replica": 2})


def assert_equal(columns: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert columns.keys() == expected.keys()
    for name, value in expected.items():
        assert columns[name].dtype == value.dtype and torch.equal(columns[name], value), name


def shared():
    rank = dist.get_rank()
    return share(
        Axis("data", dist.get_world_size(), rank, dist.group.WORLD),
        torch.arange(rank) + 10.0 * rank,
    )


def test_share_joins_all_ranks_in_their_order():
    """Rank r holds r values: none, 10, then 20 and 21."""
    assert [values.tolist() for values in run_ranks(3, shared)] == [[10.0, 20.0, 21.0]] * 3


def test_share_on_one_rank():
    assert share(Axis("data", 1, 0, None), torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_select_and_token_index_by_hand():
    batch = whole([2, 1, 3])
    assert batch.select([2, 0]).input_ids.tolist() == [9, 12, 15, 0, 3]
    assert token_index(batch.offsets, torch.tensor([1, 1, 0])).tolist() == [2, 2, 0, 1]
    assert batch.position_ids.tolist() == [0, 1, 0, 0, 1, 2] and batch.sequence_ids.tolist() == [
        0,
        0,
        1,
        2,
        2,
        2,
    ]


def disagreeing() -> list[str]:
    """Return what each rank of two replicas says about columns in different forms.

    The data rank of one replica has them in another form than the other's.
    """
    data, replica = axes_of(2).values()
    said = []
    forms = [
        ({"a": torch.zeros(2)}, {"a": torch.zeros(0, dtype=torch.bfloat16)}),
        ({"a": torch.zeros(2)}, {}),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(0, 4)}),
        ({"a": torch.zeros(2, dtype=torch.bool)}, {"a": torch.zeros(0, dtype=torch.bool)}),
    ]

    for form in forms:
        store = MemoryStore(data, replica)
        columns = form[data.rank]
        ids = torch.tensor([2**40, 7]) if data.rank == 0 else torch.zeros(0, dtype=torch.int64)
        store.put(ids, torch.ones_like(ids), sequences=columns)
        try:
            store.rows()
            store.move([[], [7, 2**40]])
            said.append(str(store.get([7, 2**40] if data.rank else [])["a"].dtype))
        except ValueError as error:
            said.append(str(error))

    return said


def test_ranks_with_different_columns_all_say_so():
    """Ranks without rows do, too; large ids and empty ranks are no obstacle."""
    kind = "the ranks have different columns 'a': sample float32"
    expected = [
        f"{kind} [] on data rank 0, sample bfloat16 [] on data rank 1",
        f"{kind} [] on data rank 0, absent on data rank 1",
        f"{kind} [3] on data rank 0, sample float32 [4] on data rank 1",
        "torch.bool",
    ]
    assert run_ranks(4, disagreeing) == [expected] * 4
