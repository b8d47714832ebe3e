"""Measure time and peak memory of log-probs, forward and backward.

They are computed from hidden states and the weight of the head.

    python scripts/bench/logprobs.py  # the table in docs/benchmarks.md: half an hour
    python scripts/bench/logprobs.py --cases 32000x128 --tokens 512 --repeat 1
    python scripts/bench/logprobs.py --cases 152000x128 --top_p 0.95 --variants lightrft full_logits

Each variant runs in a process of its own. On a CPU: float32, one thread, `seconds` of CPU time, and
`peak_mb` is how far the process's resident memory rose above what it was before the first pass. On
an accelerator (the default where there is one, see --device): bfloat16, seconds that pass, and the
device memory that was allocated above what it was before. Seconds are the median of the
repetitions; the memory includes the gradients. `lightrft` knows the gradient of its objective in
the forward pass, `sequences` after every 512 tokens, and `four_products` does not. The entropy of
each token is added to the objective with the coefficient --entropy. `vocabulary_blocks` is not what
lightrft does: it computes the logits in blocks of the vocabulary and reads each while it is in the
cache.

One JSON line per variant; the last one has, for the first case, `time_ratio` and
`peak_memory_ratio`, lightrft / full logits, and the latter without the weight's gradient,
`peak_memory_ratio_less_weight`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from lightrft.models.logits.logprobs import chunk_rows, token_logprobs
from lightrft.models.logits.truncation import ALL, Truncation
from lightrft.models.logits.vocab_parallel import HOST_BLOCK
from lightrft.models.parallel.device import exponentials

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import parser_of

truncation = ALL
"""Part of the vocabulary to take log-probs over; --top_p."""
coefficient = 0.0
"""Coefficient of the entropy in the objective; --entropy."""


def lightrft(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the sum is 1 for every token."""
    return _objective(hidden, weight, targets, upstream=_ones)


