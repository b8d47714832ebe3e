"""The benchmark of moving samples runs, and counts what the store promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "data_plane.py"


@pytest.mark.slow
def test_a_small_run_prints_its_line():
    command = [sys.executable, BENCH, "--ranks", "2", "--samples", "16", "--length", "8", "--repeats", "2"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(said.splitlines()[-1])
    assert result["store_collectives"] == 2 and result["columns_collectives"] > 10 and result["columns_over_store"] > 0
