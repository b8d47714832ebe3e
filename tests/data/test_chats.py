"""Chat data for SFT: tokens and mask by hand.

A mask off by one would learn the user's turns, or never learn to stop.
"""

import json
from pathlib import Path

import pytest
from tokenizers import models, normalizers

from lightrft.config import DataSection
from lightrft.core.samples import Answer
from lightrft.data.conversations import load_examples, supervised_batch
from lightrft.data.readers import DataError
from lightrft.data.rendering.tokens import consecutive_tokens
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from tiny import EOS, byte_tokenizer

ROLES = "{% for m in messages %}{% if m.role == 'assistant' %}a>"
OTHERS = (
    "{% else %}{{ m.role[0] }}>{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}a>{% endif %}"
)
TEMPLATES = {
    "ends turns": ROLES + "{{ m.content }}<eos>\n" + OTHERS,
    "has no end": ROLES + "{{ m.content }}" + OTHERS,
    "marks turns": (
        ROLES + "{% generation %}{{ m.content }}<eos>{% endgeneration %}{{ '\n' }}" + OTHERS
    ),
    "marks turns without their end": (
        ROLES + "{%- generation -%}{{ m.content }}{%- endgeneration -%}<eos>\n" + OTHERS
    ),
}
"""Each renders `u>1;a>2<eos> `; the second has no end tokens."""
FORGETS = (
    ROLES + "{% if not loop.last %}{{ m.content.split('/')[-1] }}{% else %}{{ m.content }}{% endif"
    " %}<eos>\n" + OTHERS
)
"""Template that drops the thinking of earlier turns."""
OTHER_PROMPT = TEMPLATES["ends turns"].replace(
    "{% if add_generation_prompt %}a>", "{% if add_generation_prompt %}a>think:"
)
CHAT = [("user", "1"), ("assistant", "23"), ("user", "4"), ("assistant", "5")]


def messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def load(
    folder: Path,
    *rows: dict,
    template: str = TEMPLATES["ends turns"],
    longest: int = 100,
    **options,
):
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    section = DataSection(prompt_data=str(file), **{"apply_chat_template": True} | options)
    return load_examples(section, tokenizer, longest=longest), tokenizer


def shown(folder: Path, *rows: dict, **options) -> list[str]:
    """Return the sequences of a batch, with learned tokens in brackets and a dollar for the end
    token.
    """
    prompts, tokenizer = load(folder, *rows, **options)
    batch = supervised_batch(prompts, list(range(len(prompts))))

    texts = []
    start = 0
    for length in batch.lengths.tolist():
        ids = batch.input_ids[start : start + length].tolist()
        mask = batch.loss_mask[start : start + length].tolist()
        letters = ["$" if token == EOS else chr(token) for token in ids]
        texts.append(
            "".join(
                f"[{letter}]" if learned else letter
                for letter, learned in zip(letters, mask, strict=True)
            )
        )
        start += length

    assert start == len(batch.input_ids)
    return [text.replace("][", "") for text in texts]


def test_tokens_and_mask_by_hand(tmp_path):
    prompts, tokenizer = load(tmp_path, {"messages": messages(*CHAT)}, {"input": "u", "label": "v"})
    batch = supervised_batch(prompts, [3, 5])
    chat = [*b"u>1;a>", *b"23", EOS, *b"\nu>4;a>", *b"5", EOS]
    assert batch.input_ids.tolist() == [*chat, *b"u>u;a>", ord("v"), EOS]
    assert (
        batch.loss_mask.int().tolist() == [0] * 6 + [1] * 3 + [0] * 7 + [1] * 2 + [0] * 6 + [1] * 2
    )
    assert batch.lengths.tolist() == [18, 8] and batch.rows.tolist() == [3, 5]
    assert prompts[0].text == "u>1;a>" and prompts[0].token_ids == [*b"u>1;a>"]
    assert isinstance(prompts[0].columns["label"], Answer)


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_turn_of_the_assistant_is_learned_up_to_its_end_token(tmp_path, template):
    row = {"messages": messages(("system", "s"), *CHAT)}
    ends = template != "has no end"
    expected = "s>s;u>1;a>[23$]\nu>4;a>[5$]" if ends else "s>s;u>1;a>[23]u>4;a>[5$]"
    assert shown(tmp_path, row, template=TEMPLATES[template]) == [expected]
    expected = "s>s;u>1;a>23$\nu>4;a>[5$]" if ends else "s>s;u>1;a>23u>4;a>[5$]"
    assert shown(tmp_path, row, template=TEMPLATES[template], learned_turns="last") == [expected]


