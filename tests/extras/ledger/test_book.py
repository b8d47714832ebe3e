"""Why: a ledger is evidence, so it must have each group once, also after a run was killed."""

import csv
import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightrft.app.observe.sinks import Writer
from lightrft.config import Config
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt, Sample
from lightrft.extras.commands.debug.ledger import main as ledger
from lightrft.extras.ledger.book import Book
from lightrft.extras.ledger.records import LEDGER_FILE, read_ledger
from lightrft.models.parallel.collectives import Axis
from runs import PPO, prepare, train

pytestmark = pytest.mark.slow

STEPS = 6
ALONE = Axis("one rank", 1, 0, None)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    shutil.copy(folder / "train.jsonl", folder / "test.jsonl")
    return [
        *flags,
        *PPO,
        "--reward=number",
        "--ledger",
        f"--eval_data={folder / 'test.jsonl'}",
        "--max_eval_samples=2",
        "--save_steps=2",
    ]


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    dump = f"--dump_rollouts={folder / 'dump'}"
    train("train_ppo", 1, [*inputs, f"--max_steps={STEPS}", dump], folder)
    return folder


def draws(folder: Path) -> list[tuple]:
    with sqlite3.connect(folder / LEDGER_FILE) as file:
        return sorted(file.execute("SELECT * FROM draws"))


def test_each_group_is_written_once_with_its_sums(run):
    expected = []
    for step in range(1, STEPS + 1):
        (file,) = (run / "dump" / f"step_{step:06d}").iterdir()
        _, *samples = map(json.loads, file.read_text().splitlines())
        groups: dict[int, list] = {}
        for sample in samples:
            groups.setdefault(sample["group"], []).append(sample)
        for group in groups.values():
            rewards = [sample["reward"] for sample in group]
            expected.append(
                (
                    step,
                    group[0]["prompt"]["index"],
                    len(group),
                    sum(reward > 0.5 for reward in rewards),
                    sum(rewards),
                    sum(reward**2 for reward in rewards),
                    sum(len(sample["token_ids"]) for sample in group),
                    sum(sample["finish_reason"] == "length" for sample in group),
                )
            )

    assert [line[:-1] for line in draws(run)] == sorted(expected)


def test_a_killed_run_has_the_same_ledger(inputs, run, tmp_path):
    train("train_ppo", 1, [*inputs, "--max_steps=5"], tmp_path)
    # step 5 comes again after the checkpoint of step 4
    shutil.rmtree(tmp_path / "checkpoints" / "step5")
    train("train_ppo", 1, [*inputs, f"--max_steps={STEPS}", "--load_checkpoint"], tmp_path)

    assert draws(tmp_path) == draws(run)


def test_two_ranks_write_one_ledger(inputs, run, tmp_path):
    train("train_ppo", 2, [*inputs, f"--max_steps={STEPS}"], tmp_path)

    assert [line[:3] for line in draws(tmp_path)] == [line[:3] for line in draws(run)]


def test_the_view_has_a_line_for_each_row(run):
    with sqlite3.connect(run / LEDGER_FILE) as file:
        rows = file.execute("SELECT row, draws, responses FROM rows").fetchall()

    assert {row: count for row, count, _ in rows} == Counter(line[1] for line in draws(run))
    assert all(responses == 4 * count for _, count, responses in rows)


def test_prompts_and_labels_can_be_read_without_the_data(run):
    records, held_out = read_ledger(run)

    assert [record.labels for record in records] == [[str(row)] for row in range(len(records))]
    assert (len(records), len(held_out)) == (24, 2)
    assert records[3].location.endswith("train.jsonl:4")


def test_no_ledger_without_the_flag(inputs, tmp_path):
    train("train_ppo", 1, [*inputs, "--max_steps=1", "--ledger=false"], tmp_path)

    assert not (tmp_path / LEDGER_FILE).exists()


def test_the_command_writes_what_is_left(run, tmp_path, capsys):
    cleaned, review = tmp_path / "cleaned.jsonl", tmp_path / "review.csv"
    ledger([str(run), f"--write={cleaned}", f"--review={review}", "--drop=duplicate"])

    printed = capsys.readouterr().out
    assert "24 rows were drawn 48 times" in printed
    with review.open() as file:
        suspects = list(csv.DictReader(file))
    held_out = {each["location"] for each in suspects if "--eval_data" in each["evidence"]}
    assert len(held_out) == 10  # the two prompts, each in several rows
    dropped = {each["location"] for each in suspects if each["suspect"] == "duplicate"}
    assert len(cleaned.read_text().splitlines()) == 24 - len(dropped)
    assert "Ledger" in (run / "report.html").read_text()


def test_the_data_can_be_replaced_by_what_is_left(run, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text(
        "".join(json.dumps({"input": f"{row}?", "label": "1"}) + "\n" for row in range(5))
    )
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(run / LEDGER_FILE, folder)
    (folder / "config.yaml").write_text(
        json.dumps({"data": {"prompt_data": str(data), "prompt_split": "train"}})
    )
    ledger([str(folder), f"--write={data}"])

    assert len(data.read_text().splitlines()) == 5


def test_a_run_goes_on_while_the_ledger_is_read(run, tmp_path):
    shutil.copy(run / LEDGER_FILE, tmp_path)
    mesh = SimpleNamespace(data=ALONE, world=ALONE)
    book = Book(Config.of(save_path=str(tmp_path), reward="number"), mesh, Writer())
    with sqlite3.connect(tmp_path / LEDGER_FILE) as reader:
        lines = reader.execute("SELECT * FROM draws")
        lines.fetchone()  # the statement is not over
        sample = Sample(Prompt(0, "1+1=", [1], {"label": "2"}), 1, [1], [0.0], "2", "stop")
        book.measure(STEPS + 1, [sample], 0, Metrics())
        book.writer.flush()

    assert draws(tmp_path)[-1][:3] == (STEPS + 1, 0, 1)


def test_a_folder_without_a_ledger_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        ledger([str(tmp_path)])

    assert "ledger.sqlite" in capsys.readouterr().err
