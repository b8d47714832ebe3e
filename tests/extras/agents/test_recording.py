"""Why: a harness is debugged, and a server is compared with another, by what was really sent.

The official SDKs send the requests, in all three protocols, streamed and not.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, nullcontext

import pytest

from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.messages import ToolCall, Turn
from lightrft.extras.agents.recording import Recording
from lightrft.extras.agents.session import Session
from lightrft.extras.commands import agents
from lightrft.extras.http_server import listening, start_answering
from player import Player, ids

pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("anthropic", reason="anthropic is not installed")

CALL = f"so<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': 1}})}</tool_call>$"
AGENT = '''
from anthropic import AsyncAnthropic
from openai import BadRequestError

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def play(client, row):
    """Each API whole and as a stream, a response after another one, a count, and a refused request."""
    said = [{"role": "user", "content": "p"}]
    chat = {"model": "policy:chat", "messages": said, "max_tokens": 99}
    await client.chat.completions.create(**chat)
    async for _ in await client.chat.completions.create(stream=True, **chat):
        pass

    more = {"model": "policy:items", "tools": [FUNCTION]}
    first = await client.responses.create(input="p", **more)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}
    async with client.responses.stream(input=[result], previous_response_id=first.id, **more) as stream:
        async for _ in stream:
            pass

    base_url = str(client.base_url).removesuffix("/v1/")
    async with AsyncAnthropic(base_url=base_url, api_key=client.api_key, max_retries=0) as api:
        asked = {"model": "policy:blocks", "messages": said, "tools": [ADD]}
        await api.messages.create(max_tokens=99, **asked)
        async with api.messages.stream(max_tokens=99, **asked) as stream:
            async for _ in stream:
                pass
        await api.messages.count_tokens(**asked)
    try:
        await client.chat.completions.create(n=2, **chat)
    except BadRequestError:
        return dict.fromkeys(("chat", "items", "blocks"), 1.0)
'''
TURNS = ["a$", "b$", CALL, "c$", CALL, CALL]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = [CHAT, CHAT, RESPONSES, RESPONSES, MESSAGES, MESSAGES, f"{MESSAGES}/count_tokens", CHAT]


def rows_of(file):
    with closing(sqlite3.connect(file)) as connection:
        connection.row_factory = sqlite3.Row
        return list(map(dict, connection.execute("SELECT * FROM exchanges ORDER BY rowid")))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Plays the episode, and again as a resumed run; returns the file, and the two samples."""
    folder = tmp_path_factory.mktemp("recording")
    (folder / "agent.py").write_text(AGENT)
    file = folder / "new" / "agent.sqlite"
    samples = []
    for _ in range(2):
        recording = Recording(file)
        player = Player(
            agent=f"{folder}/agent.py:play", chat=True, longest=400, recording=recording
        )
        player.episodes.draw = 2**62
        samples += player.play([TURNS])
        player.episodes.close()
    return file, samples


def test_every_exchange_is_recorded_with_its_tokens(played):
    """Also by a run that repeats the step: each episode is recorded once."""
    file, (sample, again) = played
    assert sample.episode.problem == again.episode.problem == ""
    rows = rows_of(file)
    assert [row["path"] for row in rows] == PATHS
    assert [row["number"] for row in rows] == list(range(8))
    assert [row["status"] for row in rows] == [200] * 7 + [400]
    assert {row["draw"] for row in rows} == {2**62} and {row["slot"] for row in rows} == {0}
    assert [json.loads(row["token_ids"] or "[]") for row in rows] == [*map(ids, TURNS), [], []]
    assert json.loads(rows[0]["logprobs"]) == [-0.5, -0.5]
    assert [row["branch"] for row in rows] == [0, 1, 2, 2, 3, 4, None, None]
    assert [row["role"] for row in rows[1:5]] == ["chat", "items", "items", "blocks"]
    assert json.loads(rows[2]["request"])["input"] == "p"
    assert json.loads(rows[2]["reply"])["object"] == "response"
    assert "event: response.completed" in rows[3]["reply"] and "message_stop" in rows[5]["reply"]
    assert "n 2 is not possible" in json.loads(rows[7]["reply"])["error"]["message"]


class Answering(Session):
    """Session whose turns are always the same."""

    turn_of_all = Turn("so", [1, 2], "stop", content="so", logprobs=[0.0, 0.0], context_ids=[1])

    async def request(self, request, **sent):
        return self.turn_of_all


