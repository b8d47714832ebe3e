"""Write the report of a run's folder as one HTML page: results, curves, and samples of the model.

Here the data are gathered; the script in report.html draws them.

It reads metrics.jsonl, samples.jsonl, config.yaml, run.json and summary.json, if they exist.
run.json describes the run: `status`, `engine`, `strategy`, `world_size`, `seconds`, `versions`.
summary.json adds headline numbers: `eval_before_sft`, `eval_after_sft`, `eval_after_rl`,
`reward_first`, `reward_last`, `logprob_mismatch_max`, `wall_s`, and any others. `eval_*` are
shares, `*_s` seconds, `*_gb` GB.
"""

import base64
import hashlib
import json
import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from lightrft.app.observe.curves import History, curves, read_history, rounded
from lightrft.app.observe.sample_table import ENDS, excerpt, sample_table
from lightrft.app.observe.scoreboard import scoreboard
from lightrft.app.observe.sinks import read_ends, read_rows
from lightrft.app.observe.text import duration, is_number, percent, short, visible
from lightrft.config.tables import table
from lightrft.config.values import read_object

RUN_FILES = ("metrics.jsonl", "samples.jsonl", "config.yaml", "run.json", "summary.json")

LEDGER = "ledger.json"
"""File with the table of `lightrft ledger`."""
MOST_BARS = 60
PAGE_TEMPLATE = Path(__file__).with_name("report.html")
Fact = tuple[str, str]
TILE_FORMS = {"number": short, "share": percent}
"""How the values of tiles are written."""

FACTS: dict[str, str] = table("app/observe/labels")["facts"]
"""Numbers of the summary that describe the setup of the run instead of the results."""

RESULT_PREFIXES = ("eval", "reward", "accuracy")
"""What the names of numbers begin with that say how good the model is. They come first."""

RUN_TITLES: dict[str, str] = table("commands")["titles"]
"""Command -> what such a run is called."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into the run's folder; return the path."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in RUN_FILES):
        raise FileNotFoundError(
            f"{folder} is not the folder of a run: it contains none of {', '.join(RUN_FILES)}"
        )

    history = read_history(folder / "metrics.jsonl")
    if len(history.get("eval/accuracy", ())) == len(history.get("eval/reward", ())):
        history.pop("eval/reward", None)  # they are the same numbers
    written = (folder / "config.yaml").read_text() if (folder / "config.yaml").exists() else ""
    config = yaml.safe_load(written) or {}
    summary = _summary(folder)
    name = folder.resolve().name
    board = scoreboard(read_rows(folder / "metrics.jsonl"), read_object(folder / "run.json"))
    samples = read_ends(folder / "samples.jsonl", ENDS)
    data = {
        "title": name,
        "lead": _lead(history, summary),
        "warnings": list(map(excerpt, summary.get("warnings", ()))),
        "tiles": _tiles(history, summary),
        "runs": [(name, curves(history))],
        "time": _time(history),
        "speed": "\n".join(board.lines) if board else "",
        "samples": sample_table(samples, config.get("rollout", {}).get("n_samples_per_prompt", 0)),
        "ledger": read_object(folder / LEDGER) or None,
        "setup": _setup(history, config, summary),
        "config": written,
    }

    return write_page(folder / "report.html", data)


def write_page(path: Path, data: dict[str, Any]) -> Path:
    """Write report.html with data that its script draws; return the path.

    The content security policy in the head allows this one script, identified by a hash, and loads
    nothing, because images are inside the page.
    """
    template = PAGE_TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Without "<" no text of the data can end the element that the data are in.
    embedded = json.dumps(_visible(data), ensure_ascii=False, separators=(",", ":"))
    page = template.replace("{{digest}}", digest)
    page = page.replace("{{data}}", embedded.replace("<", "\\u003c"))

    path.write_text(page, encoding="utf-8")
    return path


def _visible(data: Any) -> Any:
    """Return the data with control characters and direction marks of all texts as escapes."""
    if isinstance(data, dict):
        return {visible(name): _visible(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return list(map(_visible, data))
    return visible(data) if isinstance(data, str) else data


def _summary(folder: Path) -> dict[str, Any]:
    """Return the content of run.json and summary.json; the latter takes precedence."""
    paths = (folder / "run.json", folder / "summary.json")
    run, summary = map(read_object, paths)
    # with these the program recognises the run
    for name in "run process launchers machine total_steps weight_bytes".split():
        run.pop(name, None)

    if run.get("active_parameters") == run.get("parameters"):
        run.pop("active_parameters", None)
    if "seconds" in run:
        run["wall_s"] = run.pop("seconds")
    return run | summary


def _lead(history: History, summary: dict[str, Any]) -> str:
    kind = (
        RUN_TITLES.get(summary.get("command", ""))
        or ("Reinforcement" if _from_rewards(history) else "Supervised") + " fine-tuning"
    )
    steps = max((points[-1][0] for points in history.values()), default=0)
    ended = f", {summary['status']}" if summary.get("status") else ""
    return f"{kind}, {steps:,} steps{ended}"


def _from_rewards(history: History) -> bool:
    return "rollout/reward" in history or not history


def _setup(history: History, config: dict[str, Any], summary: dict[str, Any]) -> list[Fact]:
    """Return what ran, and where."""
    facts = _facts(config, rollout=_from_rewards(history))
    facts |= {
        key.replace("_", " "): value
        for key, value in summary.items()
        if isinstance(value, str) and value
    }
    for key, label in FACTS.items():
        value = summary.get(key)
        if value or (key == "seed" and value is not None):
            facts[label] = f"{value:,}" if "parameters" in key else str(value)
    facts |= summary.get("versions", {})
    return [(key, excerpt(value)) for key, value in facts.items()]


def _facts(config: dict[str, Any], *, rollout: bool) -> dict[str, str]:
    model = str(config.get("model", {}).get("pretrain", ""))
    facts = {"model": Path(model).name if model.startswith((".", "/", "~")) else model}
    if "strategy" in config:
        facts["strategy"] = "FSDP2" if config["strategy"].get("fsdp") else "DeepSpeed ZeRO"
    if rollout:
        facts["engine"] = str(config.get("engine", {}).get("engine_type", ""))
        facts["recipe"] = str(config.get("algorithm", {}).get("advantage_estimator", ""))
    return {key: value for key, value in facts.items() if value}


def _tiles(history: History, summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return label, value and note of the headline numbers.

    They are the numbers of the summary, and of the metrics that the summary lacks.
    """
    of_summary = {
        key: (_label(key), _summary_value(key, value), "")
        for key, value in summary.items()
        if is_number(value) and key not in (*FACTS, "steps")
    }
    text = " ".join(summary)

    # A topic that any name of the summary mentions is not computed again from the metrics.
    tiles = [tile for key, tile in of_summary.items() if key.startswith(RESULT_PREFIXES)]
    tiles += [tile[1:] for tile in _headline_numbers(history) if tile[0] not in text]
    tiles += [tile for key, tile in of_summary.items() if not key.startswith(RESULT_PREFIXES)]
    return tiles


