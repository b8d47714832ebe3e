"""Reward functions: `f(samples, **columns) -> list[float]`, one number for each sample.

    def short_and_right(samples, label, **columns):
        return [s.text == right for s, right in zip(samples, label)]

A function is called once for each prompt, as soon as the last of the samples is complete, while
others are still generated; it may be `async`. Each column of the data set is passed as a list,
aligned with the samples; `label` is the column of --label_key. The built-in functions take a label
as one right answer, or as a list of alternatives:

    right_answers("7") == right_answers(7.0) == ["7"]      right_answers(["7", 8.5]) == ["7", "8.5"]

For a response that is rewarded step by step a function returns a list instead of a number: a number
for each of the tokens, or None for a token without a reward. A reward with components is a
dictionary of numbers: the reward is the sum, and each component is a metric. Functions with the
signature of TRL, OpenRLHF, verl or EasyR1 are called as those libraries call them (conventions.py).

Functions run in worker processes (worker.py), so this module imports neither torch nor an engine.
"""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from lightrft.algorithms.rollout.episode_roles import ROLE_MARK
from lightrft.core.samples import Sample
from lightrft.registry import Registry

Reward = Callable[..., list[float | list[float | None] | dict[str, float]]]
ELSEWHERE = {
    **dict.fromkeys(("accuracy", "accuracy_reward", "reasoning_accuracy_reward"), "math"),
    "think_format_reward": "format",
    "code_reward": "code",
}
"""Names of rewards in TRL and Open R1 -> names here."""
rewards = Registry("reward", flag="--reward", elsewhere=ELSEWHERE)

FAST_REWARDS = frozenset(
    {"choice", "environment", "exact_match", "f1", "format", "gsm8k", "length", "none", "number"}
)
"""Functions that take microseconds: a call of another process would take longer."""
NUMBER_PATTERN = r"(?:(?<![\w)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""Pattern of 1,234.5 and -3 and .5. U+2212 is a minus sign.

