"""A run says so if it learns nothing, or if its engine has other weights than its trainer."""

import json
import math
from pathlib import Path

import pytest
import torch
from loguru import logger

from lightrft.app.run.health import ENOUGH, Health
from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.build import ppo_trainer
from lightrft.app.trainer.build_data import steps_of_epochs
from lightrft.config import Config, parse, resolve
from lightrft.strategy import get_strategy
from ranks import run_ranks
from runs import PPO, prepare, rows_of, train

NOTHING_LEARNED = """
import torch

def nothing(samples, label, **columns):
    return [0.25] * len(samples)

def broken(logprobs, old_logprobs, advantages):
    return logprobs * float("nan"), {}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = prepare(folder)
    (folder / "bad.py").write_text(NOTHING_LEARNED)
    return [*flags, *PPO], folder / "bad.py"


@pytest.fixture
def log(tmp_path):
    sink = logger.add(tmp_path / "log", format="{message}")
    yield tmp_path / "log"
    logger.remove(sink)


def health(**settings) -> Health:
    config = Config()
    for name, value in settings.items():
        setattr(config.algorithm if name == "distill_coef" else config.train, name, value)
    return Health(config, torch.float32, logs=True)


HISTORIES = Path(__file__).parent.parent / "observe" / "histories.json"


def test_a_symptom_is_told_once_while_the_run_goes_on(log):
    """The recorded run had a reward that counts tokens, and its responses grew."""
    metrics = json.loads(HISTORIES.read_text())["length drift"]
    num_steps = len(metrics["rollout/reward"])
    checks = health()
    for index in range(num_steps):
        row = {name: values[index] for name, values in metrics.items() if len(values) == num_steps}
        checks.check_step(index + 1, row)

    assert log.read_text().count("length drift: rollout/response_length grew from") == 1
    assert sum("length drift" in warning for warning in checks.warnings) == 1


# -- length


def steps_of(num_rows: int, command: str = "train_sft", **flags) -> tuple[int, Config]:
    config = Config.of(pretrain="m", prompt_data="d.jsonl", **flags)
    resolve(config, command, 1)
    return steps_of_epochs(config, num_rows, generates=command == "train_ppo"), config


@pytest.mark.parametrize("max_steps, steps, said", [(20, 6, True), (6, 6, False), (None, 6, False)])
def test_a_run_whose_epochs_end_before_max_steps_says_so(log, max_steps, steps, said):
    found, _ = steps_of(12, num_episodes=2, train_batch_size=4, max_steps=max_steps)
    assert found == steps
    warning = "--max_steps 20 is not reached: --num_episodes 2 of 12 rows ends after 6 steps"
    assert (warning in log.read_text()) == said


@pytest.mark.parametrize(
    ("rows", "command", "flags", "size", "steps"),
    [
        (200, "train_sft", {}, 8, 75),
        (10_000, "train_sft", {}, 64, 468),
        (200, "train_dpo", {}, 8, 75),
        (200, "train_kto", {"num_episodes": 1}, 4, 50),
        (20, "train_sft", {}, 4, 15),
        (200, "train_sft", {"train_batch_size": 64}, 64, 9),
        (200, "train_sft", {"max_steps": 5}, 64, 5),
        (50, "train_sft", {"max_steps": 1}, 32, 1),
        (10, "train_kto", {"num_episodes": 1000}, 8, 1250),
        (3, "train_sft", {}, 2, 4),
        (3, "train_ppo", {}, 2, 1),
        (200, "train_ppo", {}, 4, 50),
        (7473, "train_ppo", {}, 128, 58),
        (200, "train_ppo", {"rollout_batch_size": 32}, 32, 6),
        (200, "train_ppo", {"train_batch_size": 64}, 8, 25),
    ],
)
def test_a_batch_that_nobody_set_suits_the_data(log, rows, command, flags, size, steps):
    if command == "train_ppo":
        flags = {"engine_type": "hf", "reward": "exact_match"} | flags
    found, config = steps_of(rows, command, **flags)
    name = "rollout_batch_size" if command == "train_ppo" else "train_batch_size"
    assert (getattr(config, name), found) == (size, steps)
    if command == "train_ppo" and "train_batch_size" not in flags:
        assert config.train_batch_size == size * config.n_samples_per_prompt

    said = log.read_text()
    default = {"train_sft": 64, "train_ppo": 128}.get(command, 32)
    chosen = name not in flags and size < default
    assert (f"--{name} is {size} instead of" in said) == chosen
    assert ("in which a model learns little" in said) == (steps < 20 and "max_steps" not in flags)


def test_rows_that_no_step_learns_from_are_counted(log):
    steps_of(203, num_episodes=1, train_batch_size=8)
    assert "3 of 203 rows are left over at the end" in log.read_text()
    steps_of(203, num_episodes=8, train_batch_size=8)
    steps_of(203, num_episodes=1, train_batch_size=8, max_steps=4)
    assert log.read_text().count("left over") == 1


@pytest.mark.parametrize("command, rate", [("train_kto", 5e-6), ("train_sft", 1e-4)])
def test_adapters_have_a_larger_default_rate(command, rate):
    _, config = steps_of(100, command, lora_rank=8)
    assert config.learning_rate == pytest.approx(rate)
    _, config = steps_of(100, command, lora_rank=8, learning_rate=1e-3)
    assert config.learning_rate == 1e-3


# -- signal


def test_equal_rewards_are_said_in_each_step_and_at_the_end(inputs, tmp_path, log):
    flags, bad = inputs
    train("train_ppo", 1, [*flags, f"--reward={bad}:nothing", "--max_steps=2"], tmp_path / "run")
    said = log.read_text()
    for step in (1, 2):
        assert f"step {step}: all rewards are 0.25, so it has no training signal" in said
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["status"] == "finished" and len(described["warnings"]) == 1
    assert "none of the 2 reported steps had a training signal" in described["warnings"][0] in said
    assert rows_of(tmp_path / "run")[0]["rollout/groups_without_signal"] == 1.0
    assert "none of the 2 reported steps" in (tmp_path / "run" / "report.html").read_text()


def row(low: float, high: float, advantage: float | None) -> dict[str, float]:
    made = {
        "rollout/reward": (low + high) / 2,
        "rollout/reward_min": low,
        "rollout/reward_max": high,
    }
    return made if advantage is None else made | {"rollout/advantage_abs": advantage}


def test_a_run_without_a_signal_does_not_say_so_in_every_step(log):
    checks = health()
    for step in range(1, 51):
        checks.check_step(step, row(0.0, 0.0, 0.0))
    said = [line for line in log.read_text().splitlines() if "no training signal" in line]
    assert (
        len(said) == 3
        and "step 10: all rewards are 0, so it has no training signal; 10 steps had none so far"
        in said[-1]
    )


@pytest.mark.parametrize("truncated, said", [(1.0, True), (0.2, False)])
def test_a_step_without_a_signal_says_that_its_responses_are_cut_off(log, truncated, said):
    health().check_step(1, row(0.0, 0.0, 0.0) | {"rollout/truncated": truncated})
    advice = f"{truncated:.0%} of the responses are cut off: raise --generate_max_len"
    assert (advice in log.read_text()) == said


def test_what_counts_as_a_signal(log):
    found = health()
    found.check_step(1, row(0.0, 1.0, 0.0))  # groups differ, but none in itself
    found.check_step(2, row(0.0, 1.0, None))  # everything is left out
    assert (
        found.steps_without_signal == 2
        and "step 1: all rewards of each group are equal" in log.read_text()
    )
    found.check_step(3, row(0.0, 1.0, 0.5))
    found.check_end(3, taken=3, skipped=0)
    assert found.warnings == [] and found.steps_with_signal == 1
    taught = health(distill_coef=1.0)
    taught.check_step(1, row(0.0, 0.0, 0.5))  # what a teacher says is a signal
    taught.check_step(2, {"train/loss": 1.0})  # supervised
    assert (taught.steps_with_signal, taught.steps_without_signal) == (1, 0)


def test_a_run_whose_every_update_was_skipped_is_an_error(inputs, tmp_path):
    flags, bad = inputs
    with pytest.raises(RuntimeError, match="was not trained: all 2 optimizer steps were skipped"):
        train(
            "train_ppo",
            1,
            [*flags, f"--policy_loss={bad}:broken", "--max_steps=2"],
            tmp_path / "run",
        )

    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["status"] == "failed"
    assert described["warnings"] == [
        "2 optimizer steps were skipped, because the gradient norm was not finite"
    ]


# -- mismatch


def gap(mean: float) -> dict[str, float]:
    return {"engine/logprob_mismatch": mean, "engine/logprob_mismatch_max": 10 * mean}


def alarms(values: list[float], **settings) -> list[int]:
    found = health(**settings)
    return [step for step, value in enumerate(values, 1) if found.check_step(step, gap(value))]


def test_a_mismatch_far_above_its_history_is_an_alarm():
    usual = [1e-6, 2e-6, 1.5e-6, 1e-6, 3e-6]
    assert alarms([*usual, 1e-2, 2e-6]) == [6], "one stale weight"
    assert alarms([*usual, math.nan]) == [6]
    assert alarms([*usual, 9e-5]) == [], "as much as rounding explains"
    assert alarms([5e-3] * 8) == [], "its own history, as of other kernels"
    assert alarms([1e-6 * 1.2**step for step in range(40)]) == [], (
        "a slow rise, as of a policy that sharpens"
    )
    assert alarms([1e-6] * (ENOUGH - 1) + [5e-3]) == [], "too few steps to know"


def test_a_mismatch_that_nothing_explains_is_an_alarm_from_the_first_step(log):
    assert alarms([0.028] * 6) == [1, 2, 3, 4, 5, 6]
    assert (
        "step 1: the log-probs of engine and trainer differ by 0.028 on average" in log.read_text()
    )
    found = health()
    found.config.rollout.max_staleness = 1
    assert not found.check_step(1, gap(0.028)), "the samples are older than the weights"


def test_eight_bits_explain_what_float32_does_not():
    config = Config.of(rollout_quantization="int8")
    found = Health(config, torch.float32, logs=True)
    assert not any(found.check_step(step, gap(0.028)) for step in range(1, 7))
    assert found.check_step(7, gap(0.6))


def test_mismatch_limit_ends_the_run():
    found = health(mismatch_limit=0.1)
    assert not found.check_step(1, gap(0.09))
    for worse in (0.11, math.nan):
        with pytest.raises(RuntimeError, match="step 2: .* more than --mismatch_limit 0.1 allows"):
            found.check_step(2, gap(worse))


def stale_once(flags: list[str], folder: Path, step: int) -> list[int | None]:
    """Train, and let the engine say other log-probs in one step.

    Return the round in which each load of weights is verified.
    """
    config = prepare_config("train_ppo", parse([*flags, f"--save_path={folder}"]))
    strategy = get_strategy(config)
    strategy.setup_distributed()
    trainer = ppo_trainer(config, strategy)
    score = trainer.rollout.score
    load_weights = strategy.engine.load_weights
    rounds = []

    def rewarded(groups):
        samples = score(groups)
        if len(rounds) == step:
            for sample in samples:
                sample.logprobs = [value - 0.5 for value in sample.logprobs]
        return samples

    def load(stream, version):
        rounds.append(strategy.engine.verify_round)
        load_weights(stream, version)

    trainer.rollout.score = rewarded
    strategy.engine.load_weights = load
    trainer.fit()
    strategy.close()
    return rounds


def test_an_alarm_has_every_weight_verified_at_the_next_sync(inputs, tmp_path, log):
    flags, _ = inputs
    (rounds,) = run_ranks(1, stale_once, [*flags, "--max_steps=8"], tmp_path / "run", 6)
    # the first verification, of everything, was before the first step
    assert rounds == [1, 2, 3, 4, 5, 6, None, 1]
    said = log.read_text()
    assert (
        said.count("far more than") == 1
        and "step 6: the log-probs of engine and trainer differ by 0.5 on average" in said
    )
    assert "the next weight sync verifies every weight" in said
