"""Why: the choice must be the one that the values say, and a second call must go on with it."""

import json
import math
import signal

import pytest
import yaml

optuna = pytest.importorskip("optuna")

from lightrft.app.observe.sinks import read_rows  # noqa: E402
from lightrft.config.errors import ConfigError  # noqa: E402
from lightrft.extras.commands import tune  # noqa: E402
from lightrft.extras.tune.optuna import Study  # noqa: E402
from lightrft.extras.tune.page import Findings  # noqa: E402
from lightrft.extras.tune.search import Search  # noqa: E402
from lightrft.extras.tune.space import read_parameters  # noqa: E402
from lightrft.extras.tune.trials import SHARES, Launcher, RunRecord, failure, visible_devices  # noqa: E402

STEPS = 90
FLAGS = ["--pretrain=some/model", "--prompt_data=some/data"]


class CurveLauncher(Launcher):
    """Writes the rows of runs whose metric is a function of the flags and the step."""

    def __init__(self, curve, metric="rollout/reward"):
        super().__init__("train_ppo", FLAGS, metric, ranks=1)
        self.curve = curve
        self.starts = []

    def advance(self, folder, flags, share, slot=None):
        values = dict(flag.removeprefix("--").split("=") for flag in flags)
        if values.get("learning_rate") == "0.4":
            return 1.0, "RuntimeError: out of memory"
        folder.mkdir(parents=True, exist_ok=True)
        done = len(read_rows(folder / "metrics.jsonl"))
        last = math.ceil(share * STEPS)
        self.starts.append((folder.name, done, last))
        with (folder / "metrics.jsonl").open("a") as file:
            for step in range(done + 1, last + 1):
                value = self.curve(float(values["learning_rate"]), step, int(values["seed"]))
                value = value if math.isfinite(value) else None
                row = {"step": step, self.metric: value, "rollout/tokens": 10}
                file.write(json.dumps(row) + "\n")
        status = "finished" if last == STEPS else "interrupted"
        (folder / "run.json").write_text(json.dumps({"total_steps": STEPS, "status": status}))
        return 1.0, self.failing(values)

    def failing(self, values):
        """Return why a run with these flags fails; empty if it does not."""
        return ""


def rising(rate: float, step: int, seed: int) -> float:
    """Best at 0.3, a bit better with other seeds."""
    return (1 - (rate - 0.3) ** 2) * (1 - math.exp(-step / 30)) + 0.001 * (seed - 7)


def search_of(
    folder, launcher, *, over="learning_rate=0.1,0.2,0.3,0.5,0.6,0.7", **options
) -> Search:
    parameters = read_parameters(over.split(), "train_ppo")
    study = Study(folder, {"over": over}, parameters, minimize=False, seed=0)
    return Search(folder, study, launcher, seed=7, num_trials=options.pop("trials", 9), **options)


def test_a_third_goes_on_and_the_best_to_the_end(tmp_path):
    launcher = CurveLauncher(rising)
    search = search_of(tmp_path, launcher)
    best = search.run()[0]

    assert best.parameters == {"learning_rate": 0.3}
    assert [len(each.values) for each in search.ranked()] == [3, 2, 1, 1, 1, 1]
    # six trials for a ninth, two for a third, one to the end; each step once
    assert sorted((done, last) for _, done, last in launcher.starts) == [
        *[(0, 10)] * 6,
        *[(10, 30)] * 2,
        (30, 90),
    ]
    assert sum(each.tokens for each in search.study.trials) == 10 * (4 * 10 + 30 + 90)
    assert best.values[-1] == pytest.approx(
        sum(rising(0.3, step, 7) for step in range(81, 91)) / 10
    )


def optunas(folder):
    return optuna.load_study(study_name="tune", storage=f"sqlite:///{folder / 'study.db'}")


