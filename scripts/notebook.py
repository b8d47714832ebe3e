"""Make a notebook from its page in scripts/notebooks, execute it, and store it with its outputs.

    python scripts/notebook.py tools

Each takes less than ten minutes on two cores. Needs requirements/notebook.txt; `laptop` reads a run
that `bash scripts/laptop/run.sh words --seed 0 --out runs/laptop/words-seed0` has made.
"""

import argparse
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "scripts" / "notebooks"


def build(source: str) -> nbformat.NotebookNode:
    """Return a notebook without outputs.

    Each python block of a page is a code cell, and what lies between is text.
    """
    cells = []
    for index, part in enumerate(
        re.split(r"^```python\n(.*?)\n```\n", source, flags=re.DOTALL | re.MULTILINE)
    ):
        if part.strip():
            kind = new_code_cell if index % 2 else new_markdown_cell
            cells.append(kind(part.strip(), id=f"cell-{index}"))

    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(
        cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}}
    )


def execute(notebook: nbformat.NotebookNode) -> None:
    """Execute all cells in a kernel that starts in this repository.

    Outputs are kept without logs. Raise CellExecutionError for a cell that fails, and ValueError if
    an output names the repository's folder.
    """
    client = NotebookClient(
        notebook,
        timeout=1800,
        record_timing=False,
        resources={"metadata": {"path": str(ROOT)}},
        kernel_name="python3",
    )
    client.execute()

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    if str(ROOT) in nbformat.writes(notebook):
        raise ValueError(f"an output names {ROOT}, which exists on this machine only")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(path.stem for path in SOURCES.glob("*.md")))
    name = parser.parse_args().name

    notebook = build((SOURCES / f"{name}.md").read_text())
    execute(notebook)
    nbformat.validate(notebook)
    stored = ROOT / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, stored)
    print(f"{stored}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()
