"""Trials of Harbor, unmodified, with the agent terminus-2 and processes of this machine.

It runs where the program harbor is (Python 3.12, HARBOR names it), with the rights to make
namespaces.
"""

import json
import os
import shutil
import time

import psutil
import pytest

from lightrft.config.errors import DataError
from lightrft.core.samples import Prompt, Sample
from lightrft.data.readers import BadRows, read_rows
from lightrft.extras.agents.adapters.harbor.trials import program
from lightrft.rewards.functions import environment
from player import Player, ids

HARBOR = shutil.which(os.environ.get("HARBOR", "harbor"))
pytestmark = pytest.mark.slow
needs_harbor = pytest.mark.skipif(
    HARBOR is None, reason="the program harbor is neither in PATH nor in HARBOR"
)
TASK = """
schema_version = "1.4"
[verifier]
environment_mode = "shared"
[environment]
os = "linux"
"""
TEST = """#!/bin/bash
grep -qx hello /app/hello.txt && echo 1 > /logs/verifier/reward.txt || echo 0.25 > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    task = tmp_path_factory.mktemp("tasks") / "hello"
    for name in ("environment", "tests"):
        (task / name).mkdir(parents=True)
    (task / "task.toml").write_text(TASK)
    (task / "instruction.md").write_text("Write hello into /app/hello.txt.")
    (task / "environment" / "Dockerfile").write_text("FROM debian\n")
    (task / "tests" / "test.sh").write_text(TEST)
    return task.parent


def turn(keys="", *, done=False):
    commands = [{"keystrokes": keys, "duration": 0.5}] if keys else []
    text = {"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}
    return json.dumps(text) + "$"


def trials():
    limits = {"longest": 50_000, "prompt_max_len": 20_000, "max_turns": 4}
    return Player("harbor:tasks?env=process", chat=True, environment_workers=3, **limits)


def rows_of(folder):
    bad = BadRows(False, "--prompt_data")
    return [row for _, row in read_rows(f"harbor:{folder}", "train", bad)]


def test_tasks_are_rows(folder):
    (row,) = rows_of(folder)
    assert row == {"input": "Write hello into /app/hello.txt.", "task": str(folder / "hello")}
    with pytest.raises(DataError, match="no task of Harbor"):
        rows_of(folder / "hello")


@needs_harbor
def test_trials_are_episodes(folder):
    """One agent solves the task, one does not, and one is cut by a limit of the run."""
    player = trials()
    solved, wrong, limited, other = player.play(
        [
            [turn("echo hello > /app/hello.txt\n"), turn(done=True), turn(done=True)],
            [turn("echo no\n"), turn(done=True), turn(done=True)],
            [turn("echo hello\n")] * 4,
            [],
        ],
        rows=[*rows_of(folder) * 3, {}],
        seconds=240,
    )
    player.episodes.close()

    assert [each.episode.problem for each in (solved, wrong)] == ["", ""]
    assert environment([solved, wrong]) == [1.0, 0.25]
    assert solved.episode.num_turns == 3 and solved.episode.drift == 0 and solved.rows == [solved]
    assert limited.truncated and limited.episode.problem == "" and limited.episode.num_turns == 4
    assert other.masked and "--prompt_data harbor:NAME" in other.episode.problem
    assert not os.path.exists("/app/hello.txt")


@needs_harbor
def test_an_aborted_trial_leaves_no_process(folder):
    """The rank kills the episode, and with it Harbor, the terminal, and the holder of both."""
    player = trials()
    row = {"input": "x", "task": str(folder / "hello")}
    player.episodes.begin(Sample(Prompt(0, "p", ids("p"), row), 0, [], [], "", ""), 0, 0)
    until = time.monotonic() + 60
    while not (ready := player.episodes.poll(0.05)):
        assert time.monotonic() < until

    started = psutil.Process(ready[0].worker.process).children(recursive=True)
    assert {"unshare", "sleep"} <= {process.name() for process in started}
    player.episodes.close()
    _, left = psutil.wait_procs(started, timeout=20)
    assert left == []


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("HARBOR", "no-such-program")
    with pytest.raises(ValueError, match="there is no program harbor: install it with Python 3.12"):
        program("tasks", None)
