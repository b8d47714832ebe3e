"""`lightrft curate`: responses become rows to learn from, which the loaders of training read."""

import json

import pytest

from lightrft.app.observe.sinks import encode_row
from lightrft.config import DataSection, PreferenceSection
from lightrft.data.conversations import load_examples
from lightrft.data.preferences import load_pairs
from lightrft.extras.commands.curate import main
from tiny import byte_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
CHAT = [{"role": "user", "content": "2+2?"}]
TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def response(prompt, text, reward, *, sample=0, length=None, end="stop", **columns):
    return {
        "prompt": prompt,
        "sample": sample,
        "response": text,
        "reward": reward,
        "length": len(text) if length is None else length,
        "finish_reason": end,
        **columns,
    }


@pytest.fixture
def evaluation(tmp_path):
    """Prompts with a share of right samples of 0.75, 0, and 1; one with tools and turns."""
    rows = [
        response("a", "right, greedily", 1.0, sample="greedy", input="A"),
        response("a", "right and long", 1.0, input="A"),
        response("a", "right", 1.0, sample=1, input="A"),
        response("a", "right  and long", 1.0, sample=2, input="A"),
        response("a", "wrong then", 0.0, sample=3, input="A"),
        response("b", "wrong", 0.0, input="B"),
        response("b", "wrong again", 0.2, sample=1, input="B"),
        response("c", "cut", 1.0, end="length", input="C"),
        response("c", " ", 1.0, sample=1, input="C"),
        response("c", "", 0.0, sample=2, input="C"),
        response("d", "four", 1.0, input=CHAT, messages=TURNS, tools=TOOLS),
        response("d", "five", 0.0, sample=1, input=CHAT, messages=TURNS[-1:], tools=TOOLS),
        response("e", "nobody knows", float("nan"), input="E"),
    ]
    (tmp_path / "responses.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    return tmp_path


def curated(folder, *flags, kind="--write"):
    main([str(folder), kind, str(folder / "rows.jsonl"), *flags])
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("flags", "outputs"),
    [
        ([], ["right, greedily", "right and long", "right", "right  and long"]),
        (["--shortest", "--per_prompt=2"], ["right", "right and long"]),
        (["--deduplicate"], ["right, greedily", "right and long", "right"]),
        (["--rate=0.8..1"], []),
        (["--keep=best", "--rate=0..0"], ["wrong again"]),
        (["--keep=all", "--rate=0..0"], ["wrong", "wrong again"]),
    ],
    ids=str,
)
def test_right_responses_become_rows(evaluation, flags, outputs):
    rows = [row for row in curated(evaluation, *flags) if "messages" not in row]
    assert [row["output"] for row in rows] == outputs
    assert {row["input"] for row in rows} <= {"A", "B"}


def test_turns_and_tools_are_kept(evaluation):
    (row,) = [row for row in curated(evaluation) if "messages" in row]
    assert row == {"messages": [*CHAT, *TURNS], "tools": TOOLS}


def test_pairs_are_nearest_in_length(evaluation):
    assert curated(evaluation, kind="--pairs") == [
        # of 15, 14, 5 and 15 characters, 14 is the nearest to 10
        {"prompt": "A", "chosen": "right and long", "rejected": "wrong then"},
        {"prompt": "B", "chosen": "wrong again", "rejected": "wrong"},
        {"prompt": CHAT, "chosen": TURNS, "rejected": TURNS[-1:], "tools": TOOLS},
    ]


def test_trainers_read_the_files(evaluation):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    curated(evaluation)
    curated(evaluation, kind="--pairs")
    section = DataSection(prompt_data=str(evaluation / "rows.jsonl"), apply_chat_template=True)
    pairs = load_pairs(section, PreferenceSection(), tokenizer, longest=999)
    assert [pair.text for pair in pairs] == ["u>A;a>", "u>B;a>", "add;u>2+2?;a>"]

    curated(evaluation)
    *texts, turns = load_examples(section, tokenizer, longest=999)
    assert len(texts) == 4 and {example.text for example in texts} == {"u>A;a>"}
    answer = turns.columns["label"]
    learned = [token for token, used in zip(*answer, strict=True) if used]
    assert tokenizer.decode(answer.token_ids) == "add;t>4;a>four<eos>"
    assert tokenizer.decode(learned) == "addfour<eos>"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to write: name a file with --write or --pairs"),
        (["--write=x", "--rate=half"], "--rate half: write two numbers, such as 0.05..0.95"),
        (["--write=x", "--rate=5..95"], "--rate 5..95: write two numbers, such as 0.05..0.95"),
        (["--write=x", "--per_prompt=-1"], "--per_prompt -1: write a number of responses, or 0"),
        (["--write=x", "--pairs=x"], "--write and --pairs need files of their own"),
    ],
)
def test_what_cannot_be_done_is_said(evaluation, flags, message, capsys):
    with pytest.raises(SystemExit):
        main([str(evaluation), *flags])
    assert message in capsys.readouterr().err


def test_the_evaluation_is_not_overwritten(evaluation, capsys):
    file = evaluation / "responses.jsonl"
    before = file.read_bytes()
    with pytest.raises(SystemExit):
        main([str(evaluation), f"--pairs={evaluation}/../{evaluation.name}/responses.jsonl"])
    assert f"files of their own, other than {file}" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_separators_of_lines_within_a_text_are_kept(tmp_path):
    row = response("a", "one\u2028two\x85three\r\nfour", 1.0, input="A")
    (tmp_path / "responses.jsonl").write_bytes(encode_row(row))
    written = tmp_path / "new" / "rows.jsonl"
    main([str(tmp_path), "--write", str(written)])
    assert json.loads(written.read_text()) == {"input": "A", "output": row["response"]}


def test_a_folder_without_responses_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--write=x"])
    assert f"{tmp_path} has no responses with rewards" in capsys.readouterr().err
