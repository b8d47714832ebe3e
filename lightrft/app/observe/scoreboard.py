"""The speed of a run in a few numbers, what limits it, and the flag to try next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightrft.app.observe.text import percent, short
from lightrft.config.tables import table
from lightrft.models.parallel.peaks import DEVICES, known_device

PHASE_ADVICE = table("app/observe/labels")["phase_advice"]
"""Phase -> flags that make it faster."""
NESTED: dict[str, str] = table("app/observe/labels")["nested"]
"""Nested phases with separate advice, for when they take more than half of the phase."""


@dataclass(slots=True)
class Scoreboard:
    """Medians over the steps after the first one."""

    steps: int
    seconds: float
    """Seconds of a step."""
    tokens_per_second: float
    """Tokens per second and device."""
    shares: dict[str, float]
    """Phase -> share of the step."""
    sync_seconds: float
    sync_bytes: float
    """Bytes of weights that an engine receives in a step; 0 if unknown."""
    peak_gb: float
    mismatch: float
    """Mean difference of log-probs between engine and trainer."""
    idle_share: float
    mfu: float | None
    """How much of the training devices' peak the products of tokens and matrices reach while they
    train (algorithms/roles/operations.py); None for an unknown device."""
    bottleneck: str
    advice: str
    lines: list[str] = field(default_factory=list)
    """The numbers as a table."""


def scoreboard(rows: Sequence[dict[str, Any]], run: dict[str, Any]) -> Scoreboard | None:
    """Compute the scoreboard from the rows of metrics.jsonl and the description in run.json.

    It is None without a complete step.
    """
    # The first step compiles and warms up, so it counts only if there is no other.
    steps = [row for row in rows if "time/step" in row]
    steps = steps[1:] or steps
    if not steps:
        return None

    def typical(name: str) -> float:
        return median(row.get(name) or 0.0 for row in steps)

    def typical_sum(name: str) -> float:
        """Return the median for a step: with --logging_steps a row has the sum of several."""
        return median((row.get(name) or 0.0) / row.get("perf/steps", 1) for row in steps)

    seconds = typical("time/step")
    training_ranks = run.get("world_size", 1)
    world = training_ranks + run.get("rollout_ranks", 0)
    phases = sorted(
        {name for row in steps for name in row if name.startswith("time/") and name.count("/") == 1}
    )
    total = sum(row["time/step"] for row in steps)
    shares = {
        name.removeprefix("time/"): sum(row.get(name) or 0.0 for row in steps) / total
        for name in phases
        if name not in ("time/step", "time/idle_share")
    }
    tokens = typical_sum("rollout/tokens") or typical_sum("train/tokens")
    operations = typical_sum("perf/train_flops")
    training = typical("time/train")
    device = known_device(run.get("device", ""))
    mfu = None
    if device and operations and training:
        mfu = operations / (training * training_ranks * DEVICES[device].flops)

    bottleneck = max(shares, key=shares.__getitem__, default="")
    for name, nested in NESTED.items():
        if bottleneck == "generate" and typical(name) > typical("time/generate") / 2:
            bottleneck = nested

    advice = PHASE_ADVICE.get(bottleneck, "")
    if run.get("engine_tp_size") == 1:
        advice = advice.replace(" a smaller --engine_tp_size,", "")
    if "device" in run and not run["device"]:  # on a CPU the cache has a size of its own
        advice = advice.replace("--engine_mem_util", "--engine_kv_cache_gb")
    board = Scoreboard(
        steps=round(sum(row.get("perf/steps", 1) for row in steps)),
        seconds=seconds,
        tokens_per_second=tokens / seconds / world,
        shares=shares,
        sync_seconds=typical("time/generate/weight_sync"),
        sync_bytes=run.get("weight_bytes", 0),
        peak_gb=max(row.get("memory/peak_gb") or 0.0 for row in steps),
        mismatch=max(row.get("engine/logprob_mismatch") or 0.0 for row in steps),
        idle_share=typical("time/idle_share"),
        mfu=mfu,
        bottleneck=bottleneck,
        advice=advice,
    )
    board.lines = _lines(board)

    return board


def _lines(board: Scoreboard) -> list[str]:
    """Return a table with the names on the left."""
    rows = [
        ("tokens/s per device", short(board.tokens_per_second)),
        ("a step", f"{short(board.seconds)} s (median of {board.steps})"),
        *(
            (f"  {name}", percent(share))
            for name, share in sorted(board.shares.items(), key=lambda each: -each[1])
        ),
        ("idle", percent(board.idle_share)),
        ("peak memory", f"{short(board.peak_gb)} GB"),
    ]
    if board.sync_seconds:
        size = f" for {short(board.sync_bytes / 1e6)} MB" if board.sync_bytes else ""
        rows += [
            ("weight sync", f"{short(board.sync_seconds)} s{size}"),
            ("engine - trainer", f"log-probs differ by {short(board.mismatch)}"),
        ]

    if board.mfu is not None:
        rows.append(("MFU in training", percent(board.mfu)))
    if board.advice:
        rows.append(("takes longest", f"{board.bottleneck}: try {board.advice}"))
    width = max(len(name) for name, _ in rows)

    return [f"{name:{width}}  {value}" for name, value in rows]
