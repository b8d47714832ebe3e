"""Write the report of a run's folder as one HTML page: results, curves, and samples of the model.

It reads metrics.jsonl, samples.jsonl, config.yaml, run.json and summary.json, if they exist.
run.json describes the run: `status`, `engine`, `strategy`, `world_size`, `seconds`, `versions`.
summary.json adds headline numbers: `eval_before_sft`, `eval_after_sft`, `eval_after_rl`,
`reward_first`, `reward_last`, `logprob_mismatch_max`, `wall_s`, and any others. `eval_*` are
shares, `*_s` seconds, `*_gb` GB.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from lightrft.observe.charts import Form, Line, Look, Points, line_chart, stacked_chart
from lightrft.observe.page import page, safe
from lightrft.observe.sample_table import ENDS, sample_table
from lightrft.observe.scoreboard import scoreboard
from lightrft.observe.sinks import read_ends, read_rows
from lightrft.observe.text import duration, is_number, percent, short

FILES = ("metrics.jsonl", "samples.jsonl", "config.yaml", "run.json", "summary.json")

FACTS = {"world_size": "processes", "engine_tp_size": "processes of an engine", "seed": "seed"}
"""Numbers of the summary that describe the setup of the run instead of the results."""

RESULTS = ("eval", "reward", "accuracy")
"""What the names of numbers begin with that say how good the model is. They come first."""

KINDS = {
    "train_ppo": "Reinforcement fine-tuning",
    "train_sft": "Supervised fine-tuning",
    "train_dpo": "Direct preference optimisation",
    "train_kto": "Learning from good and bad answers (KTO)",
    "train_rm": "Reward model",
    "train_prm": "Process reward model",
}
"""Command -> what such a run is called."""

History = dict[str, Points]


@dataclass(frozen=True)
class Chart:
    """A curve of the report: title, unit, and metrics with names for the legend."""

    title: str
    unit: str
    metrics: dict[str, str]
    log: bool = False
    look: Look = "noisy"
    form: Form = short


CHARTS = (
    Chart("Reward", "mean per response", {"rollout/reward": "reward"}),
    Chart("Held-out accuracy", "", {"eval/accuracy": "accuracy"}, look="marked", form=percent),
    Chart("Held-out reward", "mean of greedy responses", {"eval/reward": "reward"}, look="marked"),
    Chart("Response length", "tokens", {"rollout/response_length": "length"}),
    Chart("Loss", "", {"train/loss": "loss", "eval/loss": "held-out"}),
    Chart(
        "Accuracy",
        "share of the judgements",
        {"train/accuracy": "training", "eval/accuracy": "held-out"},
        form=percent,
    ),
    Chart(
        "Margin",
        "reward of the chosen answer minus the other",
        {"train/margin": "training", "eval/margin": "held-out"},
    ),
    Chart(
        "Rewards of answers",
        "",
        {"train/reward_chosen": "chosen", "train/reward_rejected": "rejected"},
    ),
    Chart(
        "Rewards of answers",
        "",
        {"train/reward_desirable": "good", "train/reward_undesirable": "bad"},
    ),
    Chart(
        "Probability of a right step",
        "",
        {"train/probability_right": "right", "train/probability_wrong": "wrong"},
        form=percent,
    ),
    Chart("Entropy", "nats per token", {"train/entropy": "entropy"}),
    Chart("Gradient norm", "before clipping", {"train/grad_norm": "norm"}),
    Chart(
        "Engine against trainer",
        "log-prob gap",
        {"engine/logprob_mismatch": "mean", "engine/logprob_mismatch_max": "largest"},
        log=True,
    ),
    Chart("Throughput", "tokens per second", {"perf/tokens_per_second": "tokens/s"}),
    Chart("Value loss of the critic", "", {"critic/loss": "loss"}),
    Chart("Explained variance of returns", "by the critic", {"critic/explained_variance": "share"}),
    Chart("KL to the reference", "nats per token", {"train/kl": "KL"}),
    Chart(
        "Clipped ratios",
        "share of tokens",
        {"train/clip_low": "below", "train/clip_high": "above"},
        form=percent,
    ),
    Chart("Truncated responses", "share", {"rollout/truncated": "truncated"}, form=percent),
    Chart(
        "Accepted drafts",
        "share of drafted tokens",
        {"rollout/draft_acceptance": "accepted"},
        form=percent,
    ),
    Chart("Learning rate", "", {"train/learning_rate": "rate"}, look="exact"),
    Chart("Memory", "GB", {"memory/peak_gb": "peak", "memory/now_gb": "end of step"}, look="exact"),
)


def write_report(folder: Path) -> Path:
    """Write `report.html` into the run's folder; return the path."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in FILES):
        raise FileNotFoundError(
            f"{folder} is not the folder of a run: it contains none of {', '.join(FILES)}"
        )

    history = read_history(folder / "metrics.jsonl")
    if len(history.get("eval/accuracy", ())) == len(history.get("eval/reward", ())):
        history.pop("eval/reward", None)  # they are the same numbers
    written = (folder / "config.yaml").read_text() if (folder / "config.yaml").exists() else ""
    config = yaml.safe_load(written) or {}
    summary = _summary(folder)
    name = folder.resolve().name
    body = [
        _header(name, history, summary),
        _tiles(history, summary),
        _curves(history),
        _time(history),
        _speed(folder),
        sample_table(
            read_ends(folder / "samples.jsonl", ENDS),
            config.get("rollout", {}).get("n_samples_per_prompt", 0),
        ),
        _others(history),
        _setup(history, config, summary),
        _configuration(written),
        (
            "<footer>Bold lines: centred moving average. Faint lines: every step. All metrics are"
            " over all ranks.</footer>"
        ),
    ]
    path = folder / "report.html"
    path.write_text(page(f"{name} · lightrft", "\n".join(body)), encoding="utf-8")

    return path


