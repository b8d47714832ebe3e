"""What rows say about their prompts and answers: roles, tools, weights, nulls.

Some templates would lose a part of it.
"""

import base64
import json
from dataclasses import replace

import datasets
import pytest
from PIL import Image
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from lightrft.algorithms.rollout.sampler import greedy_sampling, sampling_of
from lightrft.app.trainer.build_data import check_tools, with_token_ids
from lightrft.config import Config, DataSection, PreferenceSection, RolloutSection
from lightrft.config.errors import ConfigError
from lightrft.config.sections import EnvironmentSection
from lightrft.core.samples import Answer
from lightrft.data.conversations import load_examples, make_example
from lightrft.data.preferences import load_answers, load_pairs, pair_maker
from lightrft.data.prompts import RowContext, load_prompts, make_prompt
from lightrft.data.readers import DataError
from lightrft.data.step_labels import load_steps
from tiny import BOS, EOS, byte_tokenizer

TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments |"
    " tojson }}){% endfor %}"
)
CHAT = (
    TOOLS
    + "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<|{{ m.role"
    " }}|>{{ m.content or '' }}" + CALLS + "<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ prefill or '' }}{% endif %}"
)
"""Template that knows four roles, and ends a turn with another token than the tokenizer's."""
OTHERS = {
    "no generation prompt": CHAT.replace(
        "{% if add_generation_prompt %}<|assistant|>{{ prefill or '' }}{% endif %}", ""
    ),
    "no tools": CHAT.replace(TOOLS, ""),
    "no calls": CHAT.replace(CALLS, ""),
    "text of arguments": CHAT.replace("arguments | tojson", "arguments"),
    "begins with BOS": "{{ bos_token }}" + CHAT,
    "strips": CHAT.replace("m.content or ''", "(m.content or '') | trim"),
    "counts calls": CHAT.replace(
        CALLS, "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    ),
    "takes the first word": CHAT.replace("m.content or ''", "m.content.split(' ')[0]"),
    "prints parts": CHAT.replace("m.content or ''", "m.content | string"),
    "other end of calls": CHAT.replace(
        "<|end|>", "{% if m.tool_calls %}<|call|>{% else %}<|end|>{% endif %}"
    ),
    "moves system messages": (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}"
        "{% generation %}<|assistant|>{{ m.content }}<|end|>{% endgeneration %}{% else %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    ),
    "cuts thinking": (
        CHAT.replace("m.content or ''", "m.content.split('</think>')[-1]").replace(
            "{{ prefill or '' }}", "<think>\n"
        )
    ),
}


def tokenizer(template: str = CHAT):
    made = byte_tokenizer()
    tokens = [f"<|{name}|>" for name in ("system", "user", "assistant", "tool", "end", "call")]
    made.add_special_tokens({"additional_special_tokens": tokens})
    made.chat_template = OTHERS.get(template, template)
    return made


def turn(role: str, content=None, **others) -> dict:
    return {"role": role, "content": content} | others


def call(arguments) -> dict:
    return turn(
        "assistant",
        None,
        tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    )


SECTION = DataSection(apply_chat_template=True)
ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": None}},
}
ASK = turn("user", "What is 6+1?")
TOOL_CHAT = [ASK, call('{"a": 6, "b": [1]}'), turn("tool", "7"), turn("assistant", "It is 7.")]


def text(value, template: str = CHAT, section: DataSection = SECTION, **columns) -> str:
    return make_prompt(RowContext(section, tokenizer(template)), {"input": value} | columns).text


def shown(row: dict, template: str = CHAT, section: DataSection = SECTION) -> str:
    """Return a sequence with what is learned in brackets."""
    reader = tokenizer(template)
    prompt = make_example(RowContext(section, reader), row)
    answer = prompt.columns["label"]
    flags = [False] * len(prompt.token_ids) + answer.learned
    ids = [*prompt.token_ids, *answer.token_ids]
    pieces = [
        f"[{reader.decode([token])}]" if on else reader.decode([token])
        for token, on in zip(ids, flags, strict=True)
    ]
    return "".join(pieces).replace("][", "")


