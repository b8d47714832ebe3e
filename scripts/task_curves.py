"""Run the examples of the pages about single tasks, and draw their curves.

    python scripts/task_curves.py                    # every run, three minutes on two cores
    python scripts/task_curves.py --only rm dpo      # some of them, after sft
    python scripts/task_curves.py --runs 0           # draw again, from the runs that are there

The runs are those of configs/quickstart_*.yaml, in runs/quickstart. docs/tasks/curves.json keeps
their numbers, docs/tasks/TASK.svg has the curves, and a test compares the two.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.curves import BLUE, ORANGE, Curve, Panel, figure  # noqa: E402  after its folder

RUNS = ROOT / "runs/quickstart"
FOLDER = ROOT / "docs/tasks"
RECORD = FOLDER / "curves.json"

Points = list[list[float]]


@dataclass(frozen=True, slots=True)
class View:
    """A panel: metrics by the names that the legend gives them."""

    title: str
    metrics: dict[str, str]
    form: str = "{:.0%}"
    """Format of the values; a share of 1 has the vertical axis from 0 to 1."""

    def draw(self, curves: dict[str, Points]) -> Panel:
        """Return the panel for the curves of a run, by metric."""
        values = [value for name in self.metrics for _, value in curves[name]]
        is_share = self.form == "{:.0%}"
        bounds = (0.0, 1.0) if is_share else (min(0.0, *values), max(0.0, *values))
        lines = [
            Curve(curves[name], legend, colour)
            for (name, legend), colour in zip(self.metrics.items(), (BLUE, ORANGE), strict=False)
        ]
        return Panel(self.title, lines, bounds, self.form)


ACCURACY = View("Accuracy", {"train/accuracy": "training", "eval/accuracy": "held out"})
VIEWS = {
    "sft": (View("Loss", {"train/loss": "training", "eval/loss": "held out"}, "{:.1f}"),),
    "rm": (ACCURACY, View("Loss of a pair", {"train/loss": "training"}, "{:.2f}")),
    "prm": (
        ACCURACY,
        View(
            "Mean probability of a step",
            {"train/probability_right": "right", "train/probability_wrong": "wrong"},
        ),
    ),
    "dpo": (
        ACCURACY,
        View(
            "Reward of an answer",
            {"train/reward_chosen": "chosen", "train/reward_rejected": "rejected"},
            "{:.1f}",
        ),
    ),
    "kto": (
        ACCURACY,
        View(
            "Reward of an answer",
            {"train/reward_desirable": "good", "train/reward_undesirable": "bad"},
            "{:.1f}",
        ),
    ),
}
"""Task -> the panels of its picture. The command is train_TASK."""
FLAGS = {"sft": ["--eval_data", "runs/quickstart/data/test.jsonl", "--eval_steps", "50"]}
"""Flags of a run beside its configuration."""


def run(task: str) -> None:
    """Train as the page of the task says."""
    command = [sys.executable, "-m", "lightrft", f"train_{task}"]
    config = ["--config", f"configs/quickstart_{task}.yaml", "--overwrite"]
    subprocess.run([*command, *config, *FLAGS.get(task, [])], cwd=ROOT, check=True)


def curves_of(folder: Path, views: Sequence[View]) -> dict[str, Points]:
    """Return metric -> its points, rounded, of a run's folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        name: [[row["step"], float(f"{row[name]:.3g}")] for row in rows if name in row]
        for view in views
        for name in view.metrics
    }


def pictures(record: dict[str, dict[str, Points]]) -> dict[str, str]:
    """Return the name of a file in docs/tasks -> the SVG."""
    return {
        f"{task}.svg": figure([view.draw(record[task]) for view in views], 2)
        for task, views in VIEWS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=VIEWS, default=list(VIEWS))
    parser.add_argument("--runs", type=int, choices=(0, 1), default=1, help="0: train nothing")
    args = parser.parse_args()

    if args.runs:
        prepare = ["scripts/prepare_quickstart.py", "--out", "runs/quickstart/data"]
        subprocess.run([sys.executable, *prepare], cwd=ROOT, check=True)
        for task in args.only:
            run(task)

    FOLDER.mkdir(exist_ok=True)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record |= {task: curves_of(RUNS / task, VIEWS[task]) for task in args.only}
    RECORD.write_text(json.dumps(record) + "\n")
    for name, picture in pictures(record).items():
        (FOLDER / name).write_text(picture)


if __name__ == "__main__":
    main()
