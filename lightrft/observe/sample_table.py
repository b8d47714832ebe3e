"""The samples of a run as an HTML table: its first beside its last."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightrft.observe.page import safe
from lightrft.observe.text import is_number, short

SAMPLES_PER_END = 6
ENDS = 4 * SAMPLES_PER_END
"""Rows of the beginning, and of the end, that the samples are chosen from."""


def sample_table(rows: Sequence[dict[str, Any]]) -> str:
    """What the model said first and last, so that one sees what it learned."""
    if not rows:
        return ""
    rewards = [row["reward"] for row in rows if is_number(row.get("reward"))]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    first = _chosen(rows, SAMPLES_PER_END)
    last = [row for row in _chosen(list(reversed(rows)), SAMPLES_PER_END) if row["step"] > first[-1]["step"]]
    groups = [("At the beginning", first), ("At the end", last)]
    body = "".join(_sample_group(title, chosen, low, high) for title, chosen in groups if chosen)
    head = "".join(f"<th>{name}</th>" for name in ("Step", "Prompt", "Response", "Label", "Reward"))
    return f'<h2>Samples</h2><div class="card samples"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def _chosen(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Of the first rows, different prompts before further answers to the same; in the order of their steps."""
    seen: Counter[str] = Counter()
    ranked = []
    for row in rows[:ENDS]:
        ranked.append((seen[str(row["prompt"])], row))
        seen[str(row["prompt"])] += 1
    ranked.sort(key=lambda pair: pair[0])
    return sorted((row for _, row in ranked[:count]), key=lambda row: row["step"])


def _sample_group(title: str, rows: Sequence[dict[str, Any]], low: float, high: float) -> str:
    return f'<tbody class="group"><tr><th colspan="5">{title}</th></tr>{"".join(_sample(row, low, high) for row in rows)}</tbody>'


def _sample(row: dict[str, Any], low: float, high: float) -> str:
    reward = row.get("reward")
    share = (reward - low) / (high - low) if is_number(reward) and high > low else 0.5
    length = f"{row['length']} tokens" if "length" in row else ""
    note = f"{length}, cut off" if row.get("finish_reason") == "length" else length
    prompt, response, label = (f'<div class="text">{safe(row.get(key, ""))}</div>' for key in ("prompt", "response", "label"))
    images = f'<div class="small">{safe(", ".join(row["images"]))}</div>' if row.get("images") else ""
    return (
        f'<tr><td class="narrow" data-label="Step"><div>{row["step"]}</div></td>'
        f'<td data-label="Prompt"><div>{prompt}{images}</div></td>'
        f'<td data-label="Response"><div>{response}<div class="small">{safe(note)}</div></div></td>'
        f'<td data-label="Label">{label}</td>'
        f'<td class="narrow" data-label="Reward"><div><span class="reward" style="--share: {share:.3f}">'
        f"{short(reward) if is_number(reward) else '–'}</span></div></td></tr>"
    )
