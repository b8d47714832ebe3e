"""Measure seconds and memory of a rank that loads its shards from a Hugging Face folder.

It compares lightrft's reading with torch's.

    python scripts/bench/model_loading.py                        # the table in docs/benchmarks.md
    python scripts/bench/model_loading.py --ranks 2 --layers 2   # a quick look

A random Qwen3 in bfloat16, with files of at most 200 MB, is sharded by FSDP2 over real ranks in
float32. `torch` is `torch.distributed.checkpoint.load` with a `HuggingFaceStorageReader`. Each way
runs in fresh processes, in turn. The figures are from rank 0: seconds until its shards are
filled, seconds of its processor, and peak host memory beyond the sharded empty model, over
the bytes of its shards. `equal` says whether both have read the same values.
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

WAYS = ("lightrft", "torch")


def make_model(folder: Path, args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 128,
        head_dim=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")


def rank(way: str, folder: str) -> None:
    """Load one model on this rank; rank 0 prints the figures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightrft.models.empty import empty_parameters
    from lightrft.models.parallel.mesh import Mesh
    from lightrft.strategy.backends.materialize import materialize

    dist.init_process_group("gloo")

    with empty_parameters():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )

    model.name_or_path = folder
    for block in (*model.model.layers, model):
        fully_shard(block)
    world = Mesh("cpu").world
    dist.barrier()
    began = time.perf_counter()
    began_cpu = time.process_time()

    def load_shards() -> None:
        if way == "lightrft":
            materialize(model, torch.device("cpu"), world)
        else:
            model.to_empty(device="cpu")
            load(model.state_dict(), storage_reader=HuggingFaceStorageReader(folder))

    peak = peak_of(load_shards)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - began_cpu

    shards = [parameter.to_local() for parameter in model.parameters()]
    if dist.get_rank() == 0:
        sums = [shard.double().sum().item() for shard in shards]
        print(
            json.dumps(
                {
                    "seconds": seconds,
                    "cpu_seconds": cpu,
                    "sums": sums,
                    "peak_of_shards": peak / sum(shard.nbytes for shard in shards),
                }
            )
        )

    dist.destroy_process_group()


def measure(folder: str, ranks: int, repeat: int) -> dict[str, Any]:
    def run(way: str) -> dict[str, Any]:
        said = on_ranks(ranks, __file__, ["--rank", way, folder])
        return json.loads(said.splitlines()[-1])

    runs = in_turn({way: partial(run, way) for way in WAYS}, repeat)
    sums = [run["sums"] for way in WAYS for run in runs[way]]
    row: dict[str, Any] = {"ranks": ranks, "equal": all(each == sums[0] for each in sums)}
    for name in ("seconds", "cpu_seconds", "peak_of_shards"):
        row |= {f"{name}_{way}": round(median(run[name] for run in runs[way]), 3) for way in WAYS}
    row["speedup_cpu"] = round(row["cpu_seconds_torch"] / row["cpu_seconds_lightrft"], 3)

    return row


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    flags = {"--ranks": [2, 4], "--hidden": 2048, "--layers": 12, "--repeat": 3}
    parser = parser_of(__doc__, flags)
    # way and folder, given to a rank by measure()
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.rank:
        rank(*args.rank)
        return []

    os.environ.update(OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args)
        rows = []
        for ranks in args.ranks:
            rows.append(measure(folder, ranks, args.repeat))
            print(json.dumps(rows[-1]), flush=True)

    print(json.dumps(rows))
    return rows


if __name__ == "__main__":
    main()
