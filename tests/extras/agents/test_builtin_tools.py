"""The calculator and the Python interpreter for agents."""

import asyncio
import sys

import pytest

from lightrft.extras.agents.builtin_tools import calculator, python
from lightrft.extras.agents.messages import ToolCall
from lightrft.extras.agents.tools import answers


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("7*8", "56"),
        (" (3 + 4.5) * 2", "15"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("-2**2", "-4"),
        ("7//2 + 7 % 4", "6"),
        ("2**-1", "0.5"),
        ("12345678901234567890+1", "12345678901234567891"),
    ],
)
def test_results_are_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/0",
        "2**1000",
        "9**9**9",
        "10**9**2",
        "__import__('os')",
        "x",
        "1 if 1 else 2",
        "2**0.5",
        "(1",
        "True + 1",
        "'a'*9",
    ],
)
def test_everything_else_is_an_error(expression):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)


def test_a_program_returns_output_and_errors():
    assert python("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in python("print(1)\n1 / 0") and python(
        "print(1)\n1 / 0"
    ).startswith("1\n")
    assert "exit code" in python("import os; os._exit(3)")


def test_an_odd_result_can_be_read():
    """Half of a character, as names of files have it, and the end of the process."""

    def listing() -> str:
        return "report-\udce9.txt"

    def broken() -> str:
        raise ValueError("\udce9")

    def exits() -> str:
        sys.exit("no key")

    tools = {"listing": listing, "broken": broken, "exits": exits}
    calls = [ToolCall(name, {}) for name in tools]
    found = asyncio.run(answers(tools, calls, lambda began, failed: None, 10))
    assert [each["content"] for each in found] == [
        "report-?.txt",
        "Error: ValueError: ?",
        "Error: RuntimeError: SystemExit: no key",
    ]
