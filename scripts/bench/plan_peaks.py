"""Compare the peak bytes of a training step with what `lightrft plan` says, layout by layout.

The step runs on real ranks over gloo.

    python scripts/bench/plan_peaks.py                         # all layouts, some minutes
    python scripts/bench/plan_peaks.py --layouts zero3 adapters --layers 2

A Qwen3, of 33 million parameters with its eight layers, AdamW, two micro-batches of 512 tokens on
each rank, full recomputation. The trainer's own policy learns in two steps; torch's MemTracker
counts every storage of the process in the second, when AdamW's moments are there. The plan is the
phase `train` of the same flags. One line for each layout, rank 0's; the last line has all of them.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.rollout.sampler import sampling_of
from lightrft.algorithms.terms import policy_objective
from lightrft.app.run.run import Run
from lightrft.app.trainer.build_roles import build_policy
from lightrft.config import Config, parse
from lightrft.config.resolve import resolve
from lightrft.core.batch import Experience
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.extras.tools.planning import Planner
from lightrft.extras.tools.shapes import model_config
from lightrft.extras.tools.step_memory import total
from lightrft.models.logits import logprobs
from lightrft.models.parallel.peaks import DEVICES
from lightrft.strategy import get_strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import on_ranks, parser_of

TOKENS = 512
FIRST_TOKENS = 16
VOCABULARY = 8000
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
ZERO = ["--fsdp=false", "--strategy=deepspeed"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "fsdp": (2, []),
    "hybrid": (4, ["--dp_replicate=2"]),
    "tp": (2, ["--tp_size=2"]),
    "fsdp x tp": (4, ["--tp_size=2"]),
    "sp": (2, ["--sp_size=2"]),
    "adapters": (2, ["--lora_rank=16"]),
    "zero0": (2, [*ZERO, "--zero_stage=0"]),
    "zero1": (2, [*ZERO, "--zero_stage=1"]),
    "zero2": (2, [*ZERO, "--zero_stage=2"]),
    "zero3": (2, [*ZERO, "--zero_stage=3"]),
    "zero3 bf16": (2, [*ZERO, "--zero_stage=3", "--bf16"]),
    "zero2 adapters": (2, [*ZERO, "--zero_stage=2", "--lora_rank=16"]),
}
"""Layout -> number of ranks and flags."""


class Peak(MemTracker):
    """A MemTracker of the whole process only.

    For modules it would allow each of them one forward pass.
    """

    def _pre_fw_hook(self, *_: Any) -> None:
        pass

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook


def configuration(folder: str, layout: str) -> tuple[int, Config]:
    ranks, flags = LAYOUTS[layout]
    arguments = [
        f"--pretrain={folder}",
        f"--prompt_data={folder}",
        "--fsdp",
        "--gradient_checkpointing",
        *flags,
    ]
    config = parse(arguments, "train_sft")
    config.train.max_tokens_per_microbatch = TOKENS * max(config.strategy.sp_size, 1)
    resolve(config, "train_sft", world_size=ranks)

    return ranks, config


def experience(first: int, tokens: int) -> Experience:
    """Return two sequences of `tokens` tokens each, with the row indices `first` and the next."""
    sequences = torch.arange(first, first + 2)
    count = 2 * tokens
    generator = torch.Generator().manual_seed(0)

    return Experience(
        lengths=torch.full((2,), tokens),
        input_ids=torch.randint(0, VOCABULARY, (count,), generator=generator),
        loss_mask=(torch.arange(count) % tokens) > 0,
        rows=sequences,
        groups=sequences,
        rewards=torch.zeros(2),
        advantages=torch.ones(count),
        engine_logprobs=torch.full((count,), -9.0),
        old_logprobs=torch.full((count,), -9.0),
    )


def peak(policy: Policy, config: Config) -> int:
    """Return the most bytes at any moment of the second of two steps.

    AdamW makes its moments in the first one, which is short.
    """
    first = 2 * policy.strategy.mesh.data.rank
    objective = policy_objective(config.algorithm)
    tracker = Peak()

    def step(tokens: int) -> None:
        whole = experience(first, tokens)
        local, (rows,) = policy.strategy.redistribute(whole, minibatch_size=None, **policy.limits())
        denominator = policy.denominator(local, rows)
        policy.learn([LossTerm(local, rows, objective, denominator)], Metrics())
        policy.finish_training()

    step(FIRST_TOKENS)
    gc.collect()
    tracker.track_external(*(item for item in gc.get_objects() if isinstance(item, Tensor)))
    with tracker:
        step(config.train.max_tokens_per_microbatch)
    return total(tracker.get_tracker_snapshot("peak"))


def rank(folder: str, layout: str) -> None:
    """Measure one layout on this rank; rank 0 prints."""
    # as on an accelerator, where chunks are larger and no memory of one is kept for the next
    logprobs.HOST_CHUNK = logprobs.DEVICE_CHUNK
    logprobs._spare = deque(maxlen=0)
    ranks, config = configuration(folder, layout)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    policy = build_policy(
        Run(config, strategy), updates=2, reference=False, sampling=sampling_of(config.rollout)
    )
    measured = peak(policy, config)
    if strategy.is_rank_0():
        print(json.dumps({"measured": measured}), flush=True)
    strategy.close()


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = parser_of(__doc__, {"--layers": 8})
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=[*LAYOUTS])
    # folder and layout, given to a rank by main()
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.rank:
        rank(*args.rank)
        return {}

    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=args.layers)).save_pretrained(
            folder
        )
        for layout in args.layouts:
            ranks, config = configuration(folder, layout)
            shape = model_config(folder)
            tokens = config.train.max_tokens_per_microbatch
            planner = Planner(
                config, "train_sft", ranks, DEVICES["h100"], ranks_per_node=8, shape=shape
            )
            parts = planner.phases(planner.step(tokens), tokens)["train"]
            out = on_ranks(ranks, __file__, ["--rank", folder, layout])
            measured = json.loads(out.splitlines()[-1])["measured"]
            planned = sum(parts.values())
            rows[layout] = {
                "ranks": ranks,
                "measured": measured,
                "planned": planned,
                "ratio": round(measured / planned, 3),
            }
            print(json.dumps({layout: rows[layout], "parts": parts}), flush=True)

    print(json.dumps(rows))
    return rows


if __name__ == "__main__":
    main()
