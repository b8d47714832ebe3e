"""Why: the choice must be the one that the values say, and a second call must go on with it."""

import json
import math

import pytest
import yaml

optuna = pytest.importorskip("optuna")

from lightrft.app.observe.sinks import read_rows  # noqa: E402
from lightrft.config.errors import ConfigError  # noqa: E402
from lightrft.extras.tune.optuna import Study  # noqa: E402
from lightrft.extras.tune.page import Findings  # noqa: E402
from lightrft.extras.tune.search import Search  # noqa: E402
from lightrft.extras.tune.space import read_parameters  # noqa: E402
from lightrft.extras.tune.trials import SHARES, Launcher, RunRecord, failure  # noqa: E402

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
        return 1.0, ""


def rising(rate: float, step: int, seed: int) -> float:
    """Best at 0.3, a bit better with other seeds."""
    return (1 - (rate - 0.3) ** 2) * (1 - math.exp(-step / 30)) + 0.001 * (seed - 7)


def search_of(
    folder, launcher, *, over="learning_rate=0.1,0.2,0.3,0.5,0.6,0.7", **options
) -> Search:
    question = {"over": over}
    study = Study(folder, question, read_parameters([over], "train_ppo"), minimize=False, seed=0)
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


def test_optuna_reads_the_study(tmp_path):
    search = search_of(tmp_path, CurveLauncher(rising))
    search.run()
    study = optuna.load_study(study_name="tune", storage=f"sqlite:///{tmp_path / 'study.db'}")

    states = [each.state.name for each in study.trials]
    assert sorted(states) == ["COMPLETE", *["PRUNED"] * 5]
    assert study.best_params == {"learning_rate": 0.3}
    assert list(study.best_trial.intermediate_values) == [10, 30, 90]


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

    with pytest.raises(ConfigError, match="another over"):
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
    states = {each.params["learning_rate"]: each.state.name for each in search.study.study.trials}
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

    assert [len(each.results) for each in ranked[:3]] == [3, 3, 1]
    assert ranked[0].results[1] - ranked[0].results[0] == pytest.approx(0.001)
    assert search.folder_of(ranked[1], 9).name == f"trial_{ranked[1].number:03d}_seed_9"
    assert search.folder_of(ranked[1], 9).is_dir()
    assert "best of 2 finalists with a probability of" in findings.certainty


def test_a_trial_that_its_forecast_rules_out_ends_early(tmp_path):
    """Of six trials, the best two would go on by their rank."""

    def apart(rate, step, seed):
        return 0.01 * math.sin(7 * step + rate) + (0.005 * step + 0.3 if rate == 0.3 else 0.1)

    search = search_of(tmp_path, CurveLauncher(apart), trials=6)
    for _ in range(6):
        search.advance([(search.study.propose(), share, 7) for share in SHARES[:1]])
    trials = search.study.trials
    search.advance([(each, SHARES[1], 7) for each in trials])

    kept = search.promoted(trials, 2)
    assert [each.parameters["learning_rate"] for each in kept] == [0.3]
    search.num_seeds = 2  # which need something to compare
    assert len(search.promoted(trials, 2)) == 2


def test_no_trial_begins_after_half_of_the_budget(tmp_path):
    search = search_of(tmp_path, CurveLauncher(rising), budget=1000.0)
    search.began -= 600
    ranked = search.run()
    assert [len(each.values) for each in ranked] == [3]

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


def test_the_findings_are_written(tmp_path):
    search = search_of(tmp_path, CurveLauncher(rising))
    search.run()
    findings = Findings(search)
    assert "--seeds 2 says how sure that is" in findings.certainty

    page, best = findings.write()
    config = yaml.safe_load(best.read_text())
    assert config["optim"] == {"learning_rate": 0.3}
    assert config["train"] == {"seed": 7, "save_path": str(tmp_path / "best")}
    text = page.read_text()
    assert '"tuning":{' in text and "http://" not in text.replace("http://www.w3.org", "")


def test_a_missing_metric_is_told_with_those_that_are_there(tmp_path):
    launcher = CurveLauncher(rising, metric="rollout/reward_of_length")
    launcher.advance(tmp_path / "run", ["--learning_rate=0.1", "--seed=1"], 1)

    with pytest.raises(ConfigError, match="logs no such metric, but rollout/reward_of_length"):
        RunRecord(tmp_path / "run").measured("rollout/reward", 1 / 9)


def test_the_reason_of_a_failure_is_the_last_error(tmp_path):
    log = tmp_path / "tune.log"
    log.write_text("Traceback:\nRuntimeError: no memory\n")
    assert failure(log) == "RuntimeError: no memory"
    log.write_text("12:00:00 ERROR   --save_path is in use\ntorchrun: rank 0 ended\n")
    assert failure(log) == "12:00:00 ERROR   --save_path is in use"
