"""Write the requests of the reward `judge` to a language model, and read the replies."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightrft.config.sections import RewardSection
from lightrft.config.tables import table
from lightrft.core.samples import Sample
from lightrft.rewards.functions import as_text

JUDGE_TEMPLATE: str = table("rewards/judge")["template"]
ATTEMPTS = 3
"""Number of replies to ask for, until one contains a score; the first one is greedy."""


@dataclass(frozen=True)
class JudgeSettings:
    """Template of the judge's requests, and the pattern and the range of its scores."""

    section: RewardSection

    def __post_init__(self) -> None:
        """Raise ValueError for a template without {response}, or a pattern without one group."""
        _template(self.section.judge_template)
        _compile(self.section.judge_pattern)

    def text(self, sample: Sample, columns: Mapping[str, Any]) -> str:
        """Return the text that asks for a score of the sample; `columns` has the row's columns."""
        low, high = self.section.judge_range
        texts = {"prompt": sample.prompt.text, "response": sample.text}
        filled_in = {**columns, **texts, "low": f"{low:g}", "high": f"{high:g}"}
        return fill_template(_template(self.section.judge_template), filled_in)

    def score(self, reply: str) -> float | None:
        """Return the last score of a reply, scaled to 0 to 1.

        None if there is none within the range.
        """
        low, high = self.section.judge_range
        for match in reversed(list(_compile(self.section.judge_pattern).finditer(reply))):
            try:
                score = float(match[1])
            except (TypeError, ValueError):
                continue
            if math.isfinite(score) and low <= score <= high:
                return (score - low) / (high - low)
        return None

    def no_score(self, reply: str) -> str:
        """Return a message for a response that no reply scores; `reply` is the last one."""
        low, high = self.section.judge_range
        return (
            f"no score from {low:g} to {high:g} (--judge_pattern, --judge_range) in"
            f" {ATTEMPTS} replies of the judge, the last of which is {reply!r:.300}"
        )


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    """Replace each {name} of `values` once.

    Other braces stay as they are, also inside of inserted texts.
    """
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: as_text(values[match[1]]), template)


@lru_cache
def _template(path: str) -> str:
    if not path:
        return JUDGE_TEMPLATE
    try:
        template = Path(path).expanduser().read_text()
    except OSError as error:
        raise ValueError(f"--judge_template {path}: {error.strerror or error}") from error
    if "{response}" not in template:
        raise ValueError(f"--judge_template {path} lacks {{response}}, the place of the response")
    return template


def _compile(pattern: str) -> re.Pattern:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--judge_pattern {pattern}: {error}") from error
    if compiled.groups != 1:
        raise ValueError(
            f"--judge_pattern {pattern} has {compiled.groups} groups instead of one, the score"
        )
    return compiled
