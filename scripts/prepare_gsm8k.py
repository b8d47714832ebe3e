"""Turn GSM8K into prompts with the final number as label.

A row has a question, and an answer with `#### 42` at its end.

    python scripts/prepare_gsm8k.py --out data/gsm8k                  # from the hub: openai/gsm8k
    python scripts/prepare_gsm8k.py --source folder --out data/gsm8k  # from JSONL or parquet files

writes OUT/train.jsonl and OUT/test.jsonl with {"input": chat messages, "label": "42"}.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets import load_dataset

INSTRUCTION = "Think step by step, and end with the answer: #### and the number."
SPLITS = ("train", "test")
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_split(source: str, split: str) -> Iterable[dict[str, Any]]:
    """Read the rows of one split, from files in a folder or from the hub's data set.

    The names of the files begin with the split.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.suffix or source.count("/") != 1:
            raise SystemExit(
                f"--source {source}: neither an existing folder nor a hub name (owner/name) either"
            )
        try:
            return load_dataset(source, "main", split=split)
        except Exception as error:  # the hub's client raises errors of several libraries
            raise SystemExit(
                f"--source {source}: the hub does not give it ({type(error).__name__}: {error})."
                " Without a network, pass a folder with its train and test files: --source folder"
            ) from error

    files = sorted(file for file in folder.rglob(f"{split}*") if file.suffix in FORMATS)
    if not files:
        raise SystemExit(f"--source {source}: no {split}*.jsonl or {split}*.parquet file in it")

    return load_dataset(
        FORMATS[files[0].suffix], data_files=[str(file) for file in files], split="train"
    )


def convert(rows: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Return chat prompts with labels.

    A row without a final number ends the program with its place.
    """
    for number, row in enumerate(rows, 1):
        try:
            label = final_number(row["answer"])
            question = row["question"].strip()
        except (KeyError, ValueError, AttributeError) as error:
            raise SystemExit(
                f"{where}, row {number}: not a GSM8K problem ({type(error).__name__}: {error})"
            ) from error
        yield {"input": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}], "label": label}


def final_number(answer: str) -> str:
    """Return the text after `####`, without thousands separators: `1,234` -> `1234`."""
    _, mark, number = answer.rpartition("####")
    number = number.strip().replace(",", "").removeprefix("$")
    if not mark or not number.removeprefix("-").replace(".", "", 1).isdigit():
        raise ValueError(f"no number after #### in {answer[-60:]!r}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", default="openai/gsm8k", help="hub name, or a folder of JSONL or parquet files"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    for split in SPLITS:
        problems = list(convert(read_split(args.source, split), f"{args.source} {split}"))
        (args.out / f"{split}.jsonl").write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in problems)
        )
        print(f"{args.out / split}.jsonl: {len(problems)} problems")


if __name__ == "__main__":
    main()
