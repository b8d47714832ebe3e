"""Why: who watches a stream of lightrft serve sees what the whole reply says, and sees it grow.

The unmodified SDKs read the streams. The turns are written here, and sampled in small pieces.
"""

import itertools
import json
import queue
import re
import threading
import time
from collections import defaultdict
from contextlib import suppress

import httpx
import pytest

from lightrft.core.samples import Completion, Prompt, Sample
from lightrft.extras import model_server
from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.http_server import listening, start_answering
from player import Player, tokenizer
from tiny import EOS

openai = pytest.importorskip("openai", reason="openai is not installed")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for message in messages"
    " %}{{ message.role[0] }}:{{ message.content }}{{ eos_token }}\n{% endfor %}a:{% if"
    " messages[-1].content.startswith('opened') %}<think>\n{% endif %}"
)
CALL = f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': '<b>'}})}</tool_call>"
TURNS = {
    "plain": "one two three four five six seven$",
    "characters": "  größer 😀 als \n ß  $",
    "marks": "a < b, <thin> or </tool, or [THIN <$",
    "nothing": "$",
    "thoughts": "\n<think>\nwell, a < b </thin\n</think>\n\nso it is$",
    "cut": "<think>thoughts that do not end, ",
    "opened": "well, I see\n</think>\n\nso it is$",
    "opened and cut": "well, I do not ",
    "no thoughts": "I wrote </think> and then <think> as text$",
    "twice": "<think>a</think>b <think>c</think> d$",
    "calls": f"<think>may I {CALL}?</think>\n\n  so \n{CALL}\n{CALL}$",
    "call alone": f"\n{CALL}$",
    "after a call": f"so \n{CALL} is it$",
    "no calls": f"{CALL} so {CALL} and <think> again$",
    "no JSON": 'so <tool_call>{"name": </tool_call>$',
    "the tag": "I can write <tool_call> to call$",
}
REFUSED = "a turn that the engine does not sample to its end$"
PARAMETERS = {"type": "object", "properties": {}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": PARAMETERS}


def play(player, sessions, ended):
    """Sample the turns for the sessions that begin, as the ranks of a server do."""
    numbers = itertools.count(1)
    decode = player.episodes.format.tokenizer.decode
    while not ended.is_set():
        with suppress(queue.Empty):
            while True:
                connection = sessions.new.get_nowait()
                sample = Sample(Prompt(0, "", []), 0, [], [], "", None)
                player.episodes.attach(sample, connection, next(numbers), 0)

        for wanted in player.episodes.poll(0.01):
            sample = wanted.conversation
            (asked,) = re.findall("u:(.+?)<eos>", decode(sample.prompt.token_ids))
            said = [
                EOS if byte == ord("$") else byte for byte in TURNS.get(asked, REFUSED).encode()
            ]
            if asked == "refused" and sample.token_ids:
                player.episodes.refuse(wanted, "no more of this")
                continue
            most = wanted.request.max_tokens
            new = said[len(sample.token_ids) :][:most]
            sample.token_ids += new
            sample.logprobs += [-0.5] * len(new)
            reason = "stop" if new[-1] == EOS else "length"
            text = decode(new, skip_special_tokens=True)
            player.episodes.generated(wanted, Completion(new, [-0.5] * len(new), reason), text)
        player.episodes.take_ended()
        time.sleep(0.001)


@pytest.fixture(scope="module")
def address():
    """Begins a server whose pieces have three tokens."""
    player = Player("none", chat=True, longest=4000, max_turns=4000)
    made = player.episodes.format.tokenizer = tokenizer(chat=True)
    made.chat_template = TEMPLATE
    sessions = model_server.ClientSessions(player.episodes.format, in_pieces=True)
    ended = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_server, "PIECE", 3)
        from lightrft.extras.agents.endpoint.server import application

        app = application(sessions, EndpointModel("m", 4000, {}))
        rank = threading.Thread(target=play, args=(player, sessions, ended))
        rank.start()
        begun = start_answering(app, listening("127.0.0.1", 0))
        # The server's thread makes loggers when it starts, and pytest goes through all of them.
        httpx.get(begun)
        yield begun
        ended.set()
        rank.join()
        player.episodes.close()


def form_of(reply):
    """Return a reply of an SDK without what differs in each."""
    content = reply.model_dump(mode="json", exclude={"created", "created_at"})
    text = re.sub(r"[0-9a-f]{12}_\d+", "ID", json.dumps(content))
    return json.loads(text, object_hook=lambda each: {k: v for k, v in each.items() if v})


