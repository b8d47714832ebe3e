"""Measure a rank that trains adapters on a base in bfloat16, and in four bits (--load_in_4bit).

    python scripts/bench/four_bits.py                        # the table in docs/lora.md
    python scripts/bench/four_bits.py --ranks 2 --layers 2   # a quick look

A random Qwen3 in bfloat16 is sharded by FSDP2 over real ranks on a CPU, with adapters of rank 16 on
all linear layers, and learns from one micro-batch in each step. Each way runs in fresh processes,
in turn; figures are medians of rank 0. `held_mb`: parameters and buffers. `loading_mb`: the peak
of host memory while they are read, beyond what was there. `loading_seconds`, and `step_seconds` of
a forward and a backward pass with recomputation, are seconds of the processor.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import in_turn, on_ranks, parser_of, peak_of
from scripts.bench.model_loading import make_model

WAYS = {"bfloat16": False, "four_bits": True}
FIGURES = ("held_mb", "loading_mb", "loading_seconds", "step_seconds")


def rank(way: str, folder: str, tokens: int) -> None:
    """Load and train one model on this rank; rank 0 prints the figures."""
    import torch

    from lightrft.config import ModelSection
    from lightrft.core.batch import Batch
    from lightrft.models.heads import Actor
    from lightrft.models.load import load_model
    from lightrft.models.lora import freeze_parameters
    from lightrft.strategy import get_strategy

    if WAYS[way]:
        import lightrft.models.four_bits.bitsandbytes  # noqa: F401

    flags = {"bf16": True, "lora_rank": 16, "load_in_4bit": WAYS[way]}
    strategy = get_strategy({"fsdp": True, "gradient_checkpointing": True, **flags})
    strategy.setup_distributed()
    section = ModelSection(pretrain=folder, **flags)
    with strategy.init_model_context():
        actor = Actor(freeze_parameters(load_model(section), section)).train()
    optimizer = strategy.create_optimizer(actor, 1e-4)

    began = time.process_time()
    peak = peak_of(lambda: strategy.prepare((actor, optimizer)))
    loading_seconds = time.process_time() - began

    batch = Batch(
        lengths=torch.tensor([tokens]),
        input_ids=torch.arange(tokens),
        loss_mask=torch.arange(tokens) > 0,
        rows=torch.tensor([0]),
    )
    seconds = []
    for _ in range(3):
        began = time.process_time()
        strategy.backward(actor(batch, 1.0)[0].mean(), actor, optimizer)
        seconds.append(time.process_time() - began)
        strategy.optimizer_step(optimizer, actor)

    held = [getattr(p, "_local_tensor", p) for p in (*actor.parameters(), *actor.buffers())]
    if strategy.is_rank_0():
        figures = (sum(tensor.nbytes for tensor in held) / 1e6, peak / 1e6, loading_seconds)
        print(json.dumps(dict(zip(FIGURES, (*figures, min(seconds)), strict=True))))
    strategy.close()


def measure(folder: str, ranks: int, tokens: int, repeat: int) -> dict[str, Any]:
    def run(way: str) -> dict[str, float]:
        said = on_ranks(ranks, __file__, ["--rank", way, folder, str(tokens)])
        return json.loads(said.splitlines()[-1])

    runs = in_turn({way: partial(run, way) for way in WAYS}, repeat)
    row: dict[str, Any] = {"ranks": ranks}
    for name in FIGURES:
        row |= {f"{name}_{way}": round(median(run[name] for run in runs[way]), 2) for way in WAYS}
    return row


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    flags = {"--ranks": [1, 2], "--hidden": 1024, "--layers": 12, "--tokens": 512, "--repeat": 3}
    parser = parser_of(__doc__, flags)
    # way, folder and tokens, given to a rank by measure()
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.rank:
        way, folder, tokens = args.rank
        rank(way, folder, int(tokens))
        return []

    os.environ.update(OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args)
        rows = []
        for ranks in args.ranks:
            rows.append(measure(folder, ranks, args.tokens, args.repeat))
            print(json.dumps(rows[-1]), flush=True)

    print(json.dumps(rows))
    return rows


if __name__ == "__main__":
    main()
