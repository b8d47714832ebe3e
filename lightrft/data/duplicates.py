"""Leave out rows whose prompt has occurred before."""

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Literal

from loguru import logger

from lightrft.core.samples import Answer, Prompt
from lightrft.data.readers import is_first_rank


class Duplicates:
    """Prompts that have occurred, as digests of 16 bytes each.

    Two rows are duplicates if the prompts have the same text, as templates render it, and the
    same media. Rows that are learned need the same answer, too; `decode` returns the text of one. With "whitespace",
    all white space between words is equal, and white space around the text is ignored.
    """

    def __init__(
        self,
        mode: Literal["none", "exact", "whitespace"],
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        self.mode = mode
        self.decode = decode
        self.count = 0
        """Number of rows of the current data set that were omitted."""
        self._seen: set[bytes] = set()

    def omits(self, prompt: Prompt) -> bool:
        """Return True if the prompt has occurred before; otherwise it has now."""
        if self.mode == "none":
            return False

        digest = self.digest(prompt)
        if digest in self._seen:
            self.count += 1
            return True

        self._seen.add(digest)
        return False

    def digest(self, prompt: Prompt) -> bytes:
        """Return 16 bytes that duplicates have in common; the texts would stay in memory."""
        media = [
            (medium, item.name, item.source)
            for medium, items in sorted(prompt.multi_modal.items())
            for item in items
        ]
        key = [self._text(prompt.text), media, self._answers(prompt) if self.decode else None]
        return blake2b(repr(key).encode(), digest_size=16).digest()

    def report(self, flag: str, num_rows: int) -> None:
        """Log on the first rank how many rows of a data set were omitted, and begin to count anew.

        `num_rows` are left.
        """
        if self.mode != "none" and is_first_rank():
            logger.info(
                f"{flag}: {self.count} duplicates omitted (--deduplicate {self.mode}), {num_rows}"
                " rows are left"
            )
        self.count = 0

    def _text(self, text: str) -> str:
        return " ".join(text.split()) if self.mode == "whitespace" else text

    def _answers(self, prompt: Prompt) -> list[Any]:
        """Return all answers of the row: a pair has two."""
        answers = [value for value in prompt.columns.values() if isinstance(value, Answer)]
        if self.mode == "whitespace" and self.decode is not None:
            return [self._text(self.decode(answer.token_ids)) for answer in answers]
        return answers


def warn_of_learned_rows(
    learned: Sequence[Prompt],
    held_out: Sequence[Prompt],
    decode: Callable[[Sequence[int]], str] | None = None,
) -> None:
    """Warn on the first rank of held-out rows that are learned too; see Duplicates.

    A prompt that several learned rows have, such as the opening of an episode, says nothing.
    """
    if not held_out or not is_first_rank():
        return
    duplicates = Duplicates("exact", decode)
    rows = {duplicates.digest(prompt) for prompt in held_out}
    # Looking a text up takes a microsecond, where a digest takes twenty: most rows need none.
    texts = {prompt.text for prompt in held_out}
    counts = Counter(duplicates.digest(prompt) for prompt in learned if prompt.text in texts)
    if shared := sum(counts[row] == 1 for row in rows):
        logger.warning(
            f"--eval_data: {shared:,} of {len(rows):,} prompts are in --prompt_data too: an"
            " evaluation on rows that are learned does not show what the model does on others"
        )