def four_products(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _objective(hidden, weight, targets)


def sequences(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The gradient is known after all tokens of a sequence of 512, as in GSPO and DPO."""
    units = [len(part) for part in targets.split(512)]
    return _objective(hidden, weight, targets, upstream=_ones, units=units)


def _objective(hidden: Tensor, weight: Tensor, targets: Tensor, **known: Any) -> Tensor:
    """Return the log-prob of each token, and its entropy times the coefficient."""
    options = {"truncation": truncation, "entropy": coefficient != 0}
    values, entropy = token_logprobs(hidden, weight, targets, **options, **known)
    return values if entropy is None else values + coefficient * entropy


def _ones(rows: slice, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of _objective()'s sum."""
    of_entropy = None if entropy is None else torch.full_like(entropy, coefficient)
    return torch.ones_like(logprobs), of_entropy


def vocabulary_blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Read each block of logits while it is in the cache, without truncation and entropy."""
    return _InBlocks.apply(hidden, weight, targets)


class _InBlocks(torch.autograd.Function):
    """Treat blocks of the vocabulary as the shards that ranks have.

    The gradient of the sum is computed in the forward pass, from exponentials relative to each
    block's own maximum.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        size = chunk_rows(hidden, len(weight))
        memory = torch.empty(min(size, len(hidden)) * len(weight))
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        values = [
            _chunk_in_blocks(*chunk, weight, grad_weight, memory)
            for chunk in zip(
                hidden.split(size), targets.split(size), grad_hidden.split(size), strict=True
            )
        ]
        ctx.gradients = grad_hidden, grad_weight
        return torch.cat(values)

    @staticmethod
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients, None


def _chunk_in_blocks(
    hidden: Tensor,
    targets: Tensor,
    grad_hidden: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    memory: Tensor,
) -> Tensor:
    """Return the log-probs of a chunk, and add to the gradients."""
    picked = torch.zeros(len(targets))
    found = []
    for part, own, first in zip(
        weight.split(COLUMNS),
        memory.split(COLUMNS * len(hidden)),
        range(0, len(weight), COLUMNS),
        strict=False,
    ):
        block = own[: len(hidden) * len(part)].view(len(hidden), len(part))
        torch.mm(hidden, part.T, out=block)
        rows = ((targets >= first) & (targets < first + len(part))).nonzero()[:, 0]
        columns = targets[rows] - first
        picked[rows] = block[rows, columns]

        sums = []
        for piece in block.split(HOST_BLOCK // COLUMNS):  # fits into a smaller cache
            top = piece.amax(-1)
            sums.append((top, exponentials(piece.sub_(top[:, None]), out=piece).sum(-1)))
        found.append((block, rows, columns, *map(torch.cat, zip(*sums, strict=True))))

    tops = torch.stack([top for *_, top, _ in found])
    factors = (tops - tops.amax(0)).exp_()
    total = (torch.stack([total for *_, total in found]) * factors).sum(0)

    for (block, rows, columns, *_), factor, part, grad in zip(
        found, factors / total, weight.split(COLUMNS), grad_weight.split(COLUMNS), strict=True
    ):
        block.mul_(-factor[:, None])
        block[rows, columns] += 1.0
        grad_hidden.addmm_(block, part)
        grad.addmm_(block.T, hidden)
    return picked - tops.amax(0) - total.log()


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute all logits at once.

    With a truncation, do what engines usually do: sort all probabilities of a row and sum them up.
    """
    logits = hidden @ weight.T
    if truncation.active:
        with torch.no_grad():
            sizes, order = logits.softmax(-1).sort(dim=-1, descending=True)
            outside = torch.zeros_like(logits, dtype=torch.bool).scatter(
                -1, order, sizes.cumsum(-1) - sizes >= truncation.top_p
            )
        logits = logits.masked_fill(outside, -torch.inf)
    logprobs = logits.log_softmax(-1)
    values = logprobs.gather(-1, targets[:, None])[:, 0]
    return values - coefficient * (logprobs.exp() * logprobs).sum(-1) if coefficient else values


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Do the same over chunks as large as lightrft's.

    torch computes them again in the backward pass.
    """
    size = chunk_rows(weight, len(weight))
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat(
        [checkpoint(full_logits, part, weight, ids, use_reentrant=False) for part, ids in parts]
    )


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Use torch's own function.

    It returns only the sum over tokens, and computes the gradients in the forward pass already.
    """
    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)[None]


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        lightrft,
        sequences,
        full_logits,
        four_products,
        checkpointed,
        vocabulary_blocks,
        torch_chunked,
    )
}
COLUMNS = 2048
"""Tokens of the vocabulary in a block of vocabulary_blocks."""


def measure(
    variant: str, vocabulary: int, width: int, args: argparse.Namespace
) -> dict[str, float]:
    """Return seconds and MB of one variant, in this process.

    The reference value guards against comparing different things.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)

    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        hidden = torch.randn(args.tokens, width, dtype=dtype, requires_grad=True)
        # in place: nothing before sets a peak
        weight = torch.randn(vocabulary, width, dtype=dtype).div_(width**0.5).requires_grad_()
        targets = torch.randint(vocabulary, (args.tokens,))
        few = (
            torch.randn(2, width, dtype=dtype).requires_grad_(),
            torch.randn(64, width, dtype=dtype).requires_grad_(),
        )

    if args.top_p < 1:  # the likeliest tokens are inside any truncation
        with torch.no_grad():
            targets = torch.cat([(part @ weight.T).argmax(-1) for part in hidden.split(16)])

    global truncation, coefficient
    truncation = Truncation(top_p=args.top_p)
    coefficient = args.entropy
    VARIANTS[variant](*few, targets[:2] % 64).sum().backward()  # loads what is loaded once

    if device.type != "cpu":  # compiles and chooses what is compiled and chosen once
        VARIANTS[variant](hidden, weight, targets).sum().backward()
        hidden.grad = weight.grad = None
        torch.accelerator.reset_peak_memory_stats()

    before = _memory(device)
    seconds = []
    value = 0.0

    for _ in range(args.repeat):
        began = _seconds(device)
        total = VARIANTS[variant](hidden, weight, targets).sum()
        gradients = torch.autograd.grad(total, [hidden, weight])
        seconds.append(_seconds(device) - began)
        value = sum(gradient.float().norm().item() for gradient in gradients) + total.item()
        del gradients

    return {
        "seconds": round(statistics.median(seconds), 4),
        "peak_mb": round((_peak(device) - before) / 1e6, 1),
        "weight_gradient_mb": round(weight.nbytes / 1e6, 1),
        "value": round(value, 4),
    }


def _seconds(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def _memory(device: torch.device) -> int:
    return (
        psutil.Process().memory_info().rss
        if device.type == "cpu"
        else torch.accelerator.memory_allocated()
    )


def _peak(device: torch.device) -> int:
    """Return the highest number of bytes so far."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated()


def in_process(variant: str, vocabulary: int, width: int, args: argparse.Namespace) -> dict:
    settings = {
        name: getattr(args, name) for name in ("device", "tokens", "repeat", "top_p", "entropy")
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    case = ["--one", variant, str(vocabulary), str(width)]

    run = subprocess.run([sys.executable, __file__, *flags, *case], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{variant}: {run.stderr[-2000:]}")

    return (
        {"variant": variant, "vocabulary": vocabulary, "hidden": width}
        | settings
        | json.loads(run.stdout)
    )


def compare(vocabulary: int, width: int, args: argparse.Namespace) -> dict[str, float]:
    """Return ratios of lightrft to full logits for one case, and print one line per variant."""
    rows = {}
    for variant in args.variants:
        rows[variant] = in_process(variant, vocabulary, width, args)
        print(json.dumps(rows[variant]), flush=True)
    own_row = rows["lightrft"]
    full = rows["full_logits"]
    near = 1e-4 if args.device == "cpu" else 2e-2
    for row in rows.values():
        assert abs(row["value"] - full["value"]) <= near * abs(full["value"]), (
            f"{row['variant']} computes something else: {row}"
        )

    def ratio(name: str, least: float, less: float = 0.0) -> float:
        """`least` is what the row can tell from nothing."""
        return round((own_row[name] - less) / max(full[name] - less, least), 4)

    return {
        "time_ratio": ratio("seconds", 1e-4),
        "peak_memory_ratio": ratio("peak_mb", 0.1),
        "peak_memory_ratio_less_weight": ratio("peak_mb", 0.1, own_row["weight_gradient_mb"]),
    }


def main(argv: list[str] | None = None) -> None:
    flags = {
        "--cases": (
            ["152000x128", "152000x896", "32000x128", "32000x896"],
            "vocabulary x hidden size",
        ),
        "--tokens": 2048,
        "--repeat": 3,
        "--top_p": (1.0, "of the most likely tokens; not for the last two variants"),
        "--entropy": (0.0, "coefficient of the entropy; not for the last two variants"),
        "--device": str(torch.accelerator.current_accelerator() or "cpu"),
    }
    parser = parser_of(__doc__, flags)
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="lightrft and full_logits are needed",
    )
    # given to a process by in_process()
    parser.add_argument("--one", nargs=3, metavar="CASE", help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one[0], *map(int, args.one[1:]), args)))
        return

    ratios = {case: compare(*map(int, case.split("x")), args) for case in args.cases}
    print(json.dumps({**ratios[args.cases[0]], "cases": ratios}))


if __name__ == "__main__":
    main()
