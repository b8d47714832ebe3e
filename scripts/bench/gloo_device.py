"""Measure the processor time of a rank's gloo groups.

One gloo device serves all of them, or each has its own.

    python scripts/bench/gloo_device.py --groups 17 --seconds 5 --repeats 5

Ranks that have created and used --groups groups of all ranks first wait for --seconds, then sum a
small tensor in each group, --sums times. Both kinds alternate; the last line is a JSON object with
the medians of both over --repeats, for each rank: the share of a core while it waits, and
microseconds of the processor for each sum.
"""

import argparse
import json
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from lightrft.models.parallel.gloo import share_gloo_device

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import in_turn, parser_of, results_of_ranks

WAYS = {"shared": True, "one_each": False}


def rank(
    number: int, store: str, results: Connection, shared: bool, args: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    if shared:
        share_gloo_device()
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=args.ranks)
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(args.groups - 1))]
    value = torch.zeros(16)

    def sums(count: int) -> None:
        for group in groups * count:
            dist.all_reduce(value, group=group)

    sums(1)
    begin = time.process_time()
    time.sleep(args.seconds)
    idle = (time.process_time() - begin) / args.seconds
    begin = time.process_time()
    sums(args.sums)
    results.send((idle, 1e6 * (time.process_time() - begin) / args.sums / len(groups)))
    dist.barrier()


def measure(shared: bool, args: argparse.Namespace) -> tuple[float, float]:
    """Return the means over ranks."""
    found = results_of_ranks(args.ranks, rank, shared, args)
    idle, each = (statistics.mean(column) for column in zip(*found, strict=True))
    return idle, each


def main() -> None:
    flags = {
        "--ranks": 2,
        "--groups": (17, "as many as a rank with vLLM on a CPU has"),
        "--seconds": 5.0,
        "--sums": 200,
        "--repeats": 5,
    }
    args = parser_of(__doc__, flags).parse_args()
    ways = {name: lambda shared=shared: measure(shared, args) for name, shared in WAYS.items()}

    line = {}
    for name, runs in in_turn(ways, args.repeats).items():
        idle, each = (statistics.median(column) for column in zip(*runs, strict=True))
        line[name] = {"idle_share_of_a_core": round(idle, 4), "cpu_us_per_sum": round(each, 1)}

    print(json.dumps(line))


if __name__ == "__main__":
    main()
