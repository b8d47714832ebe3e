"""Format numbers, times and model text for people. The script of report.html does it alike."""

import math
import unicodedata
from typing import Any


def short(value: float) -> str:
    """Format a number with at least three significant digits, without needless zeros.

    The values of most metrics take at most eight characters.
    """
    if not math.isfinite(value):
        return str(value)

    size = abs(value)
    if size >= 1e7:
        return f"{value:.2e}"
    if size >= 999.5:
        return f"{value:,.0f}"
    if size >= 1e-3 or size == 0:
        return f"{value:.3g}"

    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def percent(share: float) -> str:
    return f"{short(100 * share)}%"


def duration(seconds: float) -> str:
    """Format seconds: `8.2 s`, `3 min 05 s`, `2 h 04 min`."""
    if seconds < 60:
        return f"{short(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def visible(text: str) -> str:
    """Return the text with invisible characters as escapes.

    They are control characters, direction marks and lone surrogates; line breaks and tabs stay. The
    result can mislead neither a terminal nor a reader.
    """
    return "".join(character if character in "\n\t" else _visible(character) for character in text)


def _visible(character: str) -> str:
    code = ord(character)
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
