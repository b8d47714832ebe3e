"""Draft tokens by looking up n-grams in the other responses of the group, such as to one prompt."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

CONTEXT = 3
"""How many tokens a table looks at to know the next one."""
WINDOW = 64
"""Foreseen tokens over which a table's accuracy is averaged; older ones weigh less."""
LONGEST_REST = 7
"""Most steps without drafts before they are considered again. The number of steps grows while
drafts do not pay."""
MOST_ENTRIES = 2**20
"""Most entries of all tables together, about 200 bytes each. Beyond that nothing new is learned."""


class NgramTable:
    """Table of n-grams: the token that last followed each CONTEXT tokens in a group's text.

    It also counts how often that token was the next one again.
    """

    def __init__(self) -> None:
        self.followers: dict[tuple[int, ...], int] = {}
        self._expected = 2.0
        self._accepted = 0.0

    @property
    def accuracy(self) -> float:
        """Return how likely a drafted token is accepted: the share of expected tokens that were.

        This needs no verified draft. It is 0 at first, as if two tokens had been expected wrongly.
        """
        return self._accepted / self._expected

    def learn(self, token_ids: list[int], sampled: bool) -> None:
        """Learn each token after the first CONTEXT ones.

        `sampled` tokens count for the accuracy, and tokens of prompts do not.
        """
        contexts = zip(*(token_ids[start:] for start in range(CONTEXT)), strict=False)
        if not sampled:
            self.followers.update(zip(contexts, token_ids[CONTEXT:], strict=False))
            return

        for context, token in zip(contexts, token_ids[CONTEXT:], strict=False):
            expected = self.followers.get(context)
            if expected is not None:
                self._expected += 1
                self._accepted += expected == token
            self.followers[context] = token

        # Halving what has been counted lets the accuracy follow a text that changes.
        if self._expected > WINDOW:
            scale = WINDOW / (2 * self._expected)
            self._expected = self._expected * scale
            self._accepted = self._accepted * scale

    def draft(self, context: tuple[int, ...], most: int) -> list[int]:
        """Return up to `most` tokens that are expected after `context`."""
        draft: list[int] = []
        while len(draft) < most and (token := self.followers.get(context)) is not None:
            draft.append(token)
            context = (*context[1:], token)
        return draft


class Costs:
    """Cost of verifying a full draft for each request, in plain steps.

    The cost depends on the batch size.
    """

    def __init__(self, measured: dict[int, float]):
        """Set up from measurements: batch size -> cost.

        Larger sizes cost as much as the largest one measured. Without any, drafts are free.
        """
        self.sizes = sorted(measured)
        self.measured = [measured[size] for size in self.sizes]

    def __str__(self) -> str:
        costs = zip(self.sizes, self.measured, strict=True)
        return ", ".join(f"{cost:.0%} at batch size {size}" for size, cost in costs)

    def of(self, batch_size: int) -> float:
        if not self.sizes:
            return 0.0
        return self.measured[min(bisect_left(self.sizes, batch_size), len(self.sizes) - 1)]


class TextDrafter:
    """Drafter that looks up what samples of a group have said, as a `custom_class` of vLLM.

    It reads each new token once, several at a time while drafts do not pay. A step verifies drafts
    if generating the tokens that they are expected to bring would take longer than verification.
    This depends on numbers that all ranks of the engine have, and changes no sample.
    """

    def __init__(self, vllm_config: Any):
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.batch: Any = None
        """Requests that run in vLLM's model runner."""
        self.costs = Costs({})
        self.forced: bool | None = None
        """During a measurement: True for drafts of full length in every step, False for none."""
        self._rest = self._last_rest = 0
        self._tables: dict[str, NgramTable] = {}
        self._groups: dict[str, tuple[str, int]] = {}
        self._running: Counter[str] = Counter()
        self._read: dict[str, int] = {}
        self._num_entries = 0

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing: vLLM calls it for drafters with a model."""

    def begin(self, name: str, group: str, num_prompt: int) -> None:
        """Add the request `name`, with `num_prompt` tokens in the prompt, to a group."""
        self._groups[name] = group, num_prompt
        self._running[group] += 1
        self._rest = self._last_rest = 0

    def end(self, name: str, token_ids: list[int]) -> None:
        """Learn the rest of a request's tokens; forget the group after the last request of it."""
        group, _ = self._groups[name]
        self._running[group] -= 1
        if self._running[group]:
            self._learn(name, lambda start: token_ids[start:], len(token_ids))
        elif table := self._tables.pop(group, None):
            self._num_entries -= len(table.followers)
        del self._groups[name]
        self._read.pop(name, None)

    def clear(self) -> None:
        """Forget everything; no request may be running."""
        for state in (self._tables, self._groups, self._running, self._read):
            state.clear()
        self._num_entries = 0

    def skips_step(self) -> bool:
        """Count a step; return True if it needs no drafts because they did not pay before."""
        if self.forced is not None:
            return not self.forced
        self._rest -= 1
        return self._rest >= 0

    def propose(
        self,
        sampled: list[list[int]],
        num_tokens: np.ndarray,
        token_ids: np.ndarray,
        **options: Any,
    ) -> list[list[int]]:
        """Return a draft for each request of the step, empty for requests that sampled nothing.

        `num_tokens` [R] and `token_ids` [R, max_model_len] are the tokens of each request so far,
        prompt and response.
        """
        if self.forced:
            return [[0] * self.most if new else [] for new in sampled]

        cost = self.costs.of(len(sampled)) * len(sampled)
        expected = 0.0

        drafts: list[list[int]] = [[] for _ in sampled]
        if cost < self.most * len(sampled):
            # Looking for drafts takes time too, so it is skipped where even full drafts cannot pay.
            for row, new in enumerate(sampled):
                if new:
                    drafts[row], gain = self._draft(row, int(num_tokens[row]), token_ids[row])
                    expected += gain

        worthwhile = expected > cost
        self._last_rest = 0 if worthwhile else min(LONGEST_REST, 2 * self._last_rest + 1)
        self._rest = self._last_rest

        return drafts if worthwhile else [[] for _ in sampled]

    def _draft(self, row: int, end: int, token_ids: np.ndarray) -> tuple[list[int], float]:
        """Return a draft, and how many tokens in it are expected to be accepted."""
        name = self.batch.req_ids[row].partition("-")[0]  # vLLM appends random letters
        if name not in self._groups:
            return [], 0.0

        table = self._learn(name, lambda start: token_ids[start:end].tolist(), end)
        most = min(self.most, self.max_model_len - end - 1)
        draft = []
        if end >= CONTEXT:
            draft = table.draft(tuple(token_ids[end - CONTEXT : end].tolist()), most)

        return draft, sum(table.accuracy**position for position in range(1, len(draft) + 1))

    def _learn(self, name: str, text: Callable[[int], list[int]], end: int) -> NgramTable:
        """Learn a request's unread tokens up to `end`; text(start) has the tokens from start on."""
        (group, num_prompt), read = self._groups[name], self._read.get(name, 0)
        table = self._tables.setdefault(group, NgramTable())
        if read < end and self._num_entries < MOST_ENTRIES:
            before = len(table.followers)
            if read < num_prompt:
                table.learn(text(0)[:num_prompt], sampled=False)
            table.learn(text(max(0, max(read, num_prompt) - CONTEXT)), sampled=True)
            self._num_entries += len(table.followers) - before
        self._read[name] = end
        return table
