"""Why: an agent is written and tried against the same server that it has in training.

No run is needed for that.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import httpx
import psutil
import pytest

from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.core.samples import Prompt
from lightrft.extras.agents.messages import BEGINNING, Turn, TurnRequest, from_bytes
from lightrft.extras.model_server import ServedSession
from malformed import CHAT, MALFORMED, NO_JSON, OF_A_SERVER
from warm import warm_python

openai = pytest.importorskip("openai", reason="openai is not installed")
pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Server(NamedTuple):
    """A running server, and what it logs."""

    address: str
    process: subprocess.Popen
    log: Path

    def inspected(self):
        port = int(self.address.rpartition(":")[2].partition("/")[0])
        listens = [
            connection.pid
            for connection in psutil.net_connections("tcp4")
            if connection.laddr.port == port and connection.status == "LISTEN"
        ]
        return psutil.Process(listens[0])


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tiny_qwen3(folder / "model", seed=0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    flags = [
        f"--model={folder}/model",
        "--engine_type=hf",
        "--port=0",
        "--generate_max_len=4000",
        "--bf16=false",
        "--environment_minutes=0.05",
    ]

    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [warm_python(), "-m", "lightrft", "serve", *flags],
            stderr=log,
            env={**os.environ, "MODEL_API_KEY": "secret"},
        )

    until = time.monotonic() + 300
    while "serving model at " not in (text := (folder / "log").read_text()):
        assert time.monotonic() < until and process.poll() is None, text
        time.sleep(0.1)

    address = text.rpartition("serving model at ")[2].strip()
    yield Server(address, process, folder / "log")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT, (folder / "log").read_text()
    log = (folder / "log").read_text()
    assert "Traceback" not in log and "checkpoint" not in log and "the server stops" in log


@pytest.fixture
def server(started):
    return started.address


def test_clients_at_the_same_time_get_what_each_gets_alone(server):
    async def greedy(client, number):
        return await client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": f"{number}"}],
            temperature=0,
            max_tokens=9,
            extra_body={"return_token_ids": True},
        )

    async def ask():
        async with openai.AsyncOpenAI(base_url=server, api_key="secret") as client:
            alone = [await greedy(client, number) for number in range(6)]
            return alone, await asyncio.gather(*(greedy(client, number) for number in range(6)))

    alone, together = asyncio.run(ask())
    assert [reply.choices[0].token_ids for reply in alone] == [
        reply.choices[0].token_ids for reply in together
    ]
    assert len({tuple(reply.choices[0].token_ids) for reply in alone}) > 1
    assert alone[3].prompt_token_ids == list(b"u:3\na:")


def test_a_session_keeps_its_tokens_until_it_expires(server):
    """The header names the session.

    What comes back as text is not tokenized again, unless the session has ended.
    """
    with openai.OpenAI(
        base_url=server, api_key="secret", default_headers={"x-session-id": "one"}, max_retries=0
    ) as client:
        messages = [{"role": "user", "content": "p"}]
        more = {"return_token_ids": True}
        first = client.chat.completions.create(
            model="any", messages=messages, max_tokens=16, extra_body=more
        )
        text = first.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "q"}]
        second = client.chat.completions.create(
            model="any", messages=messages, max_tokens=4, extra_body=more
        )
        sampled = first.choices[0].token_ids
        assert second.prompt_token_ids[: 6 + len(sampled)] == [*b"u:p\na:", *sampled]
        assert "\ufffd" in text, "these bytes are no text, and would not come back"
        time.sleep(5)
        with pytest.raises(openai.BadRequestError, match="the session 'one' has ended"):
            client.chat.completions.create(model="any", messages=messages, max_tokens=4)

        third = client.chat.completions.create(
            model="any", messages=messages, max_tokens=4, extra_body=more
        )
        assert sampled != third.prompt_token_ids[6 : 6 + len(sampled)]


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "add"}}]])
def test_a_stream_grows_to_what_the_whole_turn_is(server, tools):
    """Its turn is sampled in pieces, and a session continues it without tokenizing it again."""
    described = "add;" * len(tools)
    greedy = {"model": "any", "temperature": 0, "max_tokens": 40, "tools": tools}
    headers = {"x-session-id": f"stream {len(tools)}"}
    with openai.OpenAI(base_url=server, api_key="secret", max_retries=0) as client:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            messages = [{"role": "user", "content": letter}]
            whole = client.chat.completions.create(messages=messages, **greedy)
            if whole.choices[0].finish_reason == "length":
                break

        chunks = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(
                messages=messages, stream=True, extra_headers=headers, **greedy
            )
        ]
        deltas = [chunk.delta.content or "" for chunk in chunks]
        assert len([delta for delta in deltas if delta]) >= 3, deltas
        text = "".join(deltas)
        assert text == whole.choices[0].message.content
        assert chunks[-1].finish_reason == whole.choices[0].finish_reason == "length"

        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "q"}]
        more = {"return_token_ids": True}
        second = client.chat.completions.create(
            messages=messages, extra_headers=headers, extra_body=more, **greedy
        )
        # The bytes of the prompt and of the observation are tokens, and so are forty sampled ones.
        assert len(second.prompt_token_ids) == len(f"{described}u:a\na:") + 40 + len(b"\nu:q\na:")

        with pytest.raises(openai.BadRequestError, match="nothing to answer"):
            client.chat.completions.create(messages=[], stream=True, **greedy)


def test_streams_of_all_apis_grow_to_the_same_text(server):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    asked = {"model": "any", "max_tokens": 40, "temperature": 0}
    with (
        openai.OpenAI(base_url=server, api_key="secret") as client,
        anthropic.Anthropic(base_url=server.removesuffix("/v1"), api_key="secret") as api,
    ):
        for letter in "abcdefghijklmnopqrstuvwxyz":
            said = [{"role": "user", "content": letter}]
            whole = client.chat.completions.create(messages=said, **asked)
            if whole.choices[0].finish_reason == "length":
                break

        asked = {"model": "any", "input": letter, "max_output_tokens": 40, "temperature": 0}
        with client.responses.stream(**asked) as stream:
            items = [each.delta for each in stream if each.type == "response.output_text.delta"]
        asked = {"model": "any", "max_tokens": 40, "extra_body": {"temperature": 0}}
        with api.messages.stream(messages=said, **asked) as stream:
            blocks = [*stream.text_stream]

    assert whole.choices[0].message.content == "".join(items) == "".join(blocks)
    assert min(len(items), len(blocks)) >= 3


def test_a_client_that_vanishes_while_it_sends_leaves_its_answer_to_nobody():
    """Why: the next request of the session got the answer to the one before it."""
    mine, others = Pipe()
    form = SimpleNamespace(prompt=lambda _, request: Prompt(0, "", request.observation))

    def answer() -> None:
        for _ in range(2):
            request = from_bytes(others.recv_bytes())
            asked = request.observation
            turn = Turn(f"after {len(asked)} tokens", [1], "stop", context_ids=asked)
            others.send((request.number, turn))

    async def course() -> Turn:
        with ThreadPoolExecutor(1) as tokenizing:
            session = ServedSession(mine, form, tokenizing, in_pieces=False)
            # More than the socket takes before the other side reads.
            request = TurnRequest([7] * 500_000, BEGINNING)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.request(request), 0.5)
            reading = threading.Thread(target=answer)
            reading.start()
            turn = await session.request(TurnRequest([7] * 3, BEGINNING))
            reading.join()
            return turn

    assert asyncio.run(course()).text == "after 3 tokens"


def test_the_engine_drops_what_a_client_that_has_left_asked_for(started):
    """Streamed or not, with a session or without; others that wait in a session get their turn."""
    process = started.inspected()

    def seconds_of_a_moment():
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        return sum(process.cpu_times()[:2]) - before

    with httpx.Client(
        base_url=started.address, headers={"Authorization": "Bearer secret"}, timeout=60
    ) as client:

        def ask(letter, seconds=60.0, tokens=4000, name="", route="/chat/completions", **more):
            headers = {"x-session-id": name} if name else {}
            said = [{"role": "user", "content": letter}]
            asked = {"input": said} if route == "/responses" else {"messages": said}
            with client.stream(
                "POST",
                route,
                json=asked | {"temperature": 0, "max_tokens": tokens, **more},
                headers=headers,
                timeout=seconds,
            ) as reply:
                until = time.monotonic() + seconds
                lines = []
                for line in reply.iter_lines():
                    lines.append(line)
                    if time.monotonic() > until:
                        break
                return lines[-1]

        endless = next(letter for letter in "abcdefghijk" if '"length"' in ask(letter, tokens=400))
        chats = [("/chat/completions", stream) for stream in (True, False)]
        for route, stream in [*chats, ("/messages", True), ("/responses", True)]:
            for name in ("", f"left {stream}") if (route, stream) in chats else ("",):
                with suppress(httpx.ReadTimeout):
                    last = ask(endless, 0.4, name=name, route=route, stream=stream)
                    assert last and not last.endswith("[DONE]") and "response.completed" not in last
                time.sleep(0.2)
                assert seconds_of_a_moment() < 0.1, (route, stream, name)
                assert '"length"' in ask(endless, tokens=2, name=name)

        with ThreadPoolExecutor(1) as others, suppress(httpx.ReadTimeout):
            waiting = others.submit(lambda: time.sleep(0.1) or ask(endless, tokens=2, name="two"))
            ask(endless, 0.3, tokens=400, name="two")
        assert '"length"' in waiting.result()


def test_bad_requests_are_answered_and_the_server_goes_on(server):
    with httpx.Client(
        base_url=server.removesuffix("/v1"), headers={"Authorization": "Bearer secret"}
    ) as client:

        def told(route, body):
            reply = client.post(route, json=body)
            return reply.status_code, reply.json()["error"]["message"]

        assert told("/v1/completions", {"prompt": [99999]})[0] == 400
        assert "more than --prompt_max_len" in told("/v1/completions", {"prompt": "a" * 2000})[1]
        assert (
            client.post(
                "/v1/completions", json={"prompt": "a"}, headers={"Authorization": ""}
            ).status_code
            == 401
        )
        assert (
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"][
                "completion_tokens"
            ]
            <= 2
        )


def test_a_meaningless_request_is_answered_and_harms_no_other(started):
    wrong = []
    with httpx.Client(
        base_url=started.address.removesuffix("/v1"), headers={"Authorization": "Bearer secret"}
    ) as client:
        for route, body, word in [*MALFORMED, *OF_A_SERVER]:
            reply = client.post(route, content=json.dumps(body))
            message = reply.json()["error"]["message"]
            if (
                reply.status_code != 400
                or word not in message
                or "training" in message
                or "run says" in message
            ):
                wrong.append((route, body, reply.status_code, message))

        for content in NO_JSON:
            reply = client.post("/v1/completions", content=content)
            wrong += [(content[:20], reply.status_code)] if reply.status_code != 400 else []

        assert wrong == []
        assert (
            client.post(
                "/v1/chat/completions", json=CHAT | {"max_tokens": 2, "top_k": -1, "n": 1}
            ).status_code
            == 200
        )
        assert client.get("/health", headers={"Authorization": ""}).json() == {"status": "ready"}

    assert "127.0.0.1 POST /v1/completions: 400 in 0." in started.log.read_text()


def test_a_request_that_is_too_large_is_not_kept(started):
    before = started.inspected().memory_info().rss

    def pieces():
        yield b'{"prompt": "'
        for _ in range(200):
            yield b"a" * (1 << 20)

    with httpx.Client(base_url=started.address, timeout=120) as client:
        for key, status in (("secret", 413), ("wrong", 401)):
            reply = client.post(
                "/completions", content=pieces(), headers={"Authorization": f"Bearer {key}"}
            )
            assert reply.status_code == status
    assert started.inspected().memory_info().rss - before < 50 << 20


def test_sessions_that_have_ended_leave_no_descriptors(started):
    process = started.inspected()
    with httpx.Client(
        base_url=started.address, headers={"Authorization": "Bearer secret"}
    ) as client:

        def ask(name):
            headers = {"x-session-id": name} if name else {}
            assert (
                client.post(
                    "/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers
                ).status_code
                == 200
            )

        ask("")
        before = process.num_fds()
        for number in range(8):
            ask(f"session {number}")
        assert process.num_fds() > before + 10
        time.sleep(4)
        ask("")
        deadline = time.monotonic() + 10
        while process.num_fds() > before + 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.num_fds() <= before + 2


def test_no_client_keeps_others_waiting(started):
    host, port = started.address.split("//")[1].split("/")[0].split(":")
    half = [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n"
        b"Content-Length: 50\r\n\r\n{",
        b"\x16\x03\x01\x02",
        b"GET / HTTP/9.9\r\n\r\n",
    ]
    sockets = [socket.create_connection((host, int(port))) for _ in half]
    for opened, content in zip(sockets, half, strict=True):
        opened.sendall(content)

    with httpx.Client(
        base_url=started.address, headers={"Authorization": "Bearer secret"}, timeout=20
    ) as client:
        assert client.post("/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200

    for opened in sockets:
        opened.close()


def test_the_three_apis_answer_alike(server):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    asked = [{"role": "user", "content": "p"}]
    with openai.OpenAI(base_url=server, api_key="secret") as client:
        chat = client.chat.completions.create(
            model="any", messages=asked, max_tokens=6, temperature=0
        )
        response = client.responses.create(
            model="any", input="p", max_output_tokens=6, temperature=0
        )
    root = server.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key="secret") as client:
        greedy = {"max_tokens": 6, "extra_body": {"temperature": 0}}
        message = client.messages.create(model="any", messages=asked, **greedy)
        counted = client.messages.count_tokens(model="any", messages=asked)
        with pytest.raises(anthropic.AuthenticationError):
            other = client.with_options(api_key="of another episode")
            other.messages.create(model="any", messages=asked, **greedy)

    text = chat.choices[0].message.content
    assert len({chat.id, message.id, response.id} & {"chatcmpl-0", "msg_0", "resp_0"}) == 0
    assert text == message.content[0].text == response.output_text
    assert chat.usage.prompt_tokens == counted.input_tokens == message.usage.input_tokens
    assert response.usage.input_tokens == counted.input_tokens


def test_a_stream_ends_at_a_text_of_the_request(server):
    with openai.OpenAI(base_url=server, api_key="secret") as client:
        for letter in "abcdefghijklmnop":
            said = [{"role": "user", "content": letter}]
            asked = {"model": "any", "messages": said, "temperature": 0}
            reply = client.chat.completions.create(max_tokens=90, **asked)
            whole = reply.choices[0].message.content
            if stop := next(
                (each for each in whole[1:] if each.isascii() and each != whole[0]), ""
            ):
                break
        pieces = client.chat.completions.create(max_tokens=90, stop=stop, stream=True, **asked)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert stop and text == whole[: whole.index(stop)]


def test_memory_stays_the_same_under_load(started):
    """64 clients at once: every third stream is left, and one body in eight is half."""
    process = started.inspected()
    host, port = started.address.split("//")[1].split("/")[0].split(":")
    key = {"Authorization": "Bearer secret"}
    body = {"messages": [{"role": "user", "content": "p"}], "temperature": 0, "max_tokens": 2}
    routes = ("/chat/completions", "/messages", "/responses")

    async def ask(client, number):
        route = routes[number % 3]
        content = body | {"input": "p"} if route == "/responses" else body
        if number % 8 == 7:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
            await writer.drain()
            writer.close()
        if number % 3 == 2:
            long = content | {"max_tokens": 3000, "stream": True}
            with suppress(httpx.ReadTimeout):
                await client.post(route, json=long, timeout=httpx.Timeout(60, read=0.05))
            return 200
        return (await client.post(route, json=content)).status_code

    async def rounds(count):
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=started.address, headers=key, timeout=60, limits=limits
        ) as client:
            for _ in range(count):
                yield {*await asyncio.gather(*(ask(client, number) for number in range(64)))}

    async def memory_after(count):
        async for statuses in rounds(count):
            assert statuses == {200}
        return process.memory_info().rss

    before = asyncio.run(memory_after(8))
    after = asyncio.run(memory_after(24))
    assert after - before < 30 << 20, (after - before) / 2**20
