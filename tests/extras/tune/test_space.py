"""Why: a search takes hours, so a mistake in the question is told before the first run."""

import pytest

from lightrft.config.errors import ConfigError
from lightrft.config.sections import TRAINING
from lightrft.config.tables import table
from lightrft.extras.commands.tune import main, seconds_of
from lightrft.extras.tune.space import (
    Parameter,
    as_flags,
    check_values,
    combinations,
    lower_is_better,
    read_parameters,
)

FLAGS = ["--pretrain=some/model", "--prompt_data=some/data", "--engine_type=hf"]


@pytest.mark.parametrize(
    ("word", "parameter"),
    [
        (
            "learning_rate=1e-5..1e-2:log",
            Parameter("learning_rate", (1e-5, 1e-2), is_range=True, log=True),
        ),
        ("--actor-learning-rate=0.1..0.5", Parameter("learning_rate", (0.1, 0.5), is_range=True)),
        ("n_samples_per_prompt=4,8,16", Parameter("n_samples_per_prompt", (4, 8, 16))),
        ("max_epochs=1..4", Parameter("max_epochs", (1, 4), is_range=True)),
        ("optimizer=adamw,muon", Parameter("optimizer", ("adamw", "muon"))),
        ("enable_ema=true,no", Parameter("enable_ema", (True, False))),
    ],
)
def test_a_question_is_read(word, parameter):
    assert read_parameters([word], "train_ppo") == [parameter]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to search"),
        (["learning_rate"], "write NAME=LOW..HIGH"),
        (["lerning_rate=1,2"], "did you mean learning_rate?"),
        (["beta=0.1,0.2"], "train_ppo has no such option"),
        (["learning_rate=1e-5..fast"], "expected a number, not 'fast'"),
        (["n_samples_per_prompt=4,8.5"], "expected an integer, not '8.5'"),
        (["optimizer=adamw,sgd"], "choose from adamw, muon"),
        (["optimizer=adamw..muon"], "only numbers have a range"),
        (["learning_rate=1e-2..1e-5"], "LOW is below HIGH"),
        (["l2=0..1:log"], "with :log above 0"),
        (["learning_rate=1e-5"], "one value is no question"),
        (["adam_betas=0.9,0.95"], "is a list"),
        (["seed=1,2"], "tune sets it itself"),
        (["l2=0,0.1", "l2=0.2,0.3"], "occurs twice"),
    ],
)
def test_a_question_without_an_answer_is_refused(words, message):
    with pytest.raises(ConfigError) as refused:
        read_parameters(words, "train_ppo")
    assert message in str(refused.value)


def test_a_value_that_an_option_refuses_is_refused_with_its_message():
    parameters = read_parameters(["learning_rate=1e-5..3"], "train_ppo")

    with pytest.raises(
        ConfigError, match="(?s)--learning_rate=3.0 is refused.*must be between 0 and 1"
    ):
        check_values(parameters, FLAGS, "train_ppo", 1)


def test_values_that_do_not_fit_together_are_refused():
    parameters = read_parameters(["rollout_batch_size=8,16", "train_batch_size=32,64"], "train_ppo")

    flags = [*FLAGS, "--n_samples_per_prompt=4"]
    with pytest.raises(
        ConfigError, match="--rollout_batch_size=8 --train_batch_size=64 is refused"
    ):
        check_values(parameters, flags, "train_ppo", 1)
    check_values(parameters[:1], flags, "train_ppo", 1)


def test_combinations_have_the_ends_of_ranges():
    parameters = read_parameters(["learning_rate=0.1..0.2", "max_epochs=1,2,3"], "train_ppo")

    found = list(combinations(parameters))
    assert (len(found), found[0]) == (6, {"learning_rate": 0.1, "max_epochs": 1})
    assert as_flags(found[-1]) == ["--learning_rate=0.2", "--max_epochs=3"]


def test_the_direction_of_a_metric_is_known():
    assert not lower_is_better("rollout/reward", "train_ppo")
    assert not lower_is_better("eval/own/pass_at_4", "train_ppo")
    assert not lower_is_better("eval/accuracy", "train_dpo")
    assert lower_is_better("eval/loss", "train_sft")


@pytest.mark.parametrize("command", sorted(TRAINING))
def test_metrics_of_all_commands_have_a_direction(command):
    metrics = table("extras/tune/metrics")[command]
    assert all(lower_is_better(name, command) for name in metrics["lower"])
    assert not any(lower_is_better(name, command) for name in metrics["higher"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric=rollout/rewards"], "did you mean rollout/reward?"),
        (["--metric=train/own"], "for your own, add --maximize or --minimize"),
        (["--metric=eval/accuracy"], "needs held-out data: add --eval_data FILE"),
        (["--metric=eval/own", "--maximize"], "needs held-out data: add --eval_data FILE"),
        (["--eval_data=README.md"], "add --eval_steps or --max_steps"),
        (["--metric=rollout/reward", "--seeds=0"], "--seeds must be at least 1"),
        (["--metric=rollout/reward", "--budget=30"], "write a time"),
        (["--max_step=9"], "did you mean --max_steps"),
    ],
)
def test_a_command_that_cannot_work_is_refused(words, message, tmp_path, capsys):
    out = tmp_path / "tune"
    over = ["--over", "learning_rate=1e-5..1e-3:log", f"--out={out}"]
    with pytest.raises(SystemExit) as ended:
        main([*FLAGS, *over, *words])

    assert (ended.value.code, out.exists()) == (2, False)
    assert message in capsys.readouterr().err


def test_a_budget_is_a_time():
    assert [seconds_of(text) for text in ("90s", "30m", "1.5h", "")] == [
        90,
        1800,
        5400,
        float("inf"),
    ]
    for text in ("30", "m", "0s", "1d"):
        with pytest.raises(ConfigError, match="write a time"):
            seconds_of(text)
