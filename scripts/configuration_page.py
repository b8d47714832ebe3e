"""Write the list of all flags in docs/configuration.md, from lightrft/config/sections.py.

    python scripts/configuration_page.py

A test compares the page with what this script writes.
"""

import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightrft.config import SECTIONS  # noqa: E402  after its folder
from lightrft.config.command_line import field_docs  # noqa: E402
from lightrft.config.sections import field_types  # noqa: E402
from scripts.pages import between_marks  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"


def flags() -> str:
    """Return a table of the flags of each section."""
    parts = []
    for name, section in SECTIONS.items():
        rows = [_row(section, field) for field in fields(section) if field.init]
        parts.append(
            f"### {name}\n\n| Flag | Default | Meaning |\n|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"


def _row(section: type, field: Field) -> str:
    help = " ".join(field_docs(section).get(field.name, "").split())
    choices = _choices(field_types()[field.name])
    meaning = f"{choices}. {help}" if choices and "`" not in help else help
    return f"| `--{field.name}` | {_default(field)} | {_escaped(meaning)} |"


def _choices(of: Any) -> str:
    if get_origin(of) is not Literal:
        return ""
    return ", ".join(f"`{value}`" for value in get_args(of))


def _default(field: Field) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    if value in ("", None, [], {}):
        return ""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _escaped(text: str) -> str:
    """Keep Markdown from reading a help text as a table, an emphasis, or a formula."""
    return re.sub(r"([|*_<>$])", r"\\\1", text)


def page(text: str) -> str:
    """Return the page with the flags between its marks."""
    return between_marks(text, "flags", flags())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
