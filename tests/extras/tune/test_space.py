"""Why: a search takes hours, so a mistake in the question is told before the first run."""

import math

import pytest

from lightrft.config.command_line import load
from lightrft.config.errors import ConfigError
from lightrft.config.sections import TRAINING, Config, field_types
from lightrft.config.tables import table
from lightrft.extras.commands.tune import default_metric, evaluations, main, seconds_of
from lightrft.extras.tune.space import (
    OUT_OF_PLACE,
    Parameter,
    as_flags,
    check_flags,
    check_values,
    lower_is_better,
    read_parameters,
)
from lightrft.extras.tune.trials import SHARES

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
        (["lr=1e-4,1e-3"], "no such option; write --learning_rate"),
        (["beta=0.1,0.2"], "train_ppo has no such option"),
        (["learning_rate=1e-5..fast"], "expected a number, not 'fast'"),
        (["n_samples_per_prompt=4,8.5"], "expected an integer, not '8.5'"),
        (["optimizer=adamw,adam"], "choose from adamw, muon"),
        (["optimizer=adamw..muon"], "only numbers have a range"),
        (["learning_rate=1e-2..1e-5"], "LOW is below HIGH"),
        (["l2=0..1:log"], "with :log above 0"),
        (["learning_rate=1e-5"], "one value is no question"),
        (["adam_betas=0.9,0.95"], "is a list"),
        (["seed=1,2"], "--seeds repeats the finalists"),
        (["max_steps=100,200"], "compared after the same steps"),
        (["push_to_hub=me/one,me/other"], "each trial would upload its model"),
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


def test_a_name_that_no_registry_knows_is_refused_with_the_nearest_one():
    parameters = read_parameters(["advantage_estimator=grpo,rlo"], "train_ppo")

    with pytest.raises(ConfigError, match="rlo: no advantage estimator .* did you mean 'rloo'?"):
        check_values(parameters, FLAGS, "train_ppo", 1)


def test_values_that_do_not_fit_together_are_refused():
    parameters = read_parameters(["rollout_batch_size=8,16", "train_batch_size=32,64"], "train_ppo")

    flags = [*FLAGS, "--n_samples_per_prompt=4"]
    with pytest.raises(
        ConfigError, match="--rollout_batch_size=8 --train_batch_size=64 is refused"
    ):
        check_values(parameters, flags, "train_ppo", 1)
    check_values(parameters[:1], flags, "train_ppo", 1)


def test_flags_have_the_values():
    assert as_flags({"learning_rate": 0.2, "optimizer": "muon"}) == [
        "--learning_rate=0.2",
        "--optimizer=muon",
    ]


OTHER_THAN_DEFAULT = {"at": 3, "load_checkpoint": True, "overwrite": True, "dry_run": True}


@pytest.mark.parametrize("name", OUT_OF_PLACE["everywhere"])
def test_what_has_no_place_in_a_search_is_refused_with_its_reason(name):
    config = Config.of(**{name: OTHER_THAN_DEFAULT.get(name, "some/place")})

    with pytest.raises(ConfigError, match=f"--{name} in a search: "):
        check_flags(config)


def test_a_configuration_that_a_run_has_written_can_be_searched(tmp_path):
    Config.of(pretrain="some/model", save_path="runs/one").write(tmp_path / "config.yaml")

    check_flags(load(tmp_path / "config.yaml"))


def test_all_options_that_are_refused_exist():
    assert {name for names in OUT_OF_PLACE.values() for name in names} <= field_types().keys()


def test_the_direction_of_a_metric_is_known():
    assert not lower_is_better("rollout/reward", "train_ppo", False, False)
    assert not lower_is_better("eval/own/pass_at_4", "train_ppo", False, True)
    assert not lower_is_better("eval/accuracy", "train_dpo", False, False)
    assert lower_is_better("eval/loss", "train_sft", True, False)
    assert lower_is_better("rollout/length", "train_ppo", True, False)


@pytest.mark.parametrize("command", sorted(TRAINING))
def test_metrics_of_all_commands_have_a_direction(command):
    metrics = table("extras/tune/metrics")[command]
    assert all(lower_is_better(name, command, False, False) for name in metrics["lower"])
    assert not any(lower_is_better(name, command, False, False) for name in metrics["higher"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric=rollout/rewards"], "did you mean rollout/reward?"),
        (["--metric=train/own"], "for your own, add --maximize or --minimize"),
        (["--metric=train/own", "--minimize", "--maximize"], "add --maximize or --minimize"),
        (["--metric=rollout/reward", "--minimize"], "higher is better, not the contrary"),
        (["--metric=rollout/reward", "--fork_from=runs/one"], "--fork_from in a search"),
        (["--eval_data=README.md", "--max_steps=90", "--eval_steps=30"], "write 10 or less"),
        (
            ["--eval_data=README.md", "--max_steps=90", "--logging_steps=30"],
            "logging_steps 30: trials",
        ),
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


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "0"), ("WORLD_SIZE", "2"), ("SLURM_STEP_NUM_TASKS", "4")]
)
def test_several_processes_do_not_search(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([*FLAGS, "--over", "learning_rate=1e-5..1e-3:log", "--metric=rollout/reward"])

    assert "start tune in one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "eval_data", "max_steps", "found"),
    [
        ("train_ppo", "a.jsonl", 90, ("eval/reward", ["--eval_steps=10"])),
        ("train_ppo", "own=a.jsonl,gsm8k=b.jsonl", 100, ("eval/own/reward", ["--eval_steps=12"])),
        ("train_sft", "a.jsonl", 144, ("eval/loss", ["--eval_steps=16"])),
    ],
)
def test_held_out_data_are_measured_where_trials_are_compared(command, eval_data, max_steps, found):
    config = Config.of(eval_data=eval_data, max_steps=max_steps)

    metric = default_metric(config, command)
    assert (metric, evaluations(config, metric)) == found
    for share in SHARES[:2]:  # the first evaluation from there on is less than one later
        every = int(found[1][0].removeprefix("--eval_steps="))
        assert math.ceil(share * max_steps / every) * every < share * max_steps + every


def test_too_many_runs_side_by_side_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("lightrft.extras.tune.trials.visible_devices", lambda: ["0"])
    own = ["--metric=rollout/reward", "--parallel=2", f"--out={tmp_path}"]
    monkeypatch.setattr("lightrft.extras.commands.tune.check_paths", lambda *arguments: None)
    with pytest.raises(SystemExit):
        main([*FLAGS, "--over", "learning_rate=1e-5..1e-3:log", *own])

    assert "--parallel times --ranks is 2, for 1 devices" in capsys.readouterr().err


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
