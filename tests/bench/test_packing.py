"""Why: a benchmark that compares different things, or that no longer runs, says nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--sequences=6", "--median=20", "--longest=64", "--tokens=128", "--rows=64", "--ranks=4", "--repeat=1", "--response=8"]


@pytest.mark.slow
def test_packed_against_padded_runs_and_both_compute_the_same_loss():
    command = [sys.executable, ROOT / "scripts" / "bench" / "packing.py", *SMALL]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    ratios = {"packed_over_padded", "packed_over_sorted", "groups_once_over_alone", "prefix_of_token_ratio"}
    assert ratios | {"plan_64_s", "tokens"} <= found.keys()
    overheads = [value for name, value in found.items() if name.endswith(("dp8", "dp32"))]
    assert len(overheads) == 6 and all(1 <= value <= 1.1 for value in overheads)
    assert found["longest"] <= 64 and found["rows_per_padded_micro_batch"] == 2 and found["packed_over_padded"] > 0
