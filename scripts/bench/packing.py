"""Measure tokens per second of a training step, packed against padded, and the planner.

For the planner it measures its time and how long ranks wait.

    python scripts/bench/packing.py  # the table in docs/benchmarks.md, about a minute
    python scripts/bench/packing.py --sequences 8 --longest 64 --rows 64 --repeat 1

Forward and backward of a small random Qwen3, float32, one thread, over sequences of log-normal
length. `packed` is lightrft: flat micro-batches from the planner. `padded` is plain transformers
with sdpa: rows in the order that they come, padded to the longest of their micro-batch, which
holds so many rows that the longest sequences would still fit; `sorted` first sorts them by length.
All three compute the same loss, which is checked. `groups` puts the same sequences, as responses,
behind prompts of the median length, 8 to each: `once` computes a prompt once in a micro-batch,
`alone` for every response. `prefix` is one prompt with 16 responses of an eighth of its length,
over a model in which attention and head have the share that they have at 1.5 billion parameters;
`prefix_of_token_ratio` is how much faster `once` is, over how many fewer tokens it computes.
`hybrid` is one prompt with 8 responses of its length, over a Qwen3.5 with three layers of linear
attention and one of full attention. Rates count real tokens, per CPU second, best of the
repetitions. The planner's overhead is modelled: time over the time of perfect balance when ranks
wait at every micro-batch. The large plan of `--rows` rows over `--ranks` ranks, is timed without
prompts and with, 8 rows to each.
"""

import gc
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightrft.core.batch import Batch
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.attention.recurrent import install
from lightrft.models.heads import Actor
from lightrft.strategy.batching.micro_batches import find_shared_prefixes, prompts
from lightrft.strategy.batching.planner import MIN_SAVING, Plan, plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of

CAPACITY = 8192
DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "uniform": lambda r: r.randint(50, 5461),
    "log_normal": lambda r: min(CAPACITY, max(50, int(r.lognormvariate(7.5, 0.8)))),
    "truncated_bimodal": lambda r: min(
        5461, max(50, int(r.gauss(1000, 300) if r.random() < 0.5 else r.gauss(5000, 1000)))
    ),
}


def make_model(attention: str, *, width: int = 128, layers: int = 2) -> PreTrainedModel:
    config = Qwen3Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        intermediate_size=3 * width,
        vocab_size=2048,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def make_hybrid(*, width: int = 256, layers: int = 4) -> PreTrainedModel:
    config = Qwen3_5TextConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        intermediate_size=3 * width,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=width // 4,
        linear_value_head_dim=width // 4,
        vocab_size=2048,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    install(model)
    return model


