"""Supervised examples: ids and mask by hand.

A mask off by one would learn the prompt, or never learn to stop.
"""

import pytest

from lightrft.config import DataSection
from lightrft.core.samples import Prompt
from lightrft.data.conversations import make_example, supervised_batch
from lightrft.data.prompts import RowContext, too_long
from tiny import EOS, byte_tokenizer


def prompt(text: str, label) -> Prompt:
    section = DataSection()
    return make_example(RowContext(section, byte_tokenizer()), {"input": text, "label": label})


def test_answer_and_end_token_are_learned():
    batch = supervised_batch([prompt("ab=", "xy"), prompt("c", "z")], [4, 9])
    assert batch.input_ids.tolist() == [97, 98, 61, 120, 121, EOS, 99, 122, EOS]
    assert batch.loss_mask.tolist() == [False, False, False, True, True, True, False, True, True]
    assert batch.lengths.tolist() == [6, 3] and batch.rows.tolist() == [4, 9]
    assert batch.loss_mask.sum() == 5


def test_no_rows():
    batch = supervised_batch([], [])
    assert (
        len(batch) == 0
        and str(batch.input_ids.dtype) == "torch.int64"
        and str(batch.loss_mask.dtype) == "torch.bool"
    )


@pytest.mark.parametrize("label", [None, "", 5, ["a"]])
def test_an_answer_that_cannot_be_learned(label):
    with pytest.raises(ValueError) as error:
        prompt("a", label)
    assert repr(label) in str(error.value) and "--label_key" in str(error.value)


def test_a_good_answer():
    assert too_long(prompt("ab", "cd"), 5) is None


def test_an_answer_that_fits_no_microbatch():
    problem = too_long(prompt("ab", "cd"), 4)
    assert problem == "prompt and answer have 5 tokens, more than 4 (--max_tokens_per_microbatch)"
