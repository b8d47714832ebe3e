"""Read the curves of a run, and thin them to what a page can show."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightrft.app.observe.sinks import read_rows
from lightrft.app.observe.text import is_number

MOST_POINTS = 300
LEAST_AVERAGED = 8
"""The average of fewer values would only hide them."""
LOGARITHMIC = "engine/logprob_mismatch"
"""Metrics that begin with this have a logarithmic axis, and a geometric mean."""
RECENT = 10
"""Number of last steps to average in a comparison."""

Points = list[tuple[int, float | None]]
"""Values of a metric over the run: step and value, None if it was not finite."""

History = dict[str, Points]


def read_history(path: Path) -> History:
    """Return metric -> values by step. Rows of one step may hold different metrics."""
    history: dict[str, dict[int, float | None]] = {}
    for row in read_rows(path):
        for name, value in row.items():
            if name != "step" and (value is None or is_number(value)):
                finite = value is not None and math.isfinite(value)
                history.setdefault(name, {})[row["step"]] = value if finite else None
    return {name: sorted(values.items()) for name, values in history.items()}


def curves(history: History) -> dict[str, dict[str, Any]]:
    """Return what the script of report.html draws and prints for each metric."""
    found = {}
    for name, points in history.items():
        values = [value for _, value in points]
        finite = [value for value in values if value is not None]
        indices = representatives(values)
        found[name] = {
            "steps": [points[i][0] for i in indices],
            "values": [rounded(values[i]) for i in indices],
            "last": finite[-1] if finite else None,
            "recent": fmean(finite[-RECENT:]) if finite else None,
        }
        if len(values) >= LEAST_AVERAGED:
            averages = smooth(values, log=name.startswith(LOGARITHMIC))
            found[name]["averages"] = [rounded(averages[i]) for i in indices]

    return found


def rounded(value: float | None) -> float | None:
    """Return the value with as many digits as a page needs."""
    return None if value is None else float(f"{value:.8g}")


def smooth(values: Sequence[float | None], *, log: bool = False) -> list[float | None]:
    """Average over a fifteenth of the run around each value, one-sided at the ends.

    The mean is geometric with `log`.
    """
    reach = max(1, len(values) // 30)
    usable = [
        None if v is None or (log and v <= 0) else math.log10(v) if log else v for v in values
    ]

    # With running sums, each window costs the same however wide it is.
    sums = [0.0]
    counts = [0]
    for value in usable:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))

    averages: list[float | None] = []
    for index, value in enumerate(usable):
        begin = max(0, index - reach)
        end = min(len(values), index + reach + 1)
        mean = (sums[end] - sums[begin]) / max(counts[end] - counts[begin], 1)
        averages.append(None if value is None else 10**mean if log else mean)

    return averages


def representatives(values: Sequence[float | None]) -> list[int]:
    """Return the indices to draw: all of a short run, else the extremes of every stretch.

    No spike is lost that way.
    """
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))

    size = -(-2 * len(values) // MOST_POINTS)
    indices = {0, len(values) - 1}
    for start in range(0, len(values), size):
        stretch = range(start, min(start + size, len(values)))
        present = [i for i in stretch if values[i] is not None] or list(stretch[:1])
        indices |= {
            min(present, key=lambda i: values[i] or 0.0),
            max(present, key=lambda i: values[i] or 0.0),
        }
        # Gaps must stay visible too.
        indices.update(i for i in stretch if values[i] is None)

    return sorted(indices)
