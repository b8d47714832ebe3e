"""Why: a number, a curve or an example that is written by hand soon differs from the run."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from laptop_runs import write_evaluation, write_rows, write_training
from scripts.laptop import results

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def words(tmp_path) -> Path:
    """Write a run of the recipe `words`.

    It has three steps of GRPO after two of SFT, and four rows in each held-out set.
    """
    folder = tmp_path / "words-seed1"
    gaps = [
        {"engine/logprob_mismatch": gap * 1e-6, "engine/logprob_mismatch_max": gap * 1e-4}
        for gap in (1, 3, 2)
    ]
    grpo = [{"rollout/reward": 0.123456 * number} | gap for number, gap in enumerate(gaps, 1)]
    grpo[1] |= {"eval/known/accuracy": 0.4, "eval/new/accuracy": 0.3}
    write_training(folder, "train_ppo", grpo)
    write_training(folder / "sft", "train_sft", [{"memory/peak_gb": 5.25}, {}], seconds=20.0)

    write_evaluation(
        folder / "before", ["I ramble ...", "so | what", "well", "2 + 2 = 4"], [0, 0, 0, 1]
    )
    write_evaluation(
        folder / "after_sft", ["1 + 1 = 3", "2 + 3 = 6", "1", "2 + 2 = 4"], [0, 0, 0, 1]
    )
    write_evaluation(
        folder / "after", ["1 + 1 = 2", "2 + 3 = 5", "1 + 4 = 6", "2 + 2 = 4"], [1, 1, 0, 1]
    )
    write_rows(folder / "data/new.jsonl", [{"input": f"question {row}"} for row in range(4)])
    return folder


@pytest.fixture
def brevity(tmp_path) -> Path:
    """Write a run of the recipe `brevity`, with one set that has no name, and five questions."""
    folder = tmp_path / "brevity-seed0"
    write_training(
        folder,
        "train_dpo",
        [{"train/accuracy": 0.5, "train/margin": -0.1}, {"train/margin": 0.2}],
        seed=0,
    )
    write_training(folder / "sft", "train_sft", [{}], seed=0)

    long = "This is a sentence of eight words indeed."
    brief = "This one has five words."
    write_evaluation(folder / "before", [long, long, long, brief, "cut ..."], [0] * 5, sets=("",))
    write_evaluation(
        folder / "after_sft", [long, long, long, brief, "cut ..."], [0] * 5, sets=("",)
    )
    write_evaluation(folder / "after", [brief, brief, "Too few.", brief, long], [0] * 5, sets=("",))
    write_rows(folder / "data/new.jsonl", [{"input": f"question {row}"} for row in range(5)])
    return folder


def test_the_pages_show_the_published_runs():
    """The script makes the tables, examples and figures from docs/results."""
    for path, text in results.generated(results.read_records()).items():
        assert path.read_text() == text, f"{path.name}: run python scripts/laptop/results.py"


def test_numbers_of_a_run(words):
    found, steps = results.record(words)
    assert (found["recipe"], found["seed"], found["ranks"]) == ("words", 1, 2)
    assert found["versions"] == dict.fromkeys(results.VERSIONS, "1.0")
    assert found["training"]["grpo"] == {"steps": 3, "minutes": 1.7, "peak_gb": 4.5}
    assert found["mismatch"] == {"mean": 2e-6, "largest": 3e-4}

    new = found["held_out"]["new"]
    assert list(new) == ["before", "after_sft", "after"] and new["after"]["value"] == 0.75
    assert new["after"]["low"] < 0.75 < new["after"]["high"]
    assert new["before"]["truncated"] == 0.25 and new["before"]["words"] == 3.0

    assert [row["rollout/reward"] for row in steps] == [
        0.1235,
        0.2469,
        0.3704,
    ] and "train/not_kept" not in steps[0]


def test_minutes_of_a_continued_run_are_those_of_its_steps(words):
    """run.json of SFT has the 20 seconds of the last part; its two steps took 30 seconds each."""
    found, _ = results.record(words)
    assert found["training"]["sft"] == {"steps": 2, "minutes": 1.0, "peak_gb": 5.25}


def test_examples_are_chosen_by_a_rule(words):
    """The first two rows that became right, and the first that stayed wrong."""
    found, _ = results.record(words)
    assert [example["input"] for example in found["examples"]] == [
        "question 0",
        "question 1",
        "question 2",
    ]
    assert found["examples"][1] == {
        "input": "question 1",
        "before": "so | what",
        "after_sft": "2 + 3 = 6",
        "after": "2 + 3 = 5",
    }


def test_wins_against_the_model_before(brevity):
    """Two briefer answers win, and so does a whole one in place of a cut one.

    One that is too short loses, and an equal one is a tie.
    """
    found, _ = results.record(brevity)
    new = found["held_out"]["new"]
    assert new["after_sft"]["value"] == 0.5 and "value" not in new["before"]
    assert new["after"]["value"] == (1 + 1 + 0 + 0.5 + 1) / 5
    assert (new["before"]["truncated"], new["after"]["truncated"]) == (0.2, 0.0)
    assert "mismatch" not in found and len(found["examples"]) == 2


def test_text_and_pictures_of_records(words, brevity):
    runs = [results.record(words), results.record(brevity)]
    of_words, of_brevity = (results.recipe_text([numbers]) for numbers, _ in runs)
    assert (
        "| [1](results/words-seed1.json) | new | **25%** (" in of_words
        and "| 1 | 2 of SFT, 3 of GRPO | 1, 2 | 5.2 GB |" in of_words
    )
    assert "| question 1 | so &#124; what | 2 + 3 = 6 | 2 + 3 = 5 |" in of_words
    assert "**70%** (" in of_brevity and "no engine" in of_brevity

    summary = results.summary_table([numbers for numbers, _ in runs]).splitlines()
    assert len(summary) == 4 and "| 25% | 75% | 3 |" in summary[2] and "| 50% | 70% |" in summary[3]

    for run, num_curves in zip(runs, (4, 3), strict=True):
        root = ElementTree.fromstring(results.picture([run]))
        assert len(root.findall(".//{*}polyline")) == num_curves
        assert len(results.picture([run, run]).split("<polyline")) == 2 * num_curves + 1


def test_the_curve_of_accuracy_begins_with_the_model_after_sft(words):
    panel = results._accuracy_panel([results.record(words)], "", "known")
    assert list(panel.curves[0].points) == [(0, 0.25), (2, 0.4), (3, 0.75)] and panel.curves[
        0
    ].marked == (0, -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: write_training(folder, "train_ppo", [{}], status="failed"),
            "the run is failed, not finished",
        ),
        (lambda folder: write_training(folder, "train_ppo", [{}], seed=2), "has seed 2"),
        (
            lambda folder: write_rows(folder / "data/new.jsonl", [{"input": "another"}] * 4),
            "not the prompt that was evaluated",
        ),
    ],
)
def test_a_folder_that_is_not_the_run_is_refused(words, change, message):
    change(words)
    with pytest.raises(ValueError, match=message):
        results.record(words)


def test_a_folder_of_another_name_is_refused(words):
    with pytest.raises(ValueError, match="must be RECIPE-seedN"):
        results.record(words.rename(words.with_name("words")))


def test_the_recipes_are_those_of_the_script():
    script = (ROOT / "scripts/laptop/run.sh").read_text()
    assert re.search(r"^    ([a-z |]+)\) ;;", script, flags=re.MULTILINE)[1].split(" | ") == list(
        results.RECIPES
    )
