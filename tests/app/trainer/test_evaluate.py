"""Evaluations of models, runs and checkpoints, whose numbers and files are the same on any number
of ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.app.trainer.run import run
from lightrft.config import ConfigError, parse
from lightrft.config.references import EvalSource, eval_sources
from ranks import run_ranks
from runs import PPO, prepare, train
from sglang_environment import in_sglang_environment
from with_vllm import load_vllm

QUESTIONS = [{"question": f"{i} + {i}?", "answer": f"It is\n#### {2 * i}"} for i in range(7)]
CHOICES = [
    {
        "Question": f"{i}?",
        "Correct Answer": "yes",
        **{f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)},
    }
    for i in range(5)
]
SAMPLED = ["--eval_n_samples=3", "--engine_type=hf", "--generate_max_len=5", "--prompt_max_len=200"]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, list[str]]:
    """Return a folder, and the flags of an evaluation of four sets.

    There are two benchmarks, a task, and a set in columns of its own.
    """
    folder = tmp_path_factory.mktemp("inputs")
    flags = prepare(folder, rows=9)
    sets = f"gsm8k={jsonl(folder / 'gsm8k.jsonl', QUESTIONS)},hard:gpqa={jsonl(folder / 'gpqa.jsonl', CHOICES)}"
    sets += ",gym=reasoning_gym:chain_sum?size=4"
    kept = [flag for flag in flags if not flag.startswith(("--prompt", "--report_to"))]
    return folder, [*kept, f"--eval_data={sets},own={folder / 'train.jsonl'}"]


def evaluate_here(flags: list[str]) -> dict[str, float]:
    return run("evaluate", parse(flags, "evaluate"))


def evaluated(
    ranks: int, flags: list[str], save_path: Path
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Evaluate on forked ranks; return the numbers, the numbers of all ranks, and the responses."""
    returned = run_ranks(ranks, evaluate_here, [*SAMPLED, *flags, f"--save_path={save_path}"])
    numbers = json.loads((save_path / "evaluation.json").read_text())
    assert returned == [numbers] * ranks
    return numbers, [
        json.loads(line) for line in (save_path / "responses.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def one_rank(inputs, tmp_path_factory):
    return evaluated(1, inputs[1], tmp_path_factory.mktemp("one"))


@pytest.mark.slow
def test_numbers_and_responses_do_not_depend_on_the_ranks(inputs, one_rank, tmp_path):
    """Two ranks divide only one of the sets evenly."""
    assert evaluated(2, inputs[1], tmp_path) == one_rank


@pytest.mark.slow
def test_engines_give_the_same_greedy_responses(inputs, one_rank, tmp_path):
    load_vllm()
    vllm = ["--engine_type=vllm", "--engine_kv_cache_gb=0.2"]
    _, rows = evaluated(1, [*inputs[1], *vllm], tmp_path)
    assert [row for row in rows if row["sample"] == "greedy"] == [
        row for row in one_rank[1] if row["sample"] == "greedy"
    ]


@pytest.mark.slow
def test_sglang_gives_them_too(inputs, one_rank, tmp_path):
    sglang = ["--engine_type=sglang", "--engine_kv_cache_gb=0.05"]
    _, rows = in_sglang_environment(evaluated, 1, [*inputs[1], *sglang], tmp_path)
    assert [row for row in rows if row["sample"] == "greedy"] == [
        row for row in one_rank[1] if row["sample"] == "greedy"
    ]


@pytest.mark.slow
def test_every_response_is_there_once_and_the_numbers_are_theirs(one_rank):
    numbers, rows = one_rank
    counts = {"gsm8k": 7, "hard": 5, "gym": 4, "own": 9}
    assert [(row["set"], row["row"], row["sample"]) for row in rows] == [
        (name, row, sample)
        for name, count in counts.items()
        for row in range(count)
        for sample in ("greedy", 0, 1, 2)
    ]

    for name, count in counts.items():
        of_set = [row for row in rows if row["set"] == name]
        greedy = [row["reward"] for row in of_set if row["sample"] == "greedy"]
        sampled = [row["reward"] for row in of_set if row["sample"] != "greedy"]
        assert numbers[f"{name}/num_samples"] == count
        assert numbers[f"{name}/reward"] == pytest.approx(sum(greedy) / count)
        assert numbers[f"{name}/avg_at_3"] == pytest.approx(sum(sampled) / (3 * count))
        assert (
            numbers[f"{name}/reward_low"]
            <= numbers[f"{name}/reward"]
            <= numbers[f"{name}/reward_high"]
        )
        assert {f"{name}/pass_at_{k}" for k in (1, 2, 3)} <= numbers.keys()

    assert {"gsm8k/accuracy", "gym/reward"} <= numbers.keys()
    assert "own/accuracy" not in numbers, "a verifier says right or wrong, the reward does not"
    assert 0 < numbers["own/avg_at_3"] < 1
    row = rows[0]
    assert row["prompt"].startswith("0 + 0?\n\nReason step by step") and row["label"] == "0"
    assert (
        row["finish_reason"] in ("stop", "length")
        and row["length"] == len(row["response_token_ids"]) <= 5
    )


@pytest.mark.slow
def test_a_run_and_its_checkpoint_are_evaluated_without_an_export(inputs, tmp_path):
    """The folder of a run stands for the run's final model.

    The last checkpoint holds the same model, and stands in when the final model is gone.
    """
    folder, flags = inputs
    adapters = ["--lora_rank=4", "--actor_learning_rate=1e-2"]
    train(
        "train_ppo",
        2,
        [*prepare(folder, rows=9), *PPO, *adapters, "--max_steps=2", "--save_steps=1"],
        tmp_path / "run",
    )
    others = [flag for flag in flags if not flag.startswith(("--pretrain", "--eval_data"))]
    others.append(f"--eval_data=own={folder / 'train.jsonl'}")

    found = {}
    for name, pretrain in {
        "model": "run/model",
        "run": "run",
        "checkpoint": "run/checkpoints/step2",
    }.items():
        found[name] = evaluated(1, [*others, f"--pretrain={tmp_path / pretrain}"], tmp_path / name)

    (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")
    found["newest"] = evaluated(2, [*others, f"--pretrain={tmp_path / 'run'}"], tmp_path / "newest")
    found["first"] = evaluated(
        1, [*others, f"--pretrain={tmp_path / 'run/checkpoints/step1'}"], tmp_path / "newest"
    )
    assert found["model"] == found["run"] == found["checkpoint"] == found["newest"]
    assert found["first"][1] != found["model"][1], (
        "the exported model of another checkpoint is not used again"
    )


@pytest.mark.slow
def test_training_reports_every_set(inputs, tmp_path):
    folder, flags = inputs
    often = [
        "--eval_n_samples=2",
        "--eval_steps=1",
        "--max_steps=1",
        "--prompt_max_len=200",
        "--max_tokens_per_microbatch=256",
    ]

    rows = train("train_ppo", 2, [*prepare(folder, rows=9), *PPO, flags[-1], *often], tmp_path)
    for row in rows:
        assert row["eval/gsm8k/num_samples"] == 7 and row["eval/hard/num_samples"] == 5
        assert row["eval/gym/num_samples"] == 4 and row["eval/own/num_samples"] == 9
        assert {"eval/gsm8k/accuracy", "eval/hard/pass_at_2", "eval/own/avg_at_2"} <= row.keys()
        assert "eval/own/accuracy" not in row and "eval/reward" not in row


def test_a_folder_that_is_neither_model_nor_run(inputs, tmp_path):
    flags = [flag for flag in inputs[1] if not flag.startswith("--pretrain")]
    with pytest.raises(
        ConfigError, match="is neither a model's folder, nor that of a run, nor a checkpoint"
    ):
        evaluate_here(
            [*flags, *SAMPLED, f"--pretrain={tmp_path}", f"--save_path={tmp_path / 'out'}"]
        )


# -- names of sets


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("", []),
        ("a.jsonl,b.jsonl", [EvalSource("", "a.jsonl,b.jsonl")]),
        ("owner/name", [EvalSource("", "owner/name")]),
        ("data/a=b.jsonl", [EvalSource("", "data/a=b.jsonl")]),
        (
            "gsm8k=openai/gsm8k, own=b",
            [EvalSource("gsm8k", "openai/gsm8k", "gsm8k"), EvalSource("own", "b")],
        ),
        (
            "aime24:aime=a,aime-25:aime=b",
            [EvalSource("aime24", "a", "aime"), EvalSource("aime-25", "b", "aime")],
        ),
    ],
)
def test_forms_of_held_out_data(text, sources):
    assert eval_sources(text) == sources


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=x,y.jsonl", "--eval_data y.jsonl: name every set, as NAME=SOURCE, or none"),
        ("a=x,a=y", "--eval_data: two sets are called a"),
        ("a:gsm9k=x", "--eval_data a:gsm9k: unknown format; did you mean gsm8k? (choices: gsm8k, "),
    ],
)
def test_forms_that_are_errors(text, message):
    with pytest.raises(ValueError) as error:
        eval_sources(text)
    assert message in str(error.value)
