"""Make the data of the recipes for a laptop.

These are word problems, instructions, questions, and pairs of short and long answers.

    python scripts/laptop/tasks.py words --out runs/laptop/words
    python scripts/laptop/tasks.py instructions --out runs/laptop/instructions
    python scripts/laptop/tasks.py questions --out runs/laptop/brevity
    python scripts/laptop/tasks.py pairs --out runs/laptop/brevity --responses runs/laptop/brevity/sampled/responses.jsonl

Each writes OUT/train.jsonl, OUT/test.jsonl, which has new rows of the same kinds, and
OUT/new.jsonl, whose templates or subjects do not occur in training. Words also has OUT/form.jsonl,
a few rows that teach the form of a worked answer. Pairs needs answers that the model itself
sampled, and writes OUT/pairs.jsonl and OUT/brief.jsonl. The files depend on nothing but --seed.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.laptop.rewards import brevity  # noqa: E402  after its folder

Row = dict[str, Any]

NUM_TRAINED = 12_000
NUM_HELD_OUT = 250
NUM_OF_FORM = 192
LARGEST = 10
"""Largest number in a word problem."""

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Rosa Sam"
    " Tina Victor".split()
)
THINGS = (
    "apples balls books buttons cards coins cookies crayons flowers marbles pencils shells stamps"
    " stickers".split()
)
PROBLEMS = {
    "a+b": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        (
            "There are {a} {things} on the table and {b} {things} in the box. How many {things} are"
            " there in all?"
        ),
        (
            "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} does"
            " {other} have?"
        ),
        (
            "{name} found {a} {things} in the morning and {b} in the evening. How many {things} did"
            " {name} find?"
        ),
    ),
    "a-b": (
        "{name} has {a} {things} and gives {b} of them away. How many {things} are left?",
        "{name} had {a} {things}, but lost {b} of them. How many {things} does {name} still have?",
        (
            "{name} has {a} {things}. {other} has {b} fewer than {name}. How many {things} does"
            " {other} have?"
        ),
        "Of {a} {things} in a shop, {b} were sold. How many {things} are left in the shop?",
    ),
    "a+b-c": (
        (
            "{name} has {a} {things}, gets {b} more and gives {c} to {other}. How many {things}"
            " does {name} have now?"
        ),
    ),
    "a-b+c": (
        (
            "{name} had {a} {things}, lost {b} and then found {c}. How many {things} does {name}"
            " have now?"
        ),
    ),
    "a+b+c": (
        (
            "{name} has {a} {things}, {other} has {b}, and there are {c} in the box. How many"
            " {things} are there in all?"
        ),
    ),
    "a-b-c": (
        (
            "There were {a} {things}. {name} took {b} of them, and {other} took {c}. How many"
            " {things} are left?"
        ),
    ),
}
"""Solution of a word problem, computed from left to right -> templates that have it."""
NEW_PROBLEMS = {
    "a+b": (
        (
            "A basket holds {a} {things}. {name} puts in {b} more. How many {things} are in the"
            " basket?"
        ),
    ),
    "a-b": ("{name} picked {a} {things} and sold {b}. How many {things} remain?",),
    "a-b+c": (
        (
            "{name} bought {a} {things}, dropped {b} of them, and bought {c} more. How many"
            " {things} does {name} have?"
        ),
    ),
    "a+b-c": (
        (
            "A bag has {a} {things}. {name} adds {b}, and {other} takes out {c}. How many {things}"
            " are in the bag?"
        ),
    ),
}
SUBJECTS = (
    "the sea, a cat, the moon, coffee, a bicycle, rain, a teacher, bread, the desert, a train,"
    " music, winter, a garden, honey, a bridge, the forest, a clock, chess, a farmer, snow, a"
    " library, a dragon, tea, a mountain, the city, a dog, football, a doctor, a river, summer,"
    " cheese, a robot, a pencil, the market, a ship, a horse, the sky, a friend, fire, a castle"
).split(", ")
NEW_SUBJECTS = (
    "a bee, autumn, a violin, a lighthouse, rice, an island, a baker, a candle, the wind, a kitchen"
).split(", ")
WORDS = (
    "bright quiet old slow happy morning water light small road together never always green heart"
    " gold story world".split()
)
NEW_WORDS = "gentle silver evening stone song".split()
AVOIDED = "the is and of a".split()
KEYS = "name color size age taste price sound use season place".split()

QUESTIONS = (
    "What is {}?",
    "Tell me about {}.",
    "Why do people like {}?",
    "What should I know about {}?",
    "Explain {} to a child.",
    "What makes {} special?",
    "How would you describe {}?",
    "What do you think of when you hear of {}?",
)
NEW_QUESTIONS = ("Give me a fact about {}.", "What can one learn from {}?")


def word_problem(rng: random.Random, problems: dict[str, tuple[str, ...]]) -> Row:
    """Return a word problem with its answer, and the equations that lead to it as `working`.

    Numbers are from 2 to LARGEST.
    """
    formula, template = rng.choice(
        [(formula, template) for formula, templates in problems.items() for template in templates]
    )

    results = [0]
    working = []
    while min(results) < 1:  # nobody can give away what is not there
        a, b, c = numbers = [rng.randint(2, LARGEST) for _ in range(3)]
        results = [a]
        working = []
        for sign, number in zip(formula[1::2], numbers[1:], strict=False):
            results.append(results[-1] + number if sign == "+" else results[-1] - number)
            working.append(f"{results[-2]} {sign} {number} = {results[-1]}")

    name, other = rng.sample(NAMES, 2)
    text = template.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b, c=c)
    return {"input": text, "label": str(results[-1]), "working": ", ".join(working)}


def instruction(rng: random.Random, subjects: Sequence[str], words: Sequence[str]) -> Row:
    """Return an instruction with the checks of rewards.py that a response has to pass."""
    subject = rng.choice(subjects)
    word = rng.choice(words)
    avoided = rng.choice(AVOIDED)

    kind = rng.choice(("json", "list", "sentence", "sentence", "sentence", "sentence"))

    if kind == "json":
        keys = rng.sample(KEYS, rng.choice((1, 2)))
        named = ("the key " if len(keys) == 1 else "the keys ") + " and ".join(
            f'"{key}"' for key in keys
        )
        text = f"Describe {subject} as a JSON object with {named}. Write only the JSON object."
        return {"input": text, "checks": [f"keys:{' '.join(keys)}"]}

    if kind == "list":
        number = rng.choice((3, 4))
        text = (
            f"List {number} words about {subject}, separated by commas. Write only the {number}"
            " words."
        )
        return {"input": text, "checks": [f"items:{number}"]}

    most = rng.randint(8, 20)
    wishes = rng.sample(
        [
            (f'Use the word "{word}".', f"use:{word}"),
            (f'Do not use the word "{avoided}".', f"avoid:{avoided}"),
            ("End with an exclamation mark.", "end:!"),
        ],
        rng.choice((0, 1, 1, 2)),
    )
    text = " ".join(
        [
            f"Write one sentence of at most {most} words about {subject}.",
            *(wish for wish, _ in wishes),
        ]
    )

    return {"input": text, "checks": ["sentence", f"words:{most}", *(check for _, check in wishes)]}


def question(rng: random.Random, templates: Sequence[str], subjects: Sequence[str]) -> Row:
    """Return an open question."""
    return {"input": rng.choice(templates).format(rng.choice(subjects))}


def data(task: str, seed: int) -> dict[str, list[Row]]:
    """Return the rows of each file of a task that is made without a model.

    No input occurs twice.
    """
    rng = random.Random(seed)
    seen = set[str]()

    def rows(number: int, make: Callable[..., Row], *of: Any) -> list[Row]:
        found: list[Row] = []
        while len(found) < number:
            row = make(rng, *of)
            if row["input"] not in seen:
                seen.add(row["input"])
                found.append(row)
        return found

    if task == "words":
        train = rows(NUM_TRAINED, word_problem, PROBLEMS)
        held_out = {
            "test": rows(NUM_HELD_OUT, word_problem, PROBLEMS),
            "new": rows(NUM_HELD_OUT, word_problem, NEW_PROBLEMS),
        }
        form = [{"input": row["input"], "label": row["working"]} for row in train[-NUM_OF_FORM:]]
        return {"train": train, "form": form} | held_out

    if task == "instructions":
        known = (SUBJECTS, WORDS)
        new = (NEW_SUBJECTS, NEW_WORDS)
        numbers = {
            "train": (NUM_TRAINED, known),
            "test": (NUM_HELD_OUT, known),
            "new": (NUM_HELD_OUT, new),
        }
        return {name: rows(number, instruction, *of) for name, (number, of) in numbers.items()}

    train = rows(len(QUESTIONS) * len(SUBJECTS), question, QUESTIONS, SUBJECTS)
    return {"train": train, "new": rows(100, question, NEW_QUESTIONS, SUBJECTS + NEW_SUBJECTS)}


def pairs(questions: Sequence[Row], responses: Iterable[Row]) -> dict[str, list[Row]]:
    """Return a pair for each question whose sampled answers differ in brevity.

    The second result has the briefest answers alone, for SFT. Answers that were cut off are in no
    pair: their end would be learned as an end.
    """
    answers = defaultdict(dict)
    for response in responses:
        if response["sample"] != "greedy" and (
            value := brevity(response["response"], response["finish_reason"] == "length")
        ):
            answers[response["row"]][value] = response["response"]

    chosen = [
        question
        | {"chosen": answers[row][max(answers[row])], "rejected": answers[row][min(answers[row])]}
        for row, question in enumerate(questions)
        if len(answers[row]) > 1
    ]
    return {
        "pairs": chosen,
        "brief": [{"input": row["input"], "label": row["chosen"]} for row in chosen],
    }


def read(path: Path) -> list[Row]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("words", "instructions", "questions", "pairs"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--responses",
        type=Path,
        help="responses.jsonl of `lightrft evaluate` to OUT/train.jsonl, for pairs",
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)

    if arguments.task == "pairs":
        if arguments.responses is None:
            parser.error("pairs needs --responses")
        files = pairs(read(arguments.out / "train.jsonl"), read(arguments.responses))
    else:
        files = data(arguments.task, arguments.seed)

    for name, rows in files.items():
        (arguments.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        print(f"{arguments.out / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
