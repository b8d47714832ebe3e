"""A language model that judges responses, on an OpenAI-compatible server: `--reward judge`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightrft.algorithms.roles.endpoint import Endpoint
from lightrft.config.references import JUDGE_KEY
from lightrft.config.sections import RewardSection
from lightrft.core.samples import Sample
from lightrft.rewards.judge_settings import ATTEMPTS, JudgeSettings

REQUESTS = 8
"""Number of requests that a call sends at once."""


class Judge:
    """Reward function: the judge's score of each response, from 0 to 1.

    Raises ValueError for a server that stays away, and for a response that no reply scores.
    """

    def __init__(self, section: RewardSection, **limits: float):
        """Set up the judge. `limits` go to Endpoint().

        Raises ValueError for settings that cannot be used.
        """
        self.settings = JudgeSettings(section)
        self._server = Endpoint("--judge_url", section.judge_url, JUDGE_KEY, **limits)

    def __call__(self, samples: list[Sample], **columns: list[Any]) -> list[float]:
        rows = [
            {name: values[row] for name, values in columns.items()} for row in range(len(samples))
        ]
        with ThreadPoolExecutor(REQUESTS) as threads:
            return list(threads.map(self._score, samples, rows))

    def _score(self, sample: Sample, row: dict[str, Any]) -> float:
        messages = [{"role": "user", "content": self.settings.text(sample, row)}]
        reply = ""
        for attempt in range(ATTEMPTS):
            request = {
                "model": self.settings.section.judge_model,
                "messages": messages,
                "temperature": 1.0 if attempt else 0.0,
                "max_tokens": self.settings.section.judge_max_tokens,
            }
            reply = _content(self._server.ask("POST", "chat/completions", request))
            score = self.settings.score(reply)
            if score is not None:
                return score

        raise ValueError(self.settings.no_score(reply))


def _content(answer: Any) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the judge's answer is not a chat completion: {answer!r:.300}") from error
