"""Why: a user's estimator reads columns of the data, and a user's loss says what it depends on."""

import json
import math
from pathlib import Path

import pytest

from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.stages.compare import compare_rewards
from lightrft.algorithms.terms import policy_objective
from lightrft.algorithms.unread import unread_columns, unread_flags
from lightrft.app.cli import MAINS
from lightrft.config import AlgorithmSection, RewardSection
from lightrft.core.samples import Prompt, Sample
from ranks import run_ranks
from runs import PPO, prepare

OWN = """
from lightrft.algorithms.policy_loss import policy_losses

def weighed(rewards, groups, *, difficulty, gamma, bonus=1.0):
    return rewards * difficulty * bonus

def of_rewards(rewards, groups, *, reward):
    return rewards * reward

@policy_losses.register("by_token", per="token")
def by_token(logprobs, old_logprobs, advantages):
    return -(logprobs - old_logprobs).exp() * advantages, {}

def by_sequence(logprobs, old_logprobs, advantages, *, batch):
    return by_token(logprobs, old_logprobs, advantages)

by_sequence.properties = {"per": "sequence"}

def unknown(logprobs, old_logprobs, advantages):
    return by_token(logprobs, old_logprobs, advantages)

def wrong(logprobs, old_logprobs, advantages):
    return by_token(logprobs, old_logprobs, advantages)

wrong.properties = {"per": "word"}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN)
    return file


def compared(path: str) -> list[float]:
    """Compare two responses of each rank, of which the first has rewards of two steps."""
    from lightrft.models.parallel.mesh import world_axis

    axis = world_axis()
    prompt = Prompt(axis.rank, "?", [1], columns={"difficulty": 0.5 + axis.rank})
    samples = [Sample(prompt, axis.rank, [1, 2], [-1.0, -1.0], "", "stop") for _ in range(2)]
    samples[0].token_rewards = [3.0, 5.0]
    samples[1].reward = 7.0
    section = AlgorithmSection(advantage_estimator=f"{path}:weighed")
    compare = compare_rewards(section, RewardShaper(RewardSection(), longest=2), {})
    return compare(compare.gather(axis, samples, first_row=2 * axis.rank)).tolist()


def test_a_column_of_the_data_reaches_an_estimator_with_each_reward_of_all_ranks(path):
    expected = [0.5 * 3, 0.5 * 5, 0.5 * 7, 1.5 * 3, 1.5 * 5, 1.5 * 7]
    assert run_ranks(2, compared, str(path)) == [expected, expected]


def refused(folder: Path, difficulties: list, estimator: str, capfd) -> str:
    """Return what a run says that ends before a model is loaded. A row of data has each value."""
    flags = prepare(folder)
    file = next(flag.partition("=")[2] for flag in flags if flag.startswith("--prompt_data="))
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    rows = [
        row | ({} if value is None else {"difficulty": value})
        for row, value in zip(rows, difficulties, strict=False)
    ]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as ended:
        MAINS["train_ppo"]([*PPO, *flags, f"--advantage_estimator={estimator}"])
    said = capfd.readouterr().err
    assert ended.value.code == 2 and "loading" not in said
    return said.replace(str(Path(file).parent) + "/", "")


@pytest.mark.parametrize("value", [None, "hard", math.nan, [1]])
def test_a_column_without_numbers_is_named_before_a_model_is_loaded(tmp_path, path, capfd, value):
    said = refused(tmp_path, [value] * 8, f"{path}:weighed", capfd)
    assert "train.jsonl:1: " in said and f"the column 'difficulty', and it is {value!r}" in said


def test_a_single_row_without_a_number_is_named_too(tmp_path, path, capfd):
    said = refused(tmp_path, [1.0] * 5 + [None, 1.0, 1.0], f"{path}:weighed", capfd)
    assert "train.jsonl:6: " in said and "train.jsonl:5: " not in said


def test_a_column_of_the_rewards_is_not_one_of_the_data(tmp_path, path, capfd):
    """Why: numbers of the data replaced the rewards."""
    said = refused(tmp_path, [1.0] * 8, f"{path}:of_rewards", capfd)
    assert "of_rewards asks for the column 'reward' of the data" in said


def test_a_parameter_with_a_default_does_not_read_the_data_and_that_is_said(path):
    section = AlgorithmSection(advantage_estimator=f"{path}:weighed")
    row = {"difficulty": 1.0, "bonus": 2.0, "gamma": 3.0}
    (notice,) = unread_columns(section, row)
    assert "the column 'bonus' of the data is not read" in notice


@pytest.mark.parametrize(
    ("name", "depends"), [("by_token", "token"), ("by_sequence", "sequence"), ("unknown", "batch")]
)
def test_a_loss_of_a_user_says_what_it_depends_on(path, name, depends):
    section = AlgorithmSection(policy_loss=f"{path}:{name}")

    class Batch:
        old_logprobs = object()

    assert policy_objective(section).reach(Batch()) == depends
    notices = [line for line in unread_flags(section) if "gradients wait" in line]
    assert len(notices) == (depends == "batch")


def test_another_word_is_refused(path):
    with pytest.raises(ValueError, match="per='word' is none of token, sequence, batch"):
        policy_objective(AlgorithmSection(policy_loss=f"{path}:wrong"))
