"""Why: the benchmark reaches into the strategies and the engines.

A renamed method must not go unnoticed.
"""

import json

import pytest

from ranks import run_ranks
from scripts.bench import weight_sync
from with_vllm import load_vllm


@pytest.mark.slow
def test_the_aims_and_the_cases_are_reported(monkeypatch, capsys):
    forked = lambda number, _, argv: run_ranks(number, weight_sync.main, argv)  # noqa: E731  which is faster than torchrun
    monkeypatch.setattr(weight_sync, "on_ranks", forked)
    weight_sync.main(
        [
            "--cases",
            "single",
            "fsdp2",
            "--hidden=128",
            "--layers=1",
            "--vocabulary=500",
            "--repeat=1",
        ]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(found[name] > 0 for name in ("over_memcpy", "speedup_over_naive", "verify_cost_hf"))
    # what the allocator does beside it
    assert found["peak_extra_bytes"] <= found["peak_limit_bytes"] + 8 * 2**20
    assert set(found["cases"]) == {"single", "fsdp2"}
    assert found["cases"]["single"]["bytes"] == 2 * found["cases"]["fsdp2"]["bytes"]


@pytest.mark.slow
def test_adapters_alone_are_fewer_bytes_than_merged_weights(monkeypatch, capsys):
    load_vllm()
    forked = lambda number, _, argv: run_ranks(number, weight_sync.main, argv)  # noqa: E731  which is faster than torchrun
    monkeypatch.setattr(weight_sync, "on_ranks", forked)
    shape = ["--hidden=128", "--layers=1", "--vocabulary=500", "--repeat=1", "--rank=8"]
    weight_sync.main(["--cases", "adapters", *shape])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < found["adapter_bytes_over_all"] < 0.1 and found["adapters_over_merged"] > 0
