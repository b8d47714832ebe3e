"""Make notebooks/laptop.ipynb from scripts/laptop/notebook.md and execute it.

So it is stored with its outputs.

    bash scripts/laptop/run.sh words --seed 0 --out runs/laptop/words-seed0
    python scripts/laptop/notebook.py

It reads that run and trains three small steps itself, which takes some minutes on two cores. Needs
requirements/notebook.txt.
"""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "scripts/laptop/notebook.md"
NOTEBOOK = ROOT / "notebooks/laptop.ipynb"


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
    notebook = build(SOURCE.read_text())
    execute(notebook)
    nbformat.validate(notebook)
    NOTEBOOK.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK}: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()
