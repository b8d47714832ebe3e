"""A row with any type of Arrow is loaded with plain values, or is a bad row.

The error names file, row and column.
"""

import datetime
import decimal
import json
import math
import pickle
import uuid

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrft.app.observe.sample_table import sample_table
from lightrft.app.observe.sinks import encode_row, sample_rows
from lightrft.config import DataSection, RewardSection
from lightrft.core.samples import Sample
from lightrft.data.columns.values import plain, table_rows
from lightrft.data.digests import digests_of_pieces
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from lightrft.rewards.runner import RewardRunner
from tiny import byte_tokenizer

DAY = datetime.datetime(2024, 5, 1, 12, 30, 15)
WORD = uuid.UUID(int=7)
STRUCT = pa.struct({"a": pa.decimal128(3, 1), "b": pa.string()})
VALUES = {
    "string": (pa.array(["7"]), "7"),
    "large_string": (pa.array(["7"], pa.large_string()), "7"),
    "string_view": (pa.array(["7"], pa.string_view()), "7"),
    "dictionary": (pa.array(["7"]).dictionary_encode(), "7"),
    "bool": (pa.array([True]), True),
    "int8": (pa.array([-7], pa.int8()), -7),
    "int64": (pa.array([2**53 + 1]), 2**53 + 1),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "half": (pa.array(np.array([1.5], np.float16)), 1.5),
    "float": (pa.array([7.0]), 7.0),
    "nan": (pa.array([math.nan]), None),
    "null": (pa.array([None], pa.null()), None),
    "decimal": (pa.array([decimal.Decimal("7.50")]), 7.5),
    "whole decimal": (pa.array([decimal.Decimal("7.00")]), 7),
    "long decimal": (pa.array([decimal.Decimal("0." + "12345" * 6)]), "0." + "12345" * 6),
    "large decimal": (pa.array([decimal.Decimal("7" * 50)]), int("7" * 50)),
    "date": (pa.array([DAY.date()]), "2024-05-01"),
    "time": (pa.array([DAY.time()]), "12:30:15"),
    "timestamp": (pa.array([DAY]), "2024-05-01T12:30:15"),
    "nanoseconds": (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
    "zone": (pa.array([DAY], pa.timestamp("s", tz="UTC")), "2024-05-01T12:30:15+00:00"),
    "duration": (pa.array([datetime.timedelta(minutes=2)]), 120),
    "fraction of a second": (pa.array([datetime.timedelta(seconds=0.25)]), 0.25),
    "binary": (pa.array([b"7"]), "7"),
    "list": (pa.array([[decimal.Decimal(7)]]), [7]),
    "fixed list": (pa.array([[7, 8]], pa.list_(pa.int32(), 2)), [7, 8]),
    "struct": (pa.array([{"a": 7}], STRUCT), {"a": 7, "b": None}),
    "map": (pa.array([[("a", 7)]], pa.map_(pa.string(), pa.int64())), {"a": 7}),
    "map of numbers": (
        pa.array([[(1, DAY)]], pa.map_(pa.int8(), pa.timestamp("s"))),
        {"1": DAY.isoformat()},
    ),
    "uuid": (pa.array([WORD.bytes], pa.uuid()), str(WORD)),
    "json": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(['["7"]'])), ["7"]),
}
"""Name -> a column with one value, and the label that it becomes."""
UNREADABLE = {
    "far date": (pa.array([2**30], pa.date32()), "has a date32.* that cannot be read"),
    "far timestamp": (
        pa.array([2**50], pa.timestamp("s")),
        "has a timestamp.* that cannot be read",
    ),
    "no zone": (
        pa.array([2], pa.timestamp("s", tz="Mars/Base")),
        "has a timestamp.* that cannot be read",
    ),
    "long duration": (pa.array([2**60], pa.duration("s")), "has a duration.* that cannot be read"),
    "no utf-8": (pa.array([b"\xff"]).view(pa.string()), "has a string that cannot be read"),
    "keys twice": (
        pa.array([[("a", 1)] * 2], pa.map_(pa.string(), pa.int64())),
        "has a map.* that cannot be read",
    ),
    "broken json": (
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(["["])),
        "has a JSON that cannot be read",
    ),
}
REFUSED = {
    "bytes": (pa.array([b"\xff"]), "has bytes that are not text in UTF-8"),
    "infinity": (pa.array([math.inf]), "is inf, not a finite number"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def load(source, **options):
    section = DataSection(prompt_data=str(source), **options)
    return load_prompts(section, byte_tokenizer(), requirements=1)


def write(tmp_path, columns: dict[str, pa.Array]):
    pq.write_table(pa.table({"input": ["1+1="], **columns}), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@pytest.mark.parametrize("name", [*VALUES, *UNREADABLE])
def test_a_value_of_a_table(name):
    column, expected = (VALUES | UNREADABLE)[name]
    (row,) = table_rows(pa.table({"x": column}))
    if name in UNREADABLE:
        with pytest.raises(ValueError, match=f"the column 'x' {expected}"):
            plain(row["x"], "the column 'x'")
    elif name not in ("nan", "binary"):  # of labels
        assert plain(row["x"], "x") == expected


def test_a_parquet_file_with_all_types(tmp_path):
    """They are the same as labels and as other columns, in memory and in a cache.

    They can be written, sent and compared.
    """
    columns = {
        name: column for name, (column, _) in VALUES.items() if name not in ("nan", "binary")
    }
    file = write(tmp_path, columns)
    for name in columns:
        expected = VALUES[name][1]
        (prompt,), (stored,) = (
            load(file, label_key=name, data_cache=cache) for cache in ("", str(tmp_path / "cache"))
        )
        assert prompt.columns["label"] == expected and type(prompt.columns["label"]) is type(
            expected
        ), name
        assert pickle.loads(pickle.dumps(prompt)) == prompt == stored
        (row,) = sample_rows([Sample(prompt, 0, [1], [0.0], "7", "stop")])
        assert json.loads(encode_row({"step": 1, **row}))["label"] == expected
        assert sample_table([{"step": 1, **row}])

    assert {name: prompt.columns[name] for name in columns} == {
        name: VALUES[name][1] for name in columns
    }
    changed = write(tmp_path, columns | {"date": pa.array([DAY.date() + datetime.timedelta(1)])})
    assert digests_of_pieces(load(changed, label_key=name)) != digests_of_pieces([prompt])


@pytest.mark.parametrize("name", ["nan", "binary"])
def test_what_a_label_is_and_another_column_is_not(tmp_path, name):
    """A missing number is null as a label.

    Bytes may be anything in other columns; only functions in Python receive these.
    """
    column, expected = VALUES[name]
    (prompt,) = load(write(tmp_path, {name: column}), label_key=name)
    assert prompt.columns["label"] == expected
    assert prompt.columns[name] == b"7" if name == "binary" else math.isnan(prompt.columns[name])


@pytest.mark.parametrize("name", [*UNREADABLE, *REFUSED])
@pytest.mark.parametrize("label_key", ["other", "label"])
def test_a_bad_row_names_file_row_and_column(tmp_path, name, label_key):
    column, message = (UNREADABLE | REFUSED)[name]
    file = write(tmp_path, {label_key: column})
    if name in REFUSED and label_key == "other":
        assert len(load(file)) == 1
        return
    with pytest.raises(DataError, match=f"{file} row 1: the column '{label_key}' .*{message}"):
        load(file)


def test_rows_of_other_sources(tmp_path):
    (tmp_path / "rows.py").write_text(
        "import datetime, decimal, numpy as np\nROWS = [{'input': 'a', 'label': np.int64(7), 'b':"
        " np.array([1.5, 2]), 'c': (1, decimal.Decimal('2.5')),\n         'd': {1: np.bool_(True)},"
        " 'e': np.datetime64('2024-05-01'), 'f': np.float32(0.5)}]\nSETS = [{'input': 'a', 'x': {1,"
        " 2}}]\n"
    )
    (prompt,) = load(f"{tmp_path}/rows.py:ROWS")
    b_to_f = {"b": [1.5, 2.0], "c": [1, 2.5], "d": {"1": True}, "e": "2024-05-01", "f": 0.5}
    assert prompt.columns == {"label": 7, **b_to_f}
    assert json.dumps(prompt.columns)

    with pytest.raises(
        DataError,
        match="rows.py:SETS row 1: the column 'x' has a value of type set, which is not text",
    ):
        load(f"{tmp_path}/rows.py:SETS")

    kinds = {"label": datasets.Value("decimal128(5, 2)"), "grid": datasets.Array2D((1, 2), "int32")}
    features = datasets.Features({"input": datasets.Value("string"), **kinds})
    rows = {"input": ["a"], "label": [decimal.Decimal("7.00")], "grid": [[[1, 2]]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved")[0].columns == {"label": 7, "grid": [[1, 2]]}


def test_a_truncated_parquet_file(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"input": [str(n) * 50 for n in range(1000)]}),
        file,
        row_group_size=500,
        compression="none",
    )
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="rows.parquet: not a valid parquet file"):
        load(file)
    file.write_bytes(whole[:4] + bytes(40) + whole[44:])
    with pytest.raises(DataError, match="rows.parquet: not a valid parquet file"):
        load(file)


def test_columns_of_one_name(tmp_path):
    pq.write_table(pa.table([["a"], ["b"]], names=["input", "input"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="rows.parquet: 2 columns are called 'input'; rename them"):
        load(tmp_path / "rows.parquet")

    pq.write_table(pa.table({}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="no usable row"):
        load(tmp_path / "rows.parquet")


def test_labels_of_all_types_reach_worker_processes(tmp_path):
    """In many files a column of integers with a missing one is a column of floats.

    Its labels are right answers all the same.
    """
    (tmp_path / "mine.py").write_text(
        "def right(samples, label, day, **columns):\n    return [float(day[0] == '2024-05-01')]\n"
    )
    file = tmp_path / "rows.parquet"
    table = pa.table(
        {"input": ["3+4="] * 2, "label": pa.array([7.0, 8.0]), "day": [DAY.date()] * 2}
    )
    pq.write_table(table, file)

    judge = RewardRunner(
        f"exact_match,{tmp_path}/mine.py:right", section=RewardSection(reward_workers=1)
    )
    samples = [Sample(prompt, 0, [1], [0.0], "7", "stop") for prompt in load(file)]
    for sample in samples:
        judge.begin([sample])
    judge.finish(samples)
    assert [sample.reward_components for sample in samples] == [
        {"exact_match": 1.0, "right": 1.0},
        {"exact_match": 0.0, "right": 1.0},
    ]
