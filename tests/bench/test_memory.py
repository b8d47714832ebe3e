"""Why: whoever rents a machine by a table of bytes needs bytes that a process really had."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from warm import STARTS_WARM, warm_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--measured=2", "--shapes", "small", "--world=2", "--tokens=256", "--layers=3"]
SMALL += ["--narrow=4"]  # some CPUs are slow in bfloat16


def bench(script: str, *arguments: str) -> dict:
    """Return the last line of a benchmark."""
    command = [warm_python(), ROOT / "scripts" / "bench" / script, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), STARTS_WARM: warm_python()}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_real_ranks_take_what_the_plan_says():
    """The plans of DeepSpeed and of adapters are formulas."""
    rows = bench("plan_peaks.py", "--layouts", "adapters", "zero3", "--layers=2")
    assert rows.keys() == {"adapters", "zero3"}
    assert all(row["ratio"] == pytest.approx(1, abs=0.05) for row in rows.values())


@pytest.mark.slow
def test_real_ranks_take_what_theory_and_tensors_without_memory_say():
    found = bench("memory.py", *SMALL)
    assert all(row["peak_of_plan"] == pytest.approx(1, abs=0.1) for row in found["measured"])
    for real, fake, once in zip(found["measured"][:2], found["shapes"], (False, True), strict=True):
        numel = real["num_parameters"]
        assert (
            real["reduce_gradients_once"] == fake["reduce_gradients_once"] == once
            and fake["num_parameters"] == numel
        )
        expected = {
            "parameters": 2 * numel,
            "gradients": (4 if once else 2) * numel,
            "optimizer": 4 * numel,
        }

        for name, size in expected.items():
            assert real[name] == pytest.approx(size, rel=0.01) and fake[name] == pytest.approx(
                size, rel=0.01
            ), name

    shared, whole = found["measured"][:2]
    assert whole["peak"] - shared["peak"] > 0.5 * numel, (
        "the whole gradient is there when the next micro-batch is at its peak"
    )
