"""Why: the figures in docs/benchmarks.md must stay reproducible.

All variants must compute the same thing.
"""

import json
import sys
from argparse import Namespace

import pytest

from ranks import run_ranks
from scripts.bench import logprobs
from warm import warm_python


@pytest.mark.slow
def test_every_variant_runs_and_agrees(capsys, monkeypatch):
    """Forked processes are faster than the benchmark's own; the next test uses those."""

    def forked(variant, *case):
        return {"variant": variant} | run_ranks(1, logprobs.measure, variant, *case)[0]

    monkeypatch.setattr(logprobs, "in_process", forked)
    logprobs.main(["--cases", "4000x16", "--tokens", "512", "--repeat", "1"])
    *rows, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["variant"] for row in rows] == list(logprobs.VARIANTS)
    assert last["time_ratio"] > 0 and "peak_memory_ratio" in last


@pytest.mark.slow
def test_a_truncation_agrees_with_sorting(capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.setattr(sys, "executable", warm_python())
    logprobs.main(
        [
            "--cases",
            "4000x16",
            "--tokens=64",
            "--repeat=1",
            "--top_p=0.9",
            "--variants",
            "lightrft",
            "full_logits",
        ]
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["time_ratio"] > 0


def test_a_variant_that_computes_something_else_is_refused(monkeypatch):
    values = iter([1.0] * (len(logprobs.VARIANTS) - 1) + [1.1])
    row = {"seconds": 1.0, "peak_mb": 2.0, "weight_gradient_mb": 1.0}
    monkeypatch.setattr(
        logprobs,
        "in_process",
        lambda variant, *_: {"variant": variant, **row, "value": next(values)},
    )
    with pytest.raises(AssertionError, match="torch_chunked computes something else"):
        logprobs.compare(10, 2, Namespace(variants=list(logprobs.VARIANTS), device="cpu"))
