"""Choose responses of an evaluation or a run to learn from: rows for train_sft, and pairs for
train_dpo.

lightrft curate runs/evaluation --write sft.jsonl --rate 0.05..0.95 --per_prompt 2 --shortest
lightrft curate runs/evaluation --pairs dpo.jsonl

A folder of `lightrft evaluate` keeps every response, with messages and tools where the data have
them. Of a run of train_ppo there are the samples that it saved (--num_trajectories_to_save).
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from loguru import logger

from lightrft.app.cli import command_parser
from lightrft.app.run.logs import set_up_logging
from lightrft.core.samples import RIGHT

FILES = ("responses.jsonl", "samples.jsonl")
"""Responses of an evaluation, and samples of a run."""
OTHERS = ("tools", "images", "videos", "audios")
"""Columns that belong to a prompt."""
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    commands = command_parser("curate", __doc__)
    options = commands.parse_args(argv)
    set_up_logging()
    if not (options.write or options.pairs):
        commands.error("nothing to write: name a file with --write or --pairs")

    if options.per_prompt < 0:
        commands.error(f"--per_prompt {options.per_prompt}: write a number of responses, or 0")
    try:
        low, high = map(float, options.rate.split(".."))
    except ValueError:
        low = high = math.nan
    if not 0 <= low <= high <= 1:
        commands.error(f"--rate {options.rate}: write two numbers, such as 0.05..0.95")

    folder = options.folder
    file = next((folder / name for name in FILES if (folder / name).exists()), folder)
    files = [path.resolve() for path in (file, options.write, options.pairs) if path]
    if len({*files}) < len(files):
        commands.error(f"--write and --pairs need files of their own, other than {file}")
    try:
        every = read_responses(file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        commands.error(f"{folder} has no responses with rewards: {error}")
    groups = [group for group in every if low <= solve_rate(group) <= high]

    logger.info("{} of {} prompts are within --rate {}", len(groups), len(every), options.rate)
    if options.write:
        chosen = [chosen_responses(group, options) for group in groups]
        _write(options.write, [example(row) for rows in chosen for row in rows])
    if options.pairs:
        _write(options.pairs, [pair for group in groups for pair in pairs(group)])


def read_responses(file: Path) -> list[list[Row]]:
    """Return the responses to each prompt, in the order of the file.

    Those without a reward, which is null in the file, are left out.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    with file.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["reward"] is not None and math.isfinite(row["reward"]):
                key = json.dumps([row.get("set"), row.get("input"), row["prompt"]])
                groups[key].append(row)
    return [*groups.values()]


def solve_rate(group: list[Row]) -> float:
    """Return the share of right responses among those that were sampled, if there are any."""
    sampled = [row for row in group if row.get("sample") != "greedy"] or group
    return sum(map(_is_right, sampled)) / len(sampled)


def chosen_responses(group: list[Row], options: Any) -> list[Row]:
    """Return the responses to a prompt that --keep, --deduplicate and --per_prompt leave.

    Only whole ones can be learned.
    """
    best = max(row["reward"] for row in group)
    keeps = {"correct": _is_right, "best": lambda row: row["reward"] == best, "all": bool}
    rows = [row for row in group if keeps[options.keep](row) and _is_whole(row)]
    if options.shortest:
        rows.sort(key=lambda row: row["length"])
    if options.deduplicate:
        first: dict[str, Row] = {}
        for row in rows:
            first.setdefault(" ".join(row["response"].split()), row)
        rows = [*first.values()]
    return rows[: options.per_prompt or None]


def example(row: Row) -> Row:
    """Return a response as a row for train_sft."""
    prompt, answer = _prompt_and_answer(row)
    if isinstance(prompt, str):
        return {"input": prompt, "output": answer, **_others(row)}
    return {"messages": [*prompt, *answer], **_others(row)}


def pairs(group: list[Row]) -> Iterable[Row]:
    """Yield a best and a worst response to a prompt for train_dpo, if their rewards differ.

    Of all best and worst ones they are nearest in length.
    """
    rewards = [row["reward"] for row in group]
    best = [row for row in group if row["reward"] == max(rewards) and _is_whole(row)]
    worst = [row for row in group if row["reward"] == min(rewards) and _says_something(row)]
    if best and worst and max(rewards) > min(rewards):
        chosen, rejected = min(
            product(best, worst), key=lambda pair: abs(pair[0]["length"] - pair[1]["length"])
        )
        prompt, answer = _prompt_and_answer(chosen)
        other = _prompt_and_answer(rejected)[1]
        yield {"prompt": prompt, "chosen": answer, "rejected": other, **_others(chosen)}


def _prompt_and_answer(row: Row) -> tuple[Any, Any]:
    """Return two texts, or the messages of the prompt and those that follow it.

    Without the prompt of the data the text is the one that the model read.
    """
    prompt = row.get("input", row["prompt"])
    turns = row.get("messages")
    if isinstance(prompt, str) and not turns:
        return prompt, row["response"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages, turns or [{"role": "assistant", "content": row["response"]}]


def _others(row: Row) -> Row:
    return {name: row[name] for name in OTHERS if row.get(name)}


def _is_whole(row: Row) -> bool:
    """Return False for a truncated response, which has no end, and for an empty one."""
    return row["finish_reason"] != "length" and _says_something(row)


def _says_something(row: Row) -> bool:
    return bool(row["response"].strip() or row.get("messages"))


def _is_right(row: Row) -> bool:
    return row["reward"] > RIGHT


def _write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    logger.info("{} rows with {}: {}", len(rows), ", ".join(rows[0]) if rows else "nothing", path)
