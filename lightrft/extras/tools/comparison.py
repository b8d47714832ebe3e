"""Several runs on one page: curves over each other, last numbers, and settings that differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightrft.app.observe.curves import curves, read_history
from lightrft.app.observe.report import write_page
from lightrft.app.observe.sample_table import excerpt

MAX_RUNS = 8
"""Number of runs that have a colour each."""
FOLDER_SETTINGS = ("save_path", "ckpt_path", "load_checkpoint", "overwrite")
"""Settings that say where a run is, not what it does."""


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares the runs of the folders; return the path.

    Raises ValueError for more than eight runs, and FileNotFoundError for a folder without metrics.
    """
    if len(folders) > MAX_RUNS:
        raise ValueError(f"at most {MAX_RUNS} runs can be compared, not {len(folders)}")

    histories = {}
    for folder, name in zip(folders, _names(folders), strict=True):
        histories[name] = read_history(folder / "metrics.jsonl")
        if not histories[name]:
            raise FileNotFoundError(
                f"{folder} is not the folder of a run with metrics: it has no metrics.jsonl, or an"
                " empty one"
            )

    settings = dict(zip(histories, map(read_settings, folders), strict=True))
    data = {
        "title": "comparison",
        "runs": [(name, curves(history)) for name, history in histories.items()],
        "differences": _differences(settings),
    }
    path.parent.mkdir(parents=True, exist_ok=True)

    return write_page(path, data)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the ends of the paths that tell the runs apart."""
    paths = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(each[-depth:]) for each in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a folder is named twice")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run by name; none if its folder has no config.yaml."""
    file = folder / "config.yaml"
    sections = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return {name: value for section in sections.values() for name, value in section.items()}


def _differences(settings: dict[str, dict[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(
        name for given in settings.values() for name in given if name not in FOLDER_SETTINGS
    )
    return [
        [f"--{name}", *(excerpt(given.get(name, "")) for given in settings.values())]
        for name in names
        if len({str(given.get(name)) for given in settings.values()}) > 1
    ]
