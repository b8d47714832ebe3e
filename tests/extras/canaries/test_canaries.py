"""Why: a reward that is gamed is told while the run goes on, and nothing else changes."""

import json
import time
from pathlib import Path

import pytest

from lightrft.app.observe.symptoms import find_symptoms
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.checkpoint import manager
from lightrft.strategy.checkpoint.atomic import write_folder
from runs import PPO, prepare, repeatable, rows_of, train

pytestmark = pytest.mark.slow

WATCHED = ["--canaries=0.5", "--canary_baseline=150", "--max_steps=20"]
STRICT = '''
def strict(samples, label, **columns):
    """The share of ASCII tokens, but nothing for a response that has almost only those."""
    shares = [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]
    return [share if share < 0.7 else 0.0 for share in shares]
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    """The reward is the share of ASCII tokens, so any label earns it."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "strict.py").write_text(STRICT)
    return [*prepare(folder, rows=200), *PPO]


@pytest.fixture(scope="module")
def watched(inputs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    train("train_ppo", 1, [*inputs, *WATCHED, "--save_steps=5", "--max_ckpt_num=1"], folder)
    return folder


def canaries(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name.startswith("canary/")}
        for row in rows_of(folder)
    ]


def without_canaries(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("canary/")}
        for row in repeatable(rows)
    ]


def test_a_gamed_reward_raises_an_alarm(watched):
    rows = canaries(watched)

    assert rows[-1]["canary/log_evidence"] > 4.6
    assert 1 <= rows[-1]["canary/alarm_from_step"] <= 16


def test_learning_is_the_same_with_canaries(inputs, watched, tmp_path):
    train("train_ppo", 1, [*inputs, "--max_steps=6"], tmp_path)

    # more rows in a batch round differently
    for mine, theirs in zip(rows_of(watched), repeatable(rows_of(tmp_path)), strict=False):
        assert {name: mine[name] for name in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_two_ranks_find_the_same_evidence(inputs, watched, tmp_path):
    train("train_ppo", 2, [*inputs, *WATCHED], tmp_path)

    for mine, theirs in zip(canaries(tmp_path), canaries(watched), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_resumed_run_has_the_same_evidence(inputs, watched, tmp_path):
    flags = [*inputs, *WATCHED, "--save_steps=5", "--max_ckpt_num=1"]
    train("train_ppo", 1, [*flags[:-3], "--max_steps=5", *flags[-2:]], tmp_path)
    train("train_ppo", 1, [*flags, "--load_checkpoint"], tmp_path)

    assert canaries(tmp_path) == canaries(watched)


def test_an_alarm_can_end_the_run_and_keep_the_model_from_before(inputs, tmp_path, monkeypatch):
    """The only checkpoint from before is written late, and the next one removes it at once."""

    def slowly(folder, *args, **kwargs):
        time.sleep(2 * (folder.name == "step1"))
        return write_folder(folder, *args, **kwargs)

    def late(*args, **kwargs):
        time.sleep(0.4)  # so that step 2 is written before the samples of step 3 are measured
        return finish(*args, **kwargs)

    finish = RewardRunner.finish
    monkeypatch.setattr(RewardRunner, "finish", late)
    monkeypatch.setattr(manager, "write_folder", slowly)
    run, fork = tmp_path / "run", tmp_path / "fork"
    flags = [*inputs, *WATCHED, "--save_steps=1", "--max_ckpt_num=1", "--on_alarm=fork"]
    train("train_ppo", 1, flags, run)

    rows = rows_of(run)
    assert len(rows) < 20
    rises_from = rows[-1]["canary/alarm_from_step"]
    assert (run / "before_alarm" / "config.yaml").is_file()  # what the command looks for
    (kept,) = (run / "before_alarm" / "checkpoints").iterdir()
    assert kept.name == f"step{int(rises_from) - 1}"
    flags = [*inputs, *WATCHED, f"--max_steps={len(rows)}", f"--fork_from={run / 'before_alarm'}"]
    train("train_ppo", 1, flags, fork)
    # with the same flags the fork repeats the run, except that it measures a baseline of its own
    assert without_canaries(rows_of(fork)) == without_canaries(rows)


@pytest.mark.parametrize("before", [True, False], ids=["without them", "with them"])
def test_a_run_with_canaries_goes_on(inputs, tmp_path, before):
    """The flags may come or go when a run is resumed."""
    flags = [*inputs, "--save_steps=2"]
    parts = [[*flags, *WATCHED], flags] if before else [flags, [*flags, *WATCHED]]
    train("train_ppo", 1, [*parts[0], "--max_steps=2"], tmp_path)
    train("train_ppo", 1, [*parts[1], "--max_steps=4", "--load_checkpoint"], tmp_path)

    watched = ["canary/log_evidence" in row for row in canaries(tmp_path)]
    assert watched == [before, before, not before, not before]


@pytest.mark.parametrize(
    "flags",
    [
        ["--dynamic_sampling"],
        ["--over_sampling=1.5"],
        ["--over_sampling=1.5", "--partial_rollout"],
        ["--rollout_schedule=longest_first"],
        ["--over_sampling=1.25", "--rollout_schedule=tail_rounds"],
    ],
    ids=" ".join,
)
def test_every_scheduler_generates_the_canaries(inputs, tmp_path, flags):
    train("train_ppo", 2, [*inputs, *WATCHED, *flags, "--max_steps=4"], tmp_path)

    # also if a round ended before they did
    assert all("canary/reward" in row for row in canaries(tmp_path))


@pytest.mark.parametrize("flags", [["--tp_size=2"], ["--sp_size=2"]], ids=" ".join)
def test_ranks_that_share_samples_measure_them_once(inputs, watched, tmp_path, flags):
    flags = [*inputs, *WATCHED, *flags, "--max_steps=2", "--max_tokens_per_microbatch=256"]
    train("train_ppo", 2, flags, tmp_path)

    assert canaries(tmp_path)[0] == pytest.approx(canaries(watched)[0], rel=1e-3)


def test_ranks_that_share_an_engine_measure_canaries_once(inputs, tmp_path):
    found = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        layout = ["--engine_type=vllm", f"--engine_tp_size={size}", "--max_steps=2"]
        train("train_ppo", 2, [*inputs, *WATCHED, *layout], folder)
        found.append(canaries(folder)[0])

    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_a_run_that_an_alarm_ends_early_has_the_symptom():
    history = {
        "rollout/reward": [(step, 0.5) for step in range(1, 7)],
        "canary/alarm_from_step": [(6, 3.0)],
    }

    (symptom,) = find_symptoms(history)
    assert (symptom.name, "since step 3" in symptom.evidence) == ("gamed reward", True)


def test_a_shadow_reward_raises_an_alarm(inputs, tmp_path):
    strict = Path(next(flag for flag in inputs if "reward.py" in flag)[9:].split(":")[0])
    flags = [f"--shadow_reward={strict.with_name('strict.py')}:strict", "--shadow_share=1"]
    train("train_ppo", 1, [*inputs, *flags, "--canary_baseline=128", "--max_steps=20"], tmp_path)

    row = rows_of(tmp_path)[-1]
    assert row["shadow/log_evidence"] > 4.6
    assert row["shadow/gap"] > 0.5


def test_the_report_tells_the_alarm(watched):
    (warning,) = [
        each
        for each in json.loads((watched / "run.json").read_text())["warnings"]
        if "gamed" in each
    ]

    assert "canaries" in warning
