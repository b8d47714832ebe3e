"""Measure the bytes of one training step on a rank under FSDP2.

They are parameters, gradients, optimizer, activations, and the head's logits.

    python scripts/bench/memory.py  # the tables in docs/benchmarks.md, minutes
    python scripts/bench/memory.py --measured 2 --shapes --tokens 512

A dense Qwen model, `--tokens` tokens in each of two micro-batches, full recomputation, AdamW;
gradients reduced after every micro-batch, and with --reduce_gradients_once after the last one.

`--measured N ...`: a small model, and one with experts, on N real ranks over gloo, at most 512
tokens, in float32 and bfloat16, with recomputation and without, beside what theory says: 4 bytes a
parameter for the masters, 4 for gradients, 8 for AdamW, each divided by the ranks, but the
gradients of --reduce_gradients_once, which are whole; and the peak beside that of `lightrft plan`,
`peak_of_plan`. `--shapes NAME ...`: bfloat16 with float32 masters, rank 0 of `--world` ranks over
torch's fake process group, with tensors that have shapes and no memory: the operations, and so
their sizes, are the real ones, as on a CPU; the allocator's rounding is not in them.

torch's FSDPMemTracker counts every storage while it lives. `gradients` is what is left between the
micro-batches, `activations` what is there at the end of the second forward pass beside masters,
gradients and gathered parameters, `logits` the head's own peak above its inputs and gradients
(docs/benchmarks.md, log-probs), `peak` the most at any moment from the second step on, when AdamW's
moments are there, without the logits.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from lightrft.extras.tools.shapes import known_config
from lightrft.extras.tools.step_memory import (
    FakeRankStrategy,
    empty_model,
    fake_group,
    num_parameters,
    step_bytes,
    total,
    trace_step,
    with_layers,
)
from lightrft.models.logits.logprobs import token_logprobs
from lightrft.strategy import FSDPStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import on_ranks, parser_of

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8000,
    },
    "experts": {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8000,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
}
"""Small models that real ranks train."""
WIDTHS = (
    "hidden_size intermediate_size moe_intermediate_size num_attention_heads num_key_value_heads"
    " vocab_size"
).split()
"""Sizes that --narrow divides: parameters then shrink with its square, and activations with it."""
NAMED = {"7B": "Qwen/Qwen2.5-7B", "14B": "Qwen/Qwen3-14B", "32B": "Qwen/Qwen3-32B"}

WAYS = [
    {"shape": shape, "reduce_gradients_once": once, "bf16": bf16, "recompute": recompute}
    for shape, once, bf16, recompute in (
        ("small", False, False, True),
        ("small", True, False, True),
        ("small", False, False, False),
        ("small", False, True, True),
        ("experts", False, True, True),
    )
]
"""Configurations to measure on real ranks."""


def training_bytes(
    strategy: FSDPStrategy, config: PretrainedConfig, tokens: int, *, computed: bool
) -> dict[str, int]:
    """Return the bytes on this rank of a strategy that is set up.

    Tensors have only a shape unless the step is computed.
    """
    model = empty_model(config, strategy.config.model)
    with nullcontext() if computed else FakeTensorMode(allow_non_fake_inputs=True):
        return {
            "num_parameters": num_parameters(config),
            **asdict(trace_step(strategy, model, tokens)),
        }


def shape_config(shape: str, layers: int | None, narrow: int = 1) -> PretrainedConfig:
    if shape in NAMED:
        config = known_config(NAMED[shape])
        return with_layers(config, layers) if layers else config
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    sizes |= {name: size // narrow for name, size in sizes.items() if name in WIDTHS}
    return (Qwen3MoeConfig if "num_experts" in sizes else Qwen3Config)(
        tie_word_embeddings=False, **sizes
    )


@cache
def logits_bytes(shape: str, tokens: int, narrow: int) -> int:
    """Return the head's peak above hidden states, weight, and the gradients of both.

    Nothing is computed: a processor without bfloat16 would take ten seconds for 512 tokens.
    """
    config = shape_config(shape, None, narrow)
    options = {"dtype": torch.bfloat16, "requires_grad": True}
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(tokens, config.hidden_size, **options)
        weight = torch.empty(config.vocab_size, config.hidden_size, **options)
        tracker = MemTracker()
        tracker.track_external(hidden, weight)
        with tracker:
            token_ids = torch.zeros(tokens, dtype=torch.int64)
            token_logprobs(hidden, weight, token_ids)[0].sum().backward()
    return total(tracker.get_tracker_snapshot("peak")) - 2 * (hidden.nbytes + weight.nbytes)


def theory(num_parameters: int, world: int, once: bool) -> dict[str, float]:
    share = 4 * num_parameters / world
    return {
        "parameters": share,
        "gradients": 4 * num_parameters if once else share,
        "optimizer": 2 * share,
    }


def fake_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each shape and way, as rank 0 of `args.world`."""
    rows = []
    for shape, once in product(args.shapes, (False, True)):
        with fake_group(args.world):
            strategy = FakeRankStrategy(seed=0, args=_options(once, bf16=True))
            strategy.setup_distributed()
            sizes = training_bytes(
                strategy, shape_config(shape, args.layers, args.narrow), args.tokens, computed=False
            )
            sizes["logits"] = logits_bytes(shape, args.tokens, args.narrow)
        rows.append({"shape": shape, "world": args.world, "reduce_gradients_once": once, **sizes})
        print(json.dumps(rows[-1]), flush=True)

    return rows


