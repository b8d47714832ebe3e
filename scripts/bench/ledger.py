"""Plant wrong labels in the data of the quick start, train two passes, and look for them.

    lightrft quickstart                                         # the model and the data
    python -m scripts.bench.ledger runs/quickstart --out runs/ledger

Then a run on the cleaned rows is compared with one on all rows, by the tokens to the same held-out
accuracy. `--write` puts the table into docs/ledger.md. The whole takes about ten minutes on two
quiet cores.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightrft.app.observe.report import write_page
from lightrft.app.observe.sinks import Writer, read_rows
from lightrft.config import Config
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt, Sample
from lightrft.extras.ledger.book import Book
from lightrft.extras.ledger.records import Draw, RowRecord, read_ledger
from lightrft.extras.ledger.suspects import duplicates, leaks, wrong_labels
from lightrft.models.parallel.collectives import Axis
from scripts.bench.harness import write_measured
from scripts.laptop.tasks import data

SHARE = 0.05
NUM_LEAKS = 50
NUM_COPIES = 50
DOCS = Path(__file__).parents[2] / "docs"
ALONE = Axis("one rank", 1, 0, None)
RECIPE = """--engine_type hf --prompt_max_len 8 --generate_max_len 4 --rollout_batch_size 128
    --n_samples_per_prompt 8 --train_batch_size 1024 --lr_scheduler constant --init_kl_coef 0
    --learning_rate 1e-3 --loss_agg_mode token-mean --eps_clip_high 0.28 --num_episodes 2
    --report_to jsonl --overwrite --reward_workers 0 --eval_steps 5"""


def main() -> None:
    options = arguments()
    lines = [
        "| seed | planted | found | precision | recall | tokens to the accuracy, all rows | cleaned rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed in range(options.seeds):
        folder = options.out / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        planted = plant(options.quickstart / "data" / "train.jsonl", folder / "planted.jsonl", seed)
        with_wrong = train(options, folder / "planted", folder / "planted.jsonl", seed, "--ledger")

        records, _ = read_ledger(folder / "planted")
        found = {int(each.record.location.rpartition(":")[2]) for each in wrong_labels(records)}
        right = len(found & planted)
        cleaned = folder / "cleaned.jsonl"
        command = ["ledger", folder / "planted", "--write", cleaned, "--drop", "wrong_label"]
        lightrft(command)
        without = train(options, folder / "cleaned", cleaned, seed)

        target = best(with_wrong)
        lines.append(
            f"| {seed} | {len(planted)} | {len(found)} | {right / len(found):.1%} |"
            f" {right / len(planted):.1%} | {tokens_to(with_wrong, target):,} to {target:.1%} |"
            f" {tokens_to(without, target):,} |"
        )

    lines += ["", planted_texts(), "", overhead(options.out / "seed0" / "planted")]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_measured("ledger.md", text)
        picture(options.out / "seed0" / "planted", DOCS / "figures" / "ledger.png")


def overhead(run: Path, calls: int = 50) -> str:
    """Say how long the ledger of a step takes beside the step, with the samples of the recipe."""
    step = statistics.median(row["time/step"] for row in read_rows(run / "metrics.jsonl"))
    groups = [
        Sample(
            Prompt(row, f"{row}=", [row], {"label": str(row)}),
            row,
            [1] * 4,
            [0.0] * 4,
            "85",
            "stop",
        )
        for row in range(128)
        for _ in range(8)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = Config.of(save_path=folder, reward="exact_match")
        writer = Writer()
        book = Book(config, SimpleNamespace(data=ALONE, world=ALONE), writer)
        seconds = []
        for number in range(1, calls + 1):
            began = time.perf_counter()
            book.measure(number, groups, 0, Metrics())
            seconds.append(time.perf_counter() - began)
            writer.flush()
    middle = statistics.median(seconds)
    return (
        f"For 128 prompts with 8 responses the ledger takes {1000 * middle:.1f} ms of a step (median of"
        f" {calls}; another thread writes the file), and a step of this tiny model {step:.2f} s:"
        f" {middle / step:.2%}."
    )


def picture(run: Path, target: Path) -> None:
    """Photograph the ledger of a run in a browser."""
    empty = {"warnings": [], "tiles": [], "runs": [("", [])], "setup": [], "config": ""}
    table = json.loads((run / "ledger.json").read_text())
    page = {
        "title": "The first of 9,500 rows",
        "lead": "Wrong labels were planted",
        "ledger": table,
    }
    shown = write_page(run / "ledger.html", empty | page)
    browser = shutil.which("chromium") or "google-chrome"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,760"]
    subprocess.run(
        [browser, *options, f"--screenshot={target}", shown.resolve().as_uri()], check=True
    )


def plant(source: Path, target: Path, seed: int) -> set[int]:
    """Give a share of the rows the label of another row; return their lines, from 1."""
    generator = random.Random(seed)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    planted = generator.sample(range(len(rows)), round(SHARE * len(rows)))
    labels = [row["label"] for row in rows]
    for index in planted:
        rows[index]["label"] = next(
            label
            for label in iter(lambda: generator.choice(labels), None)
            if label != labels[index]
        )
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {index + 1 for index in planted}


def planted_texts(seed: int = 0) -> str:
    """Plant leaks and near-duplicates in word problems, and say how many of them are found.

    What a model says plays no part.
    """
    generator = random.Random(seed)
    rows = data("words", seed)["train"]
    leaking, copied = generator.sample(rows, NUM_LEAKS), generator.sample(rows, NUM_COPIES)
    for row in leaking:
        row["input"] += f" The answer is {row['label']}."
    copies = [
        {"input": row["input"].replace("How many", "So how many"), "label": f"1{row['label']}"}
        for row in copied
    ]

    draw = Draw(
        1, 0, responses=8, right=4, reward=4, squares=4, tokens=800, truncated=0, answers="{}"
    )
    records = [
        RowRecord(number, str(number), row["input"], [row["label"]], [draw])
        for number, row in enumerate([*rows, *copies])
    ]
    is_leak = {number for number, row in enumerate(rows) if "The answer is" in row["input"]}
    is_copy = {number for number, row in enumerate(rows) if row in copied}
    is_copy |= set(range(len(rows), len(records)))
    leaks_found = {each.record.row for each in leaks(records)}
    copies_found = {each.record.row for each in duplicates(records)}
    return (
        f"Among {len(rows):,} word problems {NUM_LEAKS} prompts gave their answer away, and"
        f" {len(is_leak & leaks_found)} of them were found, with"
        f" {len(leaks_found - is_leak)} others; {NUM_COPIES} prompts had a near-duplicate with"
        f" another label, and {len(is_copy & copies_found)} of these {len(is_copy)} were found, with"
        f" {len(copies_found - is_copy)} others."
    )


def train(
    options: argparse.Namespace, folder: Path, data: Path, seed: int, *flags: str
) -> list[dict[str, Any]]:
    """Train, unless the folder has the run already, and return the metrics of the steps."""
    if not (folder / "model").exists():
        lightrft(
            [
                *("train_ppo", *RECIPE.split(), *flags, "--seed", seed, "--save_path", folder),
                *("--pretrain", options.quickstart / "sft" / "model", "--prompt_data", data),
                *("--eval_data", options.quickstart / "data" / "test.jsonl"),
            ]
        )
    return list(read_rows(folder / "metrics.jsonl"))


def lightrft(command: list[Any]) -> None:
    subprocess.run(
        [sys.executable, "-m", "lightrft", *map(str, command)], check=True, capture_output=True
    )


def best(rows: list[dict[str, Any]]) -> float:
    """Return the held-out accuracy of the last evaluation."""
    return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]


def tokens_to(rows: list[dict[str, Any]], target: float) -> int:
    """Return the tokens generated until an evaluation has the accuracy."""
    tokens = 0
    for row in rows:
        tokens += int(row["rollout/tokens"])
        if row.get("eval/accuracy", 0.0) >= target:
            return tokens
    return tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quickstart", type=Path, help="folder of the quick start")
    parser.add_argument("--out", type=Path, default=Path("runs/ledger"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