def _summary(folder: Path) -> dict[str, Any]:
    """Return the content of run.json and summary.json; the latter takes precedence."""
    paths = (folder / "run.json", folder / "summary.json")
    run, summary = map(_content, paths)
    for name in ("run", "process", "launchers"):  # with these the program recognises the run
        run.pop(name, None)
    if run.get("active_parameters") == run.get("parameters"):
        run.pop("active_parameters", None)
    if "seconds" in run:
        run["wall_s"] = run.pop("seconds")
    return run | summary


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty one if it is missing or broken."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_history(path: Path) -> History:
    """Return metric -> values by step. Rows of one step may hold different metrics."""
    history: dict[str, dict[int, float | None]] = {}
    for row in read_rows(path):
        for name, value in row.items():
            if name != "step" and (value is None or is_number(value)):
                history.setdefault(name, {})[row["step"]] = value
    return {name: sorted(values.items()) for name, values in history.items()}


def _header(name: str, history: History, summary: dict[str, Any]) -> str:
    kind = (
        KINDS.get(summary.get("command", ""))
        or ("Reinforcement" if _from_rewards(history) else "Supervised") + " fine-tuning"
    )
    steps = max((points[-1][0] for points in history.values()), default=0)
    warnings = "".join(
        f'<p class="warn">{safe(warning)}</p>' for warning in summary.get("warnings", ())
    )
    ended = f", {summary['status']}" if summary.get("status") else ""

    return (
        f'<h1>{safe(name)}</h1><p class="lead">{kind}, {steps:,} steps{safe(ended)}</p>{warnings}'
    )


def _from_rewards(history: History) -> bool:
    return "rollout/reward" in history or not history


