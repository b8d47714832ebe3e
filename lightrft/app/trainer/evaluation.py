"""Evaluate a model: generate responses to held-out prompts, and score them."""

import json
import math
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from loguru import logger
from rich import box
from rich.console import Console
from rich.table import Table

from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.algorithms.rollout.scores import Estimate
from lightrft.app.observe.sinks import encode_row, sample_rows
from lightrft.app.observe.text import short
from lightrft.app.trainer.held_out import HeldOut, answer_all, evaluate
from lightrft.config.sections import Config
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.data.loader import share_of
from lightrft.data.prompts import INPUT
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.strategy import StrategyBase

AT_ONCE = 64
"""Prompts whose responses travel to rank 0 together, to be written."""
WITHOUT_INTERVAL = ("response_length",)


def evaluate_sets(
    config: Config, strategy: StrategyBase, sets: list[HeldOut], sampler: RunSampler
) -> dict[str, float]:
    """Score responses to the prompts of --eval_data: a greedy one and --eval_n_samples others.

    Return the numbers; rank 0 also prints them and writes save_path/evaluation.json. Rank 0 writes
    all responses to save_path/responses.jsonl, in the order of the data.
    """
    strategy.announce("evaluate")

    # All sets are answered while the engine is awake; reward models may need the device after.
    with strategy.engine_awake():
        answered = answer_all(sets, sampler, config.train.seed, "evaluation")

    data = strategy.mesh.data
    metrics = Metrics()
    of_sets = zip(sets, answered, strict=True)
    estimates = [evaluate(held_out, groups, metrics, data) for held_out, groups in of_sets]
    result = {name.removeprefix("eval/"): value for name, value in metrics.reduce(data).items()}
    result |= _bounds(sets, estimates)
    numbers = Path(config.train.save_path) / "evaluation.json"
    responses = numbers.with_name("responses.jsonl")
    _write_responses(responses, strategy, sets, answered)

    if strategy.is_rank_0():
        numbers.write_text(json.dumps(result, indent=2) + "\n")
        Console(width=None if sys.stdout.isatty() else 130).print(
            table(config.model.pretrain, sets, estimates)
        )
        logger.info(f"numbers: {numbers}, responses: {responses}")

    return result


def _bounds(sets: list[HeldOut], estimates: list[dict[str, Estimate]]) -> dict[str, float]:
    """Return the ends of the confidence intervals by name, as accuracy_low and _high."""
    return {
        f"{held_out.prefix}{name}_{end}": getattr(value, end)
        for held_out, values in zip(sets, estimates, strict=True)
        for name, value in values.items()
        if has_interval(name, value)
        for end in ("low", "high")
    }


def _write_responses(
    path: Path, strategy: StrategyBase, sets: list[HeldOut], answered: list[list[Group]]
) -> None:
    """Write every response to a file that appears when it is complete. All ranks call it."""
    unfinished = path.with_suffix(".part")
    file: IO[bytes] | None = None

    if strategy.is_rank_0():
        path.parent.mkdir(parents=True, exist_ok=True)
        file = unfinished.open("wb")

    for held_out, groups in zip(sets, answered, strict=True):
        for received in to_first_rank(groups, len(held_out.prompts), strategy.mesh.data):
            rows = chain.from_iterable(response_rows(held_out.name, each) for each in received)
            if file is not None:
                file.write(b"".join(map(encode_row, rows)))

    if file is not None:
        file.close()
        unfinished.replace(path)


def to_first_rank(groups: list[Group], count: int, data: Axis) -> Iterator[list[Group]]:
    """Yield the groups of all ranks on the first one, in the order of the `count` prompts.

    They come AT_ONCE at a time. The other ranks yield [].
    """
    for source in range(data.size):
        for start in range(0, len(share_of(source, data.size, count)), AT_ONCE):
            sent = groups[start : start + AT_ONCE] if source == data.rank else []
            parts = [sent if rank == 0 else [] for rank in range(data.size)]
            yield data.exchange_objects(parts)[source]


def response_rows(name: str, group: Group) -> Iterator[dict[str, Any]]:
    """Yield a row for each response to a prompt, the greedy one first."""
    where = {"set": name} if name else {}
    prompt = group.responses[0].prompt
    data = {"input": prompt.columns.get(INPUT), "tools": prompt.columns.get("tools")}
    where |= {name: value for name, value in data.items() if value}
    labels = [*["greedy"] * len(group.others), *range(len(group.samples))]
    for label, row in zip(labels, sample_rows([*group.others, *group.samples]), strict=True):
        row.pop("group")
        yield {**where, "row": prompt.index, "sample": label, **row}


def table(title: str, sets: list[HeldOut], estimates: list[dict[str, Estimate]]) -> Table:
    """Return the table of an evaluation: a column for each set, a row for each number."""
    names = [each.name or "held-out" for each in sets]
    rows = Table("", *names, title=title, box=box.SIMPLE, title_justify="left")
    rows.add_row("prompts", *(str(len(each.prompts)) for each in sets))

    for name in dict.fromkeys(name for values in estimates for name in values):
        # If every reward is 0 or 1, the accuracy is the same number as the reward.
        if not (name == "reward" and all("accuracy" in values for values in estimates)):
            rows.add_row(
                name.replace("_at_", "@").replace("_", " "),
                *(_cell(name, values.get(name)) for values in estimates),
            )

    return rows


def _cell(name: str, value: Estimate | None) -> str:
    if value is None:
        return ""
    return short(value.mean) + (
        f"  {short(value.low)} to {short(value.high)}" if has_interval(name, value) else ""
    )


def has_interval(name: str, value: Estimate) -> bool:
    return name not in WITHOUT_INTERVAL and not math.isnan(value.low)
