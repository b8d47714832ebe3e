"""Why: a step can take ten minutes, and a log that says nothing meanwhile looks like a hang."""

import re
import time

import pytest
from loguru import logger

from lightrft.app.observe import progress
from lightrft.app.observe.progress import progress_lines
from runs import PPO, prepare, train


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.05)
    sink = logger.add(tmp_path / "log", format="{message}")
    yield tmp_path / "log"
    logger.remove(sink)


def test_a_step_that_takes_long_has_lines_and_short_ones_have_none(log):
    steps = iter(range(100))
    with progress_lines(lambda: f"step {next(steps)}: train", shown=True):
        time.sleep(0.35)
    assert log.read_text() == ""

    with progress_lines(lambda: "step 1: generate", shown=True):
        time.sleep(0.55)
    assert set(log.read_text().splitlines()) == {"step 1: generate"}
    with progress_lines(lambda: "step 2: generate", shown=False):
        time.sleep(0.25)
    assert "step 2" not in log.read_text()


def test_a_run_says_how_many_responses_it_has(log, tmp_path):
    flags = [*prepare(tmp_path), *PPO, "--generate_max_len=110", "--max_steps=1"]
    train("train_ppo", 1, flags, tmp_path / "run")
    found = re.findall(
        r"^step 1: generate, (\d+) of 32 responses, \d+ tokens/s$", log.read_text(), re.M
    )
    assert found, log.read_text()


CELL = """
import time
from lightrft.app.observe import progress
from lightrft.app.run.logs import log_unless_set_up
log_unless_set_up()
progress.SECONDS_OF_SILENCE = 0.05
with progress.progress_lines(lambda: "step 1: train", shown=True):
    time.sleep(0.5)
"""


def test_a_cell_of_a_notebook_has_the_lines_while_it_runs():
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        said = []
        client.execute_interactive(CELL, timeout=60, output_hook=said.append)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)

    texts = [each["content"]["text"] for each in said if each["msg_type"] == "stream"]
    assert sum("step 1: train" in text for text in texts) > 1, said
