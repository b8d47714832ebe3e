"""What a user's files become, and errors for rows that cannot be used: with file and line."""

import copy
import json
import pickle
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from loguru import logger
from tokenizers.processors import TemplateProcessing

from lightrft.config import Config, ConfigError, DataSection
from lightrft.core.order import Order
from lightrft.core.samples import Answer, Prompt, TokenIds
from lightrft.data.duplicates import warn_of_learned_rows
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from lightrft.registry import OBJECTS
from tiny import BOS, byte_tokenizer

ROWS = [{"input": "1+1=", "label": "2", "level": 1}, {"input": "2+3=", "label": "5", "level": 2}]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif"
    " %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{%"
    " endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def infos():
    messages: list[str] = []
    handler = logger.add(messages.append, level="INFO", format="{message}")
    yield messages
    logger.remove(handler)


def load(source: Path | str, **options):
    held_out = options.pop("held_out", False)
    row_problem = options.pop("row_problem", None)
    template = options.pop("template", None)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    section = DataSection(**{"eval_data" if held_out else "prompt_data": str(source)} | options)

    return load_prompts(
        section,
        tokenizer,
        source="eval_data" if held_out else "prompt_data",
        row_problem=row_problem,
    )


def write_lines(path: Path, *rows) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(text.encode(errors="surrogatepass"))
    return path


def write_jsonl(path: Path) -> None:
    write_lines(path, *ROWS)


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=2))


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    "suffix, write", [(".jsonl", write_jsonl), (".json", write_json), (".parquet", write_parquet)]
)
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, suffix, write):
    write(tmp_path / f"data{suffix}")
    prompts = load(tmp_path / f"data{suffix}")
    assert [(p.index, p.text, p.token_ids) for p in prompts] == [
        (0, "1+1=", [49, 43, 49, 61]),
        (1, "2+3=", [50, 43, 51, 61]),
    ]
    assert [p.columns for p in prompts] == [{"label": "2", "level": 1}, {"label": "5", "level": 2}]
    assert prompts[0].multi_modal == {}


def test_a_folder_by_split(tmp_path):
    write_lines(tmp_path / "train-1.jsonl", {"input": "a"})
    write_lines(tmp_path / "train-2.jsonl", {"input": "b"})
    write_lines(tmp_path / "test.jsonl", {"input": "c"})
    (tmp_path / "README.md").write_text("not data")
    assert [p.text for p in load(tmp_path)] == ["a", "b"]
    assert [p.text for p in load(tmp_path, held_out=True)] == ["c"]

    with pytest.raises(
        DataError, match="no file is called 'validation', .* contains test.jsonl, train-1.jsonl"
    ):
        load(tmp_path, prompt_split="validation")

    (tmp_path / "only").mkdir()
    write_lines(tmp_path / "only" / "data.jsonl", {"input": "d"})
    assert [p.text for p in load(tmp_path / "only")] == ["d"]


SHARDS = (
    "train.jsonl train-00000-of-00002.jsonl train_1.jsonl train2.jsonl train.part-3.jsonl"
    " train-00001-of-00002-0123456789abcdef.jsonl"
).split()
OTHERS = "training_notes.jsonl train_v2.jsonl train_sft.jsonl trainer.jsonl test.jsonl".split()


def test_the_files_of_a_split_are_its_shards_and_the_log_names_them(tmp_path, infos):
    for number, name in enumerate((*SHARDS, *OTHERS)):
        write_lines(tmp_path / name, {"input": str(number)})
    assert sorted(p.text for p in load(tmp_path)) == [str(n) for n in range(len(SHARDS))]
    assert [p.text for p in load(tmp_path, prompt_split="train_sft")] == [
        str(len(SHARDS) + OTHERS.index("train_sft.jsonl"))
    ]
    said = "".join(infos)
    assert "6 rows of 6 files (train-00000-of-00002.jsonl, train-00001-of-" in said
    assert "not read are test.jsonl, train_sft.jsonl, train_v2.jsonl, trainer.jsonl, tr" in said


