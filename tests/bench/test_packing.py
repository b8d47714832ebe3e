"""Why: a benchmark that compares different things, or that no longer runs, says nothing."""

import json

import pytest

from scripts.bench.packing import main

SMALL = [
    "--sequences=6",
    "--median=20",
    "--longest=64",
    "--tokens=128",
    "--rows=64",
    "--ranks=4",
    "--repeat=1",
    "--response=8",
    "--hybrid=16",
]


@pytest.mark.slow
def test_packed_against_padded_runs_and_both_compute_the_same_loss(capsys):
    main(SMALL)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    ratios = {
        "packed_over_padded",
        "packed_over_sorted",
        "groups_once_over_alone",
        "prefix_of_token_ratio",
        "hybrid_of_token_ratio",
    }
    assert ratios | {"plan_64_s", "tokens"} <= found.keys()
    overheads = [value for name, value in found.items() if name.endswith(("dp8", "dp32"))]
    assert len(overheads) == 6 and all(1 <= value <= 1.1 for value in overheads)
    assert (
        found["longest"] <= 64
        and found["rows_per_padded_micro_batch"] == 2
        and found["packed_over_padded"] > 0
    )
