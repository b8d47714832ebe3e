"""Terminal output: a live view on a terminal, one line per step elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import progress
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightrft.app.observe.sinks import Settings, Sink
from lightrft.app.observe.text import duration, short, visible
from lightrft.config.tables import table

HEADLINES = table("app/observe/labels")["headlines"]
"""Metrics of a step that the terminal shows, in this order, if a run has them."""

HELD_OUT = table("app/observe/labels")["held_out"]
"""Metrics of an evaluation that the terminal shows. The same metrics of named sets follow."""

OF_ROLE = "reward/"
"""Beginning of the metric with the reward of a role."""
NARROWEST = 6
LINES_PER_HEADER = 20
BARS = "▁▂▃▄▅▆▇█"


def headlines(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> label of the metrics that the terminal shows of a step.

    The rewards of roles follow the reward. The loss of a policy gradient is left out, because it
    says nothing about progress.
    """
    hidden = {"train/loss"} if "rollout/reward" in metrics else set()
    roles = {name: name.removeprefix(OF_ROLE) for name in metrics if name.startswith(OF_ROLE)}
    labels = {"rollout/reward": "reward", **roles, **HEADLINES}
    return {name: label for name, label in labels.items() if name in metrics and name not in hidden}


def held_out(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> label of the metrics that the terminal shows of an evaluation.

    A reward that equals the accuracy is left out.
    """
    shown = {}
    for name in metrics:
        kind, _, rest = name.partition("/")
        where, _, last = rest.rpartition("/")
        if kind != "eval" or f"eval/{last}" not in HELD_OUT or (where and last == "loss"):
            continue
        accuracy = f"{name.removesuffix('reward')}accuracy"
        if last != "reward" or metrics.get(accuracy) != metrics[name]:
            shown[name] = f"{where} {HELD_OUT[f'eval/{last}']}".strip()
    return shown


def console(terminal: RichConsole | None = None) -> "Console":
    """Return the sink for a terminal, or for a file or a job's log in its place."""
    terminal = terminal or RichConsole()
    return LiveConsole(terminal) if terminal.is_terminal else Console(terminal)


class Console(Sink):
    """Prints a table: one line per call of `log`, and one for each evaluation."""

    def __init__(self, terminal: RichConsole):
        self._console = terminal
        self._columns: dict[str, str] = {}
        self._since_header = 0

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        self._progress = _progress(self._console)
        self._task = self._progress.add_task(
            "", total=total_steps, completed=resume_step or 0, phase="starting"
        )
        self._total = total_steps

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._progress.update(self._task, completed=step)
        for line in self._lines(step, metrics):
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def close(self, status: str) -> None:
        elapsed = self._progress.tasks[0].elapsed or 0
        self._console.print(f"{status} after {duration(elapsed)}", highlight=False, markup=False)

    def _lines(self, step: int, metrics: dict[str, float]) -> Iterator[str]:
        """Yield the header where it is due, then the step's metrics, then an evaluation's."""
        # Columns stay in a fixed order, so a new one needs another header.
        if (
            headlines(metrics).keys() - self._columns.keys()
            or self._since_header % LINES_PER_HEADER == 0
        ):
            self._columns = headlines(self._columns | metrics)
            self._since_header = 0
            yield self._row("step", dict(self._columns), "left")

        self._since_header += 1
        left = self._progress.tasks[0].time_remaining
        values = {name: short(metrics[name]) for name in self._columns if name in metrics}
        yield self._row(f"{step}/{self._total}", values, duration(left) if left else "")

        if shown := held_out(metrics):
            numbers = "  ".join(f"{label} {short(metrics[name])}" for name, label in shown.items())
            yield f"{'':{self._width}}  held-out: {numbers}"

    @property
    def _width(self) -> int:
        return 2 * len(str(self._total)) + 1

    def _row(self, step: str, cells: dict[str, str], left: str) -> str:
        """Return a line with a cell for each column, aligned on the right."""
        aligned = [
            f"{cells.get(name, ''):>{max(len(label), NARROWEST)}}"
            for name, label in self._columns.items()
        ]
        return "  ".join([f"{step:>{self._width}}", *aligned, left]).rstrip()


class LiveConsole(Console):
    """Shows phase, progress, time left, the course of headline metrics, and the latest sample.

    Log messages appear above the live view if they are written to `sys.stderr`, looked up at the
    time of writing.
    """

    def __init__(self, terminal: RichConsole):
        super().__init__(terminal)
        self._history: dict[str, list[float]] = {}
        self._sample: dict[str, Any] = {}

    def start(self, config: Settings, total_steps: int, resume_step: int | None = None) -> None:
        super().start(config, total_steps, resume_step)
        self._live = Live(self._view(), console=self._console, refresh_per_second=2)
        self._live.start()

    def phase(self, name: str) -> None:
        self._progress.update(self._task, phase=name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._progress.update(self._task, completed=step)
        for name in (*headlines(metrics), *held_out(metrics)):
            self._history.setdefault(name, []).append(metrics[name])
        self._live.update(self._view(), refresh=True)

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._sample = {"step": step, **rows[0]}
            self._live.update(self._view())

    def close(self, status: str) -> None:
        self._progress.update(self._task, phase=status)
        self._live.update(self._view(), refresh=True)
        self._live.stop()

    def _view(self) -> RenderableType:
        """Build the whole content of the terminal, because another thread draws it afterwards."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", no_wrap=True)

        latest = {name: values[-1] for name, values in self._history.items()}
        evaluated = {name: f"held-out {label}" for name, label in held_out(latest).items()}
        for name, label in (headlines(self._history) | evaluated).items():
            values = self._history[name]
            began = f"from {short(values[0])}" if len(values) > 1 else ""
            table.add_row(label, short(values[-1]), sparkline(values), began)

        return Group(self._progress, table, *([self._sample_line()] if self._sample else []))

    def _sample_line(self) -> Text:
        sample = self._sample
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"sample of step {sample['step']}: ", style="dim")
        line.append(_one_line(sample.get("prompt", "")))
        line.append(" → ", style="dim")
        line.append(_one_line(sample.get("response", "")), style="bold")
        if "reward" in sample:
            line.append(f"  reward {short(sample['reward'])}", style="dim")
        return line


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Draw the course of a metric in `width` characters; non-finite values are gaps."""
    chunk = max(1, -(-len(values) // width))
    chunks = [values[i : i + chunk] for i in range(0, len(values), chunk)]
    means = [sum(each) / len(each) for each in chunks]
    finite = [value for value in means if abs(value) < float("inf")]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0

    return "".join(
        BARS[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in means
    )


def _one_line(text: str, length: int = 60) -> str:
    line = visible(str(text)).replace("\n", "⏎")
    return line if len(line) <= length else line[: length - 1] + "…"


def _progress(console: RichConsole) -> progress.Progress:
    """Build the progress display. Only the live view draws it; elsewhere it measures the time."""
    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.fields[phase]:<12}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left", style="dim"),
        progress.TimeRemainingColumn(),
        console=console,
        # A step takes minutes, so the default of 30 seconds would never cover two of them.
        speed_estimate_period=3600,
    )
