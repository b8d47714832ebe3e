"""Tools for everybody: a calculator, and a Python interpreter in the sandbox of `code`."""

import ast
import operator
import subprocess
from fractions import Fraction

from lightrft.rewards.verifiers.sandbox import output_of

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LARGEST_NUMBER = 10**60
"""Largest absolute result, so that no power takes long."""


def calculator(expression: str) -> str:
    """
    Evaluate an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as "(3 + 4.5) * 2".
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first = _value(left)
            second = _value(right)
            if isinstance(op, ast.Pow) and (
                second.denominator != 1 or abs(second) > 200 or abs(first) > 10**9
            ):
                raise ValueError(
                    "the exponent must be a whole number of at most 200, and the base at most 10^9"
                )

            result = Fraction(OPERATORS[type(op)](first, second))
            if abs(result) > LARGEST_NUMBER:
                raise ValueError("the result is too large")
            return result

    raise ValueError("only numbers, + - * / // % ** and parentheses are possible")


def python(code: str) -> str:
    """
    Run a Python program without network, and return what it prints, or its error.

    Args:
        code: The program. Each call is a new process, so variables of earlier calls are gone.
    """
    exit_code, output = output_of(code, errors=subprocess.STDOUT)
    if exit_code == 0 or output:
        return output
    return f"the program has ended with exit code {exit_code}: is it out of time or memory?"
