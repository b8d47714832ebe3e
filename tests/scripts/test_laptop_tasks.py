"""The data and the rewards of the recipes for a laptop."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.laptop.rewards import brevity, follows, follows_all, passes
from scripts.laptop.tasks import NEW_SUBJECTS, data, pairs

TASKS = str(Path(__file__).resolve().parents[2] / "scripts/laptop/tasks.py")


@pytest.fixture(scope="module")
def words():
    return data("words", seed=3)


def test_the_answer_of_a_word_problem_follows_from_its_numbers(words):
    for row in words["train"] + words["test"] + words["new"]:
        equations = row["working"].split(", ")
        for equation in equations:
            left, result = equation.split(" = ")
            assert eval(left) == int(result) >= 1
        assert equations[-1].split(" = ")[1] == row["label"]
        assert row["working"].split()[0] in row["input"]


def test_held_out_rows_are_not_trained(words):
    trained = {row["input"] for row in words["train"]}
    assert len(trained) == len(words["train"])
    assert not trained & {row["input"] for row in words["test"] + words["new"]}


def test_new_instructions_are_about_new_subjects():
    made = data("instructions", seed=3)
    assert all(is_new(row) for row in made["new"])
    assert not any(is_new(row) for row in made["train"] + made["test"])


def is_new(row):
    return any(
        re.search(rf"(about|Describe) {subject}[ .,]", row["input"]) for subject in NEW_SUBJECTS
    )


def test_the_form_shows_the_working_of_trained_problems(words):
    trained = {row["input"]: row["working"] for row in words["train"]}
    assert words["form"] and all(trained[row["input"]] == row["label"] for row in words["form"])


def test_a_seed_makes_the_same_files(tmp_path):
    command = [sys.executable, TASKS, "questions", "--out"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        subprocess.run(
            [*command, str(tmp_path / name), "--seed", seed], check=True, capture_output=True
        )
    first, again, other = ((tmp_path / name / "train.jsonl").read_text() for name in "abc")
    assert first == again != other


@pytest.mark.parametrize(
    ("check", "passing", "failing"),
    [
        ("sentence", "The sea is wide.", "The sea. It is wide."),
        ("sentence", "Is the sea wide?", "The sea is wide"),
        ("words:4", "The sea is wide.", "The sea is very wide."),
        ("use:light", "The light is on.", "The lights are on."),
        ("avoid:the", "Breathe in and out.", "The sea is wide."),
        ("end:!", "The sea is wide!", "The sea is wide."),
        ("items:3", "blue, deep, wide", "blue, deep, blue"),
        ("items:3", "blue, deep sea, wide.", "blue, a deep sea, wide"),
        ("keys:name age", '{"age": 3, "name": "Tom"}', '{"name": "Tom"}'),
        ("keys:name", '{"name": "Tom"}', '{"name": ""}'),
        ("keys:name", '{"name": 7}', '{"name": ["Tom"]}'),
        ("keys:name", '{"name": "x"}', "name: x"),
    ],
)
def test_a_check_passes_what_it_says(check, passing, failing):
    assert passes(check, passing) and not passes(check, failing)


def test_an_unknown_check_is_an_error():
    with pytest.raises(ValueError, match="unknown check 'rhymes'"):
        passes("rhymes", "The sea is wide.")


def test_the_reward_is_for_all_checks_and_for_an_end():
    def sample(text, truncated=False):
        return SimpleNamespace(text=text, truncated=truncated)

    samples = [
        sample("the sea is wide!"),
        sample("the sea is wide."),
        sample("the sea is wide!", truncated=True),
    ]
    checks = [["sentence", "end:!"]] * 3
    assert follows(samples, checks=checks) == [1.0, 0.25, 0.0]
    assert follows_all(samples, checks=checks) == [1.0, 0.0, 0.0]


def test_every_instruction_can_be_followed():
    for row in data("instructions", seed=0)["train"][:500]:
        for check in row["checks"]:
            passes(check, "The sea is wide.")  # raises for an unknown one


def test_pairs_are_the_briefest_and_the_longest_whole_answers():
    def answer(row, sample, text, finish="stop"):
        return {"row": row, "sample": sample, "response": text, "finish_reason": finish}

    long = "The sea is wide and deep and old."
    short = "The sea is very wide."
    responses = [
        answer(0, "greedy", "The sea is so wide."),
        answer(0, 0, long),
        answer(0, 1, short),
        answer(0, 2, "Wide."),
        answer(0, 3, long + " It is so wide that nobody", "length"),
        answer(1, 0, short),
        answer(1, 1, short),
    ]
    made = pairs([{"input": "What is the sea?"}, {"input": "And now?"}], responses)
    assert made["pairs"] == [{"input": "What is the sea?", "chosen": short, "rejected": long}]
    assert made["brief"] == [{"input": "What is the sea?", "label": short}]
    assert (
        brevity(short, False) == pytest.approx(10 / 15)
        and brevity(short, True) == brevity("Wide.", False) == 0
    )


def test_rows_are_written_as_they_are(tmp_path):
    subprocess.run(
        [sys.executable, TASKS, "instructions", "--out", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert rows == data("instructions", seed=0)["new"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no recipe ''"),
        (["chess"], "no recipe 'chess'"),
        (["words", "--seeds", "1"], "unknown: --seeds"),
        (["words", "--seed", "1", "--out", "run"], "has the run of seed 3"),
    ],
)
def test_a_wrong_command_is_told_before_anything_is_installed(tmp_path, arguments, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/seed").write_text("3\n")
    script = Path(TASKS).with_name("run.sh")
    done = subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=20
    )
    assert done.returncode == 2 and said in done.stderr
