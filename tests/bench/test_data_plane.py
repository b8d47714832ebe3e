"""The benchmarks of moving samples run, and find what the store promises."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from warm import STARTS_WARM, warm_python

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def run(script: str, *flags: str) -> dict:
    said = subprocess.run(
        [warm_python(), BENCH / script, *flags],
        env=os.environ | {STARTS_WARM: warm_python()},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return json.loads(said.splitlines()[-1])


@pytest.mark.slow
def test_a_small_run_prints_its_line():
    result = run("data_plane.py", "--ranks=2", "--samples=16", "--length=8", "--repeats=2")
    assert (
        result["store_collectives"] == 2
        and result["columns_collectives"] > 10
        and result["columns_over_store"] > 0
    )


@pytest.mark.slow
def test_features_of_media_are_copied_once_to_be_sent_and_once_when_they_arrive():
    result = run("media_memory.py", "--ranks=2", "--prompts=16", "--megabytes=4", "--tokens=4096")
    assert result["own_mb"] == 64 <= result["moved_mb"]
    assert result["peak_increase_mb"] < 1.25 * (result["own_mb"] + result["moved_mb"])
