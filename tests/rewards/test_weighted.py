"""Several rewards with weights: their sum and components, the choice by a column, and errors."""

import pytest

from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.stages.compare import compare_rewards
from lightrft.config import AlgorithmSection, Config, ConfigError, RewardSection, reward_terms
from lightrft.config.references import reward_weights
from lightrft.models.parallel.collectives import Axis
from lightrft.rewards.runner import RewardRunner
from rewards.test_rewards import sample

FUNCTIONS = """
def length(samples, **columns):
    return [len(s.text) for s in samples]

def vowels(samples, **columns):
    return [{"a": s.text.count("a"), "e": s.text.count("e")} for s in samples]

def per_token(samples, **columns):
    return [[None, 2.0] for s in samples]

def fine(samples, label, **columns):
    return [float(s.text == right) for s, right in zip(samples, label)]

def too_few(samples, **columns):
    return [1.0]

def no_number(samples, **columns):
    return ["high" for s in samples]
"""


@pytest.fixture
def file(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


def rewarded(terms: str, *samples, workers: int = 0, **settings):
    runner = RewardRunner(terms, section=RewardSection(reward_workers=workers, **settings))
    runner.check([each.prompt for each in samples])
    runner(list(samples))
    return [(each.reward, each.reward_components) for each in samples]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("exact_match", [("exact_match", "exact_match", 1.0)]),
        ("a:0.8, b:.2", [("a", "a", 0.8), ("b", "b", 0.2)]),
        ("m:f:-1,x.py:g", [("f", "m:f", -1.0), ("g", "x.py:g", 1.0)]),
        ("short=pack.mod:length:1e-3", [("short", "pack.mod:length", 1e-3)]),
        ("http://h:8000", [("server", "http://h:8000", 1.0)]),
        ("http://h:8000:0.5", [("server", "http://h:8000", 0.5)]),
        (
            "judge=https://h/score?x=1:2,http://g:1/s",
            [("judge", "https://h/score?x=1", 2.0), ("server", "http://g:1/s", 1.0)],
        ),
    ],
)
def test_terms(text, terms):
    found = reward_terms(text)
    assert [(term.label, term.name, term.weight) for term in found] == terms
    assert reward_terms(",".join(map(str, found))) == found, (
        "what is written for a worker is read as the same"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,,b", "empty term"),
        ("a,m:a", "two rewards are called a"),
        ("http://h:80/s:much", "the weight 'much' is not a number"),
    ],
)
def test_wrong_terms_are_named(text, says):
    with pytest.raises(ValueError, match=says):
        reward_terms(text)


def test_a_list_is_the_same_as_commas():
    assert (
        Config.of(reward=["gsm8k:0.8", "exact_match:0.2"]).reward.reward
        == "gsm8k:0.8,exact_match:0.2"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_the_reward_is_the_weighted_sum(file, workers):
    texts = sample("banane"), sample("xyz")
    found = rewarded(f"{file}:length:0.5,{file}:vowels:10", *texts, workers=workers)
    assert found == [
        (3 + 20 + 10, {"length": 3.0, "vowels_a": 20.0, "vowels_e": 10.0}),
        (1.5, {"length": 1.5, "vowels_a": 0.0, "vowels_e": 0.0}),
    ]


def test_one_reward_with_a_weight(file):
    assert rewarded(f"{file}:length:-2", sample("abc")) == [(-6.0, {"length": -6.0})]


def test_numbers_for_responses_are_added_at_the_last_of_the_tokens(file):
    response = sample("ab")
    response.token_ids = [1, 2]
    response.logprobs = [0.0, 0.0]
    rewarded(f"{file}:length,{file}:per_token:0.5,again={file}:per_token", response)
    assert response.token_rewards == [None, 2 + 1 + 2] and response.reward == 5.0


def test_a_column_names_the_rewards_of_its_row(file):
    rows = [
        sample("aa", task="fine", label="aa"),
        sample("aa", task=["fine", "length"], label="b"),
        sample("aa", task="length"),
    ]
    found = rewarded(f"{file}:length,{file}:fine:3", *rows, reward_key="task")
    assert found == [
        (3.0, {"fine": 3.0}),
        (2.0, {"fine": 0.0, "length": 2.0}),
        (2.0, {"length": 2.0}),
    ]


def test_a_row_that_names_no_reward_is_a_bad_row(file):
    section = RewardSection(reward_workers=0, reward_key="task")
    runner = RewardRunner(f"{file}:length,{file}:fine", section=section, models=["helpful"])
    for value, named in (("math", "math"), (None, "nothing"), (["fine", "math"], "math")):
        problem = runner.row_problem(sample("", task=value, label="x").prompt)
        assert (
            f"the column task (--reward_key) names {named}; the rewards are fine, helpful, length"
            in problem
        )

    assert runner.row_problem(sample("", task="helpful").prompt) is None, (
        "a reward model scores this row alone"
    )
    assert "fine: the function needs label" in runner.row_problem(sample("", task="fine").prompt)
    assert runner.row_problem(sample("", task="length").prompt) is None, (
        "a column that only other rewards need may be absent"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_few", r"too_few returned \[1.0\], not a list of 2 rewards"),
        ("no_number", "no_number returned 'high', which is not a finite number"),
    ],
)
def test_a_wrong_result_names_its_function(file, name, says):
    with pytest.raises(ConfigError, match=says):
        rewarded(f"{file}:length,{file}:{name}", sample("a"), sample("b"))


def test_columns_are_checked_for_each_function(file):
    with pytest.raises(ConfigError, match="fine: the function needs label"):
        rewarded(f"{file}:length,{file}:fine", sample("a"))


def test_each_reward_is_normalised_alone_and_weighed_by_its_flag(file):
    """--advantage_estimator gdpo, from functions to advantages.

    Lengths 3, 1, 5 have mean 3 and std 2: 0, -1, 1, weight 2. Of the letters a, 2, 0, 1: 1, -1, 0,
    and of e, 0, 1, 1: -1.154701, 0.577350, 0.577350, weight -0.5 each.
    """
    terms = f"{file}:length:2,{file}:vowels:-0.5"
    samples = [sample(text) for text in ("aab", "e", "aebcd")]
    rewarded(terms, *samples)
    config = Config()
    config.reward.reward = terms
    weights = reward_weights(terms, config.model, config.reward.reward_model_coef)
    assert weights == {"length": 2.0, "vowels": -0.5}

    axis = Axis("data", 1, 0, None)
    shaper = RewardShaper(config.reward, longest=10)
    compare = compare_rewards(AlgorithmSection(advantage_estimator="gdpo"), shaper, weights)
    table = compare.gather(axis, samples, first_row=0)
    names = ["components/length", "components/vowels_a", "components/vowels_e"]
    assert [*table.columns][-3:] == names
    sums = [-0.5 + 0.577350, -2 + 0.5 - 0.288675, 2 - 0.288675]
    std = (sum(one * one for one in sums) / 2) ** 0.5
    assert compare(table).tolist() == pytest.approx([one / std for one in sums], abs=1e-3)


def test_equal_components_of_a_reward_have_no_advantage(file):
    """The mean of three times 0.1 is another number in float64."""
    terms = f"{file}:length:0.1"
    samples = [sample("a") for _ in range(3)]
    rewarded(terms, *samples)
    section = AlgorithmSection(advantage_estimator="gdpo")
    compare = compare_rewards(section, RewardShaper(RewardSection(), longest=10), {"length": 0.1})
    table = compare.gather(Axis("data", 1, 0, None), samples, first_row=0)
    assert compare(table).tolist() == [0.0] * 3
