"""Why: the benchmark of episodes stays runnable, and shows that turns which do not wait for one another keep the engine busy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_turns_that_wait_for_one_another_leave_the_engine_idle():
    command = [sys.executable, ROOT / "scripts" / "bench" / "episodes.py", "--episodes=12", "--turns=3", "--tool_ms=100",
               "--repeat=1"]  # fmt: skip
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["free"]["busy"] > found["barrier"]["busy"] + 0.05 and found["free"]["tokens"] == found["barrier"]["tokens"]