GOOD = {
    "roles in other words": (
        [turn("System", "s"), turn("Human", "q")],
        {},
        "<|system|>s<|end|>\n<|user|>q<|end|>\n<|assistant|>",
    ),
    "a system message of its own": (
        [turn("system", "own"), ASK],
        {},
        "<|system|>own<|end|>\n<|user|>What is 6+1?<|end|>\n",
    ),
    "no system message": (
        [ASK],
        {},
        "<|system|>run<|end|>\n<|user|>What is 6+1?<|end|>\n<|assistant|>",
    ),
    "variables of the row": (
        [ASK],
        {"chat_template_kwargs": {"prefill": "<b>", "other": None}},
        "<|assistant|><b>",
    ),
    "variables as JSON": (
        [ASK],
        {"chat_template_kwargs": '{"prefill": "<b>"}'},
        "<|assistant|><b>",
    ),
    "tools": ([ASK], {"tools": [ADD]}, "add;<|system|>"),
    "tools as JSON": (
        [ASK],
        {"tools": json.dumps([{"type": "function", "function": ADD}])},
        "add;<|system|>",
    ),
    "tools, each as JSON": ("q", {"tools": [json.dumps(ADD)]}, "add;<|system|>"),
    "calls with JSON in them": (
        TOOL_CHAT[:3],
        {},
        '<|assistant|>(add {"a": 6, "b": [1]})<|end|>\n<|tool|>7<|end|>\n',
    ),
    "calls of ShareGPT": (
        [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 6}}'},
            {"from": "observation", "value": "7"},
        ],
        {"tools": [ADD]},
        '<|assistant|>(add {"a": 6})<|end|>\n<|tool|>7<|end|>\n',
    ),
    "tools among the variables": (
        [ASK],
        {"chat_template_kwargs": {"tools": [ADD]}},
        "add;<|system|>",
    ),
    "a system message in a column": ([ASK], {"system": "own"}, "<|system|>own<|end|>\n<|user|>"),
    "an empty column": ([ASK], {"system": ""}, "<|system|>run<|end|>\n<|user|>"),
    "calls with nulls": (
        [ASK, call({"a": 6, "b": None}), TOOL_CHAT[2]],
        {},
        '(add {"a": 6})<|end|>',
    ),
    "calls as JSON": (
        [ASK, turn("assistant", tool_calls=json.dumps(TOOL_CHAT[1]["tool_calls"])), TOOL_CHAT[2]],
        {},
        "(add {",
    ),
    "an image among parts of text": (
        [turn("user", [{"type": "text", "text": "a"}, {"text": "b"}])],
        {},
        "<|user|>ab<|end|>",
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_a_prompt_contains(case):
    value, columns, expected = GOOD[case]
    found = text(value, section=replace(SECTION, system_prompt="run"), **columns)
    assert expected in found and found.count("<|system|>") == 1
    if not isinstance(value, str):
        assert (
            text(json.dumps(value), section=replace(SECTION, system_prompt="run"), **columns)
            == found
        )


BAD = {
    "no content": ([turn("user")], {}, CHAT, "message 1 of 1, of role 'user', has no content"),
    "another key": (
        [{"role": "user", "text": "q"}],
        {},
        CHAT,
        "has no content .its keys are role, text",
    ),
    "no role": ([{"content": "q"}], {}, CHAT, "message 1 of 1 has no role"),
    "an unknown role": (
        [turn("critic", "e"), ASK],
        {},
        CHAT,
        "leaves out the text of message 1 of 2, of role 'critic'",
    ),
    "printed by Python": (str([ASK]), {}, CHAT, "written as Python prints them"),
    "an image": (
        [turn("user", [{"type": "image"}, {"type": "text", "text": "q"}])],
        {},
        CHAT,
        "part of type 'image'.*--images_key",
    ),
    "no parts": ([turn("user", ["q"])], {}, CHAT, "must be text, or a list of parts"),
    "cut text": (
        [turn("user", "one two")],
        {},
        "takes the first word",
        "leaves out the text of message 1 of 1",
    ),
    "no tools": ([ASK], {"tools": [ADD]}, "no tools", "does not describe the tool add"),
    "other tools": ([ASK], {"tools": ["add"]}, CHAT, "tools are schemas.*not 'add'"),
    "no calls": (TOOL_CHAT[:3], {}, "no calls", "leaves out the tool calls of message 2 of 3"),
    "arguments that are no JSON": (
        [ASK, call("{a}"), ASK],
        {},
        CHAT,
        "arguments of the tool call add in message 2 of 3: not valid JSON",
    ),
    "variables": (
        [ASK],
        {"chat_template_kwargs": "[1]"},
        CHAT,
        "'chat_template_kwargs' must be an object",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_be_lost_makes_a_bad_row(case):
    value, columns, template, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        text(value, template, **columns)


def test_arguments_are_text_where_a_template_prints_them():
    assert '(add {"a": 6, "b": [1]})' in text(TOOL_CHAT[:3], "text of arguments")


OPEN = "<|assistant|>"
ASKED_AGAIN = "<|end|>\n<|user|>What is 6+1?<|end|>\n<|assistant|>"
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "A"}]


def weighted(first: dict, second: dict) -> dict:
    """Return two answers with what they say about being learned."""
    return {
        "messages": [ASK, turn("assistant", "A", **first), ASK, turn("assistant", "B", **second)]
    }


LEARNED = {
    "calls and answer": (
        {"messages": TOOL_CHAT, "tools": [ADD]},
        '[(add {"a": 6, "b": [1]})<|end|>]\n<|tool|>7<|end|>\n<|assistant|>[It is 7.<|end|>]',
    ),
    "weight": (weighted({"weight": 0}, {"weight": 1}), f"A{ASKED_AGAIN}[B<|end|>]"),
    "train": (weighted({"train": True}, {"train": False}), f"{OPEN}[A<|end|>]"),
    "loss": (weighted({"loss": None}, {"loss": False}), f"{OPEN}[A<|end|>]"),
    "a first turn": (
        {"messages": [turn("assistant", "Hi", weight=0), ASK, turn("assistant", "A")]},
        f"{OPEN}Hi{ASKED_AGAIN}[A<|end|>]",
    ),
    "its end token": ({"input": "q", "label": "A<|end|>\n"}, f"{OPEN}[A<|end|>]"),
    "the tokenizer's": (
        {"messages": [turn("user", "q"), turn("assistant", "A<eos>")]},
        f"{OPEN}[A<|end|>]",
    ),
    "the other column": ({"messages": None, "conversations": SHARED}, f"{OPEN}[A<|end|>]"),
    "calls at the end": (
        {"messages": TOOL_CHAT[:2], "tools": [ADD]},
        '[(add {"a": 6, "b": [1]})<|call|>]',
        "other end of calls",
    ),
    "calls that end otherwise": (
        {"messages": TOOL_CHAT, "tools": [ADD]},
        "<|call|>]<|tool|>7<|end|><|assistant|>[It is 7.<|end|>]",
        "other end of calls",
    ),
    "a system message that is moved to the front": (
        {"messages": [turn("user", "q"), turn("assistant", "A"), turn("system", "s"), *SHARED]},
        "s<|user|>q<|end|><|assistant|>[A<|end|>]<|user|>q<|end|><|assistant|>[A<|end|>]",
        "moves system messages",
    ),
}


@pytest.mark.parametrize("case", LEARNED)
def test_what_is_learned(case):
    row, expected, *template = LEARNED[case]
    assert shown(row, *template).endswith(expected)


NOT_LEARNED = {
    "nothing": ([ASK, turn("assistant", "A", weight=0)], CHAT, "no turn is learned"),
    "half": ([ASK, turn("assistant", "A", weight=0.5)], CHAT, "message 2 of 2 has the weight 0.5"),
    "the user's turn": (
        [ASK | {"train": True}, turn("assistant", "A")],
        CHAT,
        "only turns of the assistant",
    ),
    "a first turn": (
        [turn("assistant", "Hi"), ASK, turn("assistant", "A")],
        CHAT,
        "message 1 is a turn of the assistant",
    ),
    "thinking": (
        [ASK, turn("assistant", "A", reasoning_content="Because.")],
        CHAT,
        "leaves out the thinking of message 2 of 2",
    ),
    "cut thinking": (
        [ASK, turn("assistant", "<think>T</think>A"), ASK, turn("assistant", "B")],
        "cuts thinking",
        "without its thinking",
    ),
}


@pytest.mark.parametrize("case", NOT_LEARNED)
def test_what_cannot_be_learned(case):
    messages, template, message = NOT_LEARNED[case]
    with pytest.raises(ValueError, match=message):
        shown({"messages": messages}, template)


def test_thinking_that_a_template_cuts_is_learned_behind_its_generation_prompt():
    row = {"messages": [ASK, turn("assistant", "<think>\nT\n</think>\nA")]}
    assert shown(row, "cuts thinking").endswith("<|assistant|><think>\n[T\n</think>\nA<|end|>]")
    assert shown({"input": "q", "label": "A"}, "cuts thinking").endswith("<|assistant|>[A<|end|>]")


def test_a_template_without_a_generation_prompt():
    """Its prompts end with the beginning of an answer, and that is not learned."""
    assert text("q", "no generation prompt") == "<|user|>q<|end|>\n<|assistant|>"
    assert (
        shown({"input": "q", "label": "A"}, "no generation prompt")
        == "<|user|>q<|end|>\n<|assistant|>[A<|end|>]"
    )


def test_nulls_of_arrow(tmp_path):
    """One row with calls fills all others with nulls.

    In rows of two forms of conversation, each fills the other's column.
    """
    plain = [turn("user", "q"), turn("assistant", "A")]
    file = tmp_path / "rows.parquet"
    other = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "A"}]
    rows = [
        {"messages": plain},
        {"messages": [*plain[:1], call({"a": 6}), turn("tool", "7"), plain[1]]},
    ]
    rows = [*rows, {"conversations": other}]
    columns = {name: [row.get(name) for row in rows] for name in ("messages", "conversations")}
    datasets.Dataset.from_dict(columns).to_parquet(file)
    reader = tokenizer("counts calls")

    first, second, third = load_examples(
        replace(SECTION, prompt_data=str(file)), tokenizer(), longest=999
    )
    assert first.columns == third.columns and second.text == "<|user|>q<|end|>\n<|assistant|>"
    asked = [turn("user", "q", tool_calls=None)]
    assert (
        make_prompt(RowContext(SECTION, reader), {"input": asked}).text
        == "<|user|>q<|end|>\n<|assistant|>"
    )


