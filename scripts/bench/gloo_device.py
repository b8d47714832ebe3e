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
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from forked_ranks import results_of_ranks

from lightrft.parallel.gloo import share_gloo_device


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--groups", type=int, default=17, help="as many as a rank with vLLM on a CPU has"
    )
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--sums", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)

    args = parser.parse_args()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(args.repeats):
        for shared in found:
            found[shared].append(measure(shared, args))

    line = {}
    for shared, runs in found.items():
        idle, each = (statistics.median(column) for column in zip(*runs, strict=True))
        line["shared" if shared else "one_each"] = {
            "idle_share_of_a_core": round(idle, 4),
            "cpu_us_per_sum": round(each, 1),
        }

    print(json.dumps(line))


if __name__ == "__main__":
    main()
