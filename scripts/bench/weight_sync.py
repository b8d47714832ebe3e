"""Measure the weight stream: time and memory.

It is compared with a plain copy, with the engine's own reload, and with the obvious way.

    python scripts/bench/weight_sync.py  # the table in docs/benchmarks.md, some minutes
    python scripts/bench/weight_sync.py --layers 2 --hidden 128 --cases single --repeat 1

A random Qwen3 with tied embeddings, prepared as a trainer prepares it (float32 masters). One start
of `torchrun` per case:

    single    one process, streamed in float32 into tensors that are there; and into the hf engine
    vllm      one process, streamed in float32 into vLLM, against vLLM's reload_weights
    experts   the same of a Qwen3-MoE: 4 layers of --experts small experts, 3 published tensors each
    adapters  adapters of rank --rank on all linear layers into vLLM: merged weights, beside adapters alone
    int8, int8bf16   one process, into vLLM, verified: all weights as they are, beside matrices of int8
    fsdp2, fsdp4, hsdp4, tp2, fsdp2tp2, zero2x2, zero3x2   so many ranks, bfloat16

`memcpy_s` copies the same bytes; `naive_s` gathers one tensor at a time in float32 and casts it
then. Times are the best of the repetitions, in wall seconds, taken in turn; those of several ranks
are rank 0's between barriers. `peak_extra_bytes` is how far the process rose above what it was, in
the first stream, memory shared by ranks included. One thread per process.

`first_proof_s` is a verification of everything, `turns_s` all of those in parts that follow, both
by themselves, of tensors in memory; the latter are timed eighth by eighth, which take about as long
as a sync and so are disturbed as often. `verify_cost` is the share that one of the parts has, on
the average, in a sync with it, `first_verify_cost` that of the first one. Names with `cpu` are of
seconds of the processor, which other processes disturb less.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import on_ranks, parser_of, peak_of

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"fsdp": True}),
    "vllm": (1, {"fsdp": True}),
    "experts": (1, {"fsdp": True}),
    "adapters": (1, {"fsdp": True}),
    "int8": (1, {"fsdp": True}),
    "int8bf16": (1, {"fsdp": True, "bf16": True}),
    "fsdp2": (2, {"fsdp": True, "bf16": True}),
    "fsdp4": (4, {"fsdp": True, "bf16": True}),
    "hsdp4": (4, {"fsdp": True, "bf16": True, "dp_replicate": 2}),
    "tp2": (2, {"fsdp": True, "bf16": True, "tp_size": 2}),
    "fsdp2tp2": (4, {"fsdp": True, "bf16": True, "tp_size": 2}),
    "zero2x2": (2, {"bf16": True, "zero_stage": 2}),
    "zero3x2": (2, {"bf16": True, "zero_stage": 3}),
}
"""Name -> ranks and the flags of the strategy. Without bf16 both sides are float32."""


def make_model(folder: Path, args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = args.hidden // 64
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_mixture(folder: Path, args: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=args.experts,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure one case, on every rank."""
    from transformers import AutoModelForCausalLM

    from lightrft.config import ModelSection
    from lightrft.models.lora import freeze_parameters
    from lightrft.strategy import get_strategy

    options = CASES[case][1] | {
        "weight_sync_bucket_mb": args.bucket_mb,
        "train_batch_size": 8,
        "micro_train_batch_size": 1,
    }
    strategy = get_strategy(options)
    strategy.setup_distributed()
    model = AutoModelForCausalLM.from_pretrained(args.folder)
    if case == "adapters":
        model = freeze_parameters(model, ModelSection(str(args.folder), lora_rank=args.rank))
    model, _ = strategy.prepare((model, strategy.create_optimizer(model, lr=1e-6)))
    sizes: list[int] = []
    shape = {
        "peak_extra_bytes": peak_of(
            lambda: sizes.extend(tensor.nbytes for _, tensor in strategy.full_params(model))
        )
    }
    shape |= {"bytes": sum(sizes), "peak_limit_bytes": 2 * args.bucket_mb * 2**20 + max(sizes)}
    weights = {name: tensor.clone() for name, tensor in strategy.full_params(model)}

    def copy() -> None:
        for name, tensor in strategy.full_params(model):
            weights[name].copy_(tensor)

    def naive() -> None:
        for name, parameter in model.named_parameters():
            weights[name].copy_(parameter.full_tensor())

    ways = {"stream": copy}
    if case in ("vllm", "experts"):
        ways |= into_vllm(strategy, model, weights, args)
    elif case == "adapters":
        alone = [tensor.nbytes for _, tensor in strategy.adapter_params(model, base=False)]
        # Merging imports peft, so the peak says nothing.
        shape = {"bytes": shape["bytes"], "adapter_bytes": sum(alone)}
        ways = {"merged": into_engine(strategy, model, args, held=False)}
        ways["alone"] = into_engine(strategy, model, args, held=True)
    elif case.startswith("int8"):
        sent: list[int] = []
        ways = {"whole": into_engine(strategy, model, args, held=False)}
        ways["int8"] = into_engine(strategy, model, args, held=False, bits="int8", sent=sent)
        shape = {"bytes": shape["bytes"], "int8_bytes": sum(sent)}
    elif case == "single":
        ways |= {"memcpy": memcpy(weights)} | syncs(
            engine_of(strategy, "hf", args), strategy, model, weights
        )
    elif "zero" not in case:
        ways["naive"] = naive

    figures = shape | best(ways, args.repeat)
    if "sync" in ways:
        for kind in ("s", "cpu_s"):
            figures[f"turns_{kind}"] = sum(
                figures.pop(f"turns_{first}_{kind}") for first in range(8)
            )
        figures |= verify_cost(figures) | verify_cost(figures, "_cpu")

    strategy.close()
    return figures