# -- special tokens


def with_bos():
    """Return a tokenizer that writes BOS before each text, and an end token after it."""
    made = tokenizer("begins with BOS")
    specials = [("<bos>", BOS), ("<eos>", EOS)]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=specials
    )
    return made


def test_tools_have_no_parameters_of_others():
    """Arrow gives each tool of a column the fields of all, and fills them with nulls."""
    fields = {"x": {"type": "integer", "enum": None}, "of_another": None}
    tool = {"name": "f", "parameters": {"type": "object", "properties": fields}, "strict": None}
    template = CHAT.replace("tool.function.name", "tool.function | tojson")
    begun, _, _ = text([ASK], template, tools=[tool]).partition(";")
    properties = {"x": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    assert json.loads(begun) == {"name": "f", "parameters": parameters}


@pytest.mark.parametrize(
    "columns_of",
    [
        lambda tool: {"tools": json.dumps([tool])},
        lambda tool: {"tools": [json.dumps(tool)]},
        lambda tool: {"chat_template_kwargs": json.dumps({"tools": [tool]})},
    ],
)
def test_nulls_that_somebody_wrote_stay(columns_of):
    """A schema in JSON text has no nulls of Arrow: a default of null is the author's."""
    field = {"enum": ["a", None], "default": None}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": field}}}
    template = CHAT.replace("tool.function.name", "tool.function | tojson")
    begun, _, _ = text([ASK], template, **columns_of(tool)).partition(";")
    assert json.loads(begun) == tool


REQUIRED = {
    "type": "object",
    "required": ["a", "inner", "many"],
    "properties": {
        "a": {"type": ["integer", "null"]},
        "inner": {"type": "object", "required": ["c"], "properties": {"c": {}, "d": {}}},
        "many": {"type": "array", "items": {"type": "object", "required": ["e"]}},
    },
}
ARGUMENTS = {
    "a": None,
    "b": None,
    "inner": {"c": None, "d": None},
    "many": [{"e": None, "f": None}, None],
}


@pytest.mark.parametrize("written", [lambda each: each, json.dumps])
@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        (None, {"inner": {}, "many": [{}, None]}),
        ("no schema", {"inner": {}, "many": [{}, None]}),
        ({"type": "object", "properties": None}, {"inner": {}, "many": [{}, None]}),
        (REQUIRED, {"a": None, "inner": {"c": None}, "many": [{"e": None}, None]}),
    ],
)
def test_null_arguments_mean_the_same_as_text_and_as_an_object(parameters, given, written):
    """Tables add nulls to objects, and those that a tool requires were written by somebody."""
    tools = [ADD | {"parameters": parameters}] if parameters else []
    messages = [ASK, call(written(ARGUMENTS)), TOOL_CHAT[2]]
    assert f"(add {json.dumps(given)})" in text(messages, tools=tools)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("begin", ["", "<bos>"])
