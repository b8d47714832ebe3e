"""Stop strings: texts that end a response, in every engine at the same token."""

from bisect import bisect_left
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from lightrft.types import Completion

BYTES_OF_A_CHARACTER = 4
"""At most, and a token is at least one byte: so many tokens hold one character."""


class StopStrings:
    """Looks for any of some strings in decoded tokens; special tokens are text here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]):
        self.tokenizer, self.stop = tokenizer, stop
        self.window = BYTES_OF_A_CHARACTER * (max(map(len, stop)) + 1)

    def reached(self, token_ids: list[int], every: int = 1) -> bool:
        """Whether the last tokens have one; to be asked after every token, or `every` so many."""
        return self._inside(token_ids[-self.window - every + 1 :])

    def cut(self, completion: Completion) -> Completion:
        """Without what follows the token that completes the first of them."""
        tokens = completion.token_ids
        if not self._inside(tokens):
            return completion
        length = bisect_left(range(len(tokens)), True, key=lambda count: self._inside(tokens[:count]))
        return replace(completion, token_ids=tokens[:length], logprobs=completion.logprobs[:length], finish_reason="stop")

    def _inside(self, token_ids: list[int]) -> bool:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self.stop)
