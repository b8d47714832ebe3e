"""Several runs on one page: curves over each other, last numbers, and settings that differ."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from lightrft.observe.charts import Line, line_chart
from lightrft.observe.page import page, safe
from lightrft.observe.report import CHARTS, Chart, History, read_history

AVERAGED = 10
"""Number of last steps to average for the table."""
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

    charts = [(chart, metric) for chart in CHARTS for metric in list(chart.metrics)[:1]]
    shown = [
        (chart, metric)
        for chart, metric in charts
        if any(metric in history for history in histories.values())
    ]
    body = [
        f"<h1>{safe(' · '.join(histories))}</h1>",
        _numbers(shown, histories),
        (
            "<h2>Metrics by step</h2><div"
            f' class="charts">{"".join(_card(*each, histories) for each in shown)}</div>'
        ),
        _differences(dict(zip(histories, map(_settings, folders), strict=True))),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("comparison · lightrft", "\n".join(body)), encoding="utf-8")

    return path


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths that tell the runs apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a folder is named twice")


def _card(chart: Chart, metric: str, histories: dict[str, History]) -> str:
    lines = [
        Line(name, history.get(metric, [(0, None)]), chart.look)
        for name, history in histories.items()
    ]
    legend = "".join(
        f'<span><i class="key f{index}"></i>{safe(line.label)}</span>'
        for index, line in enumerate(lines)
    )

    return (
        f'<section class="card chart"><header><h3>{safe(chart.title)}'
        f" <span>{safe(chart.unit)}</span></h3></header>{line_chart(lines, log=chart.log, form=chart.form)}<p"
        f" class=legend>{legend}</p></section>"
    )


def _numbers(shown: Sequence[tuple[Chart, str]], histories: dict[str, History]) -> str:
    """Return a table of the means of the last steps."""
    rows = []
    for chart, metric in shown:
        cells = []
        for history in histories.values():
            last = [value for _, value in history.get(metric, []) if value is not None]
            last = last[-1:] if chart.look == "marked" else last[-AVERAGED:]
            cells.append(chart.form(fmean(last)) if last else "")
        rows.append([f"{chart.title} {chart.unit}".strip(), *cells])
    return _table(f"At the end, mean of the last {AVERAGED} steps", list(histories), rows)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.yaml"
    sections = yaml.safe_load(file.read_text()) if file.exists() else {}
    return {
        name: value
        for section in sections.values()
        for name, value in section.items()
        if name not in FOLDER_SETTINGS
    }


def _differences(settings: dict[str, dict[str, Any]]) -> str:
    names = dict.fromkeys(name for each in settings.values() for name in each)
    rows = [
        [f"--{name}", *(str(each.get(name, "")) for each in settings.values())]
        for name in names
        if len({str(each.get(name)) for each in settings.values()}) > 1
    ]

    return (
        _table("Settings that differ", list(settings), rows)
        if rows
        else "<p>All settings are the same.</p>"
    )


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{safe(name)}</th>" for name in ("", *names))
    body = "".join(
        "<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{safe(title)}</h2><div class="card samples">{table}</div>'
