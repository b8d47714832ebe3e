"""Why: the benchmark of data must still run, and data in a file take less memory than lists."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from warm import warm_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_small_run_prints_its_line():
    command = [
        warm_python(),
        ROOT / "scripts" / "bench" / "data.py",
        "--rows=3000",
        "--tokens=500",
        "--drawn=300",
    ]
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == {
        "rows",
        "tokens",
        "lists",
        "memory",
        "file_written",
        "file_read",
        "file_bytes_per_row",
    }

    assert (
        found["file_read"]["bytes_per_row"]
        < found["memory"]["bytes_per_row"]
        < found["lists"]["bytes_per_row"]
    )
    assert 4 * 500 < found["file_bytes_per_row"] < 4 * 500 + 500 + 200
