"""The benchmark of tensor parallelism runs, and its two kinds compute the same losses."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from warm import STARTS_WARM, warm_python

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "tensor_parallel.py"


@pytest.mark.slow
def test_both_kinds_are_reported():
    flags = ["--layers=1", "--steps=2", "--repeats=1"]
    said = subprocess.run(
        [warm_python(), BENCH, *flags],
        env=os.environ | {STARTS_WARM: warm_python()},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    line = json.loads(said.splitlines()[-1])
    assert line["dtensor"]["planned_operations"] > line["plain"]["planned_operations"]
    assert {"dtensor_over_plain_new", "dtensor_over_plain_repeated"} <= line.keys()
