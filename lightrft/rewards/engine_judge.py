"""Let the model that is trained judge its own responses: `--judge_url engine`.

It runs in the engine that generated them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.references import RewardTerm, chosen_labels
from lightrft.config.sections import Config, longest_sequence
from lightrft.core.engine import Request, derived_seed
from lightrft.core.samples import Sample
from lightrft.data.rendering.template import chat_template, turn_end_ids
from lightrft.data.rendering.tokens import text_tokens
from lightrft.engine.requests import Sampling
from lightrft.rewards.judge_settings import ATTEMPTS, JudgeSettings
from lightrft.rewards.models import add_score
from lightrft.strategy.strategy import StrategyBase


@dataclass(eq=False)
class EngineJudge:
    """Scores of the judge; add() adds them to the rewards, and until then they are kept.

    Raises ValueError for settings that cannot be used.
    """

    term: RewardTerm
    config: Config
    strategy: StrategyBase
    tokenizer: Tokenizer
    _replies: dict[int, tuple[Sample, str]] = field(default_factory=dict)
    """id() of a sample -> the sample, and the judge's last reply."""

    def __post_init__(self) -> None:
        self.data = self.strategy.mesh.data
        self.settings = JudgeSettings(self.config.reward)

    def ask(self, samples: Sequence[Sample]) -> None:
        """Generate replies about samples that have none yet.

        All ranks call it together, best with the engine awake.
        """
        left = [
            sample
            for sample in samples
            if self._is_chosen(sample) and id(sample) not in self._replies
        ]

        for attempt in range(ATTEMPTS):
            # Ranks leave the loop together, because generating is collective.
            count = torch.tensor(float(len(left)))
            if not float(self.data.sum(count)):
                return
            for sample, reply in zip(left, self._generated(left, attempt), strict=True):
                self._replies[id(sample)] = sample, reply
            left = [
                sample
                for sample in left
                if self.settings.score(self._replies[id(sample)][1]) is None
            ]

    def add(self, samples: Sequence[Sample]) -> list[tuple[Sample, str]]:
        """Add the weighted scores to the rewards; return the samples without a score.

        Each of them comes with a message. All ranks call it together.
        """
        self.ask(samples)
        failed = []
        for sample in filter(self._is_chosen, samples):
            _, reply = self._replies.pop(id(sample))
            score = self.settings.score(reply)
            if score is None:
                failed.append((sample, self.settings.no_score(reply)))
            else:
                add_score(sample, self.term.label, self.term.weight * score)
        return failed

    def _is_chosen(self, sample: Sample) -> bool:
        label = self.term.label
        return label in chosen_labels(sample.prompt.columns, self.config.reward.reward_key, {label})

    def _generated(self, samples: list[Sample], attempt: int) -> list[str]:
        """Return a reply for each sample; empty if the request is too long for the engine."""
        texts = [self.settings.text(sample, sample.prompt.columns) for sample in samples]
        prompts = [self._tokens(text) for text in texts]
        most = longest_sequence(self.config) - self.config.reward.judge_max_tokens
        ends = tuple(
            turn_end_ids(replace(self.config.data, apply_chat_template=True), self.tokenizer)
        )
        sampling = Sampling(
            max_tokens=self.config.reward.judge_max_tokens,
            temperature=1.0 if attempt else 0.0,
            stop_token_ids=ends,
        )
        fitting = [index for index, ids in enumerate(prompts) if len(ids) <= most]
        requests = [
            Request(
                prompts[index],
                sampling=sampling,
                seeds=(derived_seed("judge", attempt, texts[index]),),
            )
            for index in fitting
        ]

        replies = [""] * len(samples)
        completions = self.strategy.host.generate(sampling, requests, sleep_after=True)
        for index, (completion,) in zip(fitting, completions, strict=True):
            replies[index] = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)

        return replies

    def _tokens(self, text: str) -> list[int]:
        if not self.tokenizer.chat_template:
            return text_tokens(self.tokenizer, text)
        template = chat_template(self.config.data, self.tokenizer)
        rendered = template.render([{"role": "user", "content": text}], answer_follows=True)
        return text_tokens(self.tokenizer, rendered, special_tokens=False)
