"""Why: a user's estimator reads columns of the data, and a user's loss says what it depends on."""

import json
import math
from pathlib import Path

import pytest

from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.terms import policy_objective
from lightrft.algorithms.unread import unread_flags
from lightrft.cli import train_ppo
from lightrft.config import AlgorithmSection, RewardSection
from lightrft.core.samples import Prompt, Sample
from lightrft.stages.compare import compare_rewards
from ranks import run_ranks
from runs import PPO, prepare

OWN = """
from lightrft.algorithms.policy_loss import policy_losses

def weighed(rewards, groups, *, difficulty, gamma, bonus=1.0):
    return rewards * difficulty * bonus

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
def own(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN)
    return file


def compared(own: str) -> list[float]:
    """Compare two responses of each rank, of which the first has rewards of two steps."""
    from lightrft.parallel.mesh import world_axis

    axis = world_axis()
    prompt = Prompt(axis.rank, "?", [1], columns={"difficulty": 0.5 + axis.rank})
    samples = [Sample(prompt, axis.rank, [1, 2], [-1.0, -1.0], "", "stop") for _ in range(2)]
    samples[0].token_rewards = [3.0, 5.0]
    samples[1].reward = 7.0
    section = AlgorithmSection(advantage_estimator=f"{own}:weighed")
    compare = compare_rewards(section, RewardShaper(RewardSection(), longest=2), {})
    return compare(compare.gather(axis, samples, first_row=2 * axis.rank)).tolist()


def test_a_column_of_the_data_reaches_an_estimator_with_each_reward_of_all_ranks(own):
    expected = [0.5 * 3, 0.5 * 5, 0.5 * 7, 1.5 * 3, 1.5 * 5, 1.5 * 7]
    assert run_ranks(2, compared, str(own)) == [expected, expected]


@pytest.mark.parametrize("value", [None, "hard", math.nan, [1]])
def test_a_row_without_a_number_is_named_before_a_model_is_loaded(tmp_path, own, capfd, value):
    flags = prepare(tmp_path)
    file = next(flag.partition("=")[2] for flag in flags if flag.startswith("--prompt_data="))
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    rows = [row | ({} if value is None else {"difficulty": value}) for row in rows]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as ended:
        train_ppo.main([*PPO, *flags, f"--advantage_estimator={own}:weighed"])
    said = capfd.readouterr().err
    assert ended.value.code == 2 and "loading" not in said
    place = f"the column 'difficulty', and {Path(file).name}:1 has {value!r}"
    assert place in said.replace(str(Path(file).parent) + "/", "")


@pytest.mark.parametrize(
    ("name", "depends"), [("by_token", "token"), ("by_sequence", "sequence"), ("unknown", "batch")]
)
def test_a_loss_of_a_user_says_what_it_depends_on(own, name, depends):
    section = AlgorithmSection(policy_loss=f"{own}:{name}")

    class Batch:
        old_logprobs = object()

    assert policy_objective(section).reach(Batch()) == depends
    notices = [line for line in unread_flags(section) if "gradients wait" in line]
    assert len(notices) == (depends == "batch")


def test_another_word_is_refused(own):
    with pytest.raises(ValueError, match="per='word' is none of token, sequence, batch"):
        policy_objective(AlgorithmSection(policy_loss=f"{own}:wrong"))