def memcpy(weights: dict) -> Callable[[], None]:
    source = {name: tensor.clone() for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in source.items():
            weights[name].copy_(tensor)

    return copy


def into_vllm(
    strategy: Any, model: Any, weights: dict, args: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """Measure the stream into vLLM against vLLM's own reload of published tensors.

    The reload includes the packing of experts, which vLLM forgets on a CPU.
    """
    from lightrft.models.weight_sync.expert_layout import pack_experts, unpacked_experts

    engine = engine_of(strategy, "vllm", args)
    engine.load_weights(iter(weights.items()), 1)  # verified: later ones copy to where weights lie
    published = dict(engine.names.rename(iter(weights.items())))

    def reload() -> None:
        experts = unpacked_experts(engine._shim.experts)
        engine._shim.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(published.items())}
        )
        pack_experts(experts)

    return {"reload": reload} | syncs(engine, strategy, model, weights)


def into_engine(
    strategy: Any,
    model: Any,
    args: argparse.Namespace,
    *,
    held: bool,
    bits: str = "none",
    sent: list[int] | None = None,
) -> Callable[[], None]:
    """Return a verified sync of merged weights, or of adapters that vLLM holds beside them.

    `bits` is --rollout_quantization; the bytes of the first sync go to `sent`.
    """
    import torch

    from lightrft.models.lora import adapter_shapes
    from lightrft.models.weight_sync.adapters import Adapters

    adapters = Adapters(adapter_shapes(model)) if held else None
    engine = engine_of(strategy, "vllm", args, {"rollout_quantization": bits}, adapters=adapters)
    engine.verify_dtype = strategy.dtype

    def sync() -> None:
        stream = strategy.full_params(model)
        if held:
            stream = strategy.adapter_params(model, base=not engine.has_base)
        elif bits != "none":
            stream = engine.quantization.of_stream(strategy.full_params(model, torch.float32))
        if sent == []:
            stream = counted(stream, sent)
        engine.load_weights(stream, engine.version + 1)

    sync()
    return sync


def counted(stream: Iterable[tuple[str, Any]], sent: list[int]) -> Iterator[tuple[str, Any]]:
    for name, tensor in stream:
        sent.append(tensor.nbytes)
        yield name, tensor


