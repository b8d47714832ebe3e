"""Supervised examples: ids and mask by hand.

A mask off by one would learn the prompt, or never learn to stop.
"""

import pytest
import torch

from lightrft.data import conversations
from lightrft.data.conversations import answer_problem, supervised_batch
from lightrft.types import Prompt
from tiny import EOS, byte_tokenizer


def prompt(text: str, label) -> Prompt:
    return Prompt(index=0, text=text, token_ids=list(text.encode()), columns={"label": label})


def test_answer_and_end_token_are_learned():
    batch = supervised_batch([prompt("ab=", "xy"), prompt("c", "z")], byte_tokenizer(), [4, 9])
    assert batch.input_ids.tolist() == [97, 98, 61, 120, 121, EOS, 99, 122, EOS]
    assert batch.loss_mask.tolist() == [False, False, False, True, True, True, False, True, True]
    assert batch.lengths.tolist() == [6, 3] and batch.rows.tolist() == [4, 9]
    assert batch.num_loss_tokens.item() == 5


def test_no_rows():
    batch = supervised_batch([], byte_tokenizer(), [])
    assert (
        len(batch) == 0
        and str(batch.input_ids.dtype) == "torch.int64"
        and str(batch.loss_mask.dtype) == "torch.bool"
    )


@pytest.mark.parametrize("label", [None, "", 5, ["a"]])
def test_an_answer_that_cannot_be_learned(label):
    for row in (prompt("a", label), Prompt(index=0, text="a", token_ids=[97])):
        problem = answer_problem(row, byte_tokenizer(), 100)
        assert repr(row.columns.get("label")) in problem and "--label_key" in problem


def test_a_good_answer():
    assert answer_problem(prompt("ab", "cd"), byte_tokenizer(), 5) is None


def test_an_answer_that_fits_no_microbatch():
    problem = answer_problem(prompt("ab", "cd"), byte_tokenizer(), 4)
    assert problem == "prompt and answer have 5 tokens, more than --max_tokens_per_microbatch 4"


def test_an_answer_is_tokenized_once_however_often_it_is_learned(monkeypatch):
    calls = []
    plain = conversations.consecutive_tokens
    monkeypatch.setattr(
        conversations,
        "consecutive_tokens",
        lambda *args, **options: (calls.append(args), plain(*args, **options))[1],
    )
    tokenizer = byte_tokenizer()
    first = supervised_batch([prompt("ab=", "xy"), prompt("c", "z")], tokenizer, [0, 1])
    again = supervised_batch([prompt("ab=", "xy"), prompt("c", "z")], tokenizer, [0, 1])
    assert torch.equal(first.input_ids, again.input_ids) and len(calls) == 2
