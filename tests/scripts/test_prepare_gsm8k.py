"""GSM8K files of the true format become prompts with labels.

Anything else is reported with its row.
"""

import json
import sys

import pytest
from datasets import Dataset

from scripts import prepare_gsm8k

ROWS = [
    {
        "question": "Tom has 3 bags of 14 eggs. How many eggs?\n",
        "answer": "3 * 14 = <<3*14=42>>42 eggs.\n#### 42",
    },
    {
        "question": "How much is half of 2,468 dollars?",
        "answer": "2468 / 2 = $<<2468/2=1234>>1,234\n#### 1,234",
    },
    {"question": "It was 5 degrees and fell by 7. Now?", "answer": "5 - 7 = <<5-7=-2>>-2\n#### -2"},
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def prepare(source) -> dict[str, list[dict]]:
        out = tmp_path / "out"
        monkeypatch.setattr(
            sys, "argv", ["prepare_gsm8k.py", "--source", str(source), "--out", str(out)]
        )
        prepare_gsm8k.main()
        files = {split: out / f"{split}.jsonl" for split in ("train", "test")}
        return {
            split: [json.loads(line) for line in file.read_text().splitlines()]
            for split, file in files.items()
        }

    return prepare


def as_jsonl(folder, split, rows):
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(folder, split, rows):
    (folder / "main").mkdir(exist_ok=True)
    Dataset.from_list(rows).to_parquet(str(folder / "main" / f"{split}-00000-of-00001.parquet"))


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
def test_folder_of_files(run, tmp_path, write):
    source = tmp_path / "source"
    source.mkdir()
    write(source, "train", ROWS)
    write(source, "test", ROWS[:1])
    splits = run(source)
    assert [row["label"] for row in splits["train"]] == ["42", "1234", "-2"] and len(
        splits["test"]
    ) == 1
    (message,) = splits["train"][0]["input"]
    assert message["role"] == "user"
    assert (
        message["content"].startswith("Tom has 3 bags of 14 eggs. How many eggs?\nThink")
        and "####" in message["content"]
    )


def test_without_a_network_the_way_out_is_said(run):
    with pytest.raises(
        SystemExit, match="--source openai/gsm8k: the hub does not give it .* --source folder"
    ):
        run("openai/gsm8k")


@pytest.mark.parametrize("answer", ["forty-two", "#### forty-two", "####", "42 #### "])
def test_a_row_without_a_number_is_named(run, tmp_path, answer):
    as_jsonl(tmp_path, "train", [ROWS[0], ROWS[1] | {"answer": answer}])
    with pytest.raises(SystemExit, match="train, row 2: not a GSM8K problem"):
        run(tmp_path)


def test_other_columns_are_named(run, tmp_path):
    as_jsonl(tmp_path, "train", [{"prompt": "x", "completion": "y"}])
    with pytest.raises(SystemExit, match="row 1: not a GSM8K problem.*answer"):
        run(tmp_path)


def test_a_missing_split_is_named(run, tmp_path):
    as_jsonl(tmp_path, "train", ROWS)
    with pytest.raises(SystemExit, match=r"no test\*.jsonl"):
        run(tmp_path)


def test_a_missing_folder_is_not_taken_for_a_hub_name(run):
    with pytest.raises(SystemExit, match="neither an existing folder nor a hub name"):
        run("no/such/folder")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("#### 42", "42"),
        ("#### $1,234,567", "1234567"),
        ("#### -0.5 ", "-0.5"),
        ("#### 1 #### 2", "2"),
    ],
)
def test_final_number(answer, number):
    assert prepare_gsm8k.final_number(answer) == number
