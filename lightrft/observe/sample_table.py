"""Show samples of a run as an HTML table: the first prompts and the last, with some responses."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lightrft.observe.page import picture, player, safe
from lightrft.observe.sinks import BRANCHES, SOUNDS, THUMBNAILS
from lightrft.observe.text import is_number, short

PROMPTS_PER_END = 6
RESPONSES_PER_PROMPT = 4
ENDS = 256
"""Rows at the beginning, and at the end, that samples are chosen from."""
BRANCH = '<div class="small">another conversation of the episode:</div>'

Group = list[dict[str, Any]]
"""Rows of one prompt in one step."""


def sample_table(rows: Sequence[dict[str, Any]], group_size: int = 0) -> str:
    """Show the model's first and last responses, and how responses to one prompt differ.

    `group_size` is the number of responses to a prompt; the file may have fewer.
    """
    if not rows:
        return ""

    rewards = [row["reward"] for row in rows if is_number(row.get("reward"))]
    low = min(rewards, default=0.0)
    high = max(rewards, default=1.0)
    groups = _groups(rows)
    first = _choose(groups)
    # In a short run both ends are the same rows, and they should appear once.
    last = [group for group in _choose(groups[::-1]) if group[0]["step"] > first[-1][0]["step"]]
    ends = [("At the beginning", first), ("At the end", last)]
    body = "".join(_end(title, chosen, low, high) for title, chosen in ends if chosen)
    written = max(map(len, groups))
    note = (
        f'<p class="small">Of the {group_size} responses to a prompt, {written} are written to'
        " samples.jsonl (--num_trajectories_to_save).</p>"
        if written < group_size
        else ""
    )
    head = "".join(f"<th>{name}</th>" for name in ("Step", "Prompt", "Response", "Label", "Reward"))

    return (
        f'<h2>Samples</h2>{note}<div class="card'
        f' samples"><table><thead><tr>{head}</tr></thead>{body}</table></div>'
    )


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
    return sorted(
        (group for _, group in ranked[:PROMPTS_PER_END]), key=lambda group: group[0]["step"]
    )


def _end(title: str, groups: Sequence[Group], low: float, high: float) -> str:
    rows = "".join(_group(group, low, high) for group in groups)
    return f'<tbody class="group"><tr><th colspan="5">{title}</th></tr>{rows}</tbody>'


def _group(group: Group, low: float, high: float) -> str:
    """Show the prompt once, with the best, the worst and some other responses."""
    responses = _spread(group)
    return "".join(
        _sample(row, low, high, _prompt(group, len(responses)) if row is responses[0] else None)
        for row in responses
    )


def _spread(group: Group) -> Group:
    """Choose responses evenly from the highest reward to the lowest, if there are too many."""
    ordered = sorted(group, key=lambda row: -row["reward"] if is_number(row.get("reward")) else 0.0)
    if len(ordered) <= RESPONSES_PER_PROMPT:
        return ordered
    return [
        ordered[place * (len(ordered) - 1) // (RESPONSES_PER_PROMPT - 1)]
        for place in range(RESPONSES_PER_PROMPT)
    ]


def _prompt(group: Group, num_shown: int) -> str:
    row = group[0]
    names = [
        str(name) for medium in ("images", "videos", "audios") for name in row.get(medium) or ()
    ]
    pictures = "".join(map(picture, row.get(THUMBNAILS) or (), names)) + "".join(
        map(player, row.get(SOUNDS) or ())
    )
    notes = [", ".join(names)] if names else []
    rewards = [row["reward"] for row in group if is_number(row.get("reward"))]
    if len(group) > 1 and rewards:
        notes.append(f"{num_shown} of {len(group)} responses, mean reward {short(fmean(rewards))}")
    small = "".join(f'<div class="small">{safe(note)}</div>' for note in notes)
    thumbnails = f'<div class="thumbnails">{pictures}</div>' if pictures else ""

    return f'<div class="text">{safe(row.get("prompt", ""))}</div>{thumbnails}{small}'


def _turn(message: dict[str, Any]) -> str:
    """Show a message of an episode, with the role of the author unless the model wrote it."""
    role = message.get("role", "assistant")
    name = " ".join((role, message.get("name") or "")).strip()
    heading = "" if role == "assistant" else f'<div class="small">{safe(name)}</div>'
    return f'{heading}<div class="text">{safe(message.get("content") or "")}</div>'


def _sample(row: dict[str, Any], low: float, high: float, prompt: str | None) -> str:
    """Show a response; without a `prompt` it belongs to the one above."""
    reward = row.get("reward")
    # The colour tells where the reward lies between the lowest and the highest of the table.
    share = (reward - low) / (high - low) if is_number(reward) and high > low else 0.5
    length = f"{row['length']} tokens" if "length" in row else ""
    note = f"{length}, truncated" if row.get("finish_reason") == "length" else length
    note += f"; the episode failed: {row['problem']}" if row.get("problem") else ""
    label = f'<div class="text">{safe(row.get("label", ""))}</div>'
    conversations = [
        row.get("messages") or [{"content": row.get("response", "")}],
        *row.get(BRANCHES, ()),
    ]
    response = BRANCH.join("".join(map(_turn, messages)) for messages in conversations)
    step = row["step"] if prompt is not None else ""

    return (
        f'<tr{"" if prompt is not None else " class=more"}><td class="narrow"'
        f' data-label="Step"><div>{step}</div></td>'
        f'<td data-label="Prompt"><div>{prompt or ""}</div></td>'
        f'<td data-label="Response"><div>{response}<div class="small">{safe(note)}</div></div></td>'
        f'<td data-label="Label">{label}</td>'
        '<td class="narrow" data-label="Reward"><div><span class="reward" style="--share:'
        f' {share:.3f}">'
        f"{short(reward) if is_number(reward) else '–'}</span></div></td></tr>"
    )
