"""Tokenized data in a file: the same prompts as in memory.

One process writes it once, and again when anything changes.
"""

import json
import multiprocessing
import os
from pathlib import Path

import datasets
import pytest
from PIL import Image

from lightrft.config import DataSection
from lightrft.config.sections import PreferenceSection
from lightrft.data.conversations import load_examples
from lightrft.data.preferences import load_pairs
from lightrft.data.prompt_set import PromptSet
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from lightrft.data.stored import ROWS_OF_BATCH, StoredPrompts
from lightrft.rewards.runner import RewardRunner
from runs import prepare, train
from tiny import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}<eos>{% endfor %}{% if"
    " add_generation_prompt %}a>{% endif %}"
)


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def many(tmp_path) -> Path:
    """Return rows of two batches and a few more, with unlike columns."""
    rows = [
        {
            "input": f"{n}?" * (1 + n % 3),
            "label": n,
            **({"level": [n, None, {"a": "b"}]} if n % 2 else {}),
        }
        for n in range(2100)
    ]
    return write(tmp_path / "many.jsonl", rows)


def load(source: object, cache: Path | str = "", **options) -> PromptSet:
    examples = options.pop("examples", False)
    requirements = options.pop("requirements", None)
    distinguishing = options.pop("distinguishing", None)
    template = options.pop("template", None)
    section = DataSection(prompt_data=str(source), data_cache=str(cache), **options)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template

    if examples:
        return load_examples(section, tokenizer, longest=99, requirements=requirements)

    return load_prompts(
        section, tokenizer, requirements=requirements, distinguishing=distinguishing
    )


def files(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.glob("*.arrow"))


def test_prompts_of_a_file_are_those_in_memory(tmp_path, many):
    other = write(tmp_path / "other.jsonl", [{"input": "x"}, {"input": "y"}])
    expected = load(f"{many},{other}")
    found = load(f"{many},{other}", tmp_path / "cache")
    assert len(found) == 2102 > 2 * ROWS_OF_BATCH and list(found) == list(expected)
    assert (
        isinstance(found.sets[0].prompts, StoredPrompts)
        and found[-1].index == 2101
        and found[3:5] == expected[3:5]
    )
    assert type(found[7].token_ids) is type(expected[7].token_ids)
    assert found.digests == expected.digests

    assert [prompt.location for prompt in found[2099:]] == [
        prompt.location for prompt in expected[2099:]
    ]
    assert found[2101].location == f"{other}:2"
    assert [prompt.index for prompt in found.examples] == [0, 1, 2100]
    with pytest.raises(IndexError):
        found[2102]
    kinds = load(
        many, tmp_path / "cache", distinguishing="label", max_samples=5, requirements="others"
    ).examples
    assert len(kinds) == 5


def test_conversations_and_images(tmp_path):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}] * 2
    rows = write(tmp_path / "chat.jsonl", [{"messages": chat}, {"input": "u", "label": "v"}])
    given = {"apply_chat_template": True, "template": TEMPLATE, "examples": True}
    expected = load(rows, **given)
    found = load(rows, tmp_path / "cache", **given)
    assert list(found) == list(expected) and found.digests == expected.digests
    pairs = write(
        tmp_path / "pairs.jsonl",
        [{"prompt": "a", "chosen": text, "rejected": "x"} for text in ("b", "c", "b")],
    )

    both = []
    for cache in ("", tmp_path / "cache"):
        section = DataSection(prompt_data=str(pairs), data_cache=str(cache), deduplicate="exact")
        both.append(list(load_pairs(section, PreferenceSection(), byte_tokenizer(), longest=99)))

    assert (
        both[0] == both[1]
        and len(both[0]) == 2
        and both[0][0].columns.keys() >= {"chosen", "rejected"}
    )
    Image.new("RGB", (3, 4)).save(tmp_path / "a.png")
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    rows = write(tmp_path / "paths.jsonl", [{"input": "a", "images": ["a.png"]}, {"input": "b"}])

    datasets.Dataset.from_list([{"input": "c", "images": [image]}]).to_parquet(
        tmp_path / "inside.parquet"
    )
    both = f"{rows},{tmp_path / 'inside.parquet'}"
    expected = load(both, images_key="images")
    found = load(both, tmp_path / "cache", images_key="images")
    assert list(found) == list(expected) and [len(prompt.multi_modal) for prompt in found] == [
        1,
        0,
        1,
    ]
    assert found[2].multi_modal["images"][0].size == (3, 4)


