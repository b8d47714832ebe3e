"""Bytes of one training step on a rank under FSDP2: parameters, gradients, optimizer, activations, and the head's logits.

    python scripts/bench/memory.py                                   # the tables in docs/benchmarks.md, some minutes
    python scripts/bench/memory.py --measured 2 --shapes --tokens 512

A dense Qwen model, `--tokens` tokens in each of two micro-batches, full recomputation, AdamW; gradients reduced after every
micro-batch, and with --reduce_gradients_once after the last one.

`--measured N ...`: a small model in float32 on N real ranks over gloo, at most 512 tokens, beside what theory says: 4 bytes a
parameter for the masters, 4 for gradients, 8 for AdamW, each divided by the ranks, but the gradients of --reduce_gradients_once,
which are whole.
`--shapes NAME ...`: bfloat16 with float32 masters, rank 0 of `--world` ranks over torch's fake process group, with tensors that
have shapes and no memory: the operations, and so their sizes, are the real ones, those of a CPU; the allocator's rounding is not
in them.

torch's FSDPMemTracker counts every storage while it lives. `gradients` is what is left between the micro-batches,
`activations` what is there at the end of the second forward pass beside masters, gradients and gathered parameters, `logits` the
head's own peak above its inputs and gradients (docs/benchmarks.md, log-probs), `peak` the most at any moment from the second step
on, when AdamW's moments are there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lightrft.models.logprobs import token_logprobs
from lightrft.parallel.mesh import Mesh
from lightrft.strategy import FSDPStrategy

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8000},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152064},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
"""`small` is the one that is measured, the others are those of Qwen2.5-7B, Qwen3-14B and Qwen3-32B."""

GATHERED = ("Unsharded Param", "All Gather", "Reduce Scatter")


class Learner(nn.Module):
    """Log-probs of the model's own tokens, with the head inside, as an actor has it."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logprobs, _ = token_logprobs(hidden, self.model.lm_head.weight, ids)
        return logprobs.clone()


class OneOfMany(FSDPStrategy):
    """A rank whose others are not there, over a fake process group: no monitor, and nothing that waits for an answer."""

    def setup_distributed(self, *_: Any, **__: Any) -> None:
        self.device, self._mesh = torch.device("cpu"), Mesh("cpu", dp_replicate=self.config.dp_replicate)


def training_bytes(strategy: FSDPStrategy, shape: str, tokens: int, layers: int | None = None) -> dict[str, int]:
    """Bytes on this rank. The strategy is set up; inside of FakeTensorMode nothing is computed."""
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    model = Learner(Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=False, **sizes)))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = strategy.create_optimizer(model, lr=1e-6)
    strategy.make_ready(model)
    strategy.distribute(model, optimizer)
    tracker = FSDPMemTracker(model, optimizer)
    peaks, between, forward = [], {}, {}
    with tracker:
        for last in (False, True):
            loss = model(torch.randint(0, 1000, (tokens,))).sum()
            forward = _now(tracker)
            strategy.accumulate(loss, model, last)
            del loss
            dist.barrier()  # a thread of gloo may have a gradient for a moment after it was reduced
            between = between or _now(tracker)
            peaks.append(_total(tracker.get_tracker_snapshot("peak")))
            tracker.reset_mod_stats()
        optimizer.step()
        after = _now(tracker)
    held = between["Total"] - between["Sharded Param"] - between["Activation"]
    return {
        "num_parameters": num_parameters,
        "parameters": after["Sharded Param"],
        "gradients": held,
        "optimizer": after["OptState"],
        "activations": forward["Total"] - forward["Sharded Param"] - held - sum(forward[name] for name in GATHERED),
        "peak": max(peaks) + after["OptState"],
    }


def logits_bytes(shape: str, tokens: int) -> int:
    """The head's peak above hidden states, weight, and the gradients of both."""
    hidden = torch.empty(tokens, SHAPES[shape]["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(SHAPES[shape]["vocab_size"], SHAPES[shape]["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(hidden, weight)
    with tracker:
        token_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64))[0].sum().backward()
    return _total(tracker.get_tracker_snapshot("peak")) - 2 * (hidden.nbytes + weight.nbytes)


def theory(num_parameters: int, world: int, once: bool) -> dict[str, float]:
    share = 4 * num_parameters / world
    return {"parameters": share, "gradients": 4 * num_parameters if once else share, "optimizer": 2 * share}


def fake_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each shape and way, as rank 0 of `args.world`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world)
    rows = []
    for shape in args.shapes:
        for once in (False, True):
            strategy = OneOfMany(seed=0, args=_options(once, bf16=True))
            strategy.setup_distributed()
            with FakeTensorMode(allow_non_fake_inputs=True):
                found = training_bytes(strategy, shape, args.tokens, args.layers) | {"logits": logits_bytes(shape, args.tokens)}
            rows.append({"shape": shape, "world": args.world, "reduce_gradients_once": once, **found})
            print(json.dumps(rows[-1]), flush=True)
    dist.destroy_process_group()
    return rows


def measured_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same from real ranks, in processes of their own; rank 0's."""
    rows = []
    for world in args.measured:
        ask = ["--rank", str(world), "--tokens", str(args.tokens), *(["--layers", str(args.layers)] if args.layers else [])]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", __file__, *ask]
        out = subprocess.check_output(command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        for row in map(json.loads, out.splitlines()[-2:]):
            expected = theory(row["num_parameters"], world, row["reduce_gradients_once"])
            ratios = {f"{name}_of_theory": round(row[name] / size, 3) for name, size in expected.items()}
            rows.append({"shape": "small", "world": world, **row, **ratios})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def rank(args: argparse.Namespace) -> None:
    """Measure both ways, one line each from rank 0."""
    for once in (False, True):
        strategy = FSDPStrategy(seed=0, args=_options(once, bf16=False))
        strategy.setup_distributed()
        found = training_bytes(strategy, "small", args.tokens, args.layers) | {"logits": logits_bytes("small", args.tokens)}
        if strategy.is_rank_0():
            print(json.dumps({"reduce_gradients_once": once, **found}), flush=True)
        strategy.close()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=int, nargs="*", default=[2, 4], help="numbers of real ranks")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["7B", "14B", "32B"])
    parser.add_argument("--world", type=int, default=8, help="ranks that the shapes are divided over")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch; at most 512 where they are measured")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # given to a rank by measured_rows()
    args = parser.parse_args(argv)
    if args.rank:
        args.tokens = min(args.tokens, 512)
        rank(args)
        return {}
    result = {"tokens": args.tokens, "measured": measured_rows(args), "shapes": fake_rows(args) if args.shapes else []}
    print(json.dumps(result))
    return result


def _options(once: bool, *, bf16: bool) -> dict[str, Any]:
    return {"fsdp": True, "bf16": bf16, "gradient_checkpointing": True, "reduce_gradients_once": once,
            "train_batch_size": 1024, "micro_train_batch_size": 1}  # fmt: skip


def _now(tracker: MemTracker) -> dict[str, int]:
    (snapshot,) = tracker.get_tracker_snapshot("current").values()
    return {getattr(kind, "value", kind): size for kind, size in snapshot.items()}


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return sum(sizes["Total"] for sizes in snapshot.values())


if __name__ == "__main__":
    main()
