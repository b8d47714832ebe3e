"""Draw curves as inline SVG: round ticks, faint raw lines under smoothed ones, values on hover.

A chart is drawn in a box of WIDTH x HEIGHT units and scales with the card around it. Colours are
classes of the page's style sheet: c0..c7 stroke, f0..f7 fill. The hover texts are in `data-hover`
as [[x, [y of each dot], [line, ...]], ...]; a script shows them.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from lightrft.observe.text import short

WIDTH = 400
HEIGHT = 200
LEFT = 44
RIGHT = 390
TOP = 10
BOTTOM = 174
MOST_POINTS = 300
MOST_BARS = 60
MOST_MARKS = 60

Points = list[tuple[int, float | None]]
"""Values of a metric over the run: step and value, None if it was not finite."""

Look = Literal["noisy", "exact", "marked"]
"""Style of a line. noisy: average over a faint line. exact: the line alone. marked: few values with
marks, such as evaluations."""


@dataclass(frozen=True)
class Line:
    """One metric of a chart."""

    label: str
    points: Points
    look: Look = "noisy"


@dataclass(frozen=True)
class Scale:
    """Maps values to positions; `log` for values over many orders of magnitude."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            _log10(v) if self.log else v
            for v in (self.low, self.high, min(max(value, self.low), self.high))
        )
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)


Form = Callable[..., str]
"""Formats a value, on the axis and on hover: form(value) or form(value, digits), like `short`."""


def line_chart(lines: Sequence[Line], *, log: bool = False, form: Form = short) -> str:
    """Draw an SVG of one or more metrics over the steps."""
    finite = [value for line in lines for _, value in line.points if value is not None]
    steps = [step for line in lines for step, _ in line.points]
    x = Scale(*_padded(min(steps), max(steps)), LEFT, RIGHT)
    y, ticks = _value_axis(finite, log)
    paths = "".join(_draw(line, index, x, y) for index, line in enumerate(lines))
    summary = "; ".join(_summary(line, form) for line in lines)

    return _frame(
        _y_ticks(y, ticks, form) + _x_ticks(x, min(steps), max(steps)) + paths,
        summary,
        _line_hover(lines, x, y, form),
    )