def test_the_file_opens_with_the_package_datasets(tmp_path, many):
    load(many, tmp_path / "cache")
    (name,) = files(tmp_path / "cache")
    table = datasets.Dataset.from_file(str(tmp_path / "cache" / name))
    assert table[1]["text"] == "1?1?" and table[1]["token_ids"] == [*b"1?1?"]


def test_what_changes_a_row_changes_the_file(tmp_path, many):
    cache = tmp_path / "cache"
    changes = [
        {},
        {"prompt_max_len": 99},
        {"input_template": "{}!"},
        {"max_samples": 7},
        {"requirements": 1},
    ]

    for number, options in enumerate([*changes, {"deduplicate": "exact"}, {"bad_rows": "skip"}], 1):
        load(many, cache, **options)
        assert len(files(cache)) == number

    for same in ({}, {"eval_data": "x"}, {"pretrain_split": "y"}):
        load(many, cache, **same)
    assert len(files(cache)) == 7
    first = load(many, cache)
    os.utime(many, (1, 1))
    assert list(load(many, cache)) == list(first) and len(files(cache)) == 8


def test_bad_rows_leave_no_file(tmp_path):
    rows = write(tmp_path / "a.jsonl", [{"input": "a"}])
    rows.open("a").write("{\n")
    with pytest.raises(DataError, match="a.jsonl:2: not valid JSON"):
        load(rows, tmp_path / "cache")
    assert files(tmp_path / "cache") == []
    assert len(load(rows, tmp_path / "cache", bad_rows="skip")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data_cache .*file: (File exists|Not a directory)"):
        load(rows, tmp_path / "file", bad_rows="skip")


def test_columns_that_are_not_json(tmp_path):
    (tmp_path / "rows.py").write_text("ROWS = [{'input': 'a', 'scan': b'1'}]")
    with pytest.raises(
        DataError,
        match="rows.py:ROWS row 1: the column 'scan' cannot be stored as JSON with --data_cache: ",
    ):
        load(f"{tmp_path}/rows.py:ROWS", tmp_path / "cache")
    assert len(load(f"{tmp_path}/rows.py:ROWS")) == 1


COUNTED = """
import os
def rows():
    open({file!r}, "a").write("x")
    return [{{"input": str(n)}} for n in range(3)]
"""


def test_one_of_several_processes_writes_the_file(tmp_path):
    (tmp_path / "rows.py").write_text(COUNTED.format(file=str(tmp_path / "calls")))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=load, args=(f"{tmp_path}/rows.py:rows", tmp_path / "cache"))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "x" and len(files(tmp_path / "cache")) == 1


def of_label(samples, label):
    return [0.0] * len(samples)


def test_a_reward_determines_which_rows_are_usable():
    first, second = (RewardRunner(name).requirements for name in (f"{__name__}:of_label", "none"))
    assert (
        first != second
        and "label" in first
        and "number" in RewardRunner("number,f1:0.5").requirements
    )


@pytest.mark.slow
def test_a_run_on_two_ranks_reads_its_blend_from_the_file(tmp_path):
    """The second run resumes the first, with the same rows, from memory."""
    flags = [
        flag for flag in prepare(tmp_path) if not flag.startswith(("--reward", "--prompt_data"))
    ]
    other = write(tmp_path / "other.jsonl", [{"input": f"z{n}", "label": "z"} for n in range(6)])
    flags += [
        f"--prompt_data={tmp_path}/train.jsonl:0.7,{other}:0.3",
        "--train_batch_size=8",
        "--num_episodes=9",
    ]
    cache = f"--data_cache={tmp_path / 'cache'}"
    whole = train("train_sft", 2, [*flags, "--max_steps=4"], tmp_path / "whole")

    train(
        "train_sft",
        2,
        [*flags, cache, "--max_steps=2", "--save_steps=2", "--lr_scheduler=constant"],
        tmp_path / "run",
    )
    resumed = train(
        "train_sft",
        2,
        [*flags, "--max_steps=4", "--load_checkpoint", "--lr_scheduler=constant"],
        tmp_path / "run",
    )
    assert [row["train/tokens"] for row in resumed] == [
        row["train/tokens"] for row in whole
    ] and len(resumed) == 4