@pytest.fixture
def replay(played, capsys):
    """Sends the recorded requests to a server that always samples the same, or to none."""

    def run(turn, file=played[0], address=None, *flags):
        from lightrft.extras.agents.endpoint.server import application

        session = Answering(None)
        session.turn_of_all = turn
        session.stored = {"resp_": []}
        if address is None:
            app = application(
                lambda _: nullcontext(session), EndpointModel("m", 264, {"top_p": 1.0})
            )
            address = start_answering(app, listening("127.0.0.1", 0))
        with pytest.raises(SystemExit) as ended:
            agents.main(["replay", str(file), "--base_url", f"{address}/v1", *flags])
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    return run


CALLS = Turn(
    "", [1, 2], "stop", tool_calls=[ToolCall("add", {"b": "x"})], content="so", context_ids=[1]
)


def test_replies_of_the_same_form_are_no_difference(replay):
    """Other texts, arguments and numbers are none. Chats have no tools, so they have no calls."""
    code, said = replay(CALLS)
    problems = [line for line in said.splitlines() if "request 3, /v1/responses" not in line]
    assert problems == ["8 requests; 7 replies have a recorded form"] and code == 1


def test_differences_in_form_are_told(replay):
    code, said = replay(Turn("so", [1, 2], "length", content="so", context_ids=[1]))
    lines = said.splitlines()
    assert code == 1 and lines[-1] == "8 requests; 2 replies have a recorded form"
    whole = [line for line in lines if "request 4, /v1/messages:" in line]
    assert any("message.stop_reason 'tool_use' is missing" in line for line in whole)
    assert any("message.stop_reason 'max_tokens' is new" in line for line in whole)
    assert any("content[].name (str) is missing" in line for line in whole)
    assert "chat.completion.choices[].finish_reason 'stop' is missing" in lines[0]
    (order,) = [line for line in lines if "request 3" in line and "the events were" in line]
    assert "'response.completed'] and are" in order and "'response.incomplete']" in order


def test_a_turn_that_is_sampled_otherwise_is_no_difference(replay, played, tmp_path):
    """If the recording has another reply of this form, to a request with the same fields."""
    (row,) = [each for each in rows_of(played[0]) if each["number"] == 4]
    words = row | {"reply": row["reply"].replace('"tool_use"', '"end_turn"')}
    chat = next(each for each in rows_of(played[0]) if each["number"] == 0)
    for name, rows, code in (("both", [words, row], 0), ("one", [words, chat], 1)):
        file = tmp_path / name
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute(f"CREATE TABLE exchanges ({', '.join(row)})")
            marks = ", ".join("?" * len(row))
            values = [tuple(each.values()) for each in rows]
            connection.executemany(f"INSERT INTO exchanges VALUES ({marks})", values)
        ended, said = replay(CALLS, file)
        assert ended == code and f"2 requests; {2 - code} replies have a recorded form" in said
        assert code == 0 or "message.stop_reason 'end_turn' is missing" in said


def test_what_cannot_be_replayed_is_told(replay, tmp_path):
    (tmp_path / "text.sqlite").write_text("no database, but a text that is long enough to be none")
    code, said = replay(CALLS, tmp_path / "text.sqlite")
    assert code == 2 and "is no recording of --agent_record" in said
    code, said = replay(CALLS, tmp_path / "missing.sqlite")
    assert code == 2 and "is no recording of --agent_record" in said
    code, said = replay(CALLS, address="http://127.0.0.1:9")
    assert code == 2 and "--base_url http://127.0.0.1:9/v1: ConnectError" in said


KILLED = """
import os, signal, sys
from pathlib import Path
from lightrft.core.samples import Completion, Episode, Prompt, Sample
from lightrft.extras.agents.episode_state import EpisodeState
from lightrft.extras.agents.messages import Exchanged
from lightrft.extras.agents.recording import Recording

state = EpisodeState(Sample(Prompt(0, "", [1]), 0, [], [], "", None, episode=Episode()), (1, 0), 4)
recording = Recording(Path(sys.argv[1]))
for number in range(100):
    recording.add(7, state, Exchanged("/v1/messages", "{}", 200, str(number)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_file_of_a_killed_run_has_all_exchanges(tmp_path):
    file = tmp_path / "agent.sqlite"
    ended = subprocess.run([sys.executable, "-c", KILLED, file], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [row["reply"] for row in rows_of(file)] == [str(number) for number in range(100)]
