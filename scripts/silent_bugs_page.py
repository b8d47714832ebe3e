"""Write the rows of docs/silent_bugs.md, from silent_bugs.yaml beside this file.

    python scripts/silent_bugs_page.py

Each row names a test. The page is not written if one of them is gone. A test compares the page with
what this script writes.
"""

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.pages import between_marks  # noqa: E402  after its folder

PAGE = ROOT / "docs" / "silent_bugs.md"
ROWS = Path(__file__).with_name("silent_bugs.yaml")
PROJECTS = {
    "huggingface/trl": "TRL",
    "verl-project/verl": "verl",
    "THUDM/slime": "slime",
    "NVIDIA-NeMo/RL": "NeMo-RL",
    "OpenRLHF/OpenRLHF": "OpenRLHF",
    "NovaSky-AI/SkyRL": "SkyRL",
    "allenai/open-instruct": "open-instruct",
    "PrimeIntellect-ai/prime-rl": "prime-rl",
    "modelscope/ms-swift": "ms-swift",
    "unslothai/unsloth": "Unsloth",
    "unslothai/unsloth-zoo": "Unsloth Zoo",
    "OpenPipe/ART": "ART",
    "thinking-machines-lab/tinker-cookbook": "Tinker Cookbook",
    "thinking-machines-lab/tinker-feedback": "Tinker",
    "vllm-project/vllm": "vLLM",
    "sgl-project/sglang": "SGLang",
}
"""Repository -> the name that readers know."""


@dataclass(frozen=True)
class Row:
    """A bug that reports tell of, and the test that fails if lightrft has it."""

    reports: str
    """OWNER/REPO/(issues|pull)/NUMBER, several with spaces between them."""
    elsewhere: str
    here: str
    test: str
    """PATH::FUNCTION."""
    case: str = ""
    """A function that the test runs by name, beside it or in a contract of the package."""

    def missing(self) -> list[str]:
        """Return what the row names and the repository lacks."""
        path, _, name = self.test.partition("::")
        file = ROOT / path
        if not file.is_file() or name not in _functions(file):
            return [self.test]
        places = [*file.parent.glob("*.py"), *ROOT.glob("lightrft/*/testing.py")]
        if self.case and not any(self.case in _functions(place) for place in places):
            return [f"{self.test}, case {self.case}"]
        return []

    def cells(self) -> str:
        """Return the row of the table."""
        links = " ".join(map(_link, self.reports.split()))
        case = f", case `{self.case}`" if self.case else ""
        return f"| {links} | {self.elsewhere} | {self.here} | `{self.test}`{case} |"


def _link(report: str) -> str:
    repository, _, number = report.rsplit("/", 2)
    return f"[{PROJECTS[repository]} #{number}](https://github.com/{report})"


@cache
def _functions(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def groups() -> dict[str, list[Row]]:
    """Return the rows by where it goes wrong.

    Raise LookupError if a test is gone.
    """
    read = yaml.safe_load(ROWS.read_text())
    found = {heading: [Row(**row) for row in rows] for heading, rows in read.items()}
    gone = [name for rows in found.values() for row in rows for name in row.missing()]
    if gone:
        raise LookupError("these tests are gone: " + "; ".join(gone))
    return found


def reports() -> str:
    """Return a heading and a table for each group."""
    head = "| Report | What went wrong | Here | Test |\n|---|---|---|---|\n"
    return (
        "\n\n".join(
            f"## {heading}\n\n{head}" + "\n".join(row.cells() for row in rows)
            for heading, rows in groups().items()
        )
        + "\n"
    )


def page(text: str) -> str:
    """Return the page with the reports between its marks."""
    return between_marks(text, "reports", reports())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
