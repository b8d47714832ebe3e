"""Draw docs/shelves.svg: the folders at the top of the package, and which imports which.

    python scripts/shelves_picture.py

A test compares the file with what this script draws.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightrft"
PICTURE = ROOT / "docs" / "shelves.svg"
SHELVES = "extras app rewards algorithms strategy engine data models config core".split()
"""From the top to the bottom; tests/test_architecture.py holds this order."""

LEFT = 16
BAR = 560
ROW = 46
TOP = 44
COLUMN = 58
COLOURS = {"core": "#2f6fde", "extras": "#8d99a8"}
OTHERS = "#1c9a8a"


def imported_by(shelf: str) -> set[str]:
    """Return the shelves that the files of one import."""
    found = set()
    for file in (PACKAGE / shelf).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = node.module.split(".")
                if names[0] == "lightrft" and len(names) > 1:
                    found.add(names[1])
    return found & set(SHELVES) - {shelf}


def folders_of(shelf: str) -> list[str]:
    return sorted(path.parent.name for path in (PACKAGE / shelf).glob("*/__init__.py"))


def picture() -> str:
    """Return the SVG."""
    width = LEFT + BAR + COLUMN * len(SHELVES) + 16
    height = TOP + ROW * len(SHELVES) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        "<style>text { fill: #5d6673 } .in { fill: #ffffff }"
        " @media (prefers-color-scheme: dark) { text { fill: #9aa4b2 } .in { fill: #ffffff } }"
        "</style>",
        f'<text x="{LEFT}" y="20">a package, with its folders</text>',
    ]

    for column, name in enumerate(SHELVES):
        x = LEFT + BAR + COLUMN * column + COLUMN / 2
        lines.append(
            f'<text x="{x:.0f}" y="{20 + 14 * (column % 2)}" text-anchor="middle">{name}</text>'
        )

    for row, shelf in enumerate(SHELVES):
        y = TOP + ROW * row
        colour = COLOURS.get(shelf, OTHERS)
        lines += [
            f'<rect x="{LEFT}" y="{y}" width="{BAR - 24}" height="{ROW - 8}" rx="5"'
            f' fill="{colour}"/>',
            f'<text class="in" font-weight="600" x="{LEFT + 12}" y="{y + 24}">{shelf}</text>',
            f'<text class="in" x="{LEFT + 110}" y="{y + 24}">{" · ".join(folders_of(shelf))}</text>',
        ]
        for other in sorted(imported_by(shelf)):
            x = LEFT + BAR + COLUMN * SHELVES.index(other) + COLUMN / 2
            lines.append(f'<circle cx="{x:.0f}" cy="{y + 19}" r="6" fill="{colour}"/>')

    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
