"""Measure how a step's samples move between data ranks: seconds and collectives.

They move in one buffer, or with one exchange for each column.

    python scripts/bench/data_plane.py --ranks 4 --samples 1024 --length 1024

Samples of random lengths up to --length, with the columns of a PPO step, are planned and moved to
the ranks that learn them: `store` is strategy/batching/sample_store.py; `columns` exchanges lengths, and
then each column by itself. Both alternate; the last line is a JSON object with the medians over
--repeats.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import in_turn, on_ranks, parser_of

COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
)


def experience(count: int, length: int, first: int, seed: int):
    import torch

    from lightrft.core.batch import Experience

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, length + 1, (count,), generator=generator)
    total = int(lengths.sum())
    tokens = {
        name: torch.randn(total, generator=generator)
        for name in ("engine_logprobs", "reward_advantages")
    }
    return Experience(
        lengths=lengths,
        input_ids=torch.randint(32000, (total,), generator=generator),
        rows=torch.arange(first, first + count),
        loss_mask=torch.rand(total, generator=generator) < 0.5,
        groups=torch.arange(first, first + count) // 8,
        rewards=torch.rand(count, generator=generator),
        **tokens,
    )


def by_columns(axis, batch, owners: list[list[int]]):
    """Exchange the lengths, and then each other column by itself."""
    import torch

    owner = {row: rank for rank, rows in enumerate(owners) for row in rows}
    to = torch.tensor([owner[row] for row in batch.rows.tolist()])
    parts = [batch.select((to == rank).nonzero()[:, 0]) for rank in range(axis.size)]
    names = [*batch.columns("sequence"), *batch.columns("token")]
    columns = {
        name: torch.cat(axis.exchange([getattr(part, name) for part in parts])) for name in names
    }
    arrived = batch.with_columns(columns)
    place = {row: at for at, row in enumerate(arrived.rows.tolist())}
    return arrived.select([place[row] for row in owners[axis.rank]])


def measure(args: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from lightrft.models.parallel.collectives import Axis
    from lightrft.strategy.batching.micro_batches import get_batch, put_batch
    from lightrft.strategy.batching.planner import plan
    from lightrft.strategy.batching.sample_store import MemoryStore

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    axis = Axis("data", size, rank, dist.group.WORLD)
    alone = Axis("replica", 1, 0, None)
    each = args.samples // size
    batch = experience(each, args.length, rank * each, rank)

    def owners(lengths: list[int]) -> list[list[int]]:
        schedule = plan(
            lengths, num_ranks=size, minibatch_size=len(lengths), max_tokens=16 * args.length
        )
        return [schedule.rows(place) for place in range(size)]

    def store():
        used = MemoryStore(axis, alone)
        put_batch(used, batch)
        chosen = owners(used.rows().lengths.tolist())
        used.move(chosen)
        return get_batch(used, chosen[rank], batch)

    def columns():
        return by_columns(axis, batch, owners(torch.cat(axis.gather(batch.lengths)).tolist()))

    ways = {"store": store, "columns": columns}
    counts = {}
    for name, way in ways.items():
        way()
        counts[name] = collectives_of(dist, way)

    columns_read = store().columns("token")
    expected = columns().columns("token")
    assert all(torch.equal(columns_read[name], value) for name, value in expected.items())

    def timed(way: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        way()
        return time.perf_counter() - began

    seconds = in_turn({name: partial(timed, way) for name, way in ways.items()}, args.repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    dist.destroy_process_group()
    return {
        "ranks": size,
        "samples": args.samples,
        "tokens_of_rank_0": batch.num_tokens,
        **{f"{name}_seconds": round(value, 5) for name, value in medians.items()},
        **{f"{name}_collectives": value for name, value in counts.items()},
        "columns_over_store": round(medians["columns"] / medians["store"], 2),
    }


def collectives_of(dist, way: Callable[[], object]) -> int:
    plain = {name: getattr(dist, name) for name in COLLECTIVES}
    calls = []

    def counted(name: str):
        def call(*args, **kwargs):
            calls.append(name)
            return plain[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        way()
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return len(calls)


def main() -> None:
    flags = {"--ranks": 4, "--samples": 1024, "--length": 1024, "--repeats": 15}
    parser = parser_of(__doc__, flags)
    parser.add_argument("--on_rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.on_rank:
        print(on_ranks(args.ranks, __file__, [*sys.argv[1:], "--on_rank"]).splitlines()[-1])
        return

    result = measure(args)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