def _headline_numbers(history: History) -> list[tuple[str, str, str, str]]:
    """Return topic, label, value and note of each headline number found in the metrics."""
    finite = {
        name: values
        for name, points in history.items()
        if (values := [value for _, value in points if value is not None])
    }
    tiles = []

    for topic, name, label, form in table("app/observe/labels")["tiles"]:
        if values := finite.get(name):
            # An evaluation counts by itself. Noisy numbers of steps are averaged over a tenth of
            # the run, at most ten steps.
            window = 1 if topic == "eval" else min(10, max(1, len(values) // 10))
            first, last = (
                TILE_FORMS[form](fmean(each)) for each in (values[:window], values[-window:])
            )
            tiles.append((topic, label, last, f"at first {first}"))

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


def _time(history: History) -> dict[str, Any] | None:
    """Return the seconds of each step by phase.

    Nested phases (`time/generate/weights`) are part of the outer one.
    """
    totals = {step: value for step, value in history.get("time/step", []) if value is not None}
    if not totals:
        return None

    phases = {
        name.removeprefix("time/"): [dict(points).get(step) or 0.0 for step in totals]
        for name, points in history.items()
        if name.startswith("time/")
        and name.count("/") == 1
        and name not in ("time/step", "time/idle_share")
    }
    # With the rest, the longest seven are as many as there are colours.
    longest = sorted(phases, key=lambda name: -sum(phases[name]))[:7]
    phases = {name: values for name, values in phases.items() if name in longest}
    of_steps = zip(totals.values(), *phases.values(), strict=True)
    phases["other"] = [max(0.0, total - sum(column)) for total, *column in of_steps]

    # A bar for every step of a long run would be thinner than a pixel.
    steps = list(totals)
    size = math.ceil(len(steps) / MOST_BARS)
    bars = [slice(start, start + size) for start in range(0, len(steps), size)]
    return {
        "last": totals[steps[-1]],
        "mean": fmean(totals.values()),
        "bars": [(steps[bar][0], steps[bar][-1]) for bar in bars],
        "phases": [
            {
                "label": name,
                "mean": fmean(values),
                "values": [rounded(fmean(values[bar])) for bar in bars],
            }
            for name, values in phases.items()
        ],
    }


def _label(key: str) -> str:
    """Return a label: `eval_after_rl` -> `Accuracy after RL`, `wall_s` -> `Wall time`."""
    key = f"{key.removesuffix('_s')}_time" if key.endswith("_s") else key.removesuffix("_gb")
    spelled = table("app/observe/labels")["spelled"]
    words = " ".join(spelled.get(word, word) for word in key.split("_"))
    return words[:1].upper() + words[1:]


def _summary_value(key: str, value: float) -> str:
    if key.startswith("eval_"):
        return percent(value)
    if key.endswith("_s"):
        return duration(value)
    return f"{short(value)} GB" if key.endswith("_gb") else short(value)
