"""Find where the steps of an answer end.

The training of a process reward model and the responses that it scores are divided in the same way.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.errors import ConfigError

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is only a piece of a character."""
BYTES_OF_A_CHARACTER = 4
"""Maximum number of bytes of a character.

A token has at least one byte, so this is also the maximum number of tokens of a character.
"""


class StepEnds:
    """Search for the tokens that complete a separator, however its text is divided into tokens."""

    def __init__(self, tokenizer: Tokenizer, separator: str):
        """Set up the search. Raise ConfigError for an empty separator."""
        if not separator:
            raise ConfigError("--step_separator is empty, so no step would have an end")
        self.tokenizer = tokenizer
        self.separator = separator
        self.window = BYTES_OF_A_CHARACTER * len(separator)
        self._may_end: dict[int, bool] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[int]:
        """Return the index of the last token of each step.

        Such a token completes a separator, or is the last of all. A step that would consist of
        spaces belongs to the one before it.
        """
        ends: list[int] = []
        start = 0
        for position, token in enumerate(token_ids):
            if position < len(token_ids) - 1 and not self._ends_separator(
                token, token_ids[max(start, position - self.window) : position]
            ):
                continue
            if ends and not self._text(token_ids[start : position + 1]).strip():
                ends[-1] = position
            else:
                ends.append(position)
            start = position + 1

        return ends

    def _ends_separator(self, token: int, before: Sequence[int]) -> bool:
        if token not in self._may_end:
            text = self._text([token])
            self._may_end[token] = self.separator[-1] in text or INCOMPLETE in text
        return self._may_end[token] and self.separator in self._text([*before, token])

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
