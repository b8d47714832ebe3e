"""Why: a reward that is gamed is told while the run goes on, and nothing else changes."""

import json
from pathlib import Path

import pytest

from lightrft.config.errors import ConfigError
from lightrft.core.samples import Prompt
from lightrft.extras.canaries.rows import CanaryRows, plain
from runs import PPO, prepare, repeatable, rows_of, train

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


def test_an_alarm_can_end_the_run_and_keep_the_model_from_before(inputs, watched, tmp_path):
    run, fork = tmp_path / "run", tmp_path / "fork"
    flags = [*inputs, *WATCHED, "--save_steps=1", "--max_ckpt_num=1", "--on_alarm=fork"]
    train("train_ppo", 1, flags, run)

    rows = rows_of(run)
    assert len(rows) < 20
    rises_from = rows[-1]["canary/alarm_from_step"]
    (kept,) = (run / "before_alarm" / "checkpoints").iterdir()
    assert kept.name == f"step{int(rises_from) - 1}"
    flags = [*inputs, *WATCHED, f"--max_steps={len(rows)}", f"--fork_from={run / 'before_alarm'}"]
    train("train_ppo", 1, flags, fork)
    # with the same flags the fork repeats the run
    assert repeatable(rows_of(fork)) == repeatable(rows)


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

    # two groups a step, or later if a round ended before they did
    state = canaries(tmp_path)[-1]
    assert "canary/reward" in state and state["canary/log_evidence"] != 0


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


# -- rows


def prompts(*labels: object) -> list[Prompt]:
    return [Prompt(row, f"{row}?", [row], {"label": label}) for row, label in enumerate(labels)]


def test_a_canary_has_the_label_of_another_row():
    rows = CanaryRows(prompts("5", "5.0", "7", 7, "9"), seed=0, swaps=True)

    for position in range(10):
        canary = rows[position]
        assert canary.prompt.text == f"{canary.prompt.index}?"
        assert plain(canary.prompt.columns["label"]) != plain(canary.true_label)
        assert plain(canary.prompt.columns["label"]) in ("5", "7", "9")


def test_the_data_keep_their_labels():
    data = prompts("5", "7")
    CanaryRows(data, seed=0, swaps=True)[0]

    assert [prompt.columns for prompt in data] == [{"label": "5"}, {"label": "7"}]


def test_a_guess_earns_what_the_most_frequent_label_does():
    assert CanaryRows(prompts("a", "a", "a", "b"), seed=0, swaps=True).chance == 0.75


def test_rows_of_the_user_stay_as_they_are():
    rows = CanaryRows(prompts("5", "5"), seed=0, swaps=False)

    assert {rows[position].prompt.columns["label"] for position in range(4)} == {"5"}


@pytest.mark.parametrize(
    ("labels", "message"), [(("5", None), "a row has none"), (("5", 5.0), "all are 5")]
)
def test_data_without_two_labels_are_refused(labels, message):
    with pytest.raises(ConfigError, match=message):
        CanaryRows(prompts(*labels), seed=0, swaps=True)