def test_one_bos(chat, begin):
    section = replace(
        SECTION, apply_chat_template=chat, input_template=None if chat else begin + "{}"
    )
    prompt = make_prompt(RowContext(section, with_bos()), {"input": "q"})
    assert list(prompt.token_ids).count(BOS) == 1 and EOS not in prompt.token_ids
    example = make_example(RowContext(section, with_bos()), {"input": "q", "label": "A<eos>"})
    answer = example.columns["label"]
    assert [*example.token_ids, *answer.token_ids].count(BOS) == 1
    assert list(answer.token_ids).count(EOS) == (0 if chat else 1), (
        "one end, the template's or the tokenizer's"
    )


def test_answers_have_the_tokens_of_the_whole_text(tmp_path):
    """A tokenizer that writes a space before each text writes none between prompt and answer."""
    spaced = byte_tokenizer()
    spaced.backend_tokenizer.normalizer = normalizers.Prepend("_")
    section = DataSection(prompt_data=str(tmp_path / "rows.jsonl"))
    file = tmp_path / "rows.jsonl"

    def written(load, *rest, **row):
        file.write_text(json.dumps(row))
        return next(iter(load(section, *rest, spaced, longest=99))).columns

    made = make_example(RowContext(section, spaced), {"input": "1+1=", "label": "2"})
    assert made.columns["label"] == Answer([ord("2"), EOS], [True, True])
    pair = written(load_pairs, PreferenceSection(), prompt="1+1=", chosen="2", rejected="3")
    assert pair["chosen"].token_ids == [ord("2"), EOS] and pair["rejected"].token_ids == [
        ord("3"),
        EOS,
    ]
    assert written(load_answers, PreferenceSection(), prompt="1+1=", completion="2", label=True)[
        "answer"
    ].token_ids[0] == ord("2")
    steps = written(
        load_steps, PreferenceSection(), prompt="1+1=", completions=["2", "3"], labels=[1, 1]
    )
    assert steps["answer"].token_ids == [*b"2\n\n3", EOS]


