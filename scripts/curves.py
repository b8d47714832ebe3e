"""Draw curves over steps as SVG, for the pages that show runs.

A figure has panels, and a panel has one or several curves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PANEL = 280
HEIGHT = 190
LEFT = 40
TOP = 34
BOTTOM = 160
STYLE = 'font-family="sans-serif" font-size="11" fill="#444"'
BLUE = "#2a6fbb"
ORANGE = "#d1741f"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through (step, value) points."""

    points: Points
    name: str = ""
    """Text of the legend. A panel has no legend if its curves have no names."""
    colour: str = BLUE
    marked: tuple[int, ...] = (-1,)
    """Indices of the points that get a circle: by default, the last one."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves with common axes."""

    title: str
    curves: Sequence[Curve]
    bounds: tuple[float, float]
    """Least and greatest value of the vertical axis."""
    form: str
    """Format of the values beside the vertical axis, such as `{:.0%}`."""

    def draw(self) -> str:
        """Return the panel as elements of an SVG, PANEL pixels wide and HEIGHT pixels high."""
        right = PANEL - 14
        last = max(curve.points[-1][0] for curve in self.curves)
        lines = "".join(self._line(curve, last, right) for curve in self.curves)

        return (
            f'<text x="{LEFT}" y="18"'
            f' font-weight="bold">{self.title}</text>{self._ticks(right)}{lines}<text x="{right}"'
            f' y="{BOTTOM + 18}" text-anchor="end">step {last}</text>{self._legend()}'
        )

    def _ticks(self, right: int) -> str:
        low, high = self.bounds
        ticks = ""
        for share in (0.0, 0.5, 1.0):
            value = low + share * (high - low)
            height = BOTTOM - (BOTTOM - TOP) * share
            ticks += f'<path d="M{LEFT} {height}H{right}" stroke="#ddd"/>'
            ticks += (
                f'<text x="{LEFT - 4}" y="{height + 4}"'
                f' text-anchor="end">{self.form.format(value) if value else 0}</text>'
            )

        return ticks

    def _line(self, curve: Curve, last: float, right: int) -> str:
        low, high = self.bounds

        def at(step: float, value: float) -> str:
            across = LEFT + (right - LEFT) * step / last
            return f"{across:.1f},{BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low):.1f}"

        line = " ".join(at(step, value) for step, value in curve.points)
        circles = ""
        for index in curve.marked:
            x, y = at(*curve.points[index]).split(",")
            circles += f'<circle cx="{x}" cy="{y}" r="2.5" fill="{curve.colour}"/>'
        return (
            f'<polyline points="{line}" fill="none" stroke="{curve.colour}"'
            f' stroke-width="1.5"/>{circles}'
        )

    def _legend(self) -> str:
        names = "".join(
            f'<tspan fill="{curve.colour}" dx="6">{curve.name}</tspan>'
            for curve in self.curves
            if curve.name
        )
        return f'<text x="{LEFT - 6}" y="{BOTTOM + 18}">{names}</text>' if names else ""


def figure(panels: Sequence[Panel], columns: int) -> str:
    """Return an SVG with panels in rows of `columns`."""
    width = PANEL * min(columns, len(panels))
    height = HEIGHT * -(-len(panels) // columns)
    drawn = "".join(
        f'<g transform="translate({PANEL * (index % columns)}'
        f' {HEIGHT * (index // columns)})">{panel.draw()}</g>'
        for index, panel in enumerate(panels)
    )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" {STYLE}><rect width="{width}" height="{height}"'
        f' fill="#fff"/>{drawn}</svg>\n'
    )