PARTLY = {
    "train-00000-of-00002": "parts of the split 'train' are missing",
    "train-1 train-1-of-2": "parts of the split 'train' are missing",
    "train train.json": "there in two formats: train.json, train.jsonl",
    "data/train-00000-of-00001": "no .* file; its folders data do: give one of these",
}


@pytest.mark.parametrize("names", PARTLY)
def test_a_split_that_is_not_whole_is_refused(tmp_path, names):
    for name in names.split():
        file = tmp_path / (name if name.endswith(".json") else f"{name}.jsonl")
        file.parent.mkdir(exist_ok=True)
        file.write_text('[{"input": "a"}]' if file.suffix == ".json" else '{"input": "a"}')
    with pytest.raises(DataError, match=PARTLY[names]):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "held_out"),
    [
        ("train.jsonl", True),
        ("test-0.jsonl", False),
        ("TRAIN.jsonl", True),
        ("gsm8k_train.jsonl", True),
        ("val.jsonl", False),
    ],
)
def test_the_only_file_of_a_folder_may_be_of_another_split(tmp_path, name, held_out):
    write_lines(tmp_path / name, {"input": "a"})
    with pytest.raises(DataError, match=f"no file is called .*; the folder contains {name}"):
        load(tmp_path, held_out=held_out)


def test_rows_that_are_learned_and_held_out_are_named(tmp_path, warnings, monkeypatch):
    file = write_lines(tmp_path / "train.jsonl", {"input": "a"})
    other = write_lines(tmp_path / "test.jsonl", {"input": "b"})
    for training in (f"{tmp_path}:0.7,{other}:0.3", str(other), ""):
        load(file, held_out=True, prompt_data=training)
        load(tmp_path, held_out=True, prompt_data="owner/name")
    stored = tmp_path / "stored"
    datasets.Dataset.from_list(ROWS).save_to_disk(stored)
    monkeypatch.setattr(OBJECTS, "rows", ROWS, raising=False)
    for source in (str(stored), f"{OBJECTS.__name__}:rows"):
        load(source, held_out=True, prompt_data=source)
    assert [line.partition(" is in")[0].removeprefix("--eval_data: ") for line in warnings] == [
        str(file.resolve()),
        str(stored),
        f"{OBJECTS.__name__}:rows",
    ]


def test_escaped_characters_are_text(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"input": "\\ud83d\\ude00 \\u00e9"}\n')
    assert [p.text for p in load(file)] == ["\N{GRINNING FACE} \N{LATIN SMALL LETTER E WITH ACUTE}"]
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(
        DataError, match="deep.json: not valid JSON .lists or objects are nested too deep"
    ):
        load(tmp_path / "deep.json")


def test_empty_lines_and_a_byte_order_mark_are_not_rows(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"input": "a"}\n\n   \n{"input": "b"}')
    assert [p.text for p in load(tmp_path / "data.jsonl")] == ["a", "b"]


