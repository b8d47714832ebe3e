"""Why: a client sends back text, and tokenizing it again may give other tokens.

What was sampled is learned, whatever a client does.
"""

import asyncio
import json
from multiprocessing import Pipe

import pytest

from lightrft.extras.agents.endpoint.parts import parts_of
from lightrft.extras.agents.endpoint.protocol import EndpointModel, chat_reply
from lightrft.extras.agents.messages import ToolCall, Turn
from lightrft.extras.agents.session import Session
from lightrft.rewards.functions import environment
from malformed import MALFORMED, NO_JSON
from player import Player, ids
from tiny import EOS

pytest.importorskip("openai", reason="openai is not installed")

AGENTS = '''
import asyncio
import json

import httpx
from openai import APIStatusError


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="any", messages=messages, **options)


async def twenty(client, row):
    """Twenty turns, which are sent back without their white space, as many clients do."""
    messages = [{"role": "user", "content": "p"}]
    for number in range(20):
        reply = await ask(client, messages, logprobs=True, extra_body={"return_token_ids": True})
        (choice,) = reply.choices
        assert len(choice.token_ids) == len(choice.logprobs.content) == reply.usage.completion_tokens
        assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens
        text = choice.message.content.strip()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number % 10}"}]
    return 1.0


async def forgetful(client, row):
    """It keeps the first turn, forgets the second, and then begins with a summary; the first turn is asked for twice."""
    messages = [{"role": "user", "content": "p"}]
    first = (await ask(client, messages)).choices[0].message
    messages += [first, {"role": "user", "content": "x"}]
    await ask(client, messages)
    messages[-1] = {"role": "user", "content": "y"}
    await ask(client, messages)
    await ask(client, [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    await ask(client, messages[:1])
    return 0.5


async def chats(engine, row):
    """The same as a program in the worker, without a server."""
    messages = [{"role": "user", "content": "p"}]
    turn = await engine.chat(messages)
    await engine.chat([*messages, {"role": "assistant", "content": turn.text}, {"role": "user", "content": "x"}])
    await engine.chat([{"role": "user", "content": "q"}])
    engine.reward(2)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def tools(client, row):
    messages = [{"role": "user", "content": "p"}]
    reply = (await ask(client, messages, tools=[TOOL])).choices[0]
    assert reply.finish_reason == "tool_calls" and reply.message.content == "so"
    (call,) = reply.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
    messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    stream = await ask(client, messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}, max_tokens=3)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "abc"
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage.completion_tokens == 3
    without = (await ask(client, [{"role": "user", "content": "p"}])).choices[0]
    assert without.message.tool_calls is None and "<tool_call>" in without.message.content
    return 1.0


async def other_routes(client, row):
    first = await client.completions.create(model="any", prompt="ab", max_tokens=2, logprobs=0)
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("cd", "length")
    assert first.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    second = await client.completions.create(model="any", prompt="abcd!", extra_body={"return_token_ids": True})
    assert second.prompt_token_ids == [97, 98, 99, 100, 33]
    async with httpx.AsyncClient(base_url=str(client.base_url).removesuffix("/v1/"),
                                 headers={"Authorization": f"Bearer {client.api_key}"}) as plain:
        (model,) = (await plain.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 264)
        ids = [*second.prompt_token_ids, *second.choices[0].token_ids, 63]
        body = {"model": "tiny", "token_ids": ids, "sampling_params": {"temperature": 1.0, "logprobs": 1, "max_tokens": 9,
                "stop_token_ids": [row["end"]], "skip_special_tokens": False}}
        (choice,) = (await plain.post("/inference/v1/generate", json=body)).json()["choices"]
        assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{each}" for each in choice["token_ids"]]
        assert (await plain.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "old"})).status_code == 401
        for route, bad in ("/v1/completions", "[]"), ("/v1/completions", "{"), ("/inference/v1/generate", '{"token_ids": ["a"]}'):
            assert (await plain.post(route, content=bad)).status_code == 400
    return 1.0


async def refused(client, row):
    messages = [{"role": "user", "content": "p"}]
    wrong = {"temperature": 0.5, "top_p": 0.9, "n": 2, "stop": [5], "max_tokens": 0, "presence_penalty": 1.0}
    told = []
    for name, value in wrong.items():
        try:
            await ask(client, messages, **{name: value})
        except APIStatusError as error:
            told.append(f"{error.status_code} {error.body['message']}")
    assert len(told) == len(wrong) and "(--temperature)" in told[0], told
    image = {"role": "user", "content": [{"type": "image_url"}]}
    for bad in ([], [{"content": "p"}], [image], [*messages, {"role": "assistant"}]):
        try:
            await ask(client, bad)
        except APIStatusError as error:
            told.append(error.body["message"])
    assert len(told) == len(wrong) + 4, told
    await ask(client, messages, temperature=1.0, top_p=1.0, n=1, tool_choice="auto")
    return 1.0


async def malformed(client, row):
    """Each request is sent as it is, without the checks of the client."""
    base, key = str(client.base_url), {"Authorization": f"Bearer {client.api_key}"}
    wrong = []
    async with httpx.AsyncClient(base_url=base.removesuffix("/v1/"), headers=key) as plain:
        for route, body, word in MALFORMED:
            reply = await plain.post(route, content=json.dumps(body))
            if reply.status_code != 400 or word not in reply.text:
                wrong.append((route, body, reply.status_code, reply.text))
        for content in NO_JSON:
            reply = await plain.post("/v1/completions", content=content)
            wrong += [] if reply.status_code == 400 else [(content[:20], reply.status_code)]
        large = await plain.post("/v1/completions", json={"prompt": "a" * 1_000_000})
        assert wrong == [] and large.status_code == 413, (wrong, large)
    await ask(client, [{"role": "user", "content": "p"}])
    return 1.0


async def impatient(client, row):
    """It gives up its first request, whose turn is not the answer to the second one."""
    try:
        await asyncio.wait_for(ask(client, [{"role": "user", "content": "p"}]), 0.001)
    except TimeoutError:
        pass
    reply = (await ask(client, [{"role": "user", "content": "q"}])).choices[0]
    return float(reply.message.content == "b")


async def in_a_library(client, row):
    await client.chat.completions.create(model="any", messages=[{"role": "user"}], n=5)


async def endless(client, row):
    messages = [{"role": "user", "content": "p"}]
    while True:
        reply = (await ask(client, messages)).choices[0].message
        messages += [reply, {"role": "user", "content": "more"}]


async def several_at_once(client, row):
    replies = await asyncio.gather(*(ask(client, [{"role": "user", "content": letter}]) for letter in "abc"))
    assert all(reply.choices[0].message.content for reply in replies)
    return 1.0


async def breaks(client, row):
    await ask(client, [{"role": "user", "content": "p"}])
    raise OSError("no network")
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(f"MALFORMED = {MALFORMED!r}\nNO_JSON = {NO_JSON!r}\n" + AGENTS)
    return path


@pytest.fixture
def play(file):
    players = []

    def run(name, turns, **options):
        players.append(Player(agent=f"{file}:{name}", chat=True, **options))
        return players[-1].play([turns])[0]

    yield run
    for player in players:
        player.episodes.close()


def test_twenty_turns_are_learned_as_they_were_sampled(play):
    """The texts are not tokenized to the same bytes again.

    They have white space, invalid UTF-8, a missing end, and a role in the text.
    """
    sampled = [ids("  t$"), [0xC3, EOS], ids("t"), ids("u:t$")] * 5
    sample = play("twenty", sampled, max_turns=20, longest=2000)
    between = [
        "\nu:0$\na:",
        "\nu:1$\na:",
        "$\nu:2$\na:",
        "\nu:3$\na:",
        "\nu:4$\na:",
        "\nu:5$\na:",
        "$\nu:6$\na:",
        "\nu:7$\na:",
        "\nu:8$\na:",
        "\nu:9$\na:",
        "$\nu:0$\na:",
        "\nu:1$\na:",
        "\nu:2$\na:",
        "\nu:3$\na:",
        "$\nu:4$\na:",
        "\nu:5$\na:",
        "\nu:6$\na:",
        "\nu:7$\na:",
        "$\nu:8$\na:",
    ]
    mask = "11110000000011000000001000000000111100000000"

    tokens = [
        token
        for turn, read in zip(sampled, [*between, ""], strict=True)
        for token in (*turn, *ids(read))
    ]
    assert sample.prompt.token_ids == ids("u:p$\na:")
    assert sample.token_ids == tokens
    assert "".join(str(int(each)) for each in sample.episode.sampled) == (mask * 5).removesuffix(
        "00000000"
    )
    assert sample.logprobs == [-0.5 if each else 0.0 for each in sample.episode.sampled]

    assert (
        sample.episode.drift == 0
        and sample.episode.branches == []
        and environment([sample]) == [1.0]
    )
    again = Player(chat=True).episodes.format.tokenizer
    assert again(again.decode(tokens))["input_ids"] != tokens, (
        "these tokens would not survive a round trip"
    )


def test_a_history_that_was_rewritten_is_a_branch(play):
    sample = play("forgetful", ["one$", "two$", "three$", "four$", "five$"])
    first, second, third = sample.episode.branches
    assert (
        sample.token_ids == ids("one$\nu:x$\na:two$")
        and sample.episode.sampled == [True] * 4 + [False] * 8 + [True] * 4
    )
    assert (
        first.token_ids == ids("one$\nu:y$\na:three$")
        and first.episode.sampled == [False] * 12 + [True] * 6
    )
    assert [message["content"] for message in first.episode.messages] == ["p", "one", "y", "three"]

    assert (
        second.prompt.token_ids == ids("s:s$\nu:q$\na:")
        and second.token_ids == ids("four$")
        and all(second.episode.sampled)
    )
    assert third.prompt.token_ids == sample.prompt.token_ids and third.token_ids == ids("five$")
    assert sample.text == "five" and environment([sample]) == [0.5] and sample.episode.drift == 0
    assert [each.episode.num_turns for each in sample.rows] == [2, 1, 1, 1]


def test_a_program_has_the_same_histories_without_a_server(file):
    player = Player(f"{file}:chats", chat=True)
    (sample,) = player.play([["one$", "two$", "three$"]])
    player.episodes.close()
    assert [each.token_ids for each in sample.rows] == [ids("one$\nu:x$\na:two$"), ids("three$")]
    assert environment([sample]) == [2.0]


def test_tool_calls_and_streams(play):
    call = f"so<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 1}})}</tool_call>$"
    sample = play("tools", [call, "abcde", call], longest=400)
    assert sample.episode.problem == "" and sample.prompt.token_ids == ids("add;u:p$\na:")
    assert sample.token_ids == ids(f"{call}\nt:2$\na:abc") and sample.episode.branches[
        0
    ].prompt.token_ids == ids("u:p$\na:")


def test_completions_and_token_ids(file):
    player = Player(agent=f"{file}:other_routes", chat=True)
    (sample,) = player.play([["cde", "f$", "g$"]])
    player.episodes.close()
    assert sample.episode.problem == "" and sample.prompt.token_ids == ids("ab")
    assert sample.token_ids == ids("cd!f$?g$")
    assert sample.episode.sampled == [True] * 2 + [False] + [True] * 2 + [False] + [True] * 2


def test_sampling_settings_unlike_those_of_the_run_are_refused(play):
    sample = play("refused", ["a$"], refuses=True)
    assert sample.episode.problem == "" and sample.token_ids == ids("a$")


@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"longest": 24}])
def test_an_agent_that_goes_on_ends_at_the_limit(play, limits):
    sample = play("endless", ["a$"] * 9, **limits)
    assert (
        sample.token_ids == ids("a$\nu:more$\na:a$")
        and sample.truncated
        and sample.episode.problem == ""
    )


def test_requests_at_the_same_time_are_branches(play):
    sample = play("several_at_once", ["1$", "2$", "3$"])
    assert sorted(row.prompt.token_ids.tolist() for row in sample.rows) == [
        ids(f"u:{letter}$\na:") for letter in "abc"
    ]
    assert sorted(bytes(row.token_ids[:1]) for row in sample.rows) == [b"1", b"2", b"3"]


def test_a_meaningless_request_is_refused(play):
    sample = play("malformed", ["a$"], refuses=True)
    assert sample.episode.problem == "" and sample.token_ids == ids("a$")


HALF_SENT = {
    "nothing": b"",
    "a head": b"POST /v1/completions HTT",
    "a body": (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\nContent-Length:"
        b" 9\r\n\r\n{"
    ),
    "a second head": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n|GET /hea",
}


@pytest.mark.parametrize("case", HALF_SENT)
def test_a_connection_with_half_a_request_is_closed(case, monkeypatch):
    from lightrft.extras import http_server
    from lightrft.extras.agents.endpoint import server

    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.3)

    async def closed():
        program, rank = Pipe()
        async with server.serving(Session(program), EndpointModel("tiny", 264, {})) as address:
            host, port = address.url.removeprefix("http://").removesuffix("/v1").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for sent in HALF_SENT[case].replace(b"KEY", address.key.encode()).split(b"|"):
                writer.write(sent)
                await asyncio.sleep(0.1)
            answer = await asyncio.wait_for(reader.read(), 4)
            writer.close()
            rank.close()
            return answer

    assert (b"408" in asyncio.run(closed())) == (case == "a body")


def test_the_error_of_an_agent_is_located_in_its_file(play, file):
    sample = play("in_a_library", ["a$"])
    line = next(
        number for number, text in enumerate(file.read_text().splitlines(), 1) if "n=5" in text
    )
    assert sample.episode.problem.startswith("BadRequestError: ")
    assert sample.episode.problem.endswith(f"agents.py:{line} (in_a_library)")


def test_an_agent_that_raises_loses_only_its_sample(play):
    sample = play("breaks", ["a$"])
    assert (
        sample.masked
        and "OSError: no network, at " in sample.episode.problem
        and "agents.py:" in sample.episode.problem
    )


@pytest.mark.parametrize(("ended", "says"), [("stop", "tool_calls"), ("length", "length")])
def test_a_turn_that_was_cut_after_a_call_says_so(ended, says):
    turn = Turn("", [1], ended, tool_calls=[ToolCall("add", {})], logprobs=[0.0])
    asked = {"tools": [{}]}
    parts = parts_of(turn, asked, apart=False)
    reply = chat_reply(turn, parts, EndpointModel("any", 99, {}), asked)
    (choice,) = reply["choices"]
    assert choice["message"]["tool_calls"] and choice["finish_reason"] == says
