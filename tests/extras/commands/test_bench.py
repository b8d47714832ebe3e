"""The command prints the scoreboard of a short run."""

import json
import subprocess
from pathlib import Path

import pytest

from runs import PPO, prepare
from warm import warm_python

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_run_is_measured_and_removed(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    ranks = [
        warm_python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
    ]
    command = [*ranks, "lightrft", "bench", *prepare(tmp_path), *PPO, "--max_steps=4"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, last = ran.stdout.splitlines()
    found = json.loads(last)
    assert (
        found["steps"] == 3
        and found["tokens_per_second"] > 0
        and lines[-len(found["lines"]) :] == found["lines"]
    )

    assert (
        0.5 < sum(found["shares"].values()) <= 1.001
        and found["bottleneck"]
        and found["sync_bytes"] > 0
    )
    assert not [
        path
        for path in (tmp_path / "temporary").iterdir()
        if path.name.startswith("lightrft-bench")
    ]
