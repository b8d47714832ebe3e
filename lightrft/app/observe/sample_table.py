"""Choose samples for the report of a run: the first prompts and the last, with some responses."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lightrft.app.observe.sinks import BRANCHES, SOUNDS, THUMBNAILS
from lightrft.app.observe.text import is_number, short, visible

PROMPTS_PER_END = 6
RESPONSES_PER_PROMPT = 4
ENDS = 256
"""Rows at the beginning, and at the end, that samples are chosen from."""
LONGEST_TEXT = 4000
PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+=*")
LONGEST_PICTURE = 60_000
SOUND = re.compile(r"data:audio/wav;base64,[A-Za-z0-9+/]+=*")
LONGEST_SOUND = 100_000
"""Characters of the longest sound that is played."""

Group = list[dict[str, Any]]
"""Rows of one prompt in one step."""


def sample_table(rows: Sequence[dict[str, Any]], group_size: int = 0) -> dict[str, Any] | None:
    """Show the model's first and last responses, and how responses to one prompt differ.

    `group_size` is the number of responses to a prompt; the file may have fewer.
    """
    if not rows:
        return None

    rewards = [reward for row in rows if (reward := _reward(row)) is not None]
    low = min(rewards, default=0.0)
    high = max(rewards, default=1.0)
    groups = _groups(rows)
    first = _choose(groups)
    # In a short run both ends are the same rows, and they should appear once.
    last = [group for group in _choose(groups[::-1]) if group[0]["step"] > first[-1][0]["step"]]
    written = max(map(len, groups))
    note = ""
    if not rewards:
        note = "What is learned stands between ⟦ and ⟧."
    elif written < group_size:
        note = (
            f"Of the {group_size} responses to a prompt, {written} are written to samples.jsonl"
            " (--num_trajectories_to_save)."
        )

    return {
        "note": note,
        "ends": [
            {"title": title, "groups": [_group(group, low, high) for group in chosen]}
            for title, chosen in (("At the beginning", first), ("At the end", last))
            if chosen
        ],
    }


def excerpt(value: Any) -> str:
    """Return any value as a text that is not too long."""
    text = visible(str(value))
    hidden = len(text) - LONGEST_TEXT
    return f"{text[:LONGEST_TEXT]} … ({hidden:,} more characters)" if hidden > 0 else text


def _reward(row: dict[str, Any]) -> float | None:
    reward = row.get("reward")
    return reward if is_number(reward) and math.isfinite(reward) else None


def _groups(rows: Sequence[dict[str, Any]]) -> list[Group]:
    groups: dict[tuple[Any, str], Group] = {}
    for row in rows:
        groups.setdefault((row["step"], str(row.get("group", row.get("prompt")))), []).append(row)
    return list(groups.values())


def _choose(groups: Sequence[Group]) -> list[Group]:
    """Choose from the first groups, with as many different prompts as possible, in step order."""
    counts: Counter[str] = Counter()
    ranked = []
    for group in groups[: 4 * PROMPTS_PER_END]:
        prompt = str(group[0].get("prompt"))
        ranked.append((counts[prompt], group))
        counts[prompt] += 1
    ranked.sort(key=lambda pair: pair[0])
    chosen = [group for _, group in ranked[:PROMPTS_PER_END]]
    return sorted(chosen, key=lambda group: group[0]["step"])


def _group(group: Group, low: float, high: float) -> dict[str, Any]:
    """Show the prompt once, with the best, the worst and some other responses."""
    responses = _spread(group)
    row = group[0]
    media = [row.get(medium) or () for medium in ("images", "videos", "audios")]
    names = [excerpt(name) for each in media for name in each]
    notes = [", ".join(names)] if names else []
    rewards = [reward for each in group if (reward := _reward(each)) is not None]
    if len(group) > 1 and rewards:
        mean = short(fmean(rewards))
        notes.append(f"{len(responses)} of {len(group)} responses, mean reward {mean}")

    pictures = zip(row.get(THUMBNAILS) or (), names, strict=False)
    return {
        "step": row["step"],
        "prompt": excerpt(row.get("prompt", "")),
        "images": [pair for pair in pictures if _is_media(pair[0], PICTURE, LONGEST_PICTURE)],
        "sounds": [uri for uri in row.get(SOUNDS) or () if _is_media(uri, SOUND, LONGEST_SOUND)],
        "notes": notes,
        "responses": [_response(each, low, high) for each in responses],
    }


def _is_media(uri: Any, form: re.Pattern[str], longest: int) -> bool:
    """Return whether this is a small JPEG or .wav file inside a data URI."""
    return isinstance(uri, str) and len(uri) <= longest and form.fullmatch(uri) is not None


def _spread(group: Group) -> Group:
    """Choose responses evenly from the highest reward to the lowest, if there are too many."""
    ordered = sorted(group, key=lambda row: -(_reward(row) or 0.0))
    if len(ordered) <= RESPONSES_PER_PROMPT:
        return ordered
    return [
        ordered[index * (len(ordered) - 1) // (RESPONSES_PER_PROMPT - 1)]
        for index in range(RESPONSES_PER_PROMPT)
    ]


def _response(row: dict[str, Any], low: float, high: float) -> dict[str, Any]:
    reward = _reward(row)
    length = f"{row['length']} tokens" if "length" in row else ""
    note = f"{length}, truncated" if row.get("finish_reason") == "length" else length
    note += f"; the episode failed: {row['problem']}" if row.get("problem") else ""
    answer = [{"content": row.get("response", "")}]
    conversations = [row.get("messages") or answer, *row.get(BRANCHES, ())]

    return {
        "conversations": [list(map(_turn, messages)) for messages in conversations],
        "note": excerpt(note),
        "label": excerpt(row.get("label", "")),
        "reward": "–" if reward is None else short(reward),
        # The colour tells where the reward lies between the lowest and the highest of the table.
        "share": 0.5 if reward is None or high <= low else round((reward - low) / (high - low), 3),
    }


def _turn(message: dict[str, Any]) -> tuple[str, str]:
    """Return author and text of a message; the model itself is not named."""
    role = message.get("role", "assistant")
    name = " ".join((role, message.get("name") or "")).strip()
    return "" if role == "assistant" else excerpt(name), excerpt(message.get("content") or "")