BAD_LINES = {
    "malformed": ('{"input": "a"', "not valid JSON .*Expecting"),
    "half a character": (
        '{"input": "a", "label": "\\ud83d"}',
        r"the column 'label' contains '.ud83d', half of a character",
    ),
    "half a character as bytes": (
        '{"input": "a", "label": "\ud83d"}',
        r"the column 'label' contains '.ud83d', half of a character",
    ),
    "half a character in a name": (
        '{"input": "a", "\\ud83d": 1}',
        r"the name of a column contains '.ud83d', half of a character",
    ),
    "a key twice": (
        '{"input": "a", "label": "1", "label": "2"}',
        "not valid JSON .an object has the key 'label' twice",
    ),
    "deep": (
        '{"input": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "not valid JSON .lists or objects are nested too deep",
    ),
    "deep, though JSON": (
        '{"input": "a", "meta": ' + "[" * 900 + "]" * 900 + "}",
        "the column 'meta' has lists or objects that are nested more than 100 deep",
    ),
    "list": ('["a"]', "not a JSON object but list"),
    "number": ("5", "not a JSON object but int"),
    "no column": (
        '{"title": "a", "label": 3}',
        "no column 'input' .--input_key.; it has title, label; .* --input_key title",
    ),
    "no columns": ("{}", "no column 'input' .--input_key.; it has none"),
    "null": ('{"input": null}', "'input' is NoneType, not text"),
    "messages": (
        '{"input": [{"role": "user"}]}',
        "'input' is list, not text; chat messages need --apply_chat_template",
    ),
    "empty": ('{"input": ""}', "the prompt is empty"),
    "too long": (
        '{"input": "12345678901"}',
        "the prompt has 11 tokens, more than --prompt_max_len 10",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_fatal_with_file_and_line(tmp_path, case):
    line, message = BAD_LINES[case]
    file = write_lines(tmp_path / "data.jsonl", {"input": "good"}, "", line, {"input": "good"})
    with pytest.raises(DataError, match=f"--prompt_data: {file}:3: {message}.* --bad_rows skip"):
        load(file, prompt_max_len=10)


def test_half_a_character_in_messages_that_are_json(tmp_path):
    messages = '[{"role": "user", "content": "\\ud83d"}]'
    file = write_lines(tmp_path / "data.jsonl", {"input": messages})
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(
        DataError, match="data.jsonl:1: the text contains '.ud83d', half of a character"
    ):
        load(file, template=template, apply_chat_template=True)


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"input": "a"}\n{"input": "\xff\xe9"}\n')
    with pytest.raises(DataError, match="data.jsonl:2: not valid JSON .'utf-8' codec can't decode"):
        load(tmp_path / "data.jsonl")


def test_skipped_rows_are_counted_and_shown(tmp_path, warnings):
    lines = [line for line, _ in BAD_LINES.values()]
    file = write_lines(tmp_path / "data.jsonl", {"input": "first"}, *lines, {"input": "last"})
    prompts = load(file, prompt_max_len=10, bad_rows="skip")
    assert [(p.index, p.text) for p in prompts] == [(0, "first"), (1, "last")]
    assert len(warnings) == 1 and f"{len(lines)} bad rows of --prompt_data skipped" in warnings[0]
    assert f"{file}:2: not valid JSON" in warnings[0] and warnings[0].count(str(file)) == 5


def test_good_data_warns_of_nothing(tmp_path, warnings):
    assert len(load(write_lines(tmp_path / "data.jsonl", *ROWS), bad_rows="skip")) == 2
    assert warnings == []


def test_no_usable_row(tmp_path):
    with pytest.raises(
        DataError, match="--prompt_data .*data.jsonl: no usable row .0 bad ones were skipped"
    ):
        load(write_lines(tmp_path / "data.jsonl"))
    with pytest.raises(DataError, match="no usable row .1 bad ones"):
        load(write_lines(tmp_path / "data.jsonl", "{"), bad_rows="skip")


def test_bad_rows_of_held_out_data_name_its_flag(tmp_path):
    with pytest.raises(DataError, match="--eval_data: .*:1: not valid JSON"):
        load(write_lines(tmp_path / "data.jsonl", "{"), held_out=True)


def test_limits(tmp_path):
    file = write_lines(tmp_path / "data.jsonl", *({"input": str(n)} for n in range(5)))
    assert [p.text for p in load(file, max_samples=2)] == ["0", "1"]
    assert len(load(file, max_samples=2, held_out=True)) == 5
    assert len(load(file, max_eval_samples=3, held_out=True)) == 3
    write_lines(file, {"input": "a"}, "{")
    assert len(load(file, max_samples=1)) == 1, "rows behind the limit are not looked at"


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not valid JSON"),
        ('{"input": "a"}', "not a JSON list of objects but dict"),
        ('{"input": "a"}\n{"input": "b"}', "belongs in a .jsonl file"),
    ],
)
def test_a_json_file_that_is_not_a_list(tmp_path, content, message):
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(DataError, match=f"--prompt_data .*data.json: .*{message}"):
        load(tmp_path / "data.json")


def test_an_entry_of_a_json_list_that_is_not_an_object(tmp_path):
    (tmp_path / "data.json").write_text('[{"input": "a"}, 7]')
    with pytest.raises(DataError, match="data.json row 2: not a JSON object but int"):
        load(tmp_path / "data.json")


def test_a_file_that_is_not_parquet(tmp_path):
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(DataError, match="--prompt_data .*data.parquet: not a valid parquet file"):
        load(tmp_path / "data.parquet")