def test_generation_stops_where_data_end():
    config = with_token_ids(Config(data=SECTION), tokenizer())
    ends = {EOS, tokenizer().convert_tokens_to_ids("<|end|>")}
    assert (
        ends
        == set(sampling_of(config.rollout).stop_token_ids)
        == set(greedy_sampling(config.rollout).stop_token_ids)
    )
    plain = with_token_ids(Config(), tokenizer())
    assert plain.rollout.stop_token_ids == [EOS], "without the chat template its end has no meaning"


def test_bad_words_are_tokens_that_are_never_sampled():
    section = RolloutSection(bad_words=["e", "<|end|>"], banned_token_ids=[7])
    config = with_token_ids(Config(rollout=section), tokenizer())
    banned = (7, ord("e"), tokenizer().convert_tokens_to_ids("<|end|>"))
    assert sampling_of(config.rollout).banned_token_ids == banned
    assert greedy_sampling(config.rollout).truncation.banned == banned
    with pytest.raises(ConfigError, match="--bad_words 'ab' is 2 tokens of --pretrain"):
        with_token_ids(Config(rollout=RolloutSection(bad_words=["ab"])), tokenizer())


# -- agents


def test_tools_that_no_prompt_would_name():
    tools = [{"type": "function", "function": ADD}]
    config = Config(data=replace(SECTION, chat_template_kwargs=json.dumps({"tools": tools})))
    check_tools(config, tokenizer())
    with pytest.raises(
        ConfigError,
        match="--tools: the chat template of --pretrain .* does not describe tools.* name add",
    ):
        check_tools(config, tokenizer("no tools"))


