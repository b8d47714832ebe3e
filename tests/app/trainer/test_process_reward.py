"""train_prm takes the steps of a plain loop over the whole batch, in every layout.

The last token of each step is scored.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from app.trainer.judged import (
    ANSWERS,
    LAYOUTS,
    RANK,
    RUN,
    assert_adapters_equal,
    assert_equal,
    course,
    plain,
    plain_adapters,
    write,
)
from ranks import run_cases, run_ranks
from runs import prepare, repeatable
from tiny import EOS

ROWS = [
    {
        "prompt": "abcdefgh"[: 2 + index % 5] + "?",
        "completions": ["so", answer, "yes"][: 1 + index % 3],
        "labels": [index % 2 == 0, 0.25, True][: 1 + index % 3],
    }
    for index, answer in enumerate(ANSWERS)
]
SEPARATOR = "; "


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scorer")

    return [
        f"--pretrain={folder}/scorer",
        f"--prompt_data={write(ROWS, folder / 'steps.jsonl')}",
        f"--step_separator={SEPARATOR}",
    ]


def step_scores(model, row) -> torch.Tensor:
    """Return the score after each step [number of steps].

    Each comes from a separate text that ends with the step.
    """
    scores = []
    text = row["prompt"]
    for index, step in enumerate(row["completions"], 1):
        last = index == len(row["completions"])
        text += step if last else step + SEPARATOR
        ids = torch.tensor([[*text.encode(), *([EOS] if last else [])]])
        scores.append(model.score(model.model(ids, use_cache=False).last_hidden_state)[0, -1, 0])
    return torch.stack(scores)


def loss_of(model, rows) -> torch.Tensor:
    scores = torch.cat([step_scores(model, row) for row in rows])
    return F.binary_cross_entropy(
        scores.sigmoid(), torch.tensor([float(label) for row in rows for label in row["labels"]])
    )


@pytest.fixture(scope="module")
def expected(inputs) -> tuple:
    folder = inputs[0].partition("=")[2]
    return plain(
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32),
        loss_of,
        ROWS,
    )


def test_steps_are_those_of_plain_torch(inputs, expected, tmp_path):
    ((found,),) = run_cases(
        1, course, {"": ("train_prm", ["--fsdp", *inputs], f"{tmp_path}/run")}
    ).values()
    assert_equal(found, expected)


@pytest.mark.slow
def test_layouts_do_not_change_the_steps(inputs, expected, tmp_path):
    cases = {
        name: ("train_prm", [*layout, *inputs], f"{tmp_path}/{name}")
        for name, layout in LAYOUTS.items()
    }
    for by_rank in run_cases(2, course, cases).values():
        for found in by_rank:
            assert_equal(found, expected)


@pytest.mark.slow
def test_adapters_and_the_head_are_those_of_plain_torch(inputs, tmp_path):
    flags = [*inputs, f"--lora_rank={RANK}"]
    folder = inputs[0].partition("=")[2]
    base = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert_adapters_equal(
        "train_prm",
        flags,
        plain_adapters("train_prm", flags, base, loss_of, ROWS, tmp_path),
        tmp_path,
    )


@pytest.mark.slow
def test_two_ranks_report_what_one_reports(inputs, tmp_path):
    flags = [*inputs, inputs[1].replace("prompt_data", "eval_data"), "--fsdp"]
    one, two = (
        run_cases(ranks, course, {"": ("train_prm", flags, f"{tmp_path}/{ranks}")})[""][0][0]
        for ranks in (1, 2)
    )
    for first, second in zip(repeatable(one), repeatable(two), strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "1" / "model", dtype=torch.float32
    )
    assert one[-1]["eval/loss"] == pytest.approx(loss_of(model, ROWS).item(), rel=1e-4)
    scores = [score > 0 for row in ROWS for score in step_scores(model, row)]
    right = [
        score == (label > 0.5)
        for score, label in zip(
            scores, (label for row in ROWS for label in row["labels"]), strict=True
        )
    ]
    assert one[-1]["eval/accuracy"] == pytest.approx(sum(right).item() / len(right))


def test_bad_rows_and_a_separator_without_tokens_are_refused(inputs, tmp_path):
    cases = {
        "steps.jsonl:1: the row has 2 steps but 1 labels": (
            {"completions": ["a", "b"], "labels": [True]},
            [],
        ),
        "'labels' (--label_key) must be a list of true, false or numbers from 0 to 1, not [2]": (
            {"completions": ["a"], "labels": [2]},
            [],
        ),
        "'completions' (--completion_key) must be a list of texts, the steps, not 'a'": (
            {"completions": "a", "labels": [1]},
            [],
        ),
        "--step_separator is empty": ({}, ["--step_separator="]),
        "the row has 2 steps, but --step_separator '; ' divides their text into 3": (
            {"completions": ["a; b", "c"], "labels": [1, 1]},
            [],
        ),
    }
    for number, (message, (row, added)) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        data = write([ROWS[0] | row, *ROWS], tmp_path / str(number) / "steps.jsonl")
        with pytest.raises(RuntimeError) as error:
            run_ranks(
                1,
                course,
                "train_prm",
                [*RUN, "--fsdp", *inputs, f"--prompt_data={data}", *added],
                f"{tmp_path}/{number}/run",
            )
        assert message in str(error.value)
