"""A language model that judges responses, on an OpenAI-compatible server: `--reward judge`."""

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightrft.config.references import JUDGE_KEY
from lightrft.rewards.judge_settings import JudgeSettings
from lightrft.roles.endpoint import Endpoint
from lightrft.samples import Sample

TEMPLATE = """Judge a response to a prompt. Rate how correct, helpful and complete it is, from {low} (worst) to {high} (best).

[Prompt]
{prompt}

[Response]
{response}

Explain your judgement in a few sentences. Then write the rating on a line of its own, in this form:
Score: NUMBER"""
REQUESTS = 8
"""Number of requests that a call sends at once."""
ATTEMPTS = 3
"""Number of replies to ask for, until one contains a score; the first one is greedy."""


class Judge:
    """Reward function: the judge's score of each response, scaled to 0 to 1.

    Raises ValueError for a server that stays away, and for a response that no reply scores.
    """

    def __init__(self, settings: JudgeSettings, *, seconds: float, patience: float):
        """Set up the judge. A request takes at most `seconds`, and the server may be away for `patience` seconds.

        Raises ValueError for a template without {response}, or a pattern without one group.
        """
        self.settings = settings
        self.template = _read_template(settings.template)
        self.pattern = _compiled(settings.pattern)
        self._server = Endpoint("--judge_url", settings.url, JUDGE_KEY, seconds=seconds, patience=patience)

    def __call__(self, samples: list[Sample], **columns: list[Any]) -> list[float]:
        rows = [{name: values[row] for name, values in columns.items()} for row in range(len(samples))]
        with ThreadPoolExecutor(REQUESTS) as threads:
            return list(threads.map(self._score, samples, rows))

    def _score(self, sample: Sample, row: dict[str, Any]) -> float:
        given = {"low": f"{self.settings.low:g}", "high": f"{self.settings.high:g}"}
        text = filled(self.template, row | given | {"prompt": sample.prompt.text, "response": sample.text})
        replies = []
        for attempt in range(ATTEMPTS):
            request = self.settings.request(text, temperature=1.0 if attempt else 0.0)
            replies.append(_content(self._server.ask("POST", "chat/completions", request)))
            score = self._read(replies[-1])
            if score is not None:
                return score
        raise ValueError(
            f"no score from {self.settings.low:g} to {self.settings.high:g} (--judge_pattern, --judge_range) in "
            f"{ATTEMPTS} replies of the judge, the last of which is {replies[-1]!r:.300}"
        )

    def _read(self, reply: str) -> float | None:
        """Return the last score of a reply, from 0 to 1; None if there is none within the range."""
        low, high = self.settings.low, self.settings.high
        for found in reversed(list(self.pattern.finditer(reply))):
            try:
                score = float(found[1])
            except (TypeError, ValueError):
                continue
            if math.isfinite(score) and low <= score <= high:
                return (score - low) / (high - low)
        return None


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Replace each {name} of `values` once; other braces, and those of inserted texts, stay as they are."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda found: str(values[found[1]]), template)


def _content(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the judge's answer is not a chat completion: {answer!r:.300}") from error


def _read_template(path: str) -> str:
    if not path:
        return TEMPLATE
    try:
        template = Path(path).expanduser().read_text()
    except OSError as error:
        raise ValueError(f"--judge_template {path}: {error.strerror or error}") from error
    if "{response}" not in template:
        raise ValueError(f"--judge_template {path} lacks {{response}}, the place of the response")
    return template


def _compiled(pattern: str) -> re.Pattern:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--judge_pattern {pattern}: {error}") from error
    if compiled.groups != 1:
        raise ValueError(f"--judge_pattern {pattern} has {compiled.groups} groups instead of one, the score")
    return compiled
