"""The benchmark of gloo's devices runs."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from warm import STARTS_WARM, warm_python

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "gloo_device.py"


@pytest.mark.slow
def test_both_kinds_are_reported():
    flags = ["--groups=3", "--seconds=0.1", "--sums=2", "--repeats=1"]
    said = subprocess.run(
        [warm_python(), BENCH, *flags],
        env=os.environ | {STARTS_WARM: warm_python()},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    line = json.loads(said.splitlines()[-1])
    assert line.keys() == {"shared", "one_each"} and all(
        kind["cpu_us_per_sum"] > 0 for kind in line.values()
    )
