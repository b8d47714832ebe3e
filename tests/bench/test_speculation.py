"""Why: the benchmark starts engines in processes of its own.

A renamed field or method must not go unnoticed.
"""

import json
import multiprocessing

import pytest

from scripts.bench import speculation
from with_vllm import load_vllm


@pytest.mark.slow
def test_the_rates_of_every_kind_are_reported(monkeypatch, capsys):
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()
    # faster than new interpreters
    monkeypatch.setattr(speculation, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr("lightrft.engine.vllm.speculation.BATCH_SIZES", (1, 8))
    small = ["--hidden=64", "--layers=1", "--tokens=64", "--batches=8", "--repeat=1"]
    speculation.main([*small, "--texts=repetitive", "--kinds", "none", "group", "draft"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    kinds = found["cases"]["repetitive"]
    assert (
        found["slowest_cpu"]
        == min(kinds[kind]["8"]["speedup_cpu"] for kind in ("group", "draft"))
        > 0
    )
    assert kinds["none"]["8"]["speedup"] == 1
    assert kinds["none"]["8"]["accepted_of_drafted"] is None
