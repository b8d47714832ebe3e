"""Why: a trial that was paused must be the run that it would have been, or its value means nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from lightrft.__main__ import main  # noqa: E402
from lightrft.app.observe.sinks import read_rows  # noqa: E402
from lightrft.config.command_line import load  # noqa: E402
from lightrft.config.resolve import resolve  # noqa: E402
from lightrft.config.values import read_object  # noqa: E402
from runs import PPO, prepare, repeatable, train  # noqa: E402

STEPS = 9


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    # a schedule that pauses would change if it counted the steps of a part of the run
    schedule = ["--lr_scheduler=cosine", "--lr_warmup_ratio=0.3", f"--max_steps={STEPS}"]
    data = [f"--eval_data={folder / 'train.jsonl'}", "--max_eval_samples=4"]
    others = [flag for flag in PPO if "learning_rate" not in flag]
    return [*prepare(folder), *others, *schedule, *data, "--reward_workers=0", "--trace_steps=0"]


def words(flags: list[str], out: Path) -> list[str]:
    over = ["--over", "learning_rate=1e-3,3e-2", "--trials=2", f"--out={out}"]
    return ["tune", *flags, *over]


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_to_the_bit(flags, tmp_path, capsys):
    out = tmp_path / "tune"
    command = [sys.executable, "-m", "lightrft", *words(flags, out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ, text=True)
    while process.poll() is None and not read_rows(out / "trial_001" / "metrics.jsonl"):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "the same command continues" in process.communicate(timeout=200)[1]
    assert process.returncode == 130

    main(words(flags, out))
    printed = capsys.readouterr().out
    assert "2 trials" in printed and "--seeds 2 says how sure that is" in printed
    runs = [out / "trial_000", out / "trial_001"]
    best = max(runs, key=lambda folder: len(read_rows(folder / "metrics.jsonl")))
    rate = load(best / "config.yaml").learning_rate
    assert read_object(best / "run.json")["status"] == "finished"
    assert read_object(next(each for each in runs if each != best) / "run.json")["status"] == (
        "interrupted"
    )

    more = [f"--learning_rate={rate}", "--eval_steps=1", "--load_checkpoint", "--max_ckpt_num=1"]
    whole = train("train_ppo", 1, [*flags, *more], tmp_path / "whole")
    assert repeatable(read_rows(best / "metrics.jsonl")) == repeatable(whole)
    config = load(out / "best.yaml")
    resolve(config, "train_ppo", 1)
    assert (config.learning_rate, config.save_path) == (rate, str(out / "best"))
