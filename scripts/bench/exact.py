"""Measure what makes engine and trainer differ, and what --exact costs.

    python scripts/bench/exact.py                    # the tables in docs/exact.md
    python scripts/bench/exact.py --ways causes      # only the causes

`causes`: the hf engine samples from a random Qwen3 in a left-padded batch with a cache, and the
trainer computes the same tokens in one packed batch. Each row breaks one part of exact mode and
gives the largest difference of a token's log-prob, in float32 and in bfloat16.

`vllm`: seconds of the processor to generate with each engine, without and with --exact, and the
largest difference of a token's log-prob. One engine after another, because vLLM has one for each
process.

`cost`: seconds of the processor of exact mode over those of the plain mode, in turns in one
process: generation, scoring, and a forward and backward pass. The median of all turns, with the
smallest and the largest.

`gradients`: how many tensors have the same gradient if the sequences are divided into micro-batches
of other sizes, and the largest difference, relative to the norm of a tensor.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from lightrft.app.quickstart.inputs import byte_tokenizer
from lightrft.config.sections import EngineSection, ModelSection
from lightrft.core.batch import Batch
from lightrft.core.engine import Request
from lightrft.engine.base import Engine, EngineSetup
from lightrft.engine.hf import HFEngine
from lightrft.engine.model_info import never_sampled
from lightrft.engine.requests import Sampling
from lightrft.extras.exact.hf import ExactHead, ExactHFEngine
from lightrft.extras.exact.install import make_actor_exact
from lightrft.models.heads import Actor
from lightrft.models.load import load_model, load_tokenizer
from lightrft.models.logits.logprobs import token_logprobs
from lightrft.models.logits.truncation import Truncation, without_padding
from lightrft.models.parallel.collectives import Axis
from lightrft.models.qwen_omni import load_config
from scripts.bench.harness import parser_of

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLING = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=1)


class RoundedLogits(ExactHead):
    def logits(self, hidden: Tensor, size: int, temperature: float) -> Tensor:
        return super().logits(hidden, size, temperature).bfloat16().float()


class TorchLogprobs(ExactHead):
    def sample(
        self, hidden: Tensor, temperature: float, uniform: Tensor, truncation: Truncation
    ) -> tuple[Tensor, Tensor]:
        tokens, _ = super().sample(hidden, temperature, uniform, truncation)
        size, part = without_padding(truncation, len(self.model.get_output_embeddings().weight))
        logits = part(self.logits(hidden, size, temperature)[: len(tokens)], tokens[:, None])
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


class OtherAttention(ExactHFEngine):
    """Exact engine with the attention of torch, which divides its keys by the number of queries."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        self.model.set_attn_implementation("sdpa")

    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, **_: Tensor
    ) -> Tensor:
        return self.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).last_hidden_state[:, -1]


class FewRows(ExactHFEngine):
    """Exact engine with products of as many rows as there are samples."""

    def __init__(self, setup: EngineSetup):
        super().__init__(setup)
        for module in self.model.modules():
            if type(module) is nn.Linear:
                del module.forward


class RoundedHead(ExactHFEngine):
    """Exact engine whose logits are rounded to bfloat16."""

    head_type = RoundedLogits


class OtherSoftmax(ExactHFEngine):
    """Exact engine that takes log-probs with torch's log_softmax()."""

    head_type = TorchLogprobs


