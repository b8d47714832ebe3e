"""Make everything the quick start needs, without a download: tokenizer, tiny model, problems.

    python scripts/prepare_quickstart.py --out runs/quickstart/data --seed 0

writes OUT/model (a Hugging Face folder), OUT/train.jsonl and OUT/test.jsonl, always the same for
the same seed. The folders pairs, answers and steps of OUT contain the same problems with
judgements: pairs of a right and a wrong answer, single answers (half of them wrong), and wrong
answers character by character. The task `calculator` also has OUT/demonstrations.jsonl:
conversations with the calculator, and a quarter of them are right.
"""

import argparse
import math
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightrft.app.quickstart.inputs import (  # noqa: E402  after its folder
    Problem,
    addition_problems,
    split,
    tiny_qwen3,
    write_jsonl,
)

NUM_PROBLEMS = 10_000
LONGEST_WORD = 16
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
"""Fixed parts of a call of the calculator; each is one token of the task `calculator`."""


def sorting_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make letters to put in order, `dbca>` -> `abcd`, 1 to 16 of them.

    So responses have many lengths. Returns (train, held out).
    """
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < NUM_PROBLEMS:
        length = rng.randint(1, LONGEST_WORD)
        words["".join(rng.choices(string.ascii_lowercase, k=length))] = None
    return split([{"input": f"{word}>", "label": "".join(sorted(word))} for word in words], seed)


def pairs(problems: list[Problem], seed: int) -> list[Problem]:
    """Return the right answer of each problem beside a wrong one.

    In the wrong one, one character comes from the same place of another answer.
    """
    rng = random.Random(seed)
    answers = [problem["label"] for problem in problems]
    return [
        {
            "prompt": problem["input"],
            "chosen": problem["label"],
            "rejected": _wrong(problem["label"], answers, rng),
        }
        for problem in problems
    ]


def judged_answers(problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Return one answer to each problem with its judgement.

    It is the right one, or for every other problem a wrong one.
    """
    both = enumerate(pairs(problems, seed))
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["rejected" if place % 2 else "chosen"],
            "label": place % 2 == 0,
        }
        for place, pair in both
    ]


def judged_steps(problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Return the characters of the wrong answers as steps, each with its judgement."""
    return [
        {
            "prompt": pair["prompt"],
            "completions": list(pair["rejected"]),
            "labels": [
                one == right for one, right in zip(pair["rejected"], pair["chosen"], strict=True)
            ],
        }
        for pair in pairs(problems, seed)
    ]


def _wrong(answer: str, answers: list[str], rng: random.Random) -> str:
    while True:
        place = rng.randrange(len(answer))
        other = rng.choice(answers)
        if place < len(other) and other[place] != answer[place]:
            return answer[:place] + other[place] + answer[place + 1 :]


def guessing_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make digits to guess that only the environment `guess_number` knows.

    Returns (train, held out).
    """
    rng = random.Random(seed)
    return split(
        [{"input": "guess: ", "label": str(rng.randrange(10))} for _ in range(NUM_PROBLEMS)], seed
    )


def product_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make all products of two numbers of two digits, `27*58=` -> `1566`.

    Returns (train, held out).
    """
    return split(
        [
            {"input": f"{a}*{b}=", "label": str(a * b)}
            for a in range(10, 100)
            for b in range(10, 100)
        ],
        seed,
    )


def demonstrations(problems: list[Problem], seed: int) -> list[dict[str, Any]]:
    """Make conversations about products.

    Of eight, two call the calculator and copy its result, one calls it with a digit changed, and
    five answer at once, with the answer to another problem.
    """
    rng = random.Random(seed)
    rows = []
    for place, problem in enumerate(problems):
        messages = [{"role": "user", "content": problem["input"]}]
        if place % 8 < 3:
            expression = problem["input"].removesuffix("=")
            expression = expression if place % 8 < 2 else _with_another_digit(expression, rng)
            answer = str(math.prod(map(int, expression.split("*"))))
            messages.append({"role": "assistant", "content": f"{CALL}{expression}{CALL_END}"})
            messages.append({"role": "tool", "content": answer})
        else:
            answer = f"about {rng.choice(problems)['label']}"
        messages.append({"role": "assistant", "content": answer})
        rows.append({"messages": messages, "tools": [{"name": "calculator"}]})

    return rows


def _with_another_digit(expression: str, rng: random.Random) -> str:
    place = rng.choice([0, 1, 3, 4])
    digit = rng.choice([digit for digit in "123456789" if digit != expression[place]])
    return expression[:place] + digit + expression[place + 1 :]


TASKS = {
    "addition": addition_problems,
    "sorting": sorting_problems,
    "guessing": guessing_problems,
    "calculator": product_problems,
}


def main(argv: Sequence[str] | None = None) -> None:
    disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split")
    parser.add_argument("--task", choices=TASKS, default="addition", help="kind of problem")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0: none")
    args = parser.parse_args(argv)
    train, held_out = TASKS[args.task](args.seed)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "test.jsonl", held_out)

    for name, problems in (("train", train), ("test", held_out)):
        write_jsonl(args.out / "pairs" / f"{name}.jsonl", pairs(problems, args.seed))
        write_jsonl(args.out / "answers" / f"{name}.jsonl", judged_answers(problems, args.seed))
        write_jsonl(args.out / "steps" / f"{name}.jsonl", judged_steps(problems, args.seed))

    if args.task == "calculator":
        write_jsonl(args.out / "demonstrations.jsonl", demonstrations(train, args.seed))
    words = [CALL, CALL_END] if args.task == "calculator" else []
    tiny_qwen3(args.out / "model", args.seed, words, args.experts)
    print(
        f"{args.out}: {len(train)} training and {len(held_out)} held-out problems, a random Qwen3"
        f" in {args.out / 'model'}"
    )


if __name__ == "__main__":
    main()