def test_optuna_reads_the_study(tmp_path):
    search_of(tmp_path, CurveLauncher(rising)).run()
    study = optunas(tmp_path)

    states = [each.state.name for each in study.trials]
    assert sorted(states) == ["COMPLETE", *["PRUNED"] * 5]
    assert study.best_params == {"learning_rate": 0.3}
    assert list(study.best_trial.intermediate_values) == [10, 30, 90]


def test_optuna_reads_the_study_while_the_search_runs(tmp_path):
    class Reading(CurveLauncher):
        def advance(self, folder, flags, share, slot=None):
            states.setdefault(share, [each.state.name for each in optunas(tmp_path).trials])
            return super().advance(folder, flags, share, slot)

    states = {}
    search_of(tmp_path, Reading(rising)).run()
    assert states == {SHARES[0]: ["WAITING"], SHARES[1]: ["PRUNED"] * 6, SHARES[2]: ["PRUNED"] * 6}


def test_a_second_call_continues_where_the_first_was_cut(tmp_path):
    whole = [each.values for each in search_of(tmp_path / "whole", CurveLauncher(rising)).run()]

    class Cut(CurveLauncher):
        def advance(self, *arguments):
            if len(self.starts) == 7:
                raise KeyboardInterrupt
            return super().advance(*arguments)

    with pytest.raises(KeyboardInterrupt):
        search_of(tmp_path / "cut", Cut(rising)).run()
    launcher = CurveLauncher(rising)
    search = search_of(tmp_path / "cut", launcher)
    assert [each.values for each in search.run()] == whole
    assert len(launcher.starts) == 2

    again = CurveLauncher(rising)
    assert [each.values for each in search_of(tmp_path / "cut", again).run()] == whole
    assert again.starts == []


def test_another_question_needs_another_folder(tmp_path):
    search_of(tmp_path, CurveLauncher(rising)).run()

    with pytest.raises(ConfigError, match=r"over learning_rate=0\.1,.* -> learning_rate=0\.1,0\.9"):
        search_of(tmp_path, CurveLauncher(rising), over="learning_rate=0.1,0.9")


def test_runs_side_by_side_find_the_same(tmp_path):
    alone = search_of(tmp_path / "alone", CurveLauncher(rising)).run()
    together = search_of(tmp_path / "together", CurveLauncher(rising), parallel=3).run()

    assert together == alone


def test_a_failed_trial_keeps_its_reason(tmp_path):
    def breaking(rate, step, seed):
        return math.nan if rate == 0.3 else rising(rate, step, seed)

    search = search_of(tmp_path, CurveLauncher(breaking), over="learning_rate=0.2,0.3,0.4")
    ranked = search.run()

    assert [each.parameters["learning_rate"] for each in ranked] == [0.2]
    reasons = {each.parameters["learning_rate"]: each.reason for each in search.study.trials}
    assert reasons == {
        0.2: "",
        0.3: "rollout/reward was not finite at step 10",
        0.4: "RuntimeError: out of memory",
    }
    states = {each.params["learning_rate"]: each.state.name for each in optunas(tmp_path).trials}
    assert states == {0.2: "COMPLETE", 0.3: "FAIL", 0.4: "FAIL"}


def test_a_trial_that_fails_later_is_not_tried_again(tmp_path):
    def breaking(rate, step, seed):
        return math.nan if rate == 0.3 and step > 20 else rising(rate, step, seed)

    launcher = CurveLauncher(breaking)
    search_of(tmp_path, launcher).run()
    starts = len(launcher.starts)
    best = search_of(tmp_path, launcher).run()[0]

    assert (best.parameters["learning_rate"], len(best.values)) == (0.2, 3)
    assert len(launcher.starts) == starts