def test_sources_that_are_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.csv").write_text("input\na\n")
    for source, message in [
        (tmp_path / "empty", "the folder contains no .jsonl, .json, .parquet file"),
        (tmp_path / "data.csv", "unknown file type"),
        (tmp_path / "absent.jsonl", "neither an existing file or folder nor a hub name"),
        ("data/absent.jsonl", "neither an existing"),
        ("absent", "neither an existing"),
    ]:
        with pytest.raises(DataError, match=f"--prompt_data {source}: {message}"):
            load(source)


# -- folders of the datasets package, and rows of Python


def test_folders_that_datasets_saved(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(
        tmp_path / "several"
    )

    for folder in ("one", "several"):
        assert [(p.text, p.columns["label"]) for p in load(tmp_path / folder)] == [
            ("1+1=", "2"),
            ("2+3=", "5"),
        ]

    assert [p.text for p in load(tmp_path / "several", held_out=True)] == ["2+3="]
    with pytest.raises(
        DataError,
        match="--prompt_data .*several: there is no split 'dev'; the data set has train, test",
    ):
        load(tmp_path / "several", prompt_split="dev")

    with pytest.raises(
        DataError, match=r"--prompt_data: .*several\[train\] row 1: no column 'question'"
    ):
        load(tmp_path / "several", input_key="question")

    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(
        DataError,
        match="--prompt_data .*one: it cannot be read as a folder of Dataset.save_to_disk",
    ):
        load(tmp_path / "one")


def upper(batch: dict) -> dict:
    return {"input": [text.upper() for text in batch["input"]]}


STATES = {
    "as it is": (lambda data: data, ["a", "b"], {"label": "1"}),
    "a transform": (lambda data: data.with_transform(upper), ["A", "B"], {}),
    "selected": (lambda data: data.select([1]), ["b"], {"label": "2"}),
    "shuffled": (lambda data: data.shuffle(seed=3), ["b", "a"], {"label": "2"}),
    "NumPy": (lambda data: data.with_format("numpy"), ["a", "b"], {"label": "1"}),
    "columns": (lambda data: data.with_format(columns=["input"]), ["a", "b"], {}),
    "columns, and all others": (
        lambda data: data.with_format("numpy", columns=["input"], output_all_columns=True),
        ["a", "b"],
        {"label": "1"},
    ),
    "splits": (lambda data: datasets.DatasetDict(train=data), ["a", "b"], {"label": "1"}),
    "a stream": (lambda data: data.to_iterable_dataset(), ["a", "b"], {"label": "1"}),
    "splits in a dict": (lambda data: {"train": data}, ["a", "b"], {"label": "1"}),
    "a stream of tensors": (
        lambda data: data.to_iterable_dataset().with_format("torch"),
        ["a", "b"],
        {"label": "1"},
    ),
    "a stream of tables": (
        lambda data: data.to_iterable_dataset().with_format("arrow"),
        ["a", "b"],
        {"label": "1"},
    ),
    "a stream of a transform": (
        lambda data: data.to_iterable_dataset().map(upper, batched=True),
        ["A", "B"],
        {"label": "1"},
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_data_sets_of_python_are_read_in_their_state(tmp_path, monkeypatch, name):
    change, texts, columns = STATES[name]
    data = datasets.Dataset.from_dict({"input": ["a", "b"], "label": ["1", "2"]})
    monkeypatch.setitem(sys.modules, "rows_in_a_state", SimpleNamespace(rows=change(data)))
    prompts = load("rows_in_a_state:rows")
    assert [prompt.text for prompt in prompts] == texts and prompts[0].columns == columns


ON_THE_HUB = [
    ("owner/name", "owner/name", None),
    ("owner/n.a-me:main", "owner/n.a-me", "main"),
    ("owner/name:2024:1", "owner/name", "2024"),
]


@pytest.mark.parametrize(("source", "name", "subset"), ON_THE_HUB)
def test_rows_of_the_hub(monkeypatch, source, name, subset):
    def loaded(*given, split):
        assert given == (name, subset) and split == "train"
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    prompts = load(source)
    assert [prompt.text for prompt in prompts] == ["1+1=", "2+3="]
    assert prompts[1].location == f"{name}{f':{subset}' if subset else ''}[train] row 2"


def test_an_object_of_a_file_in_a_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows.py").write_text(f"ROWS = {ROWS}")
    assert len(load("folder/rows.py:ROWS")) == 2


def test_a_name_that_the_hub_does_not_have():
    with pytest.raises(
        DataError, match="--prompt_data nobody/nothing:main: the hub's data set cannot be loaded: "
    ):
        load("nobody/nothing:main")
    with pytest.raises(
        DataError, match="--prompt_data nobody/nothing: the hub's data set cannot be loaded: "
    ):
        load("nobody/nothing")


PROGRAM = """
import datasets
ROWS = [{"input": "a"}, {"input": "b"}]
DATA = datasets.Dataset.from_list(ROWS)
NUMBER = 5
def rows():
    yield from ROWS
def of_split(split, count=2):
    return [{"input": split}] * count
def breaks():
    yield from ROWS
    yield {"input": 1 / 0}
def bad():
    return [{"input": "a"}, ["b"]]
"""


def test_rows_of_python(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_rows.py"
    for reference in ("my_rows:ROWS", f"{file}:rows", f"{file}:DATA"):
        assert [p.text for p in load(reference)] == ["a", "b"]
    assert [p.text for p in load(f"{file}:of_split")] == ["train", "train"]
    assert load(f"{file}:rows:0.5,{file}:of_split:0.5").probabilities == [0.5, 0.5]
    wrong = {
        "breaks": ": after row 2: ZeroDivisionError: division by zero",
        "NUMBER": ": before the first row: TypeError",
        "absent": " has no object 'absent'",
        "bad": " row 2: not a JSON object but list",
    }

    for name, message in wrong.items():
        with pytest.raises(DataError, match=f"--prompt_data:? .*my_rows.py.*{message}"):
            load(f"{file}:{name}")

    with pytest.raises(DataError, match="--prompt_data nowhere:rows: cannot import 'nowhere'"):
        load("nowhere:rows")


# -- duplicates


def test_duplicates_are_omitted_and_counted(tmp_path, infos):
    first = write_lines(
        tmp_path / "a.jsonl",
        *({"input": text, "label": "x"} for text in ("a b", "a b", "a\n b ", "c")),
    )
    second = write_lines(tmp_path / "b.jsonl", {"input": "c", "label": "y"}, {"input": "d"})
    found = {
        mode: load(f"{first},{second}", deduplicate=mode)
        for mode in ("none", "exact", "whitespace")
    }
    assert [p.text for p in found["exact"]] == ["a b", "a\n b ", "c", "d"] and len(
        found["none"]
    ) == 6
    assert [(p.index, p.text) for p in found["whitespace"]] == [(0, "a b"), (1, "c"), (2, "d")]

    assert [message.strip() for message in infos if "omitted (" in message] == [
        f"--prompt_data {first}: 1 duplicates omitted (--deduplicate exact), 3 rows are left",
        f"--prompt_data {second}: 1 duplicates omitted (--deduplicate exact), 1 rows are left",
        f"--prompt_data {first}: 2 duplicates omitted (--deduplicate whitespace), 2 rows are left",
        f"--prompt_data {second}: 1 duplicates omitted (--deduplicate whitespace), 1 rows are left",
    ]
    assert len(load(first, deduplicate="exact", held_out=True)) == 4, (
        "held-out data stay as they are"
    )
    assert [p.text for p in load(first, deduplicate="exact", max_samples=2)] == ["a b", "a\n b "]

    with pytest.raises(
        DataError,
        match="a.jsonl: no usable row .0 bad ones were skipped and 4 duplicates were omitted",
    ):
        load(f"{first},{first}", deduplicate="whitespace")


@pytest.mark.parametrize(
    ("learned", "held_out", "shared"),
    [
        (["a b", "c"], ["d"], None),
        (["a b", "c"], ["a b", "d", "c"], "2 of 3"),
        (["a b", "c"], ["c", "c"], "1 of 1"),
        (["begin", "begin", "c"], ["begin", "d"], None),  # episodes that begin alike
        (["a"], [], None),
    ],
)
def test_held_out_rows_of_other_files_that_are_learned_are_counted(
    learned, held_out, shared, warnings
):
    rows = [
        [Prompt(index, text, [1], {"id": index}) for index, text in enumerate(texts)]
        for texts in (learned, held_out)
    ]
    warn_of_learned_rows(*rows)
    found = [message.split(" prompts")[0] for message in warnings]
    assert found == ([f"--eval_data: {shared}"] if shared else [])


def test_the_same_question_with_another_answer_is_another_row(warnings):
    learned, other = (
        [Prompt(0, "a", [1], {"answer": Answer(token_ids=[token], learned=[True])})]
        for token in (5, 6)
    )
    warn_of_learned_rows(learned, other, str)
    assert not warnings
    warn_of_learned_rows(learned, learned, str)
    assert "1 of 1 prompts are in --prompt_data too" in warnings[0]


# -- columns and templates


def test_label_key_becomes_label(tmp_path):
    file = write_lines(tmp_path / "data.jsonl", {"question": "a", "answer": 7, "label": "other"})
    assert load(file, input_key="question", label_key="answer")[0].columns == {
        "answer": 7,
        "label": 7,
    }

    with pytest.raises(
        DataError,
        match=r"data.jsonl:1: no column 'absent' \(--label_key\); it has question, answer, label",
    ):
        load(file, input_key="question", label_key="absent")

    # nobody named a label
    assert load(write_lines(tmp_path / "none.jsonl", {"input": "a"}))[0].columns == {}


def test_template_puts_the_prompt_in_its_place_once(tmp_path):
    file = write_lines(tmp_path / "data.jsonl", {"input": "a{}b"})
    prompt = load(file, input_template="Q: {}\nA: {}")[0]
    assert prompt.text == "Q: a{}b\nA: {}" and prompt.token_ids == list(prompt.text.encode())


def test_template_without_a_place(tmp_path):
    with pytest.raises(DataError, match="--input_template 'Question: ' has no {}"):
        load(
            write_lines(tmp_path / "data.jsonl", *ROWS),
            input_template="Question: ",
            bad_rows="skip",
        )


def test_chat_template_of_text_and_of_messages(tmp_path):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    file = write_lines(tmp_path / "data.jsonl", {"input": "a"}, {"input": messages})
    texts = [p.text for p in load(file, apply_chat_template=True, template=TEMPLATE)]
    assert texts == ["<user>a<assistant>", "<user>x<assistant>y<user>z<assistant>"]

    prompt = load(
        file, apply_chat_template=True, template=TEMPLATE, system_prompt="s", input_template="[{}]"
    )[0]
    assert prompt.text == "<system>s<user>[a]<assistant>" and prompt.token_ids == list(
        prompt.text.encode()
    )


def test_an_input_template_is_not_for_messages(tmp_path, warnings):
    rows = [{"input": "a"}, {"input": [{"role": "user", "content": "z"}]}]
    file = write_lines(tmp_path / "data.jsonl", *rows)
    found = load(file, apply_chat_template=True, template=TEMPLATE, input_template="[{}]")
    assert [prompt.text for prompt in found] == ["<user>[a]<assistant>", "<user>z<assistant>"]
    assert "--input_template is for text: 1 rows of chat messages are as they were" in warnings[0]


def test_messages_that_end_in_an_answer_are_not_a_prompt(tmp_path, warnings):
    asked = [{"role": "user", "content": "1+1="}]
    file = write_lines(
        tmp_path / "data.jsonl",
        {"input": asked},
        {"input": [*asked, {"role": "assistant", "content": "2"}], "label": "2"},
    )

    with pytest.raises(
        DataError,
        match=(
            "data.jsonl:2: the last message of 'input' is a turn of the assistant, .* remove that"
            " message"
        ),
    ):
        load(file, apply_chat_template=True, template=TEMPLATE)

    prompts = load(file, apply_chat_template=True, template=TEMPLATE, bad_rows="skip")
    assert [p.text for p in prompts] == [
        "<user>1+1=<assistant>"
    ] and "1 bad rows of --prompt_data" in warnings[0]


def test_further_variables_of_the_chat_template(tmp_path):
    file = write_lines(tmp_path / "data.jsonl", {"input": "a"})
    template = TEMPLATE + "{% if thinking %}<think>{% endif %}"
    texts = [
        load(file, apply_chat_template=True, template=template, chat_template_kwargs=given)[0].text
        for given in ('{"thinking": true}', '{"thinking": false}', None)
    ]
    assert texts == ["<user>a<assistant><think>", "<user>a<assistant>", "<user>a<assistant>"]

    for wrong in ("thinking", '["thinking"]'):
        with pytest.raises(ConfigError, match="chat_template_kwargs: .* is not"):
            Config.of(chat_template_kwargs=wrong)


def test_special_tokens_are_the_tokenizers_or_the_templates_never_both(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    section = DataSection(prompt_data=str(write_lines(tmp_path / "data.jsonl", {"input": "ab"})))
    assert load_prompts(section, tokenizer)[0].token_ids == [BOS, 97, 98]
    section.apply_chat_template = True
    assert load_prompts(section, tokenizer)[0].token_ids == [BOS, *b"<user>ab<assistant>"]


def test_messages_from_parquet(tmp_path):
    rows = [{"input": [{"role": "user", "content": "x"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert (
        load(tmp_path / "data.parquet", apply_chat_template=True, template=TEMPLATE)[0].text
        == "<user>x<assistant>"
    )


def test_tokenizer_without_a_chat_template(tmp_path):
    with pytest.raises(
        DataError, match="--apply_chat_template: the tokenizer of --pretrain has no chat template"
    ):
        load(write_lines(tmp_path / "data.jsonl", *ROWS), apply_chat_template=True, bad_rows="skip")


@pytest.mark.parametrize("value", [None, 5, ["a"], {"role": "user", "content": "a"}])
def test_what_is_neither_text_nor_messages(tmp_path, value):
    with pytest.raises(
        DataError, match="data.jsonl:1: 'input' is neither text nor a list of chat messages"
    ):
        load(
            write_lines(tmp_path / "data.jsonl", {"input": value}),
            apply_chat_template=True,
            template=TEMPLATE,
        )


def test_messages_that_the_template_refuses(tmp_path):
    file = write_lines(tmp_path / "data.jsonl", {"input": [{"role": "tool", "content": "a"}]})
    with pytest.raises(DataError, match="data.jsonl:1: the chat template rejects it .*no tools"):
        load(file, apply_chat_template=True, template=TEMPLATE)


def test_a_judge_leaves_prompts_out(tmp_path, warnings):
    file = write_lines(tmp_path / "data.jsonl", *ROWS)
    prompts = load(
        file,
        bad_rows="skip",
        row_problem=lambda prompt: "even" if prompt.columns["label"] == "2" else None,
    )
    assert [(p.index, p.text) for p in prompts] == [
        (0, "2+3=")
    ] and "data.jsonl:1: even" in warnings[0]


# -- several data sets


def several(tmp_path: Path, *counts: int) -> str:
    files = [
        write_lines(
            tmp_path / f"{name}.jsonl",
            *({"input": f"{name}{i}", "label": "x"} for i in range(count)),
        )
        for name, count in zip("abc", counts, strict=False)
    ]
    return ",".join(map(str, files))


def test_several_data_sets_one_after_the_other(tmp_path):
    prompts = load(several(tmp_path, 3, 2))
    assert [prompt.text for prompt in prompts] == ["a0", "a1", "a2", "b0", "b1"]
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [prompt.text for prompt in load(several(tmp_path, 3, 4), max_samples=2)] == [
        "a0",
        "a1",
        "b0",
        "b1",
    ]


def test_probabilities_of_several_data_sets(tmp_path):
    files = several(tmp_path, 3, 2).split(",")
    weighted = ",".join(
        f"{file}:{weight}" for file, weight in zip(files, ("0.9", "0.3"), strict=True)
    )
    for prompts in (load(weighted), load(",".join(files), prompt_data_probs=[3, 1])):
        assert [prompt.text for prompt in prompts] == ["a0", "a1", "a2", "b0", "b1"]
        assert prompts.probabilities == pytest.approx([0.75, 0.25]) and prompts.draws_of_epoch == 8
        assert (
            f"{files[0]}: 3 rows with probability 0.75, each drawn 2 times in an epoch of 8 rows"
            in prompts.repetitions()
        )
        assert prompts.order(lambda count: Order(count, 0), 0).num_rows == 8

    assert load(",".join(files)).probabilities == [] and load(f"{files[0]}:0.5").draws_of_epoch == 3


@pytest.mark.parametrize(
    ("end", "options", "message"),
    [
        (":0.5", {}, "a.jsonl has no probability, and others have: write .*a.jsonl:NUMBER"),
        (
            ":0.5",
            {"prompt_data_probs": [1, 2]},
            "has probabilities of its own, and --prompt_data_probs is set",
        ),
        (
            "",
            {"prompt_data_probs": [1.0]},
            "--prompt_data_probs has 1 numbers, and --prompt_data has 2 data sets",
        ),
        ("", {"prompt_data_probs": [0.5, 0.0]}, "a probability must be above 0"),
        (
            ":0.5",
            {"held_out": True},
            "--eval_data .*: held-out data are evaluated whole and have no probabilities",
        ),
        (",", {}, "has an empty name: separate data sets by one comma"),
    ],
    ids=str,
)
def test_impossible_probabilities(tmp_path, end, options, message):
    with pytest.raises(DataError, match=message):
        load(several(tmp_path, 3, 2) + end, **options)


def test_a_comma_in_a_name_and_a_missing_file(tmp_path):
    assert len(load(write_lines(tmp_path / "a,b.jsonl", *ROWS))) == 2
    with pytest.raises(DataError, match="--prompt_data nowhere.jsonl: neither an existing file"):
        load(f"{several(tmp_path, 1)},nowhere.jsonl")


def test_a_reference_answer(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"input": "1", "label": "x", "solution": "y"})
    assert load(path, reference_key="solution")[0].columns["reference"] == "y"
    with pytest.raises(
        DataError,
        match=r"a.jsonl:1: no column 'answer' \(--reference_key\); it has input, label, solution",
    ):
        load(path, reference_key="answer")


# -- token ids


def bytes_per_token(make) -> float:
    """Return the bytes per token of 200 rows of 300 tokens, as a tokenizer returns them."""
    texts = [json.dumps([300 + 300 * row + token for token in range(300)]) for row in range(200)]
    tracemalloc.start()
    made = [make(row, json.loads(text)) for row, text in enumerate(texts)]
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / sum(300 for _ in made)


def test_a_token_takes_four_bytes():
    lists = bytes_per_token(lambda row, token_ids: token_ids)
    prompts = bytes_per_token(lambda row, token_ids: Prompt(row, "", token_ids))
    print(f"{lists:.1f} bytes per token in lists, {prompts:.1f} in prompts")
    assert lists > 30 and prompts < 6


def test_token_ids_are_like_a_list():
    ids = Prompt(0, "", [50, 55, 151_643]).token_ids
    assert (
        ids == [50, 55, 151_643]
        and [50, 55, 151_643] == ids
        and ids == TokenIds(ids)
        and ids != [50, 55]
        and ids != "a"
    )
    assert (
        ids + [1] == [50, 55, 151_643, 1]
        and [1] + ids == [1, 50, 55, 151_643]
        and ids + ids == 2 * list(ids)
    )
    assert (
        all(type(made) is list for made in (ids + [1], [1] + ids, ids[:2]))
        and ids[:2] == [50, 55]
        and ids[-1] == 151_643
    )

    assert (
        [*ids] == list(ids)
        and len(ids) == 3
        and 55 in ids
        and type(ids[0]) is int
        and repr(ids) == "[50, 55, 151643]"
    )
    for again in (copy.deepcopy(ids), pickle.loads(pickle.dumps(ids))):
        assert type(again) is TokenIds and again == ids and again is not ids
    assert torch.tensor(ids).tolist() == list(ids) and not TokenIds([])
