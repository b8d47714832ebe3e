"""Measure the host memory of a step's media.

It measures the features of a rank's prompts, and the peak while samples move to the ranks that
learn them.

    python scripts/bench/media_memory.py --ranks 4 --prompts 16 --samples 8 --megabytes 4

Every rank has groups of samples that share the features of their prompt, as after generation, and
all ranks plan and move them. Responses have log-normal lengths. One JSON object: megabytes of the
features of a rank's own prompts, of those that it has after the move, and by how much the peak of
the process exceeds its memory with its own features; each of the rank with the most.
"""

import argparse
import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import on_ranks, parser_of

MB = 1_000_000
PROMPT = 300
MEDIAN = 200
"""Tokens of a prompt, and of the median response."""


def measure(args: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from lightrft.core.batch import Batch
    from lightrft.models.parallel.collectives import Axis
    from lightrft.strategy.batching.micro_batches import redistribute
    from lightrft.strategy.batching.sample_store import MemoryStore

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    axis = Axis("data", size, rank, dist.group.WORLD)
    alone = Axis("replica", 1, 0, None)
    generator = torch.Generator().manual_seed(rank)
    shape = args.megabytes * MB // 4 // 1000, 1000
    features = [
        {"pixel_values": torch.rand(shape, generator=generator)} for _ in range(args.prompts)
    ]
    media = [each for each in features for _ in range(args.samples)]
    lengths = PROMPT + (MEDIAN * torch.randn(len(media), generator=generator).exp()).long().clamp(
        1, 4 * MEDIAN
    )
    ends = lengths.cumsum(0)
    mask = torch.ones(int(ends[-1]), dtype=torch.bool)
    for start in (ends - lengths).tolist():
        mask[start : start + PROMPT] = False

    batch = Batch(
        lengths=lengths,
        input_ids=torch.ones_like(mask, dtype=torch.int64),
        loss_mask=mask,
        media=media,
        rows=torch.arange(rank * len(media), (rank + 1) * len(media)),
        tower_tokens=torch.full((len(media),), PROMPT),
    )
    own = sum(each["pixel_values"].nbytes for each in features)
    del features, media
    dist.barrier()
    before = _peak()
    moved, _ = redistribute(MemoryStore(axis, alone), batch, max_tokens=args.tokens)
    most = _peak() - before
    sizes = {each["pixel_values"].data_ptr(): each["pixel_values"].nbytes for each in moved.media}
    totals = torch.tensor([own, sum(sizes.values()), most], dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    names = ("own_mb", "moved_mb", "peak_increase_mb")

    return {name: round(value / MB, 1) for name, value in zip(names, totals.tolist(), strict=True)}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    flags = {"--ranks": 4, "--prompts": 16, "--samples": 8, "--megabytes": 4, "--tokens": 16384}
    parser = parser_of(__doc__, flags)
    parser.add_argument("--on_rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.on_rank:
        print(on_ranks(args.ranks, __file__, [*sys.argv[1:], "--on_rank"]).splitlines()[-1])
        return

    settings = {name: value for name, value in vars(args).items() if name != "on_rank"}
    result = measure(args)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(settings | result), flush=True)


if __name__ == "__main__":
    main()
