"""Draw docs/step.svg: the ranks of a run, and the phases of one step on each of them.

    python scripts/step_picture.py

A test compares the file with what this script draws.
"""

from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "step.svg"

WIDTH = 860
LEFT = 96
ROW = 44
TOP = 58
PHASES = [
    ("new weights", 9, "#8a63d2"),
    ("generate", 38, "#2f6fde"),
    ("log-probs", 12, "#1c9a8a"),
    ("train", 41, "#e07b21"),
]
"""Name of a phase, its share of the step in percent, and its colour."""
REWARDS = (16, 33)
"""Begin of the rewards, and their share of the step; worker processes compute them meanwhile."""
RANKS = 4
GAP = 3


def picture() -> str:
    """Return the SVG."""
    height = TOP + RANKS * ROW + 62
    scale = (WIDTH - LEFT - 16) / 100
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        "<style>text { fill: #5d6673 } .in { fill: #ffffff; font-weight: 600 }"
        " @media (prefers-color-scheme: dark) { text { fill: #9aa4b2 } .in { fill: #ffffff } }"
        "</style>",
        f'<text x="{LEFT}" y="20">one step: all ranks do the same, each with its own shard of the'
        " model and its own engine</text>",
    ]

    begin = 0.0
    for name, share, colour in PHASES:
        x = LEFT + begin * scale
        width = share * scale - GAP
        for rank in range(RANKS):
            y = TOP + rank * ROW
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 14}" rx="5"'
                f' fill="{colour}"/>'
            )
        parts.append(
            f'<text x="{x + width / 2:.1f}" y="{TOP - 10}" text-anchor="middle">{name}</text>'
        )
        begin += share

    for rank in range(RANKS):
        y = TOP + rank * ROW + 20
        parts.append(f'<text x="{LEFT - 12}" y="{y}" text-anchor="end">GPU {rank}</text>')
    parts += _engine(scale)
    parts += _rewards(scale, TOP + RANKS * ROW + 12)
    return "\n".join([*parts, "</svg>", ""])


def _engine(scale: float) -> list[str]:
    """Write in the boxes what has the device."""
    texts = []
    for rank in range(RANKS):
        y = TOP + rank * ROW + 20
        for centre, text in ((28, "the engine is awake"), (80, "the model learns")):
            x = LEFT + centre * scale
            texts.append(f'<text class="in" x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>')
    return texts


def _rewards(scale: float, y: int) -> list[str]:
    """Draw the rewards below the ranks."""
    first, share = REWARDS
    x = LEFT + first * scale
    width = share * scale
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" rx="5" fill="#b7479b"/>',
        f'<text class="in" x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle">rewards, in'
        " worker processes</text>",
        f'<text x="{LEFT - 12}" y="{y + 16}" text-anchor="end">CPU</text>',
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture())