def make_batch(count: int, median: int, sigma: float, longest: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = (
        (torch.randn(count, generator=generator) * sigma + math.log(median))
        .exp()
        .long()
        .clamp(2, longest)
    )
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    mask[lengths.cumsum(0) - lengths] = False
    ids = torch.randint(2048, mask.shape, generator=generator)

    return Batch(lengths=lengths, input_ids=ids, loss_mask=mask, rows=torch.arange(count))


def with_prompts(responses: Batch, median: int, samples: int = 8) -> Batch:
    """Return the sequences, each after its group's prompt of so many tokens.

    Nothing is learned from the prompts.
    """
    prompt_of = torch.arange(len(responses)) // samples
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(2048, (int(prompt_of[-1]) + 1, median), generator=generator)
    ids, masks = (
        column.split(responses.lengths.tolist())
        for column in (responses.input_ids, responses.loss_mask)
    )
    unlearned = torch.zeros(median, dtype=torch.bool)

    return Batch(
        lengths=responses.lengths + median,
        input_ids=torch.cat(
            [
                part
                for prompt, own in zip(prompt_of, ids, strict=True)
                for part in (texts[prompt], own)
            ]
        ),
        loss_mask=torch.cat([part for own in masks for part in (unlearned, own)]),
        rows=responses.rows,
    )


def packed_step(
    batch: Batch, tokens: int, *, once: bool = False, model: PreTrainedModel | None = None
) -> Callable[[], float]:
    """Run a packed step; with `once`, a beginning that sequences share is computed once."""
    actor = Actor(model or make_model(ATTENTION))
    lengths = batch.lengths.tolist()
    alike = [tuple(prompt) for prompt in prompts(batch).tolist()] if once else None

    def step() -> float:
        one_plan = plan(
            lengths, num_ranks=1, minibatch_size=len(lengths), max_tokens=tokens, prompts=alike
        )
        parts = [batch.select(rows) for rows in one_plan.minibatches[0][0]]
        if once:
            parts = [
                replace(
                    part,
                    shared=find_shared_prefixes(
                        part.input_ids, part.lengths, min_saving=MIN_SAVING
                    ),
                )
                for part in parts
            ]

        return sum(_backward(-actor(part, 1.0)[0].sum()) for part in parts)

    return step


def prefix_rates(response: int, repeat: int) -> dict[str, float]:
    """Measure 16 responses of so many tokens to one prompt that is eight times as long."""
    batch = with_prompts(make_batch(16, response, 0.0, response), 8 * response, samples=16)
    model = make_model(ATTENTION, width=256, layers=4)
    return shared_rates("prefix", batch, 24 * response, model, repeat)


def hybrid_rates(length: int, repeat: int) -> dict[str, float]:
    """Measure 8 responses to one prompt that has as many tokens, through recurrent states."""
    batch = with_prompts(make_batch(8, length, 0.0, length), length)
    return shared_rates("hybrid", batch, 9 * length, make_hybrid(), repeat)


def shared_rates(
    name: str, batch: Batch, computed: int, model: PreTrainedModel, repeat: int
) -> dict[str, float]:
    """Measure with the prompt computed once, so `computed` tokens, and in each row."""
    steps = {
        f"{name}_{way}": packed_step(batch, batch.num_tokens, once=way == "once", model=model)
        for way in ("once", "alone")
    }
    rates = tokens_per_second(steps, batch.num_tokens, repeat)
    faster = rates[f"{name}_once_tokens_per_s"] / rates[f"{name}_alone_tokens_per_s"]
    ratio = batch.num_tokens / computed
    return rates | {f"{name}_faster": faster, f"{name}_of_token_ratio": faster / ratio}


def padded_step(batch: Batch, rows: int, by_length: bool) -> Callable[[], float]:
    model = make_model("sdpa")
    sequences = batch.input_ids.split(batch.lengths.tolist())
    sequences = sorted(sequences, key=len, reverse=True) if by_length else sequences

    def step() -> float:
        return sum(
            _backward(padded_loss(model, sequences[start : start + rows]))
            for start in range(0, len(sequences), rows)
        )

    return step


def padded_loss(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Return the negative log-likelihood of all tokens but the first ones.

    Rows are [B, S], padded on the right.
    """
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(sequence) for sequence in sequences], batch_first=True
    )
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1),
        ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100).flatten(),
        reduction="sum",
    )


def _backward(loss: Tensor) -> float:
    loss.backward()
    return loss.item()


def tokens_per_second(
    steps: dict[str, Callable[[], float]], num_tokens: int, repeat: int
) -> dict[str, float]:
    """Return real tokens per CPU second of each, taken in turn."""
    seconds = {name: math.inf for name in steps}
    losses = {name: step() for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4 * max(losses.values()), losses
    for _ in range(repeat):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return {f"{name}_tokens_per_s": num_tokens / seconds[name] for name in steps}


def overhead(one_plan: Plan, lengths: list[int], ranks: int) -> float:
    """Return the time that ranks lose; a sequence costs L + L^2 / (6 x 4096)."""
    work = [length + length**2 / (6 * 4096) for length in lengths]
    per_rank = one_plan.minibatches[0]
    waited = sum(
        max(sum(work[row] for row in rank[m]) for rank in per_rank) for m in range(len(per_rank[0]))
    )
    return waited / (sum(work) / ranks)


def planner(rows: int, ranks: int, repeat: int) -> dict[str, float]:
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    overheads = {}
    for name, draw in DISTRIBUTIONS.items():
        for dp in (8, 32):
            seeds = [
                [draw(random.Random(f"{seed} {index}")) for index in range(512)]
                for seed in range(5)
            ]
            plans = [
                plan(lengths, num_ranks=dp, minibatch_size=512, max_tokens=CAPACITY)
                for lengths in seeds
            ]
            each = [
                overhead(one_plan, lengths, dp)
                for one_plan, lengths in zip(plans, seeds, strict=True)
            ]
            overheads[f"overhead_{name}_dp{dp}"] = round(statistics.mean(each), 4)

        generator = random.Random(0)
        lengths = [draw(generator) for _ in range(rows)]
        groups = np.array(
            [
                (row // 8, min(lengths[row // 8 * 8 : row // 8 * 8 + 8]) // 2, 0)
                for row in range(rows)
            ]
        )

        for _ in range(repeat):
            for prompts_of in (None, groups):
                start = time.process_time()
                one_plan = plan(
                    lengths,
                    num_ranks=ranks,
                    minibatch_size=rows,
                    max_tokens=CAPACITY,
                    prompts=prompts_of,
                )
                seconds[name, prompts_of is not None].append(time.process_time() - start)

                if prompts_of is None:
                    overheads[f"overhead_{name}_dp{ranks}"] = round(
                        overhead(one_plan, lengths, ranks), 4
                    )

    slowest = {
        of: max(min(times) for (_, grouped), times in seconds.items() if grouped == of)
        for of in (False, True)
    }
    return {
        f"plan_{rows}_s": round(slowest[False], 3),
        f"plan_{rows}_with_prompts_s": round(slowest[True], 3),
    } | overheads


def main(argv: list[str] | None = None) -> None:
    flags = {
        "--sequences": (32, "sequences of the step"),
        "--median": (250, "median length"),
        "--sigma": (1.0, "standard deviation of the logarithm of the length"),
        "--longest": (2048, "lengths are cut to this"),
        "--tokens": (16384, "tokens of a micro-batch, padding included"),
        "--response": (64, "tokens of a response to a prompt eight times as long"),
        "--hybrid": (512, "tokens of a prompt, and of each response, of the hybrid"),
        "--rows": (524288, "rows of the large plan"),
        "--ranks": (1024, "ranks of the large plan"),
        "--repeat": (3, "repetitions"),
    }
    args = parser_of(__doc__, flags).parse_args(argv)
    torch.set_num_threads(1)
    gc.freeze()  # as a run does: no collection scans what was imported
    batch = make_batch(args.sequences, args.median, args.sigma, args.longest)
    rows = args.tokens // args.longest
    steps = {
        "packed": packed_step(batch, args.tokens),
        "padded": padded_step(batch, rows, by_length=False),
        "sorted": padded_step(batch, rows, by_length=True),
    }
    rates = tokens_per_second(steps, batch.num_tokens, args.repeat)
    groups = with_prompts(batch, args.median)
    of_groups = {
        "groups_once": packed_step(groups, args.tokens, once=True),
        "groups_alone": packed_step(groups, args.tokens),
    }
    rates |= tokens_per_second(of_groups, groups.num_tokens, args.repeat)
    prefix = prefix_rates(args.response, args.repeat) | hybrid_rates(args.hybrid, args.repeat)
    report = {name: round(rate, 1) for name, rate in rates.items()} | {
        name: round(rate, 2) for name, rate in prefix.items()
    }
    report["packed_over_padded"] = round(
        rates["packed_tokens_per_s"] / rates["padded_tokens_per_s"], 2
    )

    report["packed_over_sorted"] = round(
        rates["packed_tokens_per_s"] / rates["sorted_tokens_per_s"], 2
    )
    report["groups_once_over_alone"] = round(
        rates["groups_once_tokens_per_s"] / rates["groups_alone_tokens_per_s"], 2
    )
    shape = {
        "tokens": batch.num_tokens,
        "longest": int(batch.lengths.max()),
        "rows_per_padded_micro_batch": rows,
    }
    print(json.dumps(shape | report | planner(args.rows, args.ranks, args.repeat)))


if __name__ == "__main__":
    main()