def chats(address, asked, most, tools):
    """Return the form of the whole reply and of the stream's, and the texts of the deltas."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        more = {"tools": [{"type": "function", "function": FUNCTION}]} if tools else {}
        said = [{"role": "user", "content": asked}]
        request = {"model": "m", "messages": said, "max_tokens": most, **more}
        whole = client.chat.completions.create(**request)
        grown, calls = [], []
        for chunk in client.chat.completions.create(stream=True, **request):
            (choice,) = chunk.choices
            grown.append(choice.delta.content or "")
            calls += choice.delta.tool_calls or []
    message = whole.choices[0].message
    stated = [each.function.arguments for each in message.tool_calls or ()]
    forms = [
        ["".join(grown), [each.function.arguments for each in calls], choice.finish_reason],
        [message.content, stated, whole.choices[0].finish_reason],
    ]
    return *forms, [[text for text in grown if text]]


def messages(address, asked, most, tools):
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        tool = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
        said = [{"role": "user", "content": asked}]
        request = {"model": "m", "messages": said, "max_tokens": most, "tools": [tool] * tools}
        whole = client.messages.create(**request)
        deltas = defaultdict(list)
        with client.messages.stream(**request) as stream:
            for event in stream:
                if event.type == "content_block_delta" and event.delta.type != "signature_delta":
                    _, text = next(each for each in event.delta if each[0] != "type")
                    deltas[event.index].append(text)
            grown = stream.get_final_message()

    for index, block in enumerate(whole.content):
        text = "".join(deltas[index])
        if block.type == "tool_use":
            assert json.loads(text) == block.input
        else:
            assert text == getattr(block, block.type)
    return form_of(grown), form_of(whole), [*deltas.values()]


def responses(address, asked, most, tools):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        request = {"model": "m", "input": asked, "max_output_tokens": most}
        request["tools"] = [FUNCTION | {"type": "function"}] * tools
        whole = client.responses.create(**request)
        deltas = defaultdict(list)
        with client.responses.stream(**request) as stream:
            for event in stream:
                if event.type.endswith(".delta"):
                    deltas[event.output_index].append(event.delta)
        events = [*client.responses.create(stream=True, **request)]

    assert [event.sequence_number for event in events] == [*range(len(events))]
    grown = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == grown.output
    for index, item in enumerate(whole.output):
        called = item.type == "function_call"
        assert "".join(deltas[index]) == (item.arguments if called else item.content[0].text)
    return form_of(grown), form_of(whole), [*deltas.values()]


@pytest.mark.parametrize("api", [chats, messages, responses])
def test_a_stream_grows_to_the_whole_reply(address, api):
    pieces = {}
    for name, said in TURNS.items():
        most = len(said.encode()) - said.count("$") if "cut" in name else 400
        for tools in (False, True):
            grown, whole, pieces[name, tools] = api(address, name, most, tools)
            assert grown == whole, (name, tools)

    # Text and thoughts grow, and a call comes at once.
    (text,) = pieces["plain", True]
    assert len(text) > 5
    parts = pieces["calls", True]
    assert max(map(len, parts[:2])) > 5 and len(parts) == {chats: 1}.get(api, 4)
    assert api == chats or [len(deltas) for deltas in parts[2:]] == [1, 1]
    assert len(pieces["opened and cut", False][0]) > 3


def test_thoughts_are_no_text(address):
    """Also those that the prompt has begun, and that have not ended."""
    kinds = {}
    for name in TURNS:
        most = len(TURNS[name]) if "cut" in name else 400
        with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
            said = [{"role": "user", "content": name}]
            message = client.messages.create(model="m", max_tokens=most, messages=said)
        kinds[name] = [getattr(block, block.type) for block in message.content]
    assert kinds["thoughts"] == ["well, a < b </thin", "so it is"]
    assert kinds["opened"] == ["well, I see", "so it is"]
    assert kinds["opened and cut"] == ["well, I do not", ""] and len(kinds["cut"]) == 2
    assert kinds["twice"] == ["a", "b <think>c</think> d"]
    assert kinds["no thoughts"] == [TURNS["no thoughts"].removesuffix("$")]


@pytest.mark.parametrize("asked", ["thoughts", "cut", "opened", "opened and cut", "twice", "marks"])
def test_a_streamed_turn_that_comes_back_is_not_tokenized_again(address, asked):
    """The next prompt has its tokens, whose white space and marks no client sends back."""
    said = TURNS[asked]
    most = len(said) if "cut" in asked else 400
    heading = {"x-session-id": f"back {asked}"}
    with anthropic.Anthropic(
        base_url=address, api_key="none", max_retries=0, default_headers=heading
    ) as client:
        request = {"model": "m", "messages": [{"role": "user", "content": asked}]}
        with client.messages.stream(max_tokens=most, **request) as stream:
            content = stream.get_final_message().content
        opened = "<think>\n" if asked.startswith("opened") else ""
        request["messages"] += [
            {"role": "assistant", "content": [block.model_dump() for block in content]},
            {"role": "user", "content": "plain"},
        ]
        counted = client.messages.count_tokens(**request).input_tokens
    end = "" if said.endswith("$") else "$"
    assert counted == len(f"u:{asked}$\na:{opened}{said}{end}\nu:plain$\na:".encode())


def test_an_error_in_the_middle_of_a_stream_is_an_error_of_the_sdk(address):
    said = [{"role": "user", "content": "refused"}]
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as claude,
    ):
        with pytest.raises(openai.APIError, match="no more of this"):
            list(client.chat.completions.create(model="m", messages=said, stream=True))
        with pytest.raises(openai.APIError, match="no more of this"):
            list(client.responses.create(model="m", input="refused", stream=True))
        with (
            pytest.raises(anthropic.APIError, match="no more of this"),
            claude.messages.stream(model="m", messages=said, max_tokens=99) as stream,
        ):
            list(stream)