def test_seeds_repeat_two_finalists_at_least(tmp_path):
    search = search_of(tmp_path, CurveLauncher(rising), num_seeds=3)
    ranked = search.run()
    findings = Findings(search)

    assert [sorted(each.repeats) for each in ranked[:3]] == [[8, 9], [8, 9], []]
    # the first seed has selected the finalists, so the others alone say how good they are
    assert [len(each.results) for each in ranked[:3]] == [2, 2, 1]
    first = ranked[0].values[-1]
    assert ranked[0].results == pytest.approx([first + 0.001, first + 0.002])
    assert search.folder_of(ranked[1], 9).name == f"trial_{ranked[1].number:03d}_seed_9"
    assert search.folder_of(ranked[1], 9).is_dir()
    assert "best of 2 finalists with a probability of" in findings.certainty
    assert all(path.exists() for path in findings.write())


def test_a_trial_that_its_forecast_rules_out_ends_early(tmp_path):
    """Of six trials, the best two would go on by their rank."""

    def apart(rate, step, seed):
        return 0.01 * math.sin(7 * step + rate) + (0.005 * step + 0.3 if rate == 0.3 else 0.1)

    search = search_of(tmp_path, CurveLauncher(apart), trials=6)
    for _ in range(6):
        search.advance([(search.study.propose(lambda values: False), SHARES[0], 7)])
    trials = search.study.trials
    search.advance([(each, SHARES[1], 7) for each in trials])

    kept = search.promoted(trials, 2)
    assert [each.parameters["learning_rate"] for each in kept] == [0.3]
    search.num_seeds = 2  # which need something to compare
    assert len(search.promoted(trials, 2)) == 2


def test_no_trial_begins_after_half_of_the_budget(tmp_path, capsys):
    search = search_of(tmp_path, CurveLauncher(rising), budget=1000.0)
    search.began -= 600
    ranked = search.run()
    assert [len(each.values) for each in ranked] == [3]
    Findings(search).print()
    assert "1 of 9 trials when the budget ended" in capsys.readouterr().out

    search = search_of(tmp_path / "none", CurveLauncher(rising), budget=1000.0)
    search.began -= 1100
    assert search.run() == []
    assert "No trial has a value" in Findings(search).certainty


def test_many_combinations_are_proposed_by_the_values_so_far(tmp_path):
    over = "learning_rate=0.01..1:log"
    one = search_of(tmp_path / "one", CurveLauncher(rising), over=over, trials=14)
    other = search_of(tmp_path / "other", CurveLauncher(rising), over=over, trials=14)
    rates = [each.parameters["learning_rate"] for each in one.run()]

    assert rates == [each.parameters["learning_rate"] for each in other.run()]
    assert len(set(rates)) == 14 and all(0.01 <= rate <= 1 for rate in rates)
    assert all(rate == float(f"{rate:.3g}") for rate in rates)
    assert abs(rates[0] - 0.3) < 0.1


def test_the_first_trials_cover_ranges_and_choices_and_later_ones_are_near_the_best(tmp_path):
    over = "learning_rate=1e-5..1:log train_batch_size=32,64"
    seen = []
    for seed in (0, 1, 2):
        parameters = read_parameters(over.split(), "train_ppo")
        study = Study(tmp_path / f"{seed}", {}, parameters, minimize=True, seed=seed)
        for _ in range(10):
            trial = study.propose(lambda values: False)
            place = math.log10(trial.parameters["learning_rate"])
            value = (place + 2.7) ** 2 + 0.5 * (trial.parameters["train_batch_size"] == 32)
            trial.values, trial.steps = [value], [1]

        rates = [each.parameters["learning_rate"] for each in study.trials]
        assert sorted(math.floor(math.log10(rate)) for rate in rates[:5]) == [-5, -4, -3, -2, -1]
        assert {each.parameters["train_batch_size"] for each in study.trials[:5]} == {32, 64}
        assert min(each.values[0] for each in study.trials) < 0.05
        seen += rates[:5]

    assert len(set(seen)) == len(seen)


