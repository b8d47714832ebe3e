"""Why: to try another setting from step 500 on, nobody should repeat the first 500 steps."""

import json

import pytest

from app.trainer.planted import run_all
from lightrft.config import parse
from lightrft.config.errors import ConfigError
from lightrft.config.paths import check_paths
from lightrft.extras.commands.debug import report
from ranks import run_ranks
from runs import PPO, prepare, repeatable, rows_of, train

pytestmark = pytest.mark.slow

REMEMBERS = ["--reward_running_norm", "--init_kl_coef=0.1", "--use_kl_loss=false", "--kl_target=1"]
FLAGS = [*PPO, *REMEMBERS, "--rollout_batch_size=4", "--train_batch_size=8", "--max_steps=4"]
SAVES = ["--save_steps=1", "--max_ckpt_num=9"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write a run, equal forks, and forks with other flags."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*prepare(folder), *FLAGS]
    fork = f"--fork_from={folder / 'run'}"
    forks = {
        "equal": [fork, "--at=2"],
        "newest": [fork, "--max_steps=5"],
        "rate": [fork, "--at=2", "--actor_learning_rate=1e-3"],
        "free": [fork, "--at=2", "--seed=7", "--n_samples_per_prompt=2", "--max_epochs=2"],
        "of_fork": [f"--fork_from={folder / 'equal'}", "--at=3"],
    }
    planned = [(str(folder / "run"), [*flags, *SAVES], "")]
    planned += [
        (str(folder / name), [*flags, *SAVES, *changes], "") for name, changes in forks.items()
    ]
    run_ranks(1, run_all, planned)
    # A fork that was interrupted goes on from its own checkpoint.
    resumed = [*flags, *SAVES, *forks["rate"], "--load_checkpoint", "--max_steps=5"]
    run_ranks(1, run_all, [(str(folder / "rate"), resumed, "")])

    return folder, flags


@pytest.mark.parametrize("name", ["equal", "of_fork"])
def test_a_fork_with_equal_flags_has_the_bits_of_the_run(runs, name):
    folder, _ = runs
    assert repeatable(rows_of(folder / name)) == repeatable(rows_of(folder / "run"))
    files = "digests.jsonl", "model/model.safetensors"
    for file in files:
        assert (folder / name / file).read_bytes() == (folder / "run" / file).read_bytes()


def test_a_fork_has_other_numbers_from_its_step_on(runs):
    folder, _ = runs
    run, rate = (repeatable(rows_of(folder / name)) for name in ("run", "rate"))
    assert rate[:2] == run[:2] and rate[2:4] != run[2:4]
    assert [row["step"] for row in rate] == [1, 2, 3, 4, 5]
    assert rate[2]["train/learning_rate"] == 1e-3
    assert [row["step"] for row in rows_of(folder / "newest")] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows_of(folder / "free")] == [1, 2, 3, 4]
    described = json.loads((folder / "rate" / "run.json").read_text())
    assert described["forked_from"] == str(folder / "run")
    assert described["run"] != json.loads((folder / "run" / "run.json").read_text())["run"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--at=9"], "step9 is not a complete checkpoint: .* has step1, step2, step3, step4"),
        (["--at=2", "--rollout_batch_size=8"], "--fork_from: .*--rollout_batch_size was 4, is 8"),
    ],
)
def test_what_cannot_be_forked_is_said(runs, tmp_path, flags, message):
    folder, common = runs
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        train("train_ppo", 1, [*common, f"--fork_from={folder / 'run'}", *flags], tmp_path / "run")


def test_the_report_compares_forks_side_by_side(runs, tmp_path):
    folder, _ = runs
    page = tmp_path / "page.html"
    report.main([str(folder / "run"), str(folder / "rate"), "--out", str(page)])
    text = page.read_text()
    names = ("rollout/reward", "rollout/kl", "rollout/response_length", "train/entropy")
    for name in (*names, "--learning_rate", "--at"):
        assert name in text, name


def test_a_folder_without_a_run_is_named_at_once(tmp_path):
    flags = [*prepare(tmp_path), f"--fork_from={tmp_path}"]
    with pytest.raises(ConfigError, match="it is not the folder of a run: it has no config.yaml"):
        check_paths(parse(flags, "train_ppo"), "train_ppo")