SHAREGPT = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
FORMS = {
    "messages": ({"messages": messages(*CHAT[:2])}, {}, "u>1;a>[23$]"),
    "a named column": ({"talk": messages(*CHAT[:2])}, {"input_key": "talk"}, "u>1;a>[23$]"),
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "s"}, *SHAREGPT]},
        {},
        "s>s;u>1;a>[2$]",
    ),
    "text and completion": ({"prompt": "1", "completion": "2"}, {}, "u>1;a>[2$]"),
    "the same without a chat template": (
        {"prompt": "1", "completion": "2"},
        {"apply_chat_template": False},
        "1[2$]",
    ),
    "messages and completion": (
        {"prompt": messages(*CHAT[:3]), "completion": messages(CHAT[3])},
        {},
        "u>1;a>23$\nu>4;a>[5$]",
    ),
    "text and messages": (
        {"prompt": "1", "completion": messages(CHAT[1])},
        {"input_template": "{}?"},
        "u>1?;a>[23$]",
    ),
    "messages and text": (
        {"messages": messages(*CHAT[:3]), "label": "5"},
        {},
        "u>1;a>23$\nu>4;a>[5$]",
    ),
    "ShareGPT and text": ({"conversations": SHAREGPT[:1], "label": "5"}, {}, "u>1;a>[5$]"),
    "prompt and answer as ever": ({"input": "1", "label": "2", "messages": []}, {}, "u>1;a>[2$]"),
    "a system prompt": (
        {"messages": messages(*CHAT[:2])},
        {"system_prompt": "s"},
        "s>s;u>1;a>[23$]",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_chat_data(tmp_path, form):
    row, options, expected = FORMS[form]
    assert shown(tmp_path, row, **options) == [expected]


def test_a_template_that_renders_earlier_answers_differently(tmp_path):
    row = {
        "messages": messages(
            ("user", "1"), ("assistant", "t/2"), ("user", "3"), ("assistant", "t/4")
        )
    }
    with pytest.raises(
        DataError,
        match=(
            "chat.jsonl:1: .*in message 2 of 4 differently when other messages"
            " follow.*--learned_turns last .*--expand_turns"
        ),
    ):
        load(tmp_path, row, template=FORGETS)

    assert shown(tmp_path, row, template=FORGETS, learned_turns="last") == [
        "u>1;a>2$\nu>3;a>[t/4$]"
    ]
    assert shown(tmp_path, {"messages": row["messages"][:2]}, template=FORGETS) == ["u>1;a>[t/2$]"]


FORGOTTEN = [("user", "1"), ("assistant", "t/2"), ("user", "3"), ("assistant", "t/4")]
FIRST, SECOND = "u>1;a>[t/2$]", "u>1;a>2$\nu>3;a>[t/4$]"
WEIGHTED = messages(*FORGOTTEN)
EXPANDED = {
    "a conversation": ({"messages": messages(*FORGOTTEN)}, [FIRST, SECOND]),
    "JSON": ({"messages": json.dumps(messages(*FORGOTTEN))}, [FIRST, SECOND]),
    "ShareGPT": (
        {
            "conversations": [
                {"from": {"user": "human"}.get(role, "gpt"), "value": text}
                for role, text in FORGOTTEN
            ]
        },
        [FIRST, SECOND],
    ),
    "an answer of several turns": (
        {"prompt": "1", "completion": messages(*FORGOTTEN[1:])},
        [FIRST, SECOND],
    ),
    "a prompt with turns": ({"prompt": messages(*FORGOTTEN[:3]), "completion": "t/4"}, [SECOND]),
    "earlier turns in a column of their own": (
        {"history": [["1", "t/2"]], "prompt": messages(*FORGOTTEN[2:])},
        [FIRST, SECOND],
    ),
    "texts": ({"input": "1", "label": "t/2"}, [FIRST]),
    "a turn that is not learned": (
        {"messages": [WEIGHTED[0], WEIGHTED[1] | {"weight": 0}, *WEIGHTED[2:]]},
        [SECOND],
    ),
    "a last turn that is not learned": (
        {"messages": [*WEIGHTED[:3], WEIGHTED[3] | {"train": False}]},
        [FIRST],
    ),
}


@pytest.mark.parametrize("form", EXPANDED)
def test_each_turn_is_an_example_that_ends_with_it(tmp_path, form):
    row, expected = EXPANDED[form]
    assert shown(tmp_path, row, template=FORGETS, expand_turns=True) == expected


def test_examples_of_one_row(tmp_path):
    """They have the row's place, and each is a row of its own for whatever counts rows."""
    row = {"messages": messages(*FORGOTTEN)}
    options = {"template": FORGETS, "expand_turns": True}
    prompts, _ = load(tmp_path, row, row, **options)
    assert [each.index for each in prompts] == [0, 1, 2, 3]
    assert [each.location[-2:] for each in prompts] == [":1", ":1", ":2", ":2"]
    assert prompts.description[0].endswith("messages; 4 rows")
    batch = supervised_batch(prompts[:2], [0, 1])
    shared = find_shared_prefixes(batch.input_ids, batch.lengths)
    assert shared is not None, "what two of them have in common is computed once"
    assert len(load(tmp_path, row, row, deduplicate="exact", **options)[0]) == 2
    assert len(load(tmp_path, row, row, max_samples=3, **options)[0]) == 3
    stored, _ = load(tmp_path, row, data_cache=str(tmp_path / "cache"), **options)
    assert [each.token_ids for each in stored] == [each.token_ids for each in prompts[:2]]
    again, _ = load(
        tmp_path, row, data_cache=str(tmp_path / "cache"), template=FORGETS, learned_turns="last"
    )
    assert len(again) == 1

    skipped, _ = load(tmp_path, row, longest=14, bad_rows="skip", **options)
    assert len(skipped) == 1
    with pytest.raises(DataError, match="chat.jsonl:1: no turn is learned"):
        load(tmp_path, {"messages": [WEIGHTED[0], WEIGHTED[1] | {"weight": 0}]}, **options)


def test_a_template_whose_generation_prompt_does_not_begin_its_answers(tmp_path):
    with pytest.raises(
        DataError, match="chat.jsonl:1: .*in message 2 of 2 after its generation prompt"
    ):
        load(tmp_path, {"messages": messages(*CHAT[:2])}, template=OTHER_PROMPT)


BAD = {
    "ends in a question": (
        {"messages": messages(*CHAT[:3])},
        {},
        "no text to train on in the answer column .--label_key.: None",
    ),
    "an empty answer": (
        {"messages": messages(("user", "1"), ("assistant", ""))},
        {},
        "message 2 of 2, of role 'assistant'",
    ),
    "null": (
        {"messages": messages(("user", None), ("assistant", "2"))},
        {},
        "message 1 of 2, of role 'user', has no content",
    ),
    "who": (
        {"conversations": [*SHAREGPT, {"from": "bird", "value": "x"}]},
        {},
        "the turn has the role 'bird'; known roles are human",
    ),
    "completion by the user": (
        {"prompt": "1", "completion": messages(CHAT[0])},
        {},
        "the answer ends with a message of role",
    ),
    "no chat template": (
        {"messages": messages(*CHAT)},
        {"apply_chat_template": False},
        "chat messages need --apply_chat",
    ),
    "long": (
        {"messages": messages(*CHAT)},
        {"longest": 17},
        "prompt and answer have 18 tokens, more than 17 .--max_tokens",
    ),
    "a long prompt": (
        {"messages": messages(("user", "123"), *CHAT[1:])},
        {"prompt_max_len": 7},
        "the prompt has 8 tokens",
    ),
    "no column": ({"talk": messages(*CHAT)}, {}, "no column 'input' .--input_key.; it has talk"),
    "not there": (
        {"messages": messages(*CHAT)},
        {"input_key": "talk"},
        "no column 'talk' .--input_key.; it has messages",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows(tmp_path, case):
    row, options, message = BAD[case]
    good = {"input": "1", "label": "2"} | ({"talk": "x"} if case == "not there" else {})
    with pytest.raises(DataError, match=f"chat.jsonl:2: .*{message}"):
        load(tmp_path, good, row, **options)


def test_a_duplicate_of_a_learned_row_has_the_same_answer(tmp_path):
    other = [*CHAT[:3], ("assistant", "6")]
    rows = [{"messages": messages(*chat)} for chat in (CHAT, other, CHAT)] + [
        {"input": "1", "label": text} for text in "223"
    ]
    assert len(load(tmp_path, *rows, deduplicate="exact")[0]) == 4
    spaced = [{"input": "1", "label": text} for text in ("2 3", "2  3", "23")]
    assert [
        len(load(tmp_path, *spaced, deduplicate=mode, apply_chat_template=chat)[0])
        for mode in ("exact", "whitespace")
        for chat in (True, False)
    ] == [3, 3, 2, 2]


def test_a_token_across_a_border_is_cut_there():
    merging = byte_tokenizer()
    model = json.loads(merging.backend_tokenizer.to_str())["model"]
    merging.backend_tokenizer.model = models.BPE(
        vocab=model["vocab"] | {"aa": 300}, merges=[("a", "a")]
    )
    assert merging("aab")["input_ids"] == [300, 98]
    assert consecutive_tokens(merging, ["aa", "b", "aa"]) == [[300], [98], [300]]
    assert consecutive_tokens(merging, ["ba", "a"]) == [[98, 97], [97]], (
        "as the prompt alone has it for an engine"
    )
    prefixing = byte_tokenizer()
    prefixing.backend_tokenizer.normalizer = normalizers.Prepend("_")
    assert consecutive_tokens(prefixing, ["a", "b", "c"]) == [[*b"_a"], [*b"b"], [*b"c"]], (
        "it writes a space before each text"
    )
