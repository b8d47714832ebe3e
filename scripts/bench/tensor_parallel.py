"""Measure the processor time of a micro-batch under tensor parallelism.

It compares lightrft's plain activations with torch's DTensors.

    python scripts/bench/tensor_parallel.py --layers 28 --steps 12 --repeats 3

Ranks split a random Qwen3 of narrow layers, so that the host's work is most of the time, with
parallelize() and with the same plan of torch's parallelize_module(). Each runs forward and backward
of --steps micro-batches that differ in their number of tokens, as packed ones do, and then of the
same micro-batches once more. Both kinds alternate; the last line is a JSON object with the medians
over --repeats of CPU milliseconds per micro-batch and rank, new and repeated, and of the operations
that torch planned. On CUDA each rank has a device of its own.
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.models.parallel.tensor_parallel import parallelize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import in_turn, parser_of, results_of_ranks

KINDS = "plain", "dtensor"


def split_with_dtensors(model: Qwen3ForCausalLM, mesh: torch.distributed.DeviceMesh) -> None:
    """Split the model as parallelize() does, with the styles of torch."""
    columns = ColwiseParallel()
    norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan = dict.fromkeys(
        (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ),
        columns,
    )
    plan |= {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        "self_attn.q_norm": norm,
        "self_attn.k_norm": norm,
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in model.model.layers:
        parallelize_module(block, mesh, plan, src_data_rank=None)

    parallelize_module(
        model.model,
        mesh,
        {"embed_tokens": RowwiseParallel(input_layouts=Replicate())},
        src_data_rank=None,
    )
    parallelize_module(
        model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())}, src_data_rank=None
    )


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits.float().log_softmax(-1)[..., 0].sum()


def rank(number: int, store: str, results: Connection, kind: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=store, rank=number, world_size=args.ranks)
    mesh = init_device_mesh(device.type, (args.ranks,))
    planned: list[object] = []
    propagator = DTensor._op_dispatcher.sharding_propagator
    plan = propagator.propagate_op_sharding_non_cached
    propagator.propagate_op_sharding_non_cached = lambda schema: (
        planned.append(schema) or plan(schema)
    )
    torch.manual_seed(0)

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=args.layers,
        num_attention_heads=2 * args.ranks,
        num_key_value_heads=args.ranks,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).to(device)
    parallelize(model, mesh) if kind == "plain" else split_with_dtensors(model, mesh)
    batches = [
        torch.randint(256, (1, 64 + 8 * step), device=device) for step in range(args.steps + 1)
    ]
    losses = [loss_of(model, batches.pop())]
    losses[0].backward()

    norms = [
        parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in model.parameters()
    ]
    losses[0] = torch.stack([gradient.norm() for gradient in norms]).sum()
    found: dict[str, float] = {}
    planned.clear()

    for name in ("new", "repeated"):
        begin = time.process_time()
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
        found[f"cpu_ms_{name}"] = 1e3 * (time.process_time() - begin) / len(batches)

    found["planned_operations"] = len(planned)
    results.send((found, torch.stack(losses).tolist()))
    dist.barrier()


def measure(kind: str, args: argparse.Namespace) -> tuple[dict[str, float], list[float]]:
    """Return the means over ranks.

    They come with the summed norm of the gradients of the first micro-batch, and the losses of the
    others.
    """
    found = results_of_ranks(
        args.ranks, rank, kind, args, method="spawn" if torch.cuda.is_available() else "fork"
    )
    return {name: statistics.mean(each[name] for each, _ in found) for name in found[0][0]}, found[
        0
    ][1]


def main() -> None:
    flags = {
        "--ranks": 2,
        "--layers": (28, "as many as Qwen3-0.6B has"),
        "--steps": (12, "micro-batches, each with another number of tokens"),
        "--repeats": 3,
    }
    args = parser_of(__doc__, flags).parse_args()
    ways = {kind: lambda kind=kind: measure(kind, args) for kind in KINDS}
    found = in_turn(ways, args.repeats)

    plain, dtensor = (torch.tensor(found[kind][-1][1]) for kind in KINDS)
    torch.testing.assert_close(plain, dtensor, rtol=1e-5, atol=1e-4)
    medians = {
        kind: {
            name: round(statistics.median(values[name] for values, _ in runs), 2)
            for name in runs[0][0]
        }
        for kind, runs in found.items()
    }
    ratios = {
        f"dtensor_over_plain_{name}": round(
            medians["dtensor"][f"cpu_ms_{name}"] / medians["plain"][f"cpu_ms_{name}"], 2
        )
        for name in ("new", "repeated")
    }
    print(json.dumps(medians | ratios))


if __name__ == "__main__":
    main()
