"""Settings of the language model that judges responses (judge.py)."""

from dataclasses import dataclass
from typing import Any, Self

from lightrft.config.sections import RewardSection


@dataclass(frozen=True)
class JudgeSettings:
    """Where the judge is, what it is asked, and how its reply is read: the fields of the configuration."""

    url: str
    model: str
    template: str
    pattern: str
    low: float
    high: float
    max_tokens: int

    @classmethod
    def of(cls, section: RewardSection) -> Self:
        low, high = section.judge_range
        return cls(section.judge_url, section.judge_model, section.judge_template, section.judge_pattern, low, high,
                   section.judge_max_tokens)  # fmt: skip

    def request(self, text: str, *, temperature: float) -> dict[str, Any]:
        """Return the request for a chat completion."""
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": temperature, "max_tokens": self.max_tokens}
