"""Run the programs in responses against tests, in a sandbox."""

import json
import re
from collections import Counter
from typing import Any

from loguru import logger

from lightrft.core.samples import Sample
from lightrft.rewards.functions import reads
from lightrft.rewards.verifiers.asserts import Asserts, read_asserts
from lightrft.rewards.verifiers.sandbox import UnjudgedError, find_sandbox, output_of, passes

CODE_BLOCK = re.compile(
    r"^[ \t]*```(?:python|py)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


MOST_REASONS = 20
"""How many reasons are told apart: a program chooses the names in them."""
unjudged: Counter[str] = Counter()
"""Why programs were not judged, and how often in this process."""
AS_JSON = """
from collections import deque
from math import inf, nan

def as_json(value):
    if isinstance(value, (list, tuple, deque)):
        return [as_json(each) for each in value]
    return {key: as_json(each) for key, each in value.items()} if type(value) is dict else value

try:
    called = Solution().%(name)s
except NameError:
    called = %(name)s
"""
"""Tests of a function: a method of a class Solution, or a function. JSON has no tuples."""


def _parse_tests(tests: Any) -> Asserts | dict[str, Any]:
    """Return the tests as asserts, or as a dictionary with inputs and outputs."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]

    if isinstance(tests, list) and tests and all(isinstance(one, str) for one in tests):
        return read_asserts(tests)

    if isinstance(tests, dict):
        inputs = tests.get("inputs")
        expected = tests.get("outputs")
        if (
            isinstance(inputs, list)
            and isinstance(expected, list)
            and 0 < len(inputs) == len(expected)
        ):
            name = tests.get("fn_name")
            return _asserts_of_calls(name, inputs, expected) if name else tests

    forms = 'a list of asserts nor {"inputs": [...], "outputs": [...]} of equal length'
    raise ValueError(f"the column tests has {tests!r:.200}, which is neither {forms}")


def _asserts_of_calls(name: Any, inputs: list[Any], expected: list[Any]) -> Asserts:
    """Return asserts about calls of a function, in the form of APPS or of LiveCodeBench.

    The arguments are a list, and the result may be in a list of its own; or they are a text with
    the JSON of an argument in each line, and the result is JSON.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the column tests has fn_name {name!r:.80}, which is no name of Python")

    texts = [AS_JSON % {"name": name}]
    for given, result in zip(inputs, expected, strict=True):
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
            right = [json.loads(result)]
        elif isinstance(given, list):
            arguments = given
            right = [result, *result] if isinstance(result, list) and len(result) == 1 else [result]
        else:
            raise ValueError(f"the column tests has the input {given!r:.80}, no list of arguments")
        texts.append(f"assert as_json(called(*{arguments!r})) in {right!r}")
    return Asserts(texts, ["Solution", name])


@reads(tests=_parse_tests)
def passes_tests(samples: list[Sample], tests: list[Any], **_: Any) -> list[float]:
    """Return 1 if the last ```python block of the response passes all tests, else 0.

    Without a block the whole response is the program. The column `tests` has a list of asserts as
    texts, or {"inputs": [...], "outputs": [...]} with texts for standard input and the expected
    output, which are compared without whitespace at the ends of lines. With `fn_name` these are the
    arguments and results of a function. All may be JSON text. Raises ValueError for other tests, or
    if the machine has no sandbox.
    """
    find_sandbox()
    return [
        float(_passes(_program(sample.text), _parse_tests(one), sample.prompt.location))
        for sample, one in zip(samples, tests, strict=True)
    ]


def _program(text: str) -> str:
    blocks = CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passes(program: str, tests: Asserts | dict[str, Any], row: str = "") -> bool:
    if isinstance(tests, Asserts):
        try:
            return passes(program, tests)
        except UnjudgedError as error:
            _warn(str(error), row)
            return False
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    runs = ((output_of(program, str(stdin)), str(expected)) for stdin, expected in pairs)
    return all(
        code == 0 and _lines(output) == _lines(expected) for (code, output), expected in runs
    )


def _warn(reason: str, row: str) -> None:
    """Log why a program is not judged when that happens for the 1st, 10th, 100th time."""
    reason = reason if reason in unjudged or len(unjudged) < MOST_REASONS else "other reasons"
    unjudged[reason] += 1
    if str(unjudged[reason]).strip("0") == "1":
        times = f"{reason} ({unjudged[reason]} times in this process)"
        where = row or "a row"
        logger.warning(f"--reward code: {where}: a program cannot be judged, and earns 0: {times}")


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]