def stacked_chart(parts: dict[str, list[float]], steps: Sequence[int], form: Form) -> str:
    """Draw an SVG of stacked bars: the parts of each step, or of a few steps; at most 8 parts."""
    # A bar for every step of a long run would be thinner than a pixel.
    size = -(-len(steps) // MOST_BARS)
    bins = [slice(start, start + size) for start in range(0, len(steps), size)]
    means = {
        name: [sum(values[b]) / len(values[b]) for b in bins] for name, values in parts.items()
    }
    totals = [sum(column) for column in zip(*means.values(), strict=True)]
    y, ticks = _value_axis([0.0, *totals], log=False)
    width = (RIGHT - LEFT) / len(bins)

    body = []
    hover = []
    for index, chosen in enumerate(bins):
        below = 0.0
        left = LEFT + index * width
        for color, values in enumerate(means.values()):
            top = y(below + values[index])
            bottom = y(below)
            box = (
                f'x="{left:.1f}" y="{top}" width="{max(width - 1, 0.8):.1f}"'
                f' height="{bottom - top:.1f}"'
            )
            body.append(f'<rect class="f{color}" {box}/>')
            below += values[index]

        first = steps[chosen][0]
        last = steps[chosen][-1]
        title = f"step {first}" if first == last else f"mean of steps {first} to {last}"
        hover.append(
            [
                round(left + width / 2, 1),
                [],
                [title, *(f"{name} {form(v[index])}" for name, v in means.items())],
            ]
        )

    x = Scale(*_padded(steps[0], steps[-1]), LEFT + width / 2, RIGHT - width / 2)
    axes = _y_ticks(y, ticks, form) + _x_ticks(x, steps[0], steps[-1])
    return _frame(axes + "".join(body), "parts of each step: " + ", ".join(parts), hover)


def smooth(values: Sequence[float | None], *, log: bool = False) -> list[float | None]:
    """Average over a fifteenth of the run around each value, one-sided at the ends.

    The mean is geometric with `log`.
    """
    reach = max(1, len(values) // 30)
    usable = [None if v is None or (log and v <= 0) else _log10(v) if log else v for v in values]

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


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most `most` round numbers that enclose the range from `low` to `high`.

    They are 1, 2, 2.5 or 5 times a power of ten apart.
    """
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power, 20 * power):
        first = math.floor(low / step + 1e-9)
        last = math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [
        round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)
    ]


def _value_axis(values: Sequence[float], log: bool) -> tuple[Scale, list[float]]:
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low = math.floor(_log10(min(positive)))
        high = math.ceil(_log10(max(positive)))
        high = max(high, low + 1)
        ticks = [10.0**power for power in range(low, high + 1, -(-(high - low) // 5))]
        return Scale(10.0**low, 10.0**high, BOTTOM, TOP, log=True), ticks
    ticks = nice_ticks(*_padded(min(values, default=0.0), max(values, default=1.0)))
    return Scale(ticks[0], ticks[-1], BOTTOM, TOP), ticks


def _padded(low: float, high: float) -> tuple[float, float]:
    """Return a range that is never empty, with a constant metric in the middle.

    A metric counts as constant if only rounding changes it.
    """
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return (low - margin if low else 0.0), high + margin


def _draw(line: Line, color: int, x: Scale, y: Scale) -> str:
    """Draw the faint raw line under the smoothed one, or the raw line alone.

    The look `marked` adds marks.
    """
    values = [value for _, value in line.points]
    indices = _representatives(values)

    raw = _path([(line.points[i][0], values[i]) for i in indices], x, y)
    # The average of a few values would only hide them.
    if line.look != "noisy" or len(values) < 8:
        marked = line.points if line.look == "marked" and len(values) <= MOST_MARKS else []
        marks = "".join(
            f'<circle class="f{color}" cx="{x(s)}" cy="{y(v)}" r="3"/>'
            for s, v in marked
            if v is not None
        )
        return f'<path class="curve c{color}" d="{raw}"/>{marks}'

    average = smooth(values, log=y.log)
    curve = _path([(line.points[i][0], average[i]) for i in indices], x, y)
    return f'<path class="raw c{color}" d="{raw}"/><path class="curve c{color}" d="{curve}"/>'


def _representatives(values: Sequence[float | None]) -> list[int]:
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


def _path(points: Points, x: Scale, y: Scale) -> str:
    """Return SVG path data; a missing value interrupts the line."""
    commands = []
    pen = "M"
    for step, value in points:
        if value is None:
            pen = "M"
            continue
        commands.append(f"{pen}{x(step)} {y(value)}")
        pen = "L"

    if len(commands) == 1:  # a round cap makes a line of no length visible as a point
        commands.append("h0")
    return "".join(commands)


def _line_hover(lines: Sequence[Line], x: Scale, y: Scale, form: Form) -> list:
    """Return the x position, the dots and the text of every drawn step."""
    values_of_lines = [dict(line.points) for line in lines]
    longest = max(lines, key=lambda line: len(line.points)).points

    # Only drawn steps are hovered, so the page stays small for long runs.
    chosen = [longest[index][0] for index in _representatives([value for _, value in longest])]
    hover = []
    for step in chosen:
        values = [points.get(step) for points in values_of_lines]
        text = [
            f"{line.label} {form(v) if v is not None else 'not finite'}"
            for line, v in zip(lines, values, strict=True)
        ]
        hover.append(
            [x(step), [None if v is None else y(v) for v in values], [f"step {step}", *text]]
        )

    return hover


def _summary(line: Line, form: Form) -> str:
    finite = [(step, value) for step, value in line.points if value is not None]
    if not finite:
        return f"{line.label}: no finite value"
    (first, begin), (last, end) = finite[0], finite[-1]
    return f"{line.label}: {form(begin)} at step {first}, {form(end)} at step {last}"


def _y_ticks(y: Scale, ticks: Sequence[float], form: Form) -> str:
    # There must be enough digits to tell adjacent ticks apart: 1.025, 1.05, 1.075.
    distinct = (
        math.floor(_log10(max(abs(tick) for tick in ticks)))
        - math.floor(_log10(ticks[1] - ticks[0]))
        + 2
    )
    digits = 3 if y.log else max(3, distinct)
    return "".join(
        f'<path class="grid" d="M{LEFT} {y(tick)}H{RIGHT}"/><text class="tick" x="{LEFT - 6}"'
        f' y="{y(tick) + 3.5:.1f}" text-anchor="end">{escape(form(tick, digits))}</text>'
        for tick in ticks
    )


def _x_ticks(x: Scale, first: int, last: int) -> str:
    inside = [
        int(t)
        for t in nice_ticks(*_padded(first, last), most=7)
        if t == int(t) and first <= t <= last
    ] or [first]
    marks = "".join(
        f'<text class="tick" x="{x(tick)}" y="{BOTTOM + 15}" text-anchor="middle">{tick:,}</text>'
        for tick in inside
    )
    return f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>{marks}'


def _frame(body: str, summary: str, hover: list) -> str:
    data = escape(json.dumps(hover, separators=(",", ":")))
    return (
        f'<div class="plot" data-hover="{data}"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(summary)}">{body}<g class="cursor"></g></svg><div'
        ' class="tip"></div></div>'
    )


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf
