"""A killed run continues as if nothing happened: the metrics of the second half are bit-identical."""

import os
import signal
import subprocess
import sys
import time

import pytest

from runs import PPO, prepare, repeatable, rows_of, train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
KILLING_REWARD = '''
import os, signal
calls = 0
def killing(samples, label, **columns):
    """Kill this process without a word while it judges the step that the environment names."""
    global calls
    calls += 1
    if calls == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]
'''


REMEMBERS = ["--reward_running_norm", "--use_kl_loss=false", "--init_kl_coef=0.1", "--kl_target=1e-4", "--kl_horizon=50"]
"""What goes on from step to step beside the models: moments of all rewards, a coefficient that moves."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    (folder / "killing.py").write_text(KILLING_REWARD)
    return [*flags, f"--reward={folder / 'killing.py'}:killing", "--save_steps=2"]


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_killed_run_continues_with_the_same_numbers(inputs, tmp_path, monkeypatch, engine):
    """Killed in step 4, after the checkpoint of step 2; 24 rows and batches of 8, so step 4 begins the second pass."""
    flags = [*inputs, *PPO, f"--engine_type={engine}", "--max_steps=6", "--train_batch_size=16", "--lr_scheduler=cosine"]
    flags += REMEMBERS
    whole = train("train_ppo", 2, flags, tmp_path / "whole")
    monkeypatch.setenv("KILL_AT", "4")
    with pytest.raises(RuntimeError, match="ended with -9"):
        train("train_ppo", 2, flags, tmp_path / "killed")
    assert len(rows_of(tmp_path / "killed")) == 3
    monkeypatch.delenv("KILL_AT")
    resumed = train("train_ppo", 2, [*flags, "--load_checkpoint"], tmp_path / "killed")
    assert repeatable(resumed) == repeatable(whole)
    assert len({row["rollout/kl_coef"] for row in whole}) == 6


def test_changed_data_order_is_an_error(inputs, tmp_path):
    flags = [*inputs, *PPO, "--max_steps=2"]
    train("train_ppo", 1, flags, tmp_path)
    with pytest.raises(RuntimeError, match="data order"):
        train("train_ppo", 1, [*flags, "--load_checkpoint", "--seed=7"], tmp_path)


@pytest.mark.slow
def test_interrupt_saves_and_resumes(inputs, tmp_path):
    """Ctrl-C under torchrun: every rank stops at the same step, a checkpoint is there, the run goes on from it."""
    flags = [*inputs, *PPO, "--save_steps=-1", f"--save_path={tmp_path}"]
    run = subprocess.Popen(
        [*TORCHRUN, "-m", "lightrft.cli.train_ppo", *flags],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists() or not rows_of(tmp_path):
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()[1]
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "interrupted by SIGINT" in errors and "--load_checkpoint" in errors
    done = rows_of(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoints" / f"step{done}").is_dir()
    rows = train("train_ppo", 2, [*inputs, *PPO, "--save_steps=-1", "--load_checkpoint", f"--max_steps={done + 2}"], tmp_path)
    assert [row["step"] for row in rows] == list(range(1, done + 3))
