"""Tokens of texts that follow one another, with a tokenizer's special tokens only once."""

from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.config.values import check_text
from lightrft.core.samples import Answer

ANCHOR = "\n"
"""Text before an answer that is tokenized alone, so that no space is written before it."""


def text_tokens(tokenizer: Tokenizer, text: str, *, special_tokens: bool = True) -> list[int]:
    """Return the tokens of a text that begins a sequence.

    The tokens that the tokenizer adds at a beginning are added unless the text has them. Those at
    an end are not added, because an answer follows. A chat template writes its own special tokens,
    so `special_tokens` is False for its texts. Raise ValueError for half of a character.
    """
    check_text(text)
    plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not special_tokens:
        return plain
    complete: list[int] = tokenizer(text)["input_ids"]
    counts = range(len(complete) - len(plain) + 1)
    added = next(
        (complete[:count] for count in counts if complete[count : count + len(plain)] == plain), []
    )
    return plain if plain[: len(added)] == added else added + plain


def consecutive_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: bool = False
) -> list[list[int]]:
    """Return the tokens of consecutive texts as in the whole text.

    No engine can generate a token across a border: there, each text has its own tokens.
    """
    first, *rest = texts
    begin = partial(text_tokens, tokenizer, special_tokens=special_tokens)
    pieces = [begin(first), *(text_tokens(tokenizer, text, special_tokens=False) for text in rest)]
    tokens = begin("".join(texts))
    if [token for piece in pieces for token in piece] == tokens:
        return pieces

    beginnings = [begin(beginning) for beginning in accumulate(texts)]
    if all(tokens[: len(beginning)] == beginning for beginning in beginnings):
        return [tokens[start:end] for start, end in pairwise([0, *map(len, beginnings)])]
    return [pieces[0], *(_inner_tokens(tokenizer, text) for text in rest)]


def _inner_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text inside of another one.

    Some tokenizers write a space before a text; here there is none.
    """

    tokens = partial(text_tokens, tokenizer, special_tokens=False)
    anchor = tokens(ANCHOR)
    anchored = tokens(ANCHOR + text)
    return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else tokens(text)


def without_ends(text: str, ends: Collection[str]) -> str:
    """Return an answer without the end tokens that data rendered beforehand have after it."""
    while end := next((end for end in ends if end and text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def marked_texts(
    prompt: str, answers: Sequence[Answer], tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """Return the text of a prompt and the texts of answers to it, with True for what is learned."""
    texts = [(prompt, False)]
    for answer in answers:
        both = zip(answer.token_ids, answer.learned, strict=True)
        for learned, tokens in groupby(both, key=itemgetter(1)):
            texts.append((tokenizer.decode([token for token, _ in tokens]), learned))
    return texts
