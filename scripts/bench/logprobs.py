"""Time and peak memory of log-probs, forward and backward, from hidden states and the weight of the head.

    python scripts/bench/logprobs.py        # the table in docs/benchmarks.md: half an hour, most of it torch_chunked
    python scripts/bench/logprobs.py --cases 32000x128 --tokens 512 --repeat 1
    python scripts/bench/logprobs.py --cases 152000x128 --tokens 300 --top_p 0.95 --variants lightrft full_logits

Each variant runs in a process of its own, float32, one thread. `cpu_s` is the median of the repetitions in CPU seconds;
`peak_mb` is how far the process's resident memory rose above what it was before the first pass, gradients included. One
JSON line per variant; the last one has `time_ratio` and `peak_memory_ratio`: lightrft / full logits, for the first case.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightrft.algorithms.truncation import ALL, Truncation
from lightrft.models.logprobs import chunk_rows, token_logprobs

truncation = ALL
"""The part of the vocabulary that log-probs are of; --top_p."""


def lightrft(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets, truncation=truncation)[0]


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """With a truncation, the usual way of engines: sort all probabilities of a row and sum them up."""
    logits = hidden @ weight.T
    if truncation.active:
        with torch.no_grad():
            sizes, order = logits.softmax(-1).sort(dim=-1, descending=True)
            outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, sizes.cumsum(-1) - sizes >= truncation.top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same over chunks as large as lightrft's, computed again in the backward pass by torch."""
    size = chunk_rows(weight, len(weight))
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([checkpoint(full_logits, part, weight, wanted, use_reentrant=False) for part, wanted in parts])


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own: only the sum over tokens, whose gradients it computes in the forward pass already."""
    options = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)[None]


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    f.__name__: f for f in (lightrft, full_logits, checkpointed, torch_chunked)
}


def measure(variant: str, vocabulary: int, width: int, tokens: int, repeat: int, top_p: float) -> dict[str, float]:
    """CPU seconds and MB of one variant, in this process; the reference value guards against comparing different things."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width).div_(width**0.5).requires_grad_()  # in place: nothing before sets a peak
    targets = torch.randint(vocabulary, (tokens,))
    if top_p < 1:  # the likeliest tokens are inside any truncation
        with torch.no_grad():
            targets = torch.cat([(part @ weight.T).argmax(-1) for part in hidden.split(16)])
    global truncation
    truncation = Truncation(top_p=top_p)
    few = torch.randn(2, width, requires_grad=True), torch.randn(64, width, requires_grad=True)
    VARIANTS[variant](*few, targets[:2] % 64).sum().backward()  # loads what is loaded once
    before, seconds, value = psutil.Process().memory_info().rss, [], 0.0
    for _ in range(repeat):
        began = time.process_time()
        total = VARIANTS[variant](hidden, weight, targets).sum()
        gradients = torch.autograd.grad(total, [hidden, weight])
        seconds.append(time.process_time() - began)
        value = sum(gradient.norm().item() for gradient in gradients) + total.item()
        del gradients
    peak = (_peak() - before) / 1e6
    return {"cpu_s": round(statistics.median(seconds), 4), "peak_mb": round(peak, 1), "value": round(value, 4)}


def _peak() -> int:
    """Bytes, the highest so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_process(variant: str, vocabulary: int, width: int, args: argparse.Namespace) -> dict:
    case = [variant, str(vocabulary), str(width), str(args.tokens), str(args.repeat), str(args.top_p)]
    run = subprocess.run([sys.executable, __file__, "--one", *case], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{variant}: {run.stderr[-2000:]}")
    given = {"variant": variant, "vocabulary": vocabulary, "hidden": width, "tokens": args.tokens, "top_p": args.top_p}
    return given | json.loads(run.stdout)


def compare(vocabulary: int, width: int, args: argparse.Namespace) -> dict[str, float]:
    """Ratios of lightrft to full logits for one case; one printed line per variant."""
    rows = {}
    for variant in args.variants:
        rows[variant] = in_process(variant, vocabulary, width, args)
        print(json.dumps(rows[variant]), flush=True)
    ours, full = rows["lightrft"], rows["full_logits"]
    for row in rows.values():
        assert abs(row["value"] - full["value"]) <= 1e-4 * abs(full["value"]), f"{row['variant']} computes something else: {row}"
    return {
        "time_ratio": round(ours["cpu_s"] / max(full["cpu_s"], 1e-4), 4),  # both bounds are what the row can tell from nothing
        "peak_memory_ratio": round(ours["peak_mb"] / max(full["peak_mb"], 0.1), 4),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["152000x128", "152000x896", "32000x128", "32000x896"],
                        help="vocabulary x hidden size")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="the first two are needed")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--top_p", type=float, default=1.0, help="of the most likely tokens; for lightrft and full_logits")
    parser.add_argument("--one", nargs=6, metavar="CASE", help=argparse.SUPPRESS)  # given to a process by in_process()
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one[0], *map(int, args.one[1:5]), float(args.one[5]))))
        return
    ratios = {case: compare(*map(int, case.split("x")), args) for case in args.cases}
    print(json.dumps({**ratios[args.cases[0]], "cases": ratios}))


if __name__ == "__main__":
    main()
