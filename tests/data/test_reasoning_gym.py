"""Tasks of reasoning-gym as data and as a reward.

Each has the same rows everywhere, and its own answers score 1.
"""

import json
import warnings
from typing import Any

import pytest

from lightrft.config import ConfigError, DataSection, RewardSection
from lightrft.config.references import data_sources
from lightrft.core.samples import Prompt, Sample
from lightrft.data.conversations import load_examples
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import BadRows, DataError, read_rows
from lightrft.data.reasoning_gym import generator
from lightrft.data.reasoning_gym.tasks import ReasoningTask
from lightrft.rewards.runner import RewardRunner
from runs import PPO, prepare, train
from tiny import byte_tokenizer

NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks without a single right answer."""
SUM = "reasoning_gym:chain_sum?size=24&min_terms=2&max_terms=2&max_digits=1"


def generated(capfd: Any, name: str, *, size: int = 1, seed: int = 1, **options: Any) -> list[dict]:
    """Return what the generator writes when it is called in this process."""
    capfd.readouterr()
    generator.main(json.dumps({"name": name, "size": size, "seed": seed, "options": options}))
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def scores(*responses: tuple[str, dict]) -> list[float]:
    """Return the rewards of pairs of a response and its row, each from a call of its own."""
    runner = RewardRunner("reasoning_gym", section=RewardSection(reward_workers=0))
    samples = [
        Sample(Prompt(0, "", [1], row), 0, [1], [0.0], text, "stop") for text, row in responses
    ]
    for sample in samples:
        runner([sample])
    return [sample.reward for sample in samples]


# -- names of tasks


def test_names_with_options():
    task = ReasoningTask.parse(
        'reasoning_gym:x?size=3&seed=7&n=2&flag=true&word=a&list=["+","-"]', "train"
    )
    assert task == ReasoningTask("x", 3, 7, {"n": 2, "flag": True, "word": "a", "list": ["+", "-"]})
    names = data_sources('reasoning_gym:x?list=["+","-"],b.jsonl,reasoning_gym:y?n=1')
    assert [name.name for name in names] == [
        'reasoning_gym:x?list=["+","-"]',
        "b.jsonl",
        "reasoning_gym:y?n=1",
    ]

    for wrong in ("size=0", "size=a", "seed=-1", "seed=1.5"):
        with pytest.raises(
            DataError, match=f"reasoning_gym:x.{wrong}: {wrong} is not a whole number of at least"
        ):
            ReasoningTask.parse(f"reasoning_gym:x?{wrong}", "train")


def test_rows_of_training_are_not_held_out():
    def check(training: str, held_out: str, **options: str) -> None:
        section = DataSection(prompt_data=training, eval_data=held_out, **options)
        load_prompts(section, byte_tokenizer(), source="eval_data")

    with pytest.raises(
        DataError,
        match=(
            "--eval_data reasoning_gym:x.seed=9&size=5: some of its rows are in --prompt_data, .* "
            "set seed=10, or leave seed out of both"
        ),
    ):
        check("a.jsonl,reasoning_gym:x?size=10&seed=0", "reasoning_gym:x?seed=9&size=5")
    with pytest.raises(DataError, match="some of its rows are in --prompt_data"):
        check("reasoning_gym:x", "reasoning_gym:x", eval_split="train")
    task = ReasoningTask.parse("reasoning_gym:x", "train")
    assert not task.shares_rows(
        ReasoningTask.parse("reasoning_gym:x", "test")
    ) and task.shares_rows(task)
    assert not ReasoningTask("x", 10, 0).shares_rows(ReasoningTask("x", 10, 10))
    assert not ReasoningTask("x", 9, 0).shares_rows(ReasoningTask("y", 9, 0))
    assert not ReasoningTask("x", 9, 0).shares_rows(ReasoningTask("x", 9, 0, {"n": 1}))


# -- rows and scores


@pytest.mark.slow
def test_every_task_generates_rows_and_scores_its_own_answers(capfd):
    import reasoning_gym

    names = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})
    rows = [generated(capfd, name)[0] for name in names]
    assert (
        len(names) == 105
        and {name for name, row in zip(names, rows, strict=True) if row["answer"] is None}
        == NO_ANSWER
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about what is no matrix
        right = scores(*((f"so <answer>\n{row['answer']}\n</answer>", row) for row in rows))
        wrong = scores(*(("nothing of the kind", row) for row in rows))
    assert {name for name, score in zip(names, right, strict=True) if score != 1} == NO_ANSWER
    assert {name for name, score in zip(names, wrong, strict=True) if score > 0.05} == {
        "game_of_life_halting"
    }, "which takes any text but True for False"


@pytest.mark.slow
def test_rows_do_not_depend_on_the_process(capfd):
    """The first task draws from the global random numbers, the second iterates over a set."""
    assert generated(capfd, "list_functions", size=9) == generated(capfd, "list_functions", size=9)
    first, second = (
        list(read_rows("reasoning_gym:ransom_note?size=9", "train", BadRows(False, "--x")))
        for _ in range(2)
    )
    assert first == second and [where for where, _ in first] == [
        f"reasoning_gym:ransom_note row {n}" for n in range(1, 10)
    ]
    row = first[0][1]
    assert (
        row["input"] == row["question"] and row["label"] == row["answer"] and row["options"] == {}
    )


@pytest.mark.slow
def test_what_counts_as_the_answer_of_a_response(capfd):
    (row,) = generated(capfd, "chain_sum")
    right = row["answer"]
    responses = {
        f"<answer>{right}</answer>": 1,
        f"<answer>7</answer> no, <answer> {right}\n</answer> or 7": 1,
        f"<answer>{right}": 1,
        f"so\n{right}\n\n": 1,
        f"<think>\n7</think>{right}": 1,
        f"<think><answer>7</answer></think>\n{right}": 1,
        f"{right}\n7": 0,
        f"<answer>7</answer>\n{right}": 0,
        "": 0,
    }
    assert scores(*((text, row) for text in responses)) == list(responses.values())


@pytest.mark.slow
def test_scorers_get_the_rows_of_files_and_the_options_of_the_task(capfd):
    (grid,) = generated(capfd, "rearc")
    as_text = {
        name: json.dumps(value) if name == "metadata" else value for name, value in grid.items()
    }
    (puzzle,) = generated(capfd, "puzzle24")
    small = puzzle | {"options": {"max_value": 5}}
    found = scores(
        (f"<answer>{grid['answer']}</answer>", as_text), ("6*4*1*1", puzzle), ("6*4*1*1", small)
    )
    assert found == [1, 1, 0.01]


@pytest.mark.slow
def test_answers_that_break_a_scorer_are_wrong_and_rows_that_do_are_reported(capfd):
    (factors,), (puzzle,) = generated(capfd, "prime_factorization"), generated(capfd, "countdown")
    assert scores(("wrong", factors), ("exit()", puzzle), ("[" * 9999, puzzle))[0] == 0
    with pytest.raises(ConfigError, match="KeyError|ValueError"):
        scores(("2", factors | {"metadata": {"source_dataset": "rearc"}}))
    with pytest.raises(
        ConfigError,
        match="the column metadata names no task of reasoning-gym as source_dataset: None",
    ):
        scores(("2", {"answer": "2", "metadata": {}}))


@pytest.mark.slow
def test_an_unknown_task_says_the_way_out(capfd):
    def problem(name: str, **options: Any) -> str:
        return generated(capfd, name, **options)[0]["problem"]

    assert (
        problem("chain_smu")
        == "reasoning-gym has no task 'chain_smu'; did you mean chain_sum or decimal_chain_sum?"
    )
    assert problem("zzz").startswith(
        "reasoning-gym has no task 'zzz'; tasks are ab, acre, advanced_geometry, "
    )
    assert "composite" not in problem("zzz")
    assert problem("chain_sum", terms=2).startswith(
        "the task has no option 'terms'; its options are min_terms, max_terms, "
    )
    assert problem("chain_sum", min_terms=9) == "max_terms must be >= min_terms"
    with pytest.raises(
        DataError,
        match="--prompt_data reasoning_gym:chain_sum.terms=2: the task has no option 'terms'",
    ):
        load_prompts(DataSection(prompt_data="reasoning_gym:chain_sum?terms=2"), byte_tokenizer())


@pytest.mark.slow
def test_a_task_without_answers_is_no_data_for_sft(capfd, tmp_path):
    (row,) = generated(capfd, "graph_color")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(row | {"input": row["question"], "label": row["answer"]})
    )
    section = DataSection(prompt_data=str(tmp_path / "rows.jsonl"), prompt_max_len=9999)
    with pytest.raises(DataError, match="rows.jsonl:1: no text to train on in the answer column"):
        load_examples(section, byte_tokenizer(), longest=9999)


@pytest.mark.slow
def test_a_run_and_its_evaluation(tmp_path):
    inputs = [
        flag
        for flag in prepare(tmp_path)
        if not flag.startswith(("--prompt_data", "--reward", "--prompt_max_len"))
    ]
    flags = [
        *inputs,
        *PPO,
        f"--prompt_data={SUM}",
        f"--eval_data={SUM.replace('24', '4')}",
        "--reward=reasoning_gym",
        "--prompt_max_len=90",
        "--max_steps=1",
        "--reward_workers=1",
    ]
    (row,) = train("train_ppo", 1, flags, tmp_path / "run")
    assert row["eval/num_samples"] == 4 and 0 <= row["eval/reward"] <= 1

    shown = [
        json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert all("arithmetic" in sample["prompt"] for sample in shown)
