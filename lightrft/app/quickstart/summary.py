"""Put the numbers of a quick start together, also as a short table."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightrft.app.observe.report import write_report

EVALUATIONS = ("eval_before_sft", "eval_after_sft", "eval_after_rl")
Json = dict[str, Any]


def conclude(folder: Path, wall_s: float, seed: int) -> None:
    """Write the numbers of the quick start that took `wall_s` seconds, and print them.

    They are in the report too.
    """
    summary = summarize(folder) | {"wall_s": wall_s, "seed": seed}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(folder)
    Console().print(table(summary, folder))


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

    phases = [name for name in summary["seconds_per_phase"] if name != "step" and "/" not in name]
    split = ", ".join(f"{name} {summary['seconds_per_phase'][name]:.0f}" for name in phases)
    rows.add_row(f"seconds of {summary['steps']} GRPO steps", split)
    rows.add_row("peak memory of a rank", f"{summary['peak_memory_gb']:.2f} GB")
    rows.add_row("ranks, strategy", f"{summary['world_size']}, {summary['strategy']}")

    rows.add_row("seconds in all", f"{summary['wall_s']:.0f}")
    rows.add_row("trained model, report", f"{folder / 'model'}, {folder / 'report.html'}")
    return rows