def test_the_findings_are_written(tmp_path):
    search = search_of(tmp_path, CurveLauncher(rising))
    search.run()
    findings = Findings(search)
    assert "--seeds 2 says how sure that is" in findings.certainty

    page, best = findings.write()
    config = yaml.safe_load(best.read_text())
    assert config["learning_rate"] == 0.3
    assert (config["seed"], config["save_path"]) == (7, str(tmp_path / "best"))
    text = page.read_text()
    assert '"tuning":{' in text and "http://" not in text.replace("http://www.w3.org", "")


def test_a_missing_metric_is_told_with_those_that_are_there(tmp_path):
    launcher = CurveLauncher(rising, metric="rollout/reward_of_length")
    launcher.advance(tmp_path / "run", ["--learning_rate=0.1", "--seed=1"], 1)

    with pytest.raises(ConfigError, match="not logged until step 90 of 90, but rollout/reward_of"):
        RunRecord(tmp_path / "run").measured("rollout/reward", 1 / 9)


def test_the_reason_of_a_failure_is_the_last_error(tmp_path):
    log = tmp_path / "tune.log"
    log.write_text("Traceback:\nRuntimeError: no memory\n")
    assert failure(log) == "RuntimeError: no memory"
    log.write_text("12:00:00 ERROR   --save_path is in use\ntorchrun: rank 0 ended\n")
    assert failure(log) == "--save_path is in use torchrun: rank 0 ended"
    log.write_text("1 ERROR first\n2 ERROR   cannot run:\n  - l2 is\n  - and seed\n")
    assert failure(log) == "cannot run: - l2 is - and seed"
    log.write_text("1 ERROR   " + "much " * 1000)
    assert len(failure(log)) <= 500


def test_a_larger_budget_goes_on_with_trials_that_had_lost(tmp_path):
    """Nine trials instead of three let three of them go on, and two of these had lost before."""
    over = "learning_rate=0.05,0.1,0.2,0.3,0.5,0.6,0.7,0.8,0.9"
    launcher = CurveLauncher(lambda rate, step, seed: (rate < 0.4) + rising(rate, step, seed))
    search = search_of(tmp_path, launcher, over=over, budget=1000.0)
    propose = search.study.propose

    def third_is_the_last(refuses):
        search.began -= 600 if len(search.study.trials) == 2 else 0
        return propose(refuses)

    search.study.propose = third_is_the_last
    checkpoints = tmp_path / "trial_000" / "checkpoints"
    checkpoints.mkdir(parents=True)
    search.run()
    assert sorted(len(each.values) for each in search.study.trials) == [1, 1, 3]
    assert checkpoints.exists()  # a larger budget can need them

    again = search_of(tmp_path, launcher, over=over, budget=1e6)
    again.run()
    whole = search_of(tmp_path / "whole", CurveLauncher(launcher.curve), over=over)
    assert again.ranked()[0].parameters == whole.run()[0].parameters
    assert len(again.study.trials) == 9 and not checkpoints.exists()


def test_more_seeds_and_more_trials_continue(tmp_path):
    search_of(tmp_path, CurveLauncher(rising), trials=3).run()
    launcher = CurveLauncher(rising)
    search = search_of(tmp_path, launcher, trials=6, num_seeds=2)
    ranked = search.run()

    assert [len(each.results) for each in ranked[:2]] == [2, 2]
    assert len(search.study.trials) == 6
    assert {each.state.name for each in optunas(tmp_path).trials} == {"COMPLETE", "PRUNED"}
    assert not [start for start in launcher.starts if start[2] == 10 and start[0] == "trial_000"]


def test_a_seed_that_fails_fails_its_trial_alone(tmp_path):
    class Failing(CurveLauncher):
        def failing(self, values):
            return "no memory" if (values["learning_rate"], values["seed"]) == ("0.3", "8") else ""

    search = search_of(tmp_path, Failing(rising), num_seeds=3)
    kept = tmp_path / "trial_000_seed_8" / "checkpoints"
    kept.mkdir(parents=True)
    ranked = search.run()

    failed = [each for each in search.study.trials if each.reason]
    assert [each.reason for each in failed] == ["with seed 8: no memory"]
    # the next best ones take its place
    assert [sorted(each.repeats) for each in ranked[:2]] == [[8, 9], [8, 9]]
    assert not list(tmp_path.glob("trial_*/checkpoints"))

    launcher = Failing(rising)
    again = search_of(tmp_path, launcher, num_seeds=3)
    again.run()
    assert launcher.starts == []
    assert [each.reason for each in again.study.trials if each.reason] == ["with seed 8: no memory"]


