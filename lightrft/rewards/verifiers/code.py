"""Run the programs in responses against tests, in a sandbox."""

import json
import re
from typing import Any

from lightrft.rewards.functions import reads
from lightrft.rewards.verifiers.sandbox import find_sandbox, output_of, passes
from lightrft.samples import Sample

CODE_BLOCK = re.compile(
    r"^[ \t]*```(?:python|py)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def _parse_tests(tests: Any) -> Any:
    """Return the tests as a list of asserts, or as a dictionary with inputs and outputs."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]

    if isinstance(tests, list) and tests and all(isinstance(one, str) for one in tests):
        return tests

    if isinstance(tests, dict):
        inputs = tests.get("inputs")
        expected = tests.get("outputs")
        if (
            isinstance(inputs, list)
            and isinstance(expected, list)
            and 0 < len(inputs) == len(expected)
        ):
            return tests

    forms = 'a list of asserts nor {"inputs": [...], "outputs": [...]} of equal length'
    raise ValueError(f"the column tests has {tests!r:.200}, which is neither {forms}")


@reads(tests=_parse_tests)
def passes_tests(samples: list[Sample], tests: list[Any], **_: Any) -> list[float]:
    """Return 1 if the last ```python block of the response passes all tests, else 0.

    Without a block the whole response is the program. The column `tests` has a list of asserts as
    texts, or {"inputs": [...], "outputs": [...]} with texts for standard input and the expected
    output. Outputs are compared without whitespace at the ends of lines. Either may be JSON text.
    Raises ValueError for other tests, or if the machine has no sandbox.
    """
    find_sandbox()
    return [
        float(_passes(_program(sample.text), _parse_tests(one)))
        for sample, one in zip(samples, tests, strict=True)
    ]


def _program(text: str) -> str:
    blocks = CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passes(program: str, tests: Any) -> bool:
    if isinstance(tests, list):
        return passes(program, tests)
    pairs = zip(tests["inputs"], tests["outputs"], strict=True)
    runs = ((output_of(program, str(stdin)), str(expected)) for stdin, expected in pairs)
    return all(
        code == 0 and _lines(output) == _lines(expected) for (code, output), expected in runs
    )


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]
