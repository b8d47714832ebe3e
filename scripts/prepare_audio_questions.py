"""Turn questions about sound with several choices into prompts.

The label is the letter of the right choice.

    python -m scripts.prepare_audio_questions --source FOLDER --out data/audio_questions

reads the splits train and test of a folder of JSONL or parquet files, or of a data set of the hub
(owner/name). A row has a clip of sound, a question, a list of choices, and an answer, that is one
of the choices, its number from 0, or its letter; --audio_key and the other flags name their
columns. Without a test split, --held_out rows of train are held out.

Writes OUT/train.jsonl, OUT/test.jsonl, and below OUT/clips the sound as .wav files with 16,000
samples per second, as configs/grpo_audio_qwen2_audio_7b.yaml reads them. Rows with sound that
cannot be read or is too long, or without one right choice, are left out, counted, and the first of
them shown.
"""

import argparse
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightrft.config.errors import DataError
from lightrft.data.media_files import MediaLocation
from lightrft.data.readers import BadRows, read_rows

RATE = 16_000
LETTERS = "ABCDEFGHIJ"
"""Letters that --reward choice finds in a response."""


def letter_of(answer: Any, choices: list[str]) -> str:
    """Return the letter of the right choice. Raise ValueError unless `answer` says it."""
    letters = LETTERS[: len(choices)]
    if choices.count(answer) == 1:
        return letters[choices.index(answer)]
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return letters[answer]
    if isinstance(answer, str) and (letter := answer.strip(" ().").upper()) in [*letters]:
        return letter
    raise ValueError(f"the answer {answer!r:.60} is none of the {len(choices)} choices")


def converted(
    row: dict[str, Any], clip: Path, folder: Path, args: argparse.Namespace
) -> dict[str, str]:
    """Return a prompt about the sound of a row, and write the sound to `clip`.

    Raise ValueError for a bad row.
    """
    keys = (args.audio_key, args.question_key, args.choices_key, args.answer_key)
    sound, question, choices, answer = (row.get(key) for key in keys)
    if (
        not isinstance(question, str)
        or not isinstance(choices, list)
        or not 2 <= len(choices) <= len(LETTERS)
    ):
        raise ValueError(
            f"it needs a text ({args.question_key}) and a list of 2 to {len(LETTERS)} choices"
            f" ({args.choices_key})"
        )

    label = letter_of(answer, choices)
    array = MediaLocation(folder).audio(sound, rate=RATE).open()["array"]
    if len(array) > args.longest * RATE:
        raise ValueError(
            f"its sound has {len(array) / RATE:.1f} s, more than --longest {args.longest}"
        )

    with wave.open(str(clip), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((array.clip(-1, 1) * 32767).round().astype(np.int16).tobytes())

    listed = "\n".join(
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)
    )
    return {"input": f"<audio>{question.strip()}\n{listed}", "label": label}


def prompts(split: str, args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield the prompts of a split with the names of the clips.

    Report the rows that are left out.
    """
    bad = BadRows(skip=True, flag="--source")
    place = Path(args.source).expanduser()
    folder = place.parent if place.is_file() else place
    (args.out / "clips").mkdir(parents=True, exist_ok=True)

    for number, (where, row) in enumerate(read_rows(args.source, split, bad)):
        name = f"clips/{split}{number:06d}.wav"
        try:
            yield converted(row, args.out / name, folder, args) | {"audio": name}
        except ValueError as error:
            bad.add(where, str(error))

    bad.report()


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{file}: {len(rows)} questions")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", required=True, help="folder of JSONL or parquet files, or a data set of the hub"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    for column in ("audio", "question", "choices", "answer"):
        parser.add_argument(f"--{column}_key", default=column, help=f"column, default: {column}")

    parser.add_argument(
        "--longest", type=float, default=30.0, help="longest clip in seconds that the model reads"
    )
    parser.add_argument(
        "--held_out",
        type=int,
        default=0,
        help="rows of train that are held out; 0: the split test is",
    )

    args = parser.parse_args(argv)
    try:
        train = list(prompts("train", args))
        test, train = (
            (train[: args.held_out], train[args.held_out :])
            if args.held_out
            else (list(prompts("test", args)), train)
        )
    except DataError as error:
        raise SystemExit(f"--source {args.source}: {error}") from error

    if not train or not test:
        raise SystemExit(
            f"--source {args.source}: {len(train)} training and {len(test)} held-out questions are"
            " left"
        )

    write(args.out / "train.jsonl", train)
    write(args.out / "test.jsonl", test)


if __name__ == "__main__":
    main()