def engine_of(
    strategy: Any,
    name: str,
    args: argparse.Namespace,
    flags: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    from lightrft.config import EngineSection
    from lightrft.engine.build import build_engine

    section = EngineSection(engine_type=name, engine_kv_cache_gb=0.125, **(flags or {}))
    return build_engine(
        section,
        model_path=str(args.folder),
        dtype=strategy.dtype,
        device=strategy.device,
        axis=strategy.mesh.engine(1),
        max_model_len=256,
        from_stream=True,
        **options,
    )


def syncs(engine: Any, strategy: Any, model: Any, weights: dict) -> dict[str, Callable[[], None]]:
    """Return a whole load_weights() without verification, and the verification alone.

    The verification is of everything, and of all parts.
    """
    from lightrft.models.weight_sync.verify import FULL_EVERY

    engine.verify_dtype = None

    def sync() -> None:
        engine.verify_round = 0  # as after a verification
        engine.load_weights(strategy.full_params(model), engine.version + 1)

    def verify(*rounds: int | None) -> None:
        for round in rounds:
            sent = engine._fingerprints(strategy.dtype, round)
            for name, tensor in weights.items():
                sent.add_sent(name, tensor)
            engine._verify(sent, empty_cache=True)

    eighths = {
        f"turns_{first}": lambda first=first: verify(*range(FULL_EVERY)[first::8])
        for first in range(8)
    }
    return {"sync": sync, "first_proof": lambda: verify(None)} | eighths


def best(ways: dict[str, Callable[[], None]], repeat: int) -> dict[str, float]:
    """Return wall and CPU seconds, after one round that nobody times."""
    import torch.distributed as dist

    fastest: dict[str, float] = {}
    for timed in [False] + [True] * repeat:
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            cpu = time.process_time()
            way()
            dist.barrier()
            times = {
                f"{name}_s": time.perf_counter() - start,
                f"{name}_cpu_s": time.process_time() - cpu,
            }
            fastest |= {
                key: min(seconds, fastest.get(key, math.inf))
                for key, seconds in times.items()
                if timed
            }
    return fastest


def verify_cost(row: dict[str, float], cpu: str = "") -> dict[str, float]:
    from lightrft.models.weight_sync.verify import FULL_EVERY

    sync = row[f"sync{cpu}_s"]
    seconds_of = {
        f"first_verify_cost{cpu}": row[f"first_proof{cpu}_s"],
        f"verify_cost{cpu}": row[f"turns{cpu}_s"] / FULL_EVERY,
    }
    return {name: seconds / (sync + seconds) for name, seconds in seconds_of.items()}


def summary(cases: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the aims of the stream, over the cases that were run."""
    report: dict[str, Any] = {}
    if single := cases.get("single"):
        report["over_memcpy"] = single["stream_s"] / single["memcpy_s"]
        report["verify_cost_hf"] = single["verify_cost"]

    if vllm := cases.get("vllm"):
        report["over_engine_reload"] = vllm["sync_s"] / vllm["reload_s"]
        report["verify_cost"] = vllm["verify_cost"]

    if experts := cases.get("experts"):
        report["experts_over_engine_reload"] = experts["sync_s"] / experts["reload_s"]
    if adapters := cases.get("adapters"):
        report["adapter_bytes_over_all"] = adapters["adapter_bytes"] / adapters["bytes"]
        report["adapters_over_merged"] = adapters["alone_s"] / adapters["merged_s"]
    for case in ("int8", "int8bf16"):
        if figures := cases.get(case):
            report[f"{case}_bytes_over_all"] = figures["int8_bytes"] / figures["bytes"]
            report[f"{case}_over_whole"] = figures["int8_s"] / figures["whole_s"]
    speedups = [
        figures["naive_s"] / figures["stream_s"]
        for figures in cases.values()
        if "naive_s" in figures
    ]
    if speedups:
        report["speedup_over_naive"] = min(speedups)
    report = {name: round(value, 3) for name, value in report.items()}
    if peaks := [figures for figures in cases.values() if "peak_extra_bytes" in figures]:
        report["peak_extra_bytes"] = max(figures["peak_extra_bytes"] for figures in peaks)
        report["peak_limit_bytes"] = min(figures["peak_limit_bytes"] for figures in peaks)
    rounded = {
        name: {key: round(value, 4) for key, value in figures.items()}
        for name, figures in cases.items()
    }

    return report | {"cases": rounded}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    flags = {"--hidden": 768, "--layers": 12, "--vocabulary": 32000, "--bucket-mb": 64}
    parser = parser_of(__doc__, flags | {"--repeat": 5, "--experts": 64, "--rank": 16})
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to a rank
    args = parser.parse_args(argv)
    if args.folder is None:
        print(json.dumps(summary(launch(args, argv))))
        return

    import torch

    torch.set_num_threads(1)
    (case,) = args.cases
    figures = measure(case, args)
    if os.environ["RANK"] == "0":
        (args.folder / f"{case}.json").write_text(json.dumps(figures))


def launch(args: argparse.Namespace, argv: list[str]) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "dense", args)
        make_mixture(folder / "mixture", args)
        for case in args.cases:
            own = folder / ("mixture" if case == "experts" else "dense")
            on_ranks(CASES[case][0], __file__, [*argv, f"--cases={case}", f"--folder={own}"])
        return {
            case: json.loads(next(folder.glob(f"*/{case}.json")).read_text()) for case in args.cases
        }


if __name__ == "__main__":
    main()