def test_values_that_the_rules_refuse_are_not_proposed(tmp_path):
    class Counting(CurveLauncher):
        def advance(self, folder, flags, share, slot=None):
            flags = [flag.replace("train_batch_size", "learning_rate") for flag in flags]
            return super().advance(folder, flags, share, slot)

    launcher = Counting(rising)
    launcher.flags = [*FLAGS, "--rollout_batch_size=8", "--n_samples_per_prompt=4"]
    search = search_of(tmp_path, launcher, over="train_batch_size=16..32")
    search.run()

    # 32 samples of a step divide into updates of these sizes alone
    assert sorted(each.parameters["train_batch_size"] for each in search.study.trials) == [16, 32]


def test_a_refusal_after_a_run_that_could_is_the_reason_of_its_trial(tmp_path):
    class Refusing(CurveLauncher):
        def advance(self, folder, flags, share, slot=None):
            if self.refused in flags:
                raise ConfigError("no row is so short")
            return super().advance(folder, flags, share, slot)

    launcher = Refusing(rising)
    launcher.refused = "--learning_rate=0.5"
    search = search_of(tmp_path / "one", launcher)
    search.study.propose(lambda values: values["learning_rate"] != 0.1)
    assert search.run()[0].parameters == {"learning_rate": 0.3}
    assert [each.reason for each in search.study.trials if each.reason] == ["no row is so short"]

    # a run that could before has another fault, such as a folder that is in use
    launcher.refused = "--seed=7"
    with pytest.raises(ConfigError, match="so short"):
        search.advance([(search.study.trials[0], SHARES[-1], 7)])
    assert search.study.trials[0].reason == ""

    # nor is it of a trial alone if no other one could
    launcher.refused = "--learning_rate=0.5"
    search = search_of(tmp_path / "other", launcher, over="learning_rate=0.5,0.3")
    search.study.propose(lambda values: values["learning_rate"] != 0.5)
    with pytest.raises(ConfigError, match="so short"):
        search.run()


def test_a_reason_is_shown_as_it_is(tmp_path, capsys):
    class Failing(CurveLauncher):
        def failing(self, values):
            return "[/INST] is no [rank0]" if values["learning_rate"] == "0.5" else ""

    search = search_of(tmp_path, Failing(rising))
    search.run()
    findings = Findings(search)
    findings.print()

    assert "[/INST] is no [rank0]" in " ".join(capsys.readouterr().out.split())


def test_seconds_and_tokens_of_a_run_that_was_cut_count(tmp_path):
    class Cut(CurveLauncher):
        def advance(self, folder, flags, share, slot=None):
            super().advance(folder, flags, 5 / STEPS, slot)
            return 3.0, ""  # as a run that was asked to stop

    search = search_of(tmp_path, Cut(rising))
    search.advance([(search.study.propose(lambda values: False), SHARES[0], 7)])
    trial = search_of(tmp_path, Cut(rising)).study.trials[0]

    assert (trial.values, trial.seconds, trial.tokens) == ([], 3.0, 50)


def test_runs_side_by_side_have_devices_of_their_own(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "far.away")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launcher = Launcher("train_ppo", FLAGS, "rollout/reward", 2, devices=["3", "5", "6", "7"])

    found = launcher._environment(1)
    assert found["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert not {"MASTER_ADDR", "LOCAL_WORLD_SIZE"} & found.keys()
    # without devices, or one after the other, a run sees what the user lets it see
    assert launcher._environment(None)["CUDA_VISIBLE_DEVICES"] == ""
    assert Launcher("train_ppo", FLAGS, "", 2)._environment(1)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("given", "count", "devices"),
    [(None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("", 0, []), ("0,1", 0, [])],
)
def test_devices_are_those_that_the_user_lets_it_see(given, count, devices, monkeypatch):
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: count)

    assert visible_devices() == devices


