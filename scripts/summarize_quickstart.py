"""Put the numbers of a quick start together: FOLDER/summary.json, and a short table.

python scripts/summarize_quickstart.py runs/quickstart --wall_s 300 --install_s 40 --seed 0
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EVALUATIONS = ("eval_before_sft", "eval_after_sft", "eval_after_rl")
Json = dict[str, Any]


def summarize(folder: Path) -> Json:
    """Return the numbers of the run's files.

    Accuracies are of greedy responses, rewards of sampled ones.
    """
    run = json.loads((folder / "run.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = {
        name: json.loads((folder / name / "evaluation.json").read_text())["accuracy"]
        for name in EVALUATIONS
    }

    return accuracies | {
        "reward_first": steps[0]["rollout/reward"],
        "reward_last": steps[-1]["rollout/reward"],
        "logprob_mismatch_max": max(step["engine/logprob_mismatch_max"] for step in steps),
        "steps": len(steps),
        "seconds_per_phase": _totals(steps, "time/"),
        "peak_memory_gb": max(step["memory/peak_gb"] for step in steps),
        **{name: run[name] for name in ("engine", "strategy", "world_size", "versions")},
        "rl_s": run["seconds"],
    }


def _totals(steps: list[Json], prefix: str) -> dict[str, float]:
    names = {name for step in steps for name in step if name.startswith(prefix)}
    totals = {
        name.removeprefix(prefix): round(sum(step.get(name, 0.0) for step in steps), 2)
        for name in names
    }
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def table(summary: Json, folder: Path) -> Table:
    """Return the summary for people."""
    rows = Table(title="Quick start", show_header=False)
    for label, name in zip(("random model", "after SFT", "after GRPO"), EVALUATIONS, strict=True):
        rows.add_row(f"held-out accuracy, {label}", f"[bold]{summary[name]:.1%}[/bold]")
    rows.add_row(
        "sampled reward, first to last step",
        f"{summary['reward_first']:.2f} to {summary['reward_last']:.2f}",
    )
    rows.add_row(
        "largest log-prob mismatch",
        f"{summary['logprob_mismatch_max']:.1e} ({summary['engine']} and trainer)",
    )

    phases = {
        name: seconds
        for name, seconds in summary["seconds_per_phase"].items()
        if name != "step" and "/" not in name
    }
    split = ", ".join(f"{name} {seconds:.0f}" for name, seconds in phases.items())
    rows.add_row(f"seconds of {summary['steps']} GRPO steps", split)
    rows.add_row("peak memory of a rank", f"{summary['peak_memory_gb']:.2f} GB")
    rows.add_row("ranks, strategy", f"{summary['world_size']}, {summary['strategy']}")

    rows.add_row(
        "seconds in all, of the installation",
        f"{summary['wall_s']:.0f}, {summary['install_s']:.0f}",
    )
    rows.add_row("trained model, report", f"{folder / 'model'}, {folder / 'report.html'}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--wall_s", type=float, required=True, help="seconds since the quick start began"
    )
    parser.add_argument(
        "--install_s",
        type=float,
        required=True,
        help="seconds that its environment took, now or earlier",
    )
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    summary = summarize(args.folder) | {
        "wall_s": args.wall_s,
        "install_s": args.install_s,
        "seed": args.seed,
    }
    (args.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    Console().print(table(summary, args.folder))


if __name__ == "__main__":
    main()
