"""Compare tokens per second with --speculative and without.

The text is easy to foresee, or not.

    python scripts/bench/speculation.py  # the table in docs/benchmarks.md, some minutes
    python scripts/bench/speculation.py --hidden 64 --layers 1 --batches 1 8 --repeat 1 --kinds group

Each engine is a vLLM in a process of its own; they generate in turn, with one thread each. A batch
is groups of 8 samples.

    repetitive   a random Qwen3 at a low temperature repeats itself: most drafts are accepted
    random       a random Qwen3 with 32 tokens: contexts recur, and something else follows

The model of `draft` has one layer of half the width, and is not trained: nearly none of its drafts
are accepted, so the engine should switch it off. That of `self` is the model itself, whose drafts
are all accepted, and which costs as much. `again` is a second engine without speculation, which
shows the noise.

`speedup` and `speedup_cpu` are the rates in wall seconds and processor seconds over those without
speculation, by batch: the median over the repetitions, of two runs next to each other.
`slowest_cpu` is the least of the latter. The speeds of two processes of the same kind differ by
some percent; with `--starts` the engines are started several times, and the median is that of all
repetitions.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of

KINDS = ("none", "ngram", "group", "draft")
GROUP = 8
TEXTS = {"repetitive": 0.05, "random": 1.0}
"""Text -> temperature."""


def make_model(
    folder: Path, text: str, args: argparse.Namespace, *, hidden: int, layers: int
) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    repetitive = text == "repetitive"
    config = Qwen3Config(
        vocab_size=args.vocabulary if repetitive else 32,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        tie_word_embeddings=repetitive,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def serve(kind: str, folder: str, temperature: float, tokens: int, commands: Connection) -> None:
    """Answer each batch size with wall and CPU seconds, and the drafts of that many samples."""
    import torch
    import torch.distributed as dist

    from lightrft.config import EngineSection
    from lightrft.core.engine import Request
    from lightrft.engine.build import build_engine
    from lightrft.engine.requests import Sampling
    from lightrft.models.parallel.mesh import Mesh

    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        drafts = {"draft": f"{folder}-draft", "self": folder}.get(kind, "")
        speculative = "draft" if drafts else kind.replace("again", "none")
        section = EngineSection(
            engine_type="vllm",
            engine_kv_cache_gb=0.5,
            speculative=speculative,
            draft_pretrain=drafts,
        )

        setup = {
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "max_model_len": 2 * tokens,
            "axis": Mesh("cpu").world,
        }
        engine = build_engine(section, model_path=folder, **setup)
        commands.send(None)

        for seed, batch in enumerate(iter(commands.recv, 0)):
            groups = [min(GROUP, batch)] * max(1, batch // GROUP)
            sampling = Sampling(max_tokens=tokens, temperature=temperature, seed=seed)
            requests = [
                Request([1, 2, 3, number % 30], sampling=Sampling(count, tokens, temperature))
                for number, count in enumerate(groups)
            ]
            began = time.perf_counter()
            began_cpu = time.process_time()
            samples = [sample for each in engine.generate(requests, sampling) for sample in each]
            seconds = time.perf_counter() - began, time.process_time() - began_cpu
            assert all(len(sample.token_ids) == tokens for sample in samples)
            drafts = [sum(sample.drafts[place] for sample in samples) for place in range(3)]
            commands.send((*seconds, *drafts))

        engine.close()


def measure(text: str, args: argparse.Namespace) -> dict[str, dict]:
    """Return kind -> batch size -> figures."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/model"
        make_model(Path(folder), text, args, hidden=args.hidden, layers=args.layers)
        make_model(Path(f"{folder}-draft"), text, args, hidden=args.hidden // 2, layers=1)
        runs: dict[int, dict[str, list]] = {
            batch: {kind: [] for kind in args.kinds} for batch in args.batches
        }

        for _ in range(args.starts):
            engines = {}
            for kind in args.kinds:
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    target=serve, args=(kind, folder, TEXTS[text], args.tokens, child_end)
                )
                process.start()
                engines[kind] = process, parent_end

            for _, connection in engines.values():
                connection.recv()
            for batch in args.batches:
                for turn in range(args.repeat + 1):
                    for kind in args.kinds if turn % 2 else reversed(args.kinds):
                        engines[kind][1].send(batch)
                        found = engines[kind][1].recv()
                        if turn:  # the first one compiles
                            runs[batch][kind].append(found)

            for process, connection in engines.values():
                connection.send(0)
                process.join()

    results: dict[str, dict] = {kind: {} for kind in args.kinds}
    for batch, of_kinds in runs.items():
        for kind in args.kinds:
            results[kind][batch] = figures(
                of_kinds[kind], of_kinds[args.kinds[0]], batch * args.tokens
            )

    return results


def figures(runs: list[tuple], plain: list[tuple], num_tokens: int) -> dict[str, float]:
    drafts, drafted, accepted = (sum(run[place] for run in runs) for place in (2, 3, 4))
    return {
        "tokens_per_second": round(num_tokens / median(run[0] for run in runs)),
        "speedup": round(
            median(other[0] / run[0] for run, other in zip(runs, plain, strict=True)), 3
        ),
        "speedup_cpu": round(
            median(other[1] / run[1] for run, other in zip(runs, plain, strict=True)), 3
        ),
        "accepted_of_drafted": round(accepted / drafted, 3) if drafted else None,
        "accepted_per_draft": round(accepted / drafts, 2) if drafts else None,
    }


def main(argv: list[str] | None = None) -> None:
    flags = {
        "--hidden": 256,
        "--layers": 4,
        "--vocabulary": 2000,
        "--tokens": (128, "tokens of each sample"),
        "--batches": [1, 8, 64],
        "--repeat": (5, "repetitions of a started engine"),
        "--starts": 1,
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), help="compared with the first; also self, again"
    )
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = {text: measure(text, args) for text in args.texts}
    slowest = min(
        each["speedup_cpu"]
        for kinds in cases.values()
        for kind in args.kinds[1:]
        for each in kinds[kind].values()
    )
    print(json.dumps({"slowest_cpu": slowest, "cases": cases}))


if __name__ == "__main__":
    main()