def measured_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the same rows from rank 0 of real ranks, in processes of their own."""
    rows = []
    for world in args.measured:
        ask = [
            "--rank",
            str(world),
            "--tokens",
            str(args.tokens),
            f"--narrow={args.narrow}",
            *(["--layers", str(args.layers)] if args.layers else []),
        ]
        out = on_ranks(world, __file__, ask)
        for row in map(json.loads, out.splitlines()[-len(WAYS) :]):
            expected = theory(row["num_parameters"], world, row["reduce_gradients_once"])
            ratios = {
                f"{name}_of_theory": round(row[name] / size, 3) for name, size in expected.items()
            }
            options = _options(
                row["reduce_gradients_once"], bf16=row["bf16"], recompute=row["recompute"]
            )
            planned = step_bytes(
                shape_config(row["shape"], args.layers, args.narrow),
                options,
                world=world,
                tokens=min(args.tokens, 512),
            )
            ratios["peak_of_plan"] = round(row["peak"] / planned.peak, 3)
            rows.append({"world": world, **row, **ratios})
            print(json.dumps(rows[-1]), flush=True)

    return rows


def rank(args: argparse.Namespace) -> None:
    """Measure all ways, with one line each from rank 0."""
    for way in WAYS:
        strategy = FSDPStrategy(
            seed=0,
            args=_options(
                way["reduce_gradients_once"], bf16=way["bf16"], recompute=way["recompute"]
            ),
        )
        strategy.setup_distributed()
        sizes = training_bytes(
            strategy,
            shape_config(way["shape"], args.layers, args.narrow),
            args.tokens,
            computed=True,
        )

        if strategy.is_rank_0():
            sizes["logits"] = logits_bytes(way["shape"], args.tokens, args.narrow)
            print(json.dumps(way | sizes), flush=True)

        strategy.close()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    flags = {
        "--world": (8, "ranks that the shapes are divided over"),
        "--tokens": (16384, "tokens of a micro-batch; at most 512 where they are measured"),
        "--narrow": (1, "divide the widths of the small shapes by this"),
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument(
        "--measured", type=int, nargs="*", default=[2, 4], help="numbers of real ranks"
    )
    parser.add_argument("--shapes", nargs="*", choices=[*SHAPES, *NAMED], default=[*NAMED])
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    # given to a rank by measured_rows()
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.rank:
        args.tokens = min(args.tokens, 512)
        rank(args)
        return {}

    result = {
        "tokens": args.tokens,
        "measured": measured_rows(args),
        "shapes": fake_rows(args) if args.shapes else [],
    }
    print(json.dumps(result))
    return result


def _options(once: bool, *, bf16: bool, recompute: bool = True) -> dict[str, Any]:
    return {
        "fsdp": True,
        "bf16": bf16,
        "gradient_checkpointing": recompute,
        "reduce_gradients_once": once,
        "train_batch_size": 1024,
        "micro_train_batch_size": 1,
    }


if __name__ == "__main__":
    main()