def single_rows(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the head for one row at a time."""
    return token_logprobs(*args, **options | {"chunk": 1, "upstream": None, "units": None})


def build_engine(
    kind: type[Engine], folder: str, dtype: torch.dtype, length: int, **section: Any
) -> Engine:
    setup = EngineSetup(
        section=EngineSection(**section),
        model_path=folder,
        dtype=dtype,
        device=CPU,
        axis=Axis("tp", 1, 0, None),
        max_model_len=length,
    )
    return kind(setup)


def build_actor(folder: str, dtype: torch.dtype, *, exact: bool) -> Actor:
    actor = Actor(load_model(ModelSection(pretrain=folder))).eval()
    # Rotary frequencies are buffers, and remain float32 as in a run.
    for parameter in actor.parameters():
        parameter.data = parameter.data.to(dtype)
    if exact:
        make_actor_exact(actor, dtype, CPU, Axis("world", 1, 0, None))
    return actor


def make_prompts(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocabulary, (n,), generator=random).tolist() for n in lengths]


def sample(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> tuple[Batch, Tensor]:
    """Return the packed sequences, and the engine's log-probs of the sampled tokens."""
    requests = [Request(prompt) for prompt in prompts]
    samples = [
        (prompt, each)
        for prompt, several in zip(prompts, engine.generate(requests, sampling), strict=True)
        for each in several
    ]
    sequences = [torch.tensor(prompt + each.token_ids) for prompt, each in samples]
    masks = [torch.arange(len(x)) >= len(p) for x, (p, _) in zip(sequences, samples, strict=True)]
    batch = Batch(
        lengths=torch.tensor([len(x) for x in sequences]),
        input_ids=torch.cat(sequences),
        loss_mask=torch.cat(masks),
        rows=torch.arange(len(sequences)),
    )
    return batch, torch.tensor([value for _, each in samples for value in each.logprobs])


def causes(folder: str, args: Any) -> list[dict[str, Any]]:
    prompts = make_prompts((5, 33, 70), args.vocabulary)
    sampling = replace(SAMPLING, max_tokens=args.tokens)
    # The engine never samples rows of the head that the tokenizer has no token for.
    banned = never_sampled(folder, load_config(folder), load_tokenizer(ModelSection(folder)))
    part = sampling.resolved(banned).truncation
    plain: dict[str, Any] = {"temperature": 0.8, "truncation": part}
    ways: dict[str, tuple[type[HFEngine], dict[str, Any]]] = {
        "nothing: --exact": (ExactHFEngine, plain),
        "attention": (OtherAttention, plain),
        "row count": (FewRows, plain),
        "head dtype": (RoundedHead, plain),
        "log-softmax": (OtherSoftmax, plain),
        "chunks of the head": (ExactHFEngine, plain | {"head": single_rows}),
        "temperature": (ExactHFEngine, plain | {"temperature": 1.0}),
        "top_p and top_k": (ExactHFEngine, plain | {"truncation": Truncation(banned=part.banned)}),
        "everything: without --exact": (HFEngine, plain),
    }
    rows = []
    for way, (kind, options) in ways.items():
        row: dict[str, Any] = {"cause": way}
        for name, dtype in DTYPES.items():
            engine = build_engine(kind, folder, dtype, 70 + args.tokens)
            batch, engine_logprobs = sample(engine, prompts, sampling)
            actor = build_actor(folder, dtype, exact=kind is not HFEngine)
            actor.token_logprobs = options.get("head", actor.token_logprobs)
            with torch.no_grad():
                logprobs, _ = actor(batch, options["temperature"], options["truncation"])
            gaps = (logprobs[batch.loss_mask] - engine_logprobs).abs()
            row |= {name: gaps.max().item(), f"{name}_tokens": int((gaps > 0).sum())}
        rows.append(row | {"tokens": len(gaps)})
        print(json.dumps(rows[-1]), flush=True)

    rows.append({"cause": "prefix cache", **prefix_cache(folder, prompts[2])})
    print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.inference_mode()
def prefix_cache(folder: str, prompt: list[int]) -> dict[str, float]:
    """Return by how much log-probs change if half of the prompt comes from the cache."""
    from transformers import DynamicCache

    result = {}
    for name, dtype in DTYPES.items():
        for suffix, kind in (("", OtherAttention), ("_exact", ExactHFEngine)):
            engine = build_engine(kind, folder, dtype, len(prompt))
            whole = _read(engine, prompt, DynamicCache(config=engine.model.config), 0)
            cache = DynamicCache(config=engine.model.config)
            _read(engine, prompt[: len(prompt) // 2], cache, 0)
            cached = _read(engine, prompt, cache, len(prompt) // 2)
            gap = (whole.log_softmax(-1) - cached.log_softmax(-1)).abs().max()
            result[f"{name}{suffix}"] = gap.item()
    return result


def _read(engine: ExactHFEngine, prompt: list[int], cache: Any, start: int) -> Tensor:
    ids = torch.tensor([prompt])
    positions = torch.arange(start, len(prompt))[None]
    hidden = engine._forward(ids[:, start:], torch.ones_like(ids), positions, cache)
    return engine.head.last_logits(hidden)


def cost(folder: str, args: Any) -> list[dict[str, Any]]:
    prompts = make_prompts([30 + 5 * i for i in range(args.prompts)], args.vocabulary)
    sampling = replace(SAMPLING, n=4, max_tokens=args.tokens)
    length = 30 + 5 * args.prompts + args.tokens
    rows = []
    for name, dtype in DTYPES.items():
        engines = [build_engine(kind, folder, dtype, length) for kind in (HFEngine, ExactHFEngine)]
        actors = [build_actor(folder, dtype, exact=exact) for exact in (False, True)]
        batch, _ = sample(engines[0], prompts, sampling)

        def generate(way: int, engines: Any = engines) -> None:
            sample(engines[way], prompts, sampling)

        @torch.no_grad()
        def score(way: int, actors: Any = actors, batch: Batch = batch) -> None:
            actors[way](batch, 0.8, sampling.truncation)

        def step(way: int, actors: Any = actors, batch: Batch = batch) -> None:
            actors[way](batch, 0.8, sampling.truncation)[0].sum().backward()

        row: dict[str, Any] = {"dtype": name, "sequences": len(batch)}
        for phase in (generate, score, step):
            ratios = [_seconds(phase, 1) / _seconds(phase, 0) for _ in range(args.repeat)]
            spread = [round(x, 2) for x in (median(ratios), min(ratios), max(ratios))]
            row[phase.__name__] = dict(zip(("median", "least", "most"), spread, strict=True))
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def vllm(folder: str, args: Any) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from lightrft.engine.vllm import VLLMEngine
    from lightrft.extras.exact.vllm import ExactVLLMEngine

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    prompts = make_prompts([30 + 5 * i for i in range(args.prompts)], args.vocabulary)
    sampling = replace(SAMPLING, n=4, max_tokens=args.tokens)
    banned = never_sampled(folder, load_config(folder), load_tokenizer(ModelSection(folder)))
    part = sampling.resolved(banned).truncation
    length = 30 + 5 * args.prompts + args.tokens
    rows = []
    for name, dtype in DTYPES.items():
        for kind in (HFEngine, ExactHFEngine, VLLMEngine, ExactVLLMEngine):
            exact = kind in (ExactHFEngine, ExactVLLMEngine)
            engine = build_engine(kind, folder, dtype, length, exact=exact, engine_kv_cache_gb=0.1)
            batch, engine_logprobs = sample(engine, prompts, sampling)
            seconds = [
                _seconds(lambda _, engine=engine: sample(engine, prompts, sampling), 0)
                for _ in range(args.repeat)
            ]
            engine.close()

            actor = build_actor(folder, dtype, exact=exact)
            with torch.no_grad():
                logprobs, _ = actor(batch, 0.8, part)
            gap = (logprobs[batch.loss_mask] - engine_logprobs).abs().max().item()
            spread = [round(x, 3) for x in (median(seconds), min(seconds), max(seconds))]
            row = {"dtype": name, "engine": kind.__name__, "difference": gap}
            rows.append(row | dict(zip(("median", "least", "most"), spread, strict=True)))
            print(json.dumps(rows[-1]), flush=True)
    dist.destroy_process_group()
    return rows


def gradients(folder: str, args: Any) -> list[dict[str, Any]]:
    """Compare gradients of eight sequences in one micro-batch with those of other divisions."""
    prompts = make_prompts((70, 33, 90, 12, 55, 20, 81, 40), args.vocabulary)
    rows = []
    for name, dtype in DTYPES.items():
        actor = build_actor(folder, dtype, exact=True)

        def compute(size: int, actor: Actor = actor) -> list[Tensor]:
            actor.zero_grad()
            for start in range(0, len(prompts), size):
                actor(_whole(prompts[start : start + size]), 1.0)[0].sum().backward()
            return [parameter.grad.float() for parameter in actor.parameters()]

        together = [x.clone() for x in compute(len(prompts))]
        for size in (len(prompts), len(prompts) // 2, 1):
            pairs = list(zip(compute(size), together, strict=True))
            gap = max(((x - y).norm() / y.norm()).item() for x, y in pairs)
            equal = sum(torch.equal(x, y) for x, y in pairs)
            row = {"dtype": name, "sequences": size, "tensors": len(pairs), "equal": equal}
            rows.append(row | {"difference": gap})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _whole(prompts: list[list[int]]) -> Batch:
    sequences = list(map(torch.tensor, prompts))
    return Batch(
        lengths=torch.tensor([len(x) for x in sequences]),
        input_ids=torch.cat(sequences),
        loss_mask=torch.cat([torch.arange(len(x)) > 0 for x in sequences]),
        rows=torch.arange(len(sequences)),
    )


def _seconds(phase: Callable[[int], None], way: int) -> float:
    began = time.process_time()
    phase(way)
    return time.process_time() - began


def make_model(folder: Path, args: Any) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    ways = {"causes": causes, "vllm": vllm, "cost": cost, "gradients": gradients}
    flags = {
        "--ways": list(ways),
        "--hidden": 128,
        "--layers": 4,
        "--vocabulary": 2048,
        "--tokens": 64,
        "--prompts": 8,
        "--repeat": 5,
    }
    args = parser_of(__doc__, flags).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args)
        return [row for way in args.ways for row in ways[way](folder, args)]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    main()