def test_a_metric_that_is_never_logged_is_told_in_the_first_rung(tmp_path):
    launcher = CurveLauncher(rising, metric="eval/own/reward")
    launcher.advance(tmp_path, ["--learning_rate=0.1", "--seed=1"], 19 / STEPS)
    assert RunRecord(tmp_path).measured("eval/reward", SHARES[0]) is None

    launcher.advance(tmp_path, ["--learning_rate=0.1", "--seed=1"], 20 / STEPS)
    with pytest.raises(ConfigError, match="step 20 of 90, but eval/own/reward.*--eval_steps 10"):
        RunRecord(tmp_path).measured("eval/reward", SHARES[0])


def test_rewards_of_rollouts_stand_for_held_out_rewards_alone(tmp_path):
    rows = [
        {"step": step, "rollout/reward": step, "eval/own/length": 100 - step, "eval/own/reward": 7}
        for step in range(1, 31)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps({"total_steps": 60, "status": "interrupted"}))
    record = RunRecord(tmp_path)

    # higher is better in a forecast, and a shorter response is better here
    assert -100 < record.forecast("eval/own/length", 30, 1).low < -40
    rollouts = record.forecast("rollout/reward", 30, -1)
    assert record.forecast("eval/own/reward", 30, -1) == rollouts and rollouts.high > 30


@pytest.mark.parametrize(
    ("seeds", "curve", "said"),
    [
        (2, lambda rate, step, seed: rising(rate, step, 7), "seeds make no difference"),
        (2, rising, "best of 2 finalists with a probability"),
        (1, rising, "best of one run each: --seeds 2"),
        (1, lambda rate, step, seed: 0.0, "All trials have the same rollout/reward"),
    ],
)
def test_only_what_is_known_is_said(seeds, curve, said, tmp_path):
    search = search_of(tmp_path, CurveLauncher(curve), num_seeds=seeds)
    search.run()

    assert said in Findings(search).certainty


def test_one_finalist_is_not_compared(tmp_path):
    class Failing(CurveLauncher):
        def failing(self, values):
            return "" if values["learning_rate"] == "0.3" else "no memory"

    search = search_of(tmp_path, Failing(rising), num_seeds=3)
    search.run()

    assert "the only one at the end" in Findings(search).certainty


def test_the_question_has_the_content_of_the_file_but_not_how_long_to_search(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "mine.yaml"
    file.write_text("pretrain: some/model\nprompt_data: some/data\nl2: 0.1\n")
    over = ["--over", "learning_rate=1e-5..1e-3:log", "--metric=rollout/reward"]
    words = [str(file), *over, f"--out={tmp_path / 'tune'}"]
    monkeypatch.setattr(tune, "check_paths", lambda *arguments: None)
    monkeypatch.setattr(Search, "run", lambda search: search.study.save(1.0))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        tune.main(words)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        tune.main([*words, "--seeds=2", "--trials=20", "--budget=1h"])
        file.write_text(file.read_text().replace("0.1", "0.2"))
        with pytest.raises(SystemExit):
            tune.main(words)
        assert "another search (l2 0.1 -> 0.2)" in capsys.readouterr().err
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_next_best_takes_the_place_of_one_that_fails_later(tmp_path):
    def breaking(rate, step, seed):
        return math.nan if rate == 0.3 and step > 20 else rising(rate, step, seed)

    search = search_of(tmp_path, CurveLauncher(breaking), over="learning_rate=0.1,0.2,0.3")
    ranked = search.run()

    assert [(each.parameters["learning_rate"], each.whole) for each in ranked] == [
        (0.2, True),
        (0.1, False),
    ]
