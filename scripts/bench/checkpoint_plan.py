"""Measure the seconds that rank 0 takes to plan a checkpoint of all ranks.

All others wait for it. Both the first plan and the next one are timed.

    python scripts/bench/checkpoint_plan.py --ranks 8 128 1024

The shards have the shapes of Qwen2.5-7B and AdamW's moments under FSDP2. `arrive_s` is
the time to unpickle the plans of all ranks.
"""

import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from transformers import AutoModelForCausalLM

from lightrft.extras.tools.shapes import known_config
from lightrft.strategy.checkpoint.zero_fragment import SavePlanner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of


def plan_of(rank: int, ranks: int, shapes: dict[str, torch.Size]) -> SavePlan:
    """Return the plan of a rank: its rows of each tensor."""
    items = []
    properties = TensorProperties(dtype=torch.float32)
    for name, shape in shapes.items():
        rows = -(-shape[0] // ranks)
        first = min(rank * rows, shape[0])
        last = min((rank + 1) * rows, shape[0])
        if first < last:
            offsets = torch.Size((first, *(0 for _ in shape[1:])))
            size = torch.Size((last - first, *shape[1:]))
            data = TensorWriteData(ChunkStorageMetadata(offsets, size), properties, shape)
            items.append(
                WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)
            )

    return SavePlan(items, planner_data={name: (name,) for name in shapes})


def cpu_seconds(action: Callable[..., Any], *args: Any) -> float:
    began = time.process_time()
    action(*args)
    return time.process_time() - began


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    flags = {"--ranks": [8, 128, 1024], "--model": "Qwen/Qwen2.5-7B"}
    args = parser_of(__doc__, flags).parse_args(argv)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known_config(args.model))

    shapes = {
        f"{state}.{name}": tensor.shape
        for state in ("model", "exp_avg", "exp_avg_sq")
        for name, tensor in model.named_parameters()
    }
    rows = []

    for ranks in args.ranks:
        plans = [plan_of(rank, ranks, shapes) for rank in range(ranks)]
        planner = SavePlanner(ranks)
        arriving = pickle.dumps(plans[0])
        row = {
            "ranks": ranks,
            "items": sum(len(plan.items) for plan in plans),
            "arrive_s": ranks * cpu_seconds(pickle.loads, arriving),
            "first_s": cpu_seconds(planner.create_global_plan, plans),
        }
        same = [SavePlan([], usable=False)] * ranks
        row["next_s"] = cpu_seconds(planner.create_global_plan, same)
        planner.forget_plans()
        rows.append(row)
        print(json.dumps(row), flush=True)

    return rows


if __name__ == "__main__":
    main()
