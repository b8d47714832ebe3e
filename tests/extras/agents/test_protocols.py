"""Why: agents speak Anthropic's Messages and OpenAI's Responses, and start sub-agents in parallel.

Their SDKs, unmodified, get what the model has sampled, and exactly that is learned.
"""

import asyncio
import json
from contextlib import nullcontext

import pytest

from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.messages import Turn
from lightrft.extras.agents.session import Session
from lightrft.rewards.functions import environment
from malformed import NO_JSON, bodies_of
from player import Player, ids

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("anthropic", reason="anthropic is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

CALL = f"so<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 1}})}</tool_call>"

AGENTS = '''
import asyncio

from anthropic import APIStatusError, AsyncAnthropic

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
ADD_FUNCTION = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}


def claude(client):
    return AsyncAnthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key, max_retries=0)


async def messages(client, row):
    """Thinking, two tools in parallel, a result, and a stream; all of it is sent back as it came."""
    asked = [{"role": "user", "content": "p"}]
    async with claude(client) as api:
        first = await api.messages.create(model="m", max_tokens=300, system="s", messages=asked, tools=[ADD])
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        thought, text, call, again = first.content
        assert thought.thinking == "well" and text.text == "so" and call.input == {"a": 1}
        assert first.stop_reason == "tool_use" and call.id != again.id
        assert first.usage.output_tokens > 20

        content = [{"type": "text", "text": "2"}]
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": content} for each in (call, again)]
        asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        counted = await api.messages.count_tokens(model="m", system="s", messages=asked, tools=[ADD])
        async with api.messages.stream(model="m", max_tokens=3, system="s", messages=asked, tools=[ADD]) as stream:
            pieces = [piece async for piece in stream.text_stream]
            last = await stream.get_final_message()
    assert "".join(pieces) == last.content[0].text == "abc"
    assert last.stop_reason == "max_tokens" and last.usage.output_tokens == 3
    assert last.usage.input_tokens == counted.input_tokens
    return 1.0


async def streamed_calls(client, row):
    async with claude(client) as api:
        asked = [{"role": "user", "content": "p"}]
        async with api.messages.stream(model="m", max_tokens=300, messages=asked, tools=[ADD]) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == {"a": 1} and message.content[0].thinking == "well"
    return 1.0


async def responses(client, row):
    """The items are sent back; then the id of a response stands for them."""
    first = await client.responses.create(model="m", instructions="s", input="p", tools=[ADD_FUNCTION])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "so" and first.status == "completed"
    assert first.output[0].content[0].text == "well" and first.output[2].arguments == '{"a": 1}'
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "2"} for item in first.output[2:]]
    more = {"model": "m", "instructions": "s", "tools": [ADD_FUNCTION], "max_output_tokens": 3}
    stream = await client.responses.create(input=[{"role": "user", "content": "p"}, *first.output, *results], stream=True, **more)
    events = [event async for event in stream]
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "abc"
    assert events[-1].response.usage.output_tokens == 3
    last = await client.responses.create(input="q", previous_response_id=events[-1].response.id, **more)
    assert last.output_text == "xyz"
    return 1.0


async def streamed_items(client, row):
    async with client.responses.stream(model="m", input="p", tools=[ADD_FUNCTION]) as stream:
        async for event in stream:
            pass
        response = await stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[3].arguments == '{"a": 1}' and response.output_text == "so"
    return 1.0


TWENTY = [f"tool_{number}" for number in range(20)]


async def coding_harness(client, row):
    """The requests of a coding agent: marks for a cache, a sub-agent beside a call, and a summary."""
    cache = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are a coding agent. " * 20, **cache}]
    tools = [{"name": name, "description": "A tool.", "input_schema": {"type": "object"}} for name in TWENTY]
    more = {"model": "m", "max_tokens": 300, "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with claude(client) as api:
        said = [{"role": "user", "content": [{"type": "text", "text": "p", **cache}]}]
        first = await api.messages.create(system=system, messages=said, tools=tools, **more)
        call = first.content[-1]
        sub = api.messages.create(system="sub", messages=[{"role": "user", "content": "look"}], **more)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "done", "is_error": False, **cache}
        said += [{"role": "assistant", "content": first.content}]
        said += [{"role": "user", "content": [result, {"type": "text", "text": "<reminder>", **cache}]}]
        main = api.messages.create(system=system, messages=said, tools=tools, **more)
        sub, second = await asyncio.gather(sub, main)
        summary = [{"role": "user", "content": f"Summary: {sub.content[0].text}, {second.content[0].text}"}]
        last = await api.messages.create(system=system, messages=summary, tools=tools, **more)
        assert last.stop_reason == "end_turn"
    return 1.0


async def responses_harness(client, row):
    """The requests of an agent that stores nothing: it sends all items back, with thoughts it cannot read."""
    schema = {"type": "function", "description": "A tool.", "parameters": {"type": "object"}, "strict": False}
    tools = [schema | {"name": name} for name in TWENTY]
    more = {"model": "m", "instructions": "You are an agent. " * 20, "tools": tools, "store": False, "parallel_tool_calls": False}
    more |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium"}, "prompt_cache_key": "k"}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "p"}]},
    ]
    for turn in range(2):
        response = await client.responses.create(input=items, **more)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": each.call_id, "output": "done"} for each in calls]
    return 1.0


async def other_clients(client, row):
    """What clients change in a history: the number of a bill, hints, 30.0 as 30, the text that ended a turn."""
    async with claude(client) as api:
        def system(number):
            return [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, {"type": "text", "text": "s"}]

        said = [{"role": "user", "content": "p"}]
        first = await api.messages.create(model="m", max_tokens=99, system=system(1), messages=said, tools=[ADD])
        (thought, call) = first.content
        assert thought.signature and call.input == {"a": 30.0}
        block = call.model_dump() | {"input": {"a": 30}}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "60"}
        said += [{"role": "assistant", "content": [thought, block]}, {"role": "user", "content": [result]}]
        hinted = [ADD | {"type": "custom", "cache_control": {"type": "ephemeral"}}]
        await api.messages.create(model="m", max_tokens=99, system=system(2), messages=said, tools=hinted)
        try:
            search = [{"type": "web_search_20250305", "name": "web_search"}]
            await api.messages.create(model="m", max_tokens=9, messages=said, tools=search)
        except APIStatusError as error:
            assert error.status_code == 400 and "one that the client runs" in str(error)
        else:
            raise AssertionError("a tool of the provider")
    return 1.0


async def react(client, row):
    """Completions that end with the text which the next prompt goes on with."""
    text = "Q\\n"
    for answer in "12":
        reply = await client.completions.create(model="m", prompt=text, stop=["\\nObs:"])
        text += f"{reply.choices[0].text}\\nObs: {answer}"
    return 1.0


async def several_items(client, row):
    """Two texts of one turn, and two messages of the system, become one message each."""
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "p"},
        {"type": "reasoning", "id": "r", "summary": [], "content": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "q"},
    ]
    first = await client.responses.create(model="m", instructions="s", input=items)
    await client.responses.create(model="m", instructions="s", input="x", previous_response_id=first.id)
    for bad in ({"conversation": "c"}, {"previous_response_id": "resp_9"}):
        try:
            await client.responses.create(model="m", input="p", **bad)
        except Exception as error:
            assert error.status_code == 400, error
        else:
            raise AssertionError(bad)
    return 1.0


async def half_a_character(client, row):
    """A call that no client could read as JSON is text."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "p"}], "max_tokens": 99}
    async with claude(client) as api:
        message = await api.messages.create(tools=[ADD], **asked)
    assert message.stop_reason == "end_turn" and "tool_call" in message.content[0].text
    return 1.0


async def eight(client, row):
    """A parent, eight sub-agents at once that each take two turns, and the parent again."""
    asked = [{"role": "user", "content": "p"}]
    parent = (await client.chat.completions.create(model="m", messages=asked)).choices[0].message

    async def sub(number):
        said = [{"role": "user", "content": f"{number}"}]
        for _ in range(2):
            reply = (await client.chat.completions.create(model="m", messages=said)).choices[0].message
            said += [reply, {"role": "user", "content": "?"}]

    await asyncio.gather(*map(sub, range(8)))
    asked += [parent, {"role": "user", "content": "done"}]
    await client.chat.completions.create(model="m", messages=asked)
    return 1.0


async def continued_twice(client, row):
    """Two requests continue the same turn at the same time."""
    asked = [{"role": "user", "content": "p"}]
    first = (await client.chat.completions.create(model="m", messages=asked)).choices[0].message
    asked += [first, {"role": "user", "content": "x"}]
    await asyncio.gather(*(client.chat.completions.create(model="m", messages=asked) for _ in range(2)))
    return 1.0


async def too_many(client, row):
    told = []
    for number in range(10):
        try:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}"}])
        except Exception as error:
            told.append(str(error))
    assert len(told) == 1 and "--agent_branches" in told[0], told
    return 1.0


async def named(client, row):
    return await globals()[row["agent"]](client, row)


async def own_sampling(client, row):
    more = {"temperature": 0.2, "seed": 5, "frequency_penalty": 0.5, "stop": ["\\n", "!"]}
    asked = [{"role": "user", "content": "p"}]
    reply = await client.chat.completions.create(model="m", messages=asked, **more)
    assert reply.choices[0].message.content == "one" and reply.choices[0].finish_reason == "stop"
    async with claude(client) as api:
        said = [*asked, {"role": "assistant", "content": "one"}, {"role": "user", "content": "x"}]
        own = {"stop_sequences": ["!"], "extra_body": {"temperature": 0.2}}
        message = await api.messages.create(model="m", max_tokens=9, messages=said, **own)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "!")
        for bad in ({"temperature": "hot"}, {"temperature": -1}):
            try:
                await api.messages.create(model="m", max_tokens=9, messages=said, extra_body=bad)
            except APIStatusError as error:
                assert error.status_code == 400 and error.body["error"]["type"] == "invalid_request_error"
            else:
                raise AssertionError(bad)
    return 1.0
'''


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays an episode of one of AGENTS; all run in the same process, one after another."""
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    limits = {"longest": 400, "prompt_max_len": 1000, "max_turns": 18, "agent_branches": 8}
    player = Player(agent=f"{path}:named", chat=True, **limits)

    yield lambda name, turns: player.play([turns], rows=[{"agent": name}])[0]
    player.episodes.close()


TURN = f"<think>\nwell\n</think>\n\n{CALL}{CALL.removeprefix('so')}$"


def test_messages_are_learned_as_they_were_sampled(play):
    sample = play("messages", [TURN, "abcde"])
    assert sample.episode.problem == "" and environment([sample]) == [1.0]
    assert sample.prompt.token_ids == ids("add;s:s$\nu:p$\na:") and sample.episode.branches == []
    assert sample.token_ids == ids(f"{TURN}\nt:2$\nt:2$\na:abc") and sample.episode.drift == 0


def test_responses_are_learned_as_they_were_sampled(play):
    sample = play("responses", [TURN, "abc", "xyz"])
    assert sample.episode.problem == "" and environment([sample]) == [1.0]
    assert sample.prompt.token_ids == ids("add;s:s$\nu:p$\na:") and sample.episode.branches == []
    read = "\nt:2$\nt:2$\na:abc$\nu:q$\na:xyz"
    assert sample.token_ids == ids(f"{TURN}{read}") and sample.episode.drift == 0


def test_what_a_coding_harness_sends(play):
    call = '<tool_call>{"name": "tool_3", "arguments": {}}</tool_call>$'
    sample = play("coding_harness", [call, "b$", "c$", "d$"])
    assert sample.episode.problem == "" and sample.episode.drift == 0
    assert sample.episode.overridden == {} and len(sample.episode.branches) == 2
    system = "You are a coding agent. " * 20
    named = "".join(f"tool_{number};" for number in range(20))
    assert sample.prompt.token_ids == ids(f"{named}s:{system}$\nu:p$\na:")
    assert sample.token_ids in (
        ids(f"{call}\nt:done$\nu:<reminder>$\na:b$"),
        ids(f"{call}\nt:done$\nu:<reminder>$\na:c$"),
    )
    assert [sum(row.episode.sampled) for row in sample.rows] == [len(ids(call)) + 2, 2, 2]


def test_what_a_harness_of_responses_sends(play):
    call = '<think>well</think>so<tool_call>{"name": "tool_3", "arguments": {}}</tool_call>$'
    sample = play("responses_harness", [call, "b$"])
    assert sample.episode.problem == "" and sample.episode.drift == 0
    assert sample.episode.branches == [] and sample.token_ids == ids(f"{call}\nt:done$\na:b$")


@pytest.mark.parametrize("name", ["streamed_calls", "streamed_items"])
def test_streams_have_all_parts_of_a_turn(play, name):
    sample = play(name, [TURN])
    assert sample.episode.problem == "" and sample.token_ids == ids(TURN)


def test_what_clients_change_begins_no_branch(play):
    call = '<think>w</think><tool_call>{"name": "add", "arguments": {"a": 30.0}}</tool_call>$'
    sample = play("other_clients", [call, "b$"])
    assert sample.episode.problem == "" and sample.episode.branches == []
    assert sample.prompt.token_ids == ids("add;s:s$\nu:p$\na:")
    assert sample.token_ids == ids(f"{call}\nt:60$\na:b$")


def test_the_text_that_ends_a_turn_is_read_once(play):
    sample = play("react", ["look\nObs:", "done$"])
    assert sample.episode.problem == "" and sample.episode.branches == []
    assert sample.token_ids == ids("look\nObs: 1done$")


def test_items_of_one_turn_are_one_message(play):
    sample = play("several_items", ["a$", "b$"])
    assert sample.episode.problem == "" and sample.episode.branches == []
    assert sample.prompt.token_ids == ids("s:s\n\nd$\nu:p$\na:AB$\nu:q$\na:")
    assert sample.token_ids == ids("a$\nu:x$\na:b$")


def test_a_call_with_half_a_character_is_text(play):
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>$'
    assert play("half_a_character", [call]).episode.problem == ""


def test_eight_branches_at_once(play):
    sample = play("eight", [f"{letter}$" for letter in "abcdefghijklmnopqr"])
    assert sample.episode.problem == "" and sample.episode.drift == 0
    assert sample.token_ids == ids("a$\nu:done$\na:r$")
    assert len(sample.episode.branches) == 8
    for branch in sample.episode.branches:
        assert branch.episode.num_turns == 2 and sum(branch.episode.sampled) == 4


def test_a_turn_that_is_continued_twice_at_once(play):
    sample = play("continued_twice", ["a$", "b$", "c$"])
    assert sample.episode.problem == "" and sample.episode.drift == 0
    (branch,) = sample.episode.branches
    assert sample.token_ids == ids("a$\nu:x$\na:b$") and branch.token_ids == ids("a$\nu:x$\na:c$")
    assert sum(branch.episode.sampled) == 2


def test_more_branches_than_allowed_are_refused(play):
    sample = play("too_many", ["a$"] * 9)
    assert sample.episode.problem == "" and len(sample.episode.branches) == 8


def test_sampling_belongs_to_the_run(play):
    sample = play("own_sampling", ["one!$", "two!$"])
    assert sample.episode.problem == "" and sample.episode.branches == []
    assert sample.token_ids == ids("one!$\nu:x$\na:two!$")
    assert sample.episode.overridden == {"temperature": 2, "seed": 1, "frequency_penalty": 1}


class Answering(Session):
    """Session whose turns are always the same."""

    async def request(self, request, **sent):
        return Turn("ab", [1, 2], "stop", content="ab", logprobs=[0.0, 0.0], context_ids=[1])


@pytest.mark.parametrize(("route", "form"), [("/v1/messages", "error"), ("/v1/responses", None)])
def test_malformed_bodies_get_the_error_of_the_api(route, form):
    model = EndpointModel("m", 264, {"temperature": 1.0, "top_p": 1.0})
    from lightrft.extras.agents.endpoint.server import application

    app = application(lambda _: nullcontext(Answering(None)), model)

    async def answers():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            bodies = [*bodies_of(route), *NO_JSON]
            contents = [body if isinstance(body, bytes) else json.dumps(body) for body in bodies]
            return [await client.post(route, content=content) for content in contents]

    replies = asyncio.run(answers())
    assert len(replies) > 100 and {reply.status_code for reply in replies} == {400}
    for reply in replies:
        body = reply.json()
        assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
        assert body.get("type") == form