The dash of 10-3 is no sign, and the commas of 1,2,3 do not join.
"""
FRACTION = rf"(?<![\d/])({NUMBER_PATTERN})/(\d*[1-9]\d*)(?![\d/]|[.,]\d)|({NUMBER_PATTERN})"
"""Pattern of 1/2, or of a number alone: 1/2/2024 is a date."""

JOINED = r"[ \t]*(?:(?:,[ \t]*)?\b(?i:or|and)\b|[,/;&])[ \t]*"
"""Pattern of what joins letters: `or`, a comma and the like."""
ONE = (
    # not the word A or I of a sentence
    r"[*_($]{0,3}(?![AI][ \t]+(?!(?i:because|since|as|or|and)\b)\w)"
    r"[A-J](?![^\W_]|['\u2019])[*_)$]{0,3}"
)
"""Pattern of a letter that a response chooses, such as B, (B) and **B**."""
SEVERAL_LETTERS = rf"{ONE}(?:{JOINED}{ONE})*"
"""Pattern of such a letter, or of several that are joined, such as `A and C`."""
CHOICE = re.compile(
    r"(?i:\banswer(?:[*_]{0,2}[ ]?:|[ ]is[ ]?:?))[*_]{0,2}[ \t]*(?i:option[ ]|choice["
    rf" ])?(?P<named>{SEVERAL_LETTERS})"
    rf"|(?<![\w(])(?P<in_parentheses>\([A-J]\)(?:{JOINED}{ONE})*)"
    rf"|^[ \t]*(?P<alone>{SEVERAL_LETTERS}|\(?[a-j]\)?)[.)]?[*_]{{0,2}}[ \t]*\r?$",
    re.MULTILINE,
)
BOXED_CHOICE = re.compile(rf"({SEVERAL_LETTERS}|\(?[a-j]\)?)(?:[.:)].*|\s+[^\W_].*)?", re.DOTALL)
LETTER = re.compile(r"(?<![^\W_])[A-Ja-j](?![^\W_])")
LATEX = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|bf|rm)\b[ ]*|[{}$\\]")
"""Pattern of what may surround a letter in LaTeX."""
BRACES = re.compile(r"(?P<boxed>\\boxed[ ]*\{)|\\.|(?P<brace>[{}])", re.DOTALL)
THINK_AND_ANSWER = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


# -- reading the columns of a row, first of all the label

Reader = Callable[[Any], Any]
"""Function that reads the value of a column, and raises ValueError for one that it cannot use."""

readers: dict[Callable[..., Any], dict[str, Reader]] = {}
"""Reward function -> readers of the columns that it has to understand, by name."""


def reads(**columns: Reader) -> Callable[[Any], Any]:
    """Let rows be checked when they are loaded: each reader must accept the value of the column."""

    def add(function: Any) -> Any:
        readers[function] = columns
        return function

    return add


def right_answers(label: Any) -> list[str]:
    """Return the texts of the right answers: a label is one answer, or a list of alternatives.

    A whole number gets no decimal point: a column of integers often becomes floats when some are
    missing. Raise ValueError for other values.
    """
    alternatives = label if isinstance(label, list | tuple) else [label]
    answers = [_answer(one) for one in alternatives if one is not None]
    if not answers:
        raise ValueError(f"the label {label!r} has no right answer")
    return answers


def _answer(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Real | Decimal) or not math.isfinite(value):
        raise ValueError(
            f"the label {value!r:.80} is {_kind(value)}; it must be a text, a number, or a list of "
            "alternatives (--label_key names its column)"
        )
    return number_text(value)


def number_text(value: Any) -> str:
    """Return a number without an exponent, and a whole one without a decimal point."""
    return str(int(value)) if value == int(value) else format(Decimal(str(value)), "f")


def as_text(value: Any) -> str:
    """Return a value of a row as a text for people and models.

    It is JSON unless it is text or a number.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return number_text(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with the keys {', '.join(map(str, value))}"
    kinds = {bool: "a boolean", list: "a list inside of a list", bytes: "bytes"}
    return kinds.get(type(value), f"of type {type(value).__name__}")


# -- the functions


@rewards.register("environment")
def environment(
    samples: list[Sample], **columns: Any
) -> list[float | list[float | None] | dict[str, float]]:
    """Return the rewards of the environment.

    That is the sum at the end, each reward at the turn if several turns have one, or a component
    for each role.
    """
    return [_of_episode(sample) for sample in samples]


def _of_episode(sample: Sample) -> float | list[float | None] | dict[str, float]:
    episode = sample.episode
    if episode and episode.role_rewards:
        return {f"{ROLE_MARK}{role}": reward for role, reward in episode.role_rewards.items()}

    rewards: dict[int, float] = {}
    for token, reward in episode.rewards if episode else ():
        rewards[token] = rewards.get(token, 0.0) + reward
    if len(rewards) < 2:
        return sum(rewards.values(), 0.0)
    return [rewards.get(token) for token in range(len(sample.token_ids))]


@rewards.register("exact_match")
@reads(label=right_answers)
def exact_match(samples: list[Sample], label: list[Any], **_: Any) -> list[float]:
    """Return 1 if the response ended by itself and equals the label, else 0."""
    return [
        float(not sample.truncated and sample.text in right_answers(right))
        for sample, right in zip(samples, label, strict=True)
    ]


@rewards.register("number", "gsm8k")
@reads(label=right_answers)
def number(samples: list[Sample], label: list[Any], **_: Any) -> list[float]:
    """Return 1 if the last number of the response equals the label's, else 0.

    A response without a number gets 0.
    """
    return [
        float(last_number(sample.text) in {*map(last_number, right_answers(right))} - {None})
        for sample, right in zip(samples, label, strict=True)
    ]


def _right_letters(label: Any) -> set[str]:
    return {_letter(answer) for answer in right_answers(label)}


@rewards.register("choice")
@reads(label=_right_letters)
def choice(samples: list[Sample], label: list[Any], **_: Any) -> list[float]:
    r"""Return 1 if the last letter from A to J that the response chooses is the label, else 0.

    The label is a letter such as B, (B) or b. A letter is chosen as `\boxed{B}`, `(B)`, `answer is
    B`, `Answer: B`, or on a line of its own. `(A) or (B)` chooses none. Raises ValueError for a
    label that is no letter.
    """
    return [
        float(chosen_letter(sample.text) in _right_letters(right))
        for sample, right in zip(samples, label, strict=True)
    ]


@rewards.register("format")
def think_and_answer(samples: list[Sample], **_: Any) -> list[float]:
    """Return 1 if the response has the form <think>...</think><answer>...</answer>, else 0.

    Each tag must occur once. Only whitespace may stand before, between and after the two parts.
    Some chat templates end the prompt with <think>; the response then begins after that tag.
    """
    return [float(_is_think_and_answer(sample)) for sample in samples]


@rewards.register("length")
def length(samples: list[Sample], **_: Any) -> list[float]:
    """Return the length of the response in thousands of tokens.

    With a negative weight it is a penalty.
    """
    return [len(sample.token_ids) / 1000 for sample in samples]


@rewards.register("f1")
@reads(label=right_answers)
def f1(samples: list[Sample], label: list[Any], **_: Any) -> list[float]:
    """Return the F1 score of the response's words as in SQuAD.

    Case, punctuation and articles are ignored. Among several right answers the best counts. If the
    response has an <answer> tag, only the text of the last one counts.
    """
    return [
        max(
            _f1(_words(tagged_answer(sample.text)), _words(answer))
            for answer in right_answers(right)
        )
        for sample, right in zip(samples, label, strict=True)
    ]


for _name, _function, *_package in (
    ("math", "math_verify:equal_in_mathematics", "math-verify"),
    ("json_schema", "jsonschema:satisfies_schema", "jsonschema"),
    ("code", "code:passes_tests"),
    ("reasoning_gym", "reasoning_gym:score_of_task", "reasoning-gym"),
):
    rewards.register_deferred(_name, f"lightrft.rewards.verifiers.{_function}", *_package)


@rewards.register("none")
def none(samples: list[Sample], **_: Any) -> list[float]:
    """Return 0 for every sample; for runs that learn from a teacher or from reward models only."""
    return [0.0] * len(samples)


# -- how responses and labels are read


def last_number(text: str) -> Fraction | None:
    """Return the exact value of the last number of the text, or None if there is none."""
    numbers = re.findall(FRACTION, text)
    if not numbers:
        return None

    numerator, denominator, number = (
        digits.replace(",", "").replace("\u2212", "-") for digits in numbers[-1]
    )
    if denominator:
        return Fraction(Decimal(numerator)) / Fraction(Decimal(denominator))
    return Fraction(Decimal(number))


def boxes(text: str) -> list[tuple[int, str]]:
    r"""Return (position, content) of each complete `\boxed{...}`, ordered by where they begin.

    Braces in the content are balanced.
    """
    contents = []
    open_braces = []
    for brace in BRACES.finditer(text):
        if brace["boxed"] or brace["brace"] == "{":
            open_braces.append(brace)
        elif brace["brace"] and open_braces:
            opening = open_braces.pop()
            if opening["boxed"]:
                contents.append((opening.start(), text[opening.end() : brace.start()]))
    return sorted(contents)


def chosen_letter(text: str) -> str | None:
    """Return the letter that the text chooses last.

    None if it chooses none, or several at one position.
    """
    found = [(match.start(), match[match.lastgroup]) for match in CHOICE.finditer(text)]
    for position, content in boxes(text):
        if match := BOXED_CHOICE.fullmatch(LATEX.sub("", content).strip()):
            found.append((position, match[1]))
    letters = {letter.upper() for letter in LETTER.findall(max(found)[1])} if found else set()
    return letters.pop() if len(letters) == 1 else None


def _letter(answer: str) -> str:
    match = re.fullmatch(r"\s*\(?([A-Ja-j])\)?\s*", answer)
    if not match:
        raise ValueError(f"the label {answer!r:.80} is not a letter from A to J")
    return match[1].upper()


def _is_think_and_answer(sample: Sample) -> bool:
    opened = "<think>" if sample.prompt.text.rstrip().endswith("<think>") else ""
    text = opened + sample.text
    return (
        all(text.count(tag) == 1 for tag in TAGS) and THINK_AND_ANSWER.fullmatch(text) is not None
    )


def tagged_answer(text: str) -> str:
    """Return the text of the last <answer> tag, or the whole text without one.

    The tag may be unclosed.
    """
    return text.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in text else text


def _f1(answers: list[str], labels: list[str]) -> float:
    if not answers or not labels:
        return float(answers == labels)
    common = (Counter(answers) & Counter(labels)).total()
    return 2 * common / (len(answers) + len(labels))


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()
