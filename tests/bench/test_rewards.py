"""Why: the benchmark of reward calls must still run.

Its function runs in another process than its engine.
"""

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
        ROOT / "scripts" / "bench" / "rewards.py",
        "--calls=5",
        "--repeat=1",
        "--engine_seconds=0.3",
    ]
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == {"overhead_ms", "overhead_cpu_ms", "workers_of_alone", "thread_of_alone"}
    assert all(value > 0 for value in found.values())
    assert "in this process" not in ran.stderr, "or the figures would be those of no worker"
