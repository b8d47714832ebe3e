"""Compare mathematical answers with the library math-verify.

The library limits the time with alarms of the main thread.
"""

import logging
import threading
from functools import cache
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from lightrft.core.samples import Sample
from lightrft.rewards.functions import boxes, reads, right_answers

COMPARISON_SECONDS = 3
"""Time limit of each reading and of each comparison; an answer needs three of them."""
LONGEST = 20_000
"""How many characters at the end of a response without a box are searched for an answer."""

# it would log the text of each answer that takes too long
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


@cache
def load_parser() -> None:
    """Compare two roots, to load tables and modules of sympy.

    The time limit of the first answer must not include that.
    """
    texts = r"$\frac{\sqrt{2}}{2}$", r"$\frac{1}{\sqrt{2}}$"
    verify(*(parse(text, parsing_timeout=None) for text in texts), timeout_seconds=None)


@reads(label=right_answers)
def equal_in_mathematics(samples: list[Sample], label: list[Any], **_: Any) -> list[float]:
    r"""Return 1 if the answer of the response equals the label as mathematics, else 0.

    It is also 0 if the comparison takes too long. The answer is the last `\boxed{...}`; without
    one, what math-verify extracts, such as the text after "the answer is". The label is a number or
    a text, such as 1/2, \frac{1}{2} and \boxed{0.5}, or a list of alternatives.
    """
    load_parser()
    return [
        float(any(_is_equal(sample.text, answer) for answer in right_answers(right)))
        for sample, right in zip(samples, label, strict=True)
    ]


def _is_equal(text: str, label: str) -> bool:
    right = _content(label)
    boxed = boxes(text)
    if boxed and boxed[-1][1].strip() == right:
        return True

    answer = rf"\boxed{{{boxed[-1][1]}}}" if boxed else text[-LONGEST:]
    limit = COMPARISON_SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        expected = parse(rf"\boxed{{{right}}}", parsing_timeout=limit)
        return verify(expected, parse(answer, parsing_timeout=limit), timeout_seconds=limit)
    except (TimeoutException, RecursionError):
        return False


def _content(label: str) -> str:
    """Return the label without the box and the dollar signs."""
    boxed = boxes(label)
    return (boxed[-1][1] if boxed else label.strip().strip("$")).strip()