def _setup(history: History, config: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return what ran, and where."""
    facts = _facts(config, rollout=_from_rewards(history))
    facts |= {
        key.replace("_", " "): value
        for key, value in summary.items()
        if isinstance(value, str) and value
    }
    facts |= {label: str(summary[key]) for key, label in FACTS.items() if key in summary}
    facts |= summary.get("versions", {})
    items = "".join(
        f"<li><span>{safe(key)}</span> {safe(value)}</li>" for key, value in facts.items()
    )

    return f'<h2>Setup</h2><ul class="facts">{items}</ul>' if items else ""


def _facts(config: dict[str, Any], *, rollout: bool) -> dict[str, str]:
    model = str(config.get("model", {}).get("pretrain", ""))
    facts = {"model": Path(model).name if model.startswith((".", "/", "~")) else model}
    if "strategy" in config:
        facts["strategy"] = "FSDP2" if config["strategy"].get("fsdp") else "DeepSpeed ZeRO"
    if rollout:
        facts["engine"] = str(config.get("engine", {}).get("engine_type", ""))
        facts["recipe"] = str(config.get("algorithm", {}).get("advantage_estimator", ""))
    return {key: value for key, value in facts.items() if value}


def _tiles(history: History, summary: dict[str, Any]) -> str:
    """Return the headline numbers of the summary, and of the metrics that the summary lacks."""
    numbers = {
        key: value
        for key, value in summary.items()
        if is_number(value) and key not in (*FACTS, "steps")
    }
    of_summary = {
        key: (_label(key), _summary_value(key, value), "") for key, value in numbers.items()
    }
    text = " ".join(summary)
    # A topic that any name of the summary mentions is not computed again from the metrics.
    tiles = [tile for key, tile in of_summary.items() if key.startswith(RESULTS)]
    tiles += [tile[1:] for tile in _headline_numbers(history) if tile[0] not in text]
    tiles += [tile for key, tile in of_summary.items() if not key.startswith(RESULTS)]
    cards = "".join(
        f'<div class="card tile"><div class="label">{safe(label)}</div><div'
        f' class="value">{safe(value)}</div><div class="note">{safe(note)}</div></div>'
        for label, value, note in tiles
    )

    return f'<div class="tiles">{cards}</div>' if cards else ""


def _headline_numbers(history: History) -> list[tuple[str, str, str, str]]:
    """Return topic, label, value and note of each headline number found in the metrics."""
    finite = {
        name: values
        for name, points in history.items()
        if (values := [value for _, value in points if value is not None])
    }
    tiles = []

    for topic, name, label, form in (
        ("reward", "rollout/reward", "Reward", short),
        ("eval", "eval/accuracy", "Held-out accuracy", percent),
        ("eval", "eval/reward", "Held-out reward", short),
        ("length", "rollout/response_length", "Response length", short),
        ("accuracy", "train/accuracy", "Accuracy", percent),
        ("margin", "train/margin", "Margin", short),
        ("eval", "eval/loss", "Held-out loss", short),
        ("loss", "train/loss", "Loss", short),
    ):
        if values := finite.get(name):
            # An evaluation counts by itself. Noisy numbers of steps are averaged over a tenth of
            # the run, at most ten steps.
            part = 1 if topic == "eval" else min(10, max(1, len(values) // 10))
            tiles.append(
                (
                    topic,
                    label,
                    form(fmean(values[-part:])),
                    f"at first {form(fmean(values[:part]))}",
                )
            )

    if values := finite.get("engine/logprob_mismatch_max", finite.get("engine/logprob_mismatch")):
        tiles.append(("mismatch", "Engine mismatch", short(max(values)), "largest log-prob gap"))
    if values := finite.get("perf/tokens_per_second"):
        tiles.append(("tokens", "Tokens per second", short(median(values)), "median step"))
    if values := finite.get("time/step"):
        tiles.append(
            ("wall", "Time in steps", duration(sum(values)), f"{duration(fmean(values))} per step")
        )

    if values := finite.get("memory/peak_gb"):
        tiles.append(("memory", "Peak memory", f"{short(max(values))} GB", "largest rank"))
    return tiles


def _curves(history: History) -> str:
    sets = {name: name.split("/")[1] for name in history if re.fullmatch("eval/[^/]+/reward", name)}
    held_out = Chart("Held-out sets", "mean reward of greedy responses", sets, look="marked")
    judged = "train/accuracy" in history  # then the chart of the accuracy has the held-out one too
    shown = [
        chart
        for chart in (*CHARTS, held_out)
        if chart.title != ("Held-out accuracy" if judged else "Accuracy")
    ]

    cards = "".join(_card(chart, history) for chart in shown)
    if not cards:
        return "<p>No step has been finished yet.</p>"
    return f'<h2>Metrics by step</h2><div class="charts">{cards}</div>'


def _card(chart: Chart, history: History) -> str:
    """Return a chart of the metrics that the run has; nothing if it has none of them."""
    lines = [
        Line(label, history[name], chart.look)
        for name, label in chart.metrics.items()
        if name in history
    ]
    if not lines:
        return ""

    values = [value for _, value in lines[0].points if value is not None]
    # A value that is not finite leaves a gap in the curve, so the text names the step.
    broken = sorted({step for line in lines for step, value in line.points if value is None})
    steps = ", ".join(str(step) for step in broken[:5]) + (
        f" and {len(broken) - 5} more" if len(broken) > 5 else ""
    )
    warning = f'<p class="warn">Not finite at step {steps}.</p>' if broken else ""
    legend = "".join(
        f'<span><i class="key f{index}"></i>{safe(line.label)}</span>'
        for index, line in enumerate(lines)
    )

    return (
        f'<section class="card chart"><header><h3>{safe(chart.title)}'
        f" <span>{safe(chart.unit)}</span></h3>"
        f'<span class="last">{chart.form(values[-1]) if values else ""}</span></header>'
        f"{line_chart(lines, log=chart.log, form=chart.form)}"
        f"{f'<p class=legend>{legend}</p>' if len(lines) > 1 else ''}{warning}</section>"
    )


def _time(history: History) -> str:
    """Chart the seconds of each step by phase.

    Nested phases (`time/generate/weights`) are part of the outer one.
    """
    totals = {step: value for step, value in history.get("time/step", []) if value is not None}
    if not totals:
        return ""

    steps = list(totals)
    parts = {
        name.removeprefix("time/"): [dict(points).get(step) or 0.0 for step in steps]
        for name, points in history.items()
        if name.startswith("time/")
        and name.count("/") == 1
        and name not in ("time/step", "time/idle_share")
    }
    parts = _largest(parts, 7)  # with the rest, these are as many as there are colours
    parts["other"] = [
        max(0.0, totals[step] - sum(values[i] for values in parts.values()))
        for i, step in enumerate(steps)
    ]
    mean = fmean(totals[step] for step in steps)

    return (
        '<h2>Time per step</h2><div class="split"><section class="card chart"><header><h3>Time of'
        " a step <span>by phase</span></h3><span"
        f' class="last">{duration(totals[steps[-1]])}</span></header>{stacked_chart(parts, steps, duration)}</section><section'
        ' class="card chart"><header><h3>Mean step</h3><span'
        f' class="last">{duration(mean)}</span></header><div'
        f' class="phases">{_phases(parts)}</div></section></div>'
    )


def _speed(folder: Path) -> str:
    """Return the lines of the scoreboard."""
    run = _content(folder / "run.json")
    board = scoreboard(read_rows(folder / "metrics.jsonl"), run)
    if board is None:
        return ""
    lines = "\n".join(map(safe, board.lines))
    return f'<section class="card"><header><h3>Speed</h3></header><pre>{lines}</pre></section>'


def _phases(parts: dict[str, list[float]]) -> str:
    """Return the legend beside the chart: mean seconds of each phase, and share of the step."""
    total = sum(sum(values) for values in parts.values()) or 1.0
    rows = []
    for index, (name, values) in enumerate(parts.items()):
        share = sum(values) / total
        rows.append(
            f'<div><i class="key f{index}"></i>{safe(name)}</div><div class="bar"><i'
            f' class="f{index}" style="width: {100 * share:.1f}%"></i></div><div'
            f' class="number">{duration(fmean(values))}</div><div'
            f' class="share">{percent(share)}</div>'
        )

    return "".join(rows)


def _largest(parts: dict[str, list[float]], most: int) -> dict[str, list[float]]:
    """Return the phases that take the most time, in the given order."""
    names = sorted(parts, key=lambda name: -sum(parts[name]))[:most]
    return {name: values for name, values in parts.items() if name in names}


def _others(history: History) -> str:
    """Chart the metrics that no chart above has, such as a user's own, and the nested phases."""
    charted = {name for chart in CHARTS for name in chart.metrics}
    charted |= {name for name in history if name.startswith("time/") and name.count("/") == 1} - {
        "time/idle_share"
    }
    cards = "".join(
        _card(Chart(name, "", {name: name}), history) for name in sorted(set(history) - charted)
    )

    return (
        '<details class="card"><summary>Other metrics</summary><div'
        f' class="charts">{cards}</div></details>'
        if cards
        else ""
    )


def _configuration(written: str) -> str:
    if not written:
        return ""
    return (
        '<details class="card"><summary>Resolved'
        f" configuration</summary><pre>{safe(written, longest=None)}</pre></details>"
    )


def _label(key: str) -> str:
    """Return a label: `eval_after_rl` -> `Accuracy after RL`, `wall_s` -> `Wall time`."""
    key = f"{key.removesuffix('_s')}_time" if key.endswith("_s") else key.removesuffix("_gb")
    spelled = {
        "eval": "accuracy",
        "sft": "SFT",
        "rl": "RL",
        "logprob": "log-prob",
        "max": "(largest)",
    }
    words = " ".join(spelled.get(word, word) for word in key.split("_"))
    return words[:1].upper() + words[1:]


def _summary_value(key: str, value: float) -> str:
    if key.startswith("eval_"):
        return percent(value)
    if key.endswith("_s"):
        return duration(value)
    return f"{short(value)} GB" if key.endswith("_gb") else short(value)
