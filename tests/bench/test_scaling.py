"""Why: what grows with the square of the ranks is not noticed on eight, and stops a thousand."""

import json
import subprocess
from pathlib import Path

import pytest

from warm import warm_python

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "scaling.py"

LIMITS = {"collect": 1.25}
"""Limits by operation. The number of exchanges of a round depends on the lengths of its responses.
"""


@pytest.mark.slow
def test_what_a_rank_sends_and_receives_grows_no_faster_than_the_number_of_others(tmp_path):
    """Real processes are measured.

    Addresses that every rank published for each other one once made the rendezvous fail this test.
    Bytes are exact; how many segments the kernel sends depends on how busy the machine is.
    """
    flags = [
        "--ranks",
        "4",
        "16",
        "--simulated",
        "64",
        "--rows",
        "4",
        "--figure",
        tmp_path / "figure.svg",
    ]
    command = [warm_python(), BENCH, *flags]
    # It starts itself once more with a library that no fork of this process has.
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert set(found["exponents"]) >= {
        "meet",
        "mesh",
        "collect",
        "plan",
        "move",
        "metrics",
        "save",
        "load",
    }

    too_fast = {
        (name, key): p
        for name, each in found["exponents"].items()
        for key, p in each.items()
        if key != "segments" and p > LIMITS.get(name, 1.06)
    }
    assert not too_fast
    assert (
        found["runs"][1]["operations"]["move"]["sent"] > 1000
        and "<svg" in (tmp_path / "figure.svg").read_text()
    )
