"""Why: a plan of DeepSpeed or of adapters is a formula, and what a rank holds at its peak is the library's business."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_real_ranks_take_what_the_plan_says():
    command = [sys.executable, ROOT / "scripts" / "bench" / "plan_peaks.py", "--layouts", "adapters", "zero3"]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == {"adapters", "zero3"}
    assert all(row["ratio"] == pytest.approx(1, abs=0.05) for row in found.values())