def test_an_agent_without_a_chat_template():
    config = Config(environment=EnvironmentSection(agent="agent.py:run"))
    check_tools(config, tokenizer())
    with pytest.raises(ConfigError, match="--agent: the tokenizer of --pretrain has no chat templ"):
        check_tools(config, byte_tokenizer())


# -- rows of other tools


HH = "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: "


def test_pairs_of_texts_without_a_prompt():
    row = {"chosen": HH + "good", "rejected": HH + "bad"}
    plain = pair_maker(PreferenceSection())(RowContext(DataSection(), tokenizer()), row)
    assert (
        plain.text == HH[:-1]
        and tokenizer().decode(plain.columns["chosen"].token_ids) == " good<eos>"
    )
    chat = pair_maker(PreferenceSection())(RowContext(SECTION, tokenizer()), row)
    assert chat.text.startswith("<|user|>q<|end|>\n<|assistant|>a<|end|>\n<|user|>r<|end|>")
    assert tokenizer().decode(chat.columns["rejected"].token_ids) == "bad<|end|>"


def test_forms_of_images(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    content = base64.b64encode((tmp_path / "a.png").read_bytes() * 4).decode()
    forms = [
        f"file://{tmp_path}/a.png",
        {"image": "a.png"},
        {"url": f"file://{tmp_path}/a.png"},
        [["a.png"]],
        '["a.png"]',
        {"image_url": {"url": f"data:image/png;base64,{content}"}},
        content,
        {"bytes": content},
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input": "q", "images": form}) + "\n" for form in forms)
    )

    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '@' }}{% endfor %}{% endfor %}"
    )
    section = replace(SECTION, prompt_data=str(tmp_path / "rows.jsonl"), images_key="images")
    prompts = load_prompts(section, tokenizer(template))
    assert [[image.size for image in prompt.multi_modal["images"]] for prompt in prompts] == [
        [(4, 3)]
    ] * len(forms)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "q", "images": "!" * 9000}))
    with pytest.raises(DataError) as error:
        load_prompts(section, tokenizer(template))
    assert len(str(error.value)) < 600
