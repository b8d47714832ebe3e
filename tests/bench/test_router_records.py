"""Why: the benchmark calls vLLM's bookkeeping of chosen experts, which may change."""

import json

import pytest

from with_vllm import load_vllm


@pytest.mark.slow
def test_the_time_of_each_way_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()
    from scripts.bench import router_records

    router_records.main(["--sequences=64", "--steps=20", "--layers=4", "--repeats=1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == set(router_records.WAYS) and all(time > 0 for time in found.values())
