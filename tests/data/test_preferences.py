"""Pairs of answers from rows: texts, messages, whole conversations, and errors for bad ones."""

import json

import pytest

from lightrft.app.quickstart.inputs import byte_tokenizer
from lightrft.config import DataSection, PreferenceSection
from lightrft.data.preferences import judged_batch, load_answers, mismatched, pair_batch, pair_maker
from lightrft.data.prompts import RowContext
from lightrft.data.readers import DataError

TOKENIZER = byte_tokenizer()
USER = {"role": "user", "content": "hi"}
ANOTHER = {"role": "user", "content": "so?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def made(row: dict, heads=(), chat: bool = True, **preference):
    section = DataSection(apply_chat_template=chat)
    return pair_maker(PreferenceSection(**preference), heads)(RowContext(section, TOKENIZER), row)


def texts(pair) -> list[tuple[str, str]]:
    """Return each whole sequence, and what is learned from it."""
    batch = pair_batch([pair], [0])
    both = zip(
        *(column.split(batch.lengths.tolist()) for column in (batch.input_ids, batch.loss_mask)),
        strict=True,
    )

    return [
        (
            TOKENIZER.decode(ids),
            TOKENIZER.decode([i for i, one in zip(ids, learned, strict=True) if one]),
        )
        for ids, learned in both
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"input": [USER], "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [said("yes")], "rejected": [said("no")]},
        {"chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
        {"prompt": "hi", "chosen": [USER, said("yes")], "rejected": [USER, said("no")]},
    ],
)
def test_forms_of_a_pair(row):
    begun = "user: hi\nassistant: "
    assert texts(made(row)) == [
        (f"{begun}yes<|eos|>", "yes<|eos|>"),
        (f"{begun}no<|eos|>", "no<|eos|>"),
    ]


def test_conversations_part_at_a_turn_of_the_assistant_and_all_later_ones_are_learned():
    begun = [USER, said("well")]
    row = {
        "chosen": [*begun, ANOTHER, said("a"), ANOTHER, said("b")],
        "rejected": [*begun, ANOTHER, said("c")],
    }
    (chosen, learned), (_, other) = texts(made(row))
    assert (
        chosen.startswith("user: hi\nassistant: well<|eos|>")
        and learned == "a<|eos|>b<|eos|>"
        and other == "c<|eos|>"
    )


def test_texts_without_a_template_end_with_the_end_token():
    assert texts(made({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, chat=False))[0] == (
        "2+2=4<|eos|>",
        "4<|eos|>",
    )


def test_columns_of_the_batch():
    rows = [
        {"p": "a", "chosen": "b", "rejected": "c", "gap": gap, "same": gap > 1, "kind": kind}
        for gap, kind in ((0.5, "y"), (2, "x"))
    ]
    names = {"margin_key": "gap", "tie_key": "same", "head_key": "kind"}
    section = DataSection(input_key="p")
    pairs = [
        pair_maker(PreferenceSection(**names), ("x", "y"))(RowContext(section, TOKENIZER), row)
        for row in rows
    ]
    batch = pair_batch(pairs, [4, 1])
    assert batch.rows.tolist() == [8, 9, 2, 3] and batch.lengths.tolist() == [3] * 4
    assert batch.loss_mask.tolist() == [False, True, True] * 4
    assert batch.margins.tolist() == [0.5, 0.5, 2, 2] and batch.heads.tolist() == [1, 1, 0, 0]
    assert batch.ties.tolist() == [False, False, True, True]


def answers(tmp_path, *rows: dict) -> list:
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_answers(
        DataSection(prompt_data=str(file), apply_chat_template=True),
        PreferenceSection(),
        TOKENIZER,
        longest=40,
    )


def test_forms_of_a_single_answer(tmp_path):
    rows = [
        {"prompt": "hi", "completion": "yes", "label": True},
        {"prompt": [USER], "completion": [said("yes")], "label": True},
        {"completion": [USER, said("yes")], "label": True},
    ]
    for loaded in answers(tmp_path, *rows):
        assert TOKENIZER.decode(loaded.token_ids) == "user: hi\nassistant: "
        assert (
            TOKENIZER.decode(loaded.columns["answer"].token_ids) == "yes<|eos|>"
            and loaded.columns["desirable"] is True
        )


def test_mismatched_answers_come_from_the_next_prompt_and_are_cut(tmp_path):
    """A prompt has 19 tokens and an answer 4, so 22 tokens leave out the end token."""
    loaded = answers(
        tmp_path,
        *({"prompt": text, "completion": text * 3, "label": text == "b"} for text in "abc"),
    )
    batch = judged_batch(mismatched(loaded, 22), [0, 1, 2])
    whole = [TOKENIZER.decode(ids) for ids in batch.input_ids.split(batch.lengths.tolist())]
    assert whole == [f"user: {one}\nassistant: {other * 3}" for one, other in ("ab", "bc", "ca")]
    assert batch.loss_mask.sum() == 9 and judged_batch(loaded, [0, 1, 2]).desirable.tolist() == [
        False,
        True,
        False,
    ]


def test_bad_single_answers_are_named(tmp_path):
    for row, message in (
        (
            {"prompt": "a", "completion": "b", "label": "good"},
            "1: 'label' (--label_key) must be true or false, not 'good'",
        ),
        (
            {"prompt": "a", "label": True},
            "1: no column 'completion' (--completion_key); it has prompt, label",
        ),
        (
            {"prompt": "a", "completion": "b" * 40, "label": True},
            "1: prompt and answer have 60 tokens, more than 40",
        ),
    ):
        with pytest.raises(DataError) as error:
            answers(tmp_path, row)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "no column 'rejected' (--rejected_key); it has prompt, chosen",
        ),
        (
            {"chosen": "b", "rejected": "c"},
            "no column 'input' (--input_key); it has chosen, rejected",
        ),
        (
            {"prompt": "a", "chosen": "", "rejected": "c"},
            "the column 'chosen' (--chosen_key) is empty",
        ),
        (
            {"prompt": "a", "chosen": 3, "rejected": "c"},
            "one of the answers is empty, or neither text nor messages",
        ),
        (
            {"prompt": "a", "chosen": "c", "rejected": "c"},
            "the chosen and the rejected answer are the same",
        ),
        (
            {"chosen": [USER, said("a")], "rejected": [ANOTHER, said("a")]},
            "both conversations must begin with the same messages",
        ),
        (
            {"chosen": [USER, said("a"), ANOTHER], "rejected": [USER, said("a")]},
            "both conversations must begin with the same",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "gap": True},
            "'gap' (--margin_key) must be a finite number, not True",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "kind": "z"},
            "'kind' (--head_key) is 'z', not one of the heads x, y",
        ),
    ],
)
def test_bad_rows(row, message):
    names = {"margin_key": "gap"} if "gap" in row else {}
    names |= {"head_key": "kind"} if "kind" in row else {}
    with pytest.raises(ValueError) as error:
        made(row, ("x", "y"), chat="messages" not in row, **names)
    assert message in str(error.value)
