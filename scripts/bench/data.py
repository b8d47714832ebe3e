"""Measure memory and speed of tokenized data.

It is held in lists, in prompts in memory, or in a file of --data_cache.

    python scripts/bench/data.py --rows 200000  # the table in docs/benchmarks.md, some minutes
    python scripts/bench/data.py --rows 2000 --drawn 500

Each way runs in a process of its own: it reads a JSONL file with `--rows` rows of `--tokens`
tokens, one for each byte, and an answer, then draws `--drawn` rows in a shuffled order.
`bytes_per_row` is the peak of the process's own memory, without mapped files,
above its memory before, by the number of rows. `loaded_per_s` and `drawn_per_s` are rows per
second. The last line is one JSON object.
"""

import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoTokenizer  # noqa: E402

from lightrft.app.quickstart.inputs import tiny_qwen3  # noqa: E402
from lightrft.config import DataSection  # noqa: E402
from lightrft.core.order import Order  # noqa: E402
from lightrft.data.prompts import load_prompts  # noqa: E402
from scripts.bench.harness import parser_of  # noqa: E402

INTERVAL = 0.02
"""Seconds between two looks at the memory of the process."""


def own_memory() -> int:
    """Return the bytes of this process that belong to no file."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def in_lists(file: Path, tokenizer: Any, cache: Path) -> Sequence[Any]:
    rows = [json.loads(line) for line in file.open()]
    return [row | {"token_ids": tokenizer(row["input"])["input_ids"]} for row in rows]


def in_memory(file: Path, tokenizer: Any, cache: Path) -> Sequence[Any]:
    return load_prompts(DataSection(prompt_data=str(file), prompt_max_len=10**6), tokenizer)


def in_file(file: Path, tokenizer: Any, cache: Path) -> Sequence[Any]:
    return load_prompts(
        DataSection(prompt_data=str(file), prompt_max_len=10**6, data_cache=str(cache)), tokenizer
    )


WAYS: dict[str, Callable[[Path, Any, Path], Sequence[Any]]] = {
    "lists": in_lists,
    "memory": in_memory,
    "file_written": in_file,
    "file_read": in_file,
}


def measured(way: str, folder: Path, drawn: int) -> dict[str, float]:
    """Return the numbers of one way; it runs in a process of its own."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    before = own_memory()
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL):
            peak[0] = max(peak[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    rows = WAYS[way](folder / "rows.jsonl", tokenizer, folder / "cache")
    loaded = time.perf_counter() - began
    order = Order(len(rows), 0).rows(0, drawn)
    began = time.perf_counter()
    count = sum(
        len(rows[row].token_ids if way != "lists" else rows[row]["token_ids"]) for row in order
    )
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    assert count > 0
    memory = (max(peak[0], own_memory()) - before) / len(rows)

    return {
        "bytes_per_row": round(memory),
        "loaded_per_s": round(len(rows) / loaded),
        "drawn_per_s": round(drawn / seconds),
    }


def write_rows(file: Path, rows: int, tokens: int) -> None:
    chosen = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    with file.open("w") as lines:
        for number in range(rows):
            text = "".join(chosen.choices(letters, k=tokens))
            lines.write(json.dumps({"input": text, "label": str(number)}) + "\n")


def main() -> None:
    flags = {"--rows": 100_000, "--tokens": 300, "--drawn": 20_000}
    args = parser_of(__doc__, flags).parse_args()
    result: dict[str, Any] = {"rows": args.rows, "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_qwen3(folder / "model", seed=0)
        write_rows(folder / "rows.jsonl", args.rows, args.tokens)
        for way in WAYS:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                result[way] = pool.apply(measured, (way, folder, min(args.drawn, args.rows)))
            print(way, result[way], flush=True)
        result["file_bytes_per_row"] = round(
            next((folder / "cache").glob("*.arrow")).stat().st_size / args.rows
        )

    print(json.dumps(result))


if __name__ == "__main__":
    main()
