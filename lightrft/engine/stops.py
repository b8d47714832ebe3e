"""Stop strings: texts that end a response, at the same token in every engine."""

from bisect import bisect_left
from dataclasses import replace

from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.core.samples import Completion

BYTES_OF_A_CHARACTER = 4
"""Most bytes of a character, and so the most tokens: a token has at least one byte."""


class StopStrings:
    """Searches for any of several strings in decoded tokens, including special tokens."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.tokenizer = tokenizer
        self.stop = stop
        self.window = BYTES_OF_A_CHARACTER * (max(map(len, stop)) + 1)

    def match(self, token_ids: list[int], every: int = 1) -> bool:
        """Return True if the last tokens contain a stop string.

        Call it after every token, or after each `every` tokens.
        """
        return self._inside(token_ids[-self.window - every + 1 :])

    def cut(self, completion: Completion) -> Completion:
        """Cut off the tokens after the one that completes the first stop string."""
        tokens = completion.token_ids
        if not self._inside(tokens):
            return completion

        # Longer beginnings contain whatever shorter ones do, so bisection finds the first.
        length = bisect_left(
            range(len(tokens)), True, key=lambda count: self._inside(tokens[:count])
        )
        names = ("token_ids", "logprobs", "weight_versions")
        shortened = {name: getattr(completion, name)[:length] for name in names}

        if completion.experts is not None:
            kept = len(completion.experts) - (len(tokens) - length)
            shortened["experts"] = completion.experts[:kept]

        return replace(completion, **shortened, finish_reason="stop")

    def _inside(self, token_ids: list[int]) -> bool:
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self.stop)
