"""Drafts from what the samples of a group have said so far, such as the other samples of a
prompt.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

CONTEXT = 3
"""Number of tokens after which a book knows the next one."""
WINDOW = 64
"""Number of foreseen tokens over which a book's accuracy is averaged, with less weight on older
ones."""
LONGEST_REST = 7
"""Maximum number of steps without drafts before they are considered again; the number grows while
drafts do not pay."""
MOST_ENTRIES = 2**20
"""Maximum number of entries of all books together, which take about 200 bytes each; beyond it
nothing new is learned."""


class Book:
    """The token that last followed each CONTEXT tokens in the text of a group, and how often it was
    the next one again.
    """

    def __init__(self) -> None:
        self.followers: dict[tuple[int, ...], int] = {}
        self._expected = 2.0
        self._accepted = 0.0

    @property
    def accuracy(self) -> float:
        """Return the probability that a drafted token is accepted: the share of expected tokens
        that were accepted.

        It needs no verified draft, and is 0 at first, as if two tokens had been expected wrongly.
        """
        return self._accepted / self._expected

    def learn(self, token_ids: list[int], sampled: bool) -> None:
        """Learn each token after the first CONTEXT ones; `sampled` tokens, unlike those of prompts,
        count for the accuracy.
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
    """Number of plain steps by which a step is longer that verifies a draft of full length for each
    request, by batch size.
    """

    def __init__(self, measured: dict[int, float]):
        """Set up from measurements: batch size -> cost.

        Sizes above the largest have its cost; without any, drafts are free.
        """
        self.sizes = sorted(measured)
        self.measured = [measured[size] for size in self.sizes]

    def __str__(self) -> str:
        return ", ".join(
            f"{cost:.0%} at batch size {size}"
            for size, cost in zip(self.sizes, self.measured, strict=True)
        )

    def of(self, batch_size: int) -> float:
        if not self.sizes:
            return 0.0
        return self.measured[min(bisect_left(self.sizes, batch_size), len(self.sizes) - 1)]


class TextDrafter:
    """Drafter from what samples of a group have said, in the form that vLLM takes as a
    `custom_class`.

    It reads each new token once, several at a time while drafts do not pay. Drafts of a step are
    verified if the accepted tokens that they are expected to bring take longer to generate than the
    verification takes. This depends on numbers that all ranks of the engine have, and changes no
    sample.
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
        self._books: dict[str, Book] = {}
        self._groups: dict[str, tuple[str, int]] = {}
        self._running: Counter[str] = Counter()
        self._read: dict[str, int] = {}
        self._num_entries = 0

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing: vLLM calls it for drafters with a model."""

    def begin(self, name: str, group: str, num_prompt: int) -> None:
        """Add the request `name`, whose prompt has `num_prompt` tokens, to a group."""
        self._groups[name] = group, num_prompt
        self._running[group] += 1
        self._rest = self._last_rest = 0

    def end(self, name: str, token_ids: list[int]) -> None:
        """Learn the rest of a request's tokens, prompt and response; after the last request of a
        group, forget the group.
        """
        group, _ = self._groups[name]
        self._running[group] -= 1
        if self._running[group]:
            self._learn(name, lambda start: token_ids[start:], len(token_ids))
        elif book := self._books.pop(group, None):
            self._num_entries -= len(book.followers)
        del self._groups[name]
        self._read.pop(name, None)

    def clear(self) -> None:
        """Forget everything; no request may be running."""
        for state in (self._books, self._groups, self._running, self._read):
            state.clear()
        self._num_entries = 0

    def skips_step(self) -> bool:
        """Count a step, and return True if nothing is to be drafted in it, because drafts did not
        pay in the steps before.
        """
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

        `num_tokens` [R] and `token_ids` [R, max_model_len] are the tokens of each request, prompt
        and response, so far.
        """
        if self.forced:
            return [[0] * self.most if new else [] for new in sampled]

        cost = self.costs.of(len(sampled)) * len(sampled)
        expected = 0.0

        drafts: list[list[int]] = [[] for _ in sampled]
        if cost < self.most * len(sampled):
            for row, new in enumerate(sampled):
                if new:
                    drafts[row], gain = self._draft(row, int(num_tokens[row]), token_ids[row])
                    expected += gain

        worthwhile = expected > cost
        self._last_rest = 0 if worthwhile else min(LONGEST_REST, 2 * self._last_rest + 1)
        self._rest = self._last_rest

        return drafts if worthwhile else [[] for _ in sampled]

    def _draft(self, row: int, end: int, token_ids: np.ndarray) -> tuple[list[int], float]:
        """Return a draft and the number of its tokens that are expected to be accepted."""
        name = self.batch.req_ids[row].partition("-")[0]  # vLLM appends random letters
        if name not in self._groups:
            return [], 0.0

        book = self._learn(name, lambda start: token_ids[start:end].tolist(), end)
        most = min(self.most, self.max_model_len - end - 1)
        draft = (
            book.draft(tuple(token_ids[end - CONTEXT : end].tolist()), most)
            if end >= CONTEXT
            else []
        )

        return draft, sum(book.accuracy**place for place in range(1, len(draft) + 1))

    def _learn(self, name: str, text: Callable[[int], list[int]], end: int) -> Book:
        """Learn the unread tokens up to `end` of a request; text(start) returns those from `start`
        on.
        """
        (group, num_prompt), read = self._groups[name], self._read.get(name, 0)
        book = self._books.setdefault(group, Book())
        if read < end and self._num_entries < MOST_ENTRIES:
            before = len(book.followers)
            if read < num_prompt:
                book.learn(text(0)[:num_prompt], sampled=False)
            book.learn(text(max(0, max(read, num_prompt) - CONTEXT)), sampled=True)
            self._num_entries += len(book.followers) - before
        self._read[name] = end
        return book
