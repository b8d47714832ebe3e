"""Why: an agent is written and tried against the same server that it has in training, without a run."""

import asyncio
import os
import signal
import subprocess
import time

import httpx
import pytest

from scripts.prepare_quickstart import tiny_qwen3
from warm import warm_python

openai = pytest.importorskip("openai", reason="openai is not installed")
pytestmark = pytest.mark.slow
TEMPLATE = ("{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}")  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tiny_qwen3(folder / "model", seed=0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    flags = [f"--model={folder}/model", "--engine_type=hf", "--port=0", "--generate_max_len=200", "--bf16=false",
             "--environment_minutes=0.05"]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([warm_python(), "-m", "lightrft.cli.serve", *flags], stderr=log,
                                   env={**os.environ, "MODEL_API_KEY": "secret"})  # fmt: skip
    until = time.monotonic() + 300
    while "serving model at " not in (text := (folder / "log").read_text()):
        assert time.monotonic() < until and process.poll() is None, text
        time.sleep(0.1)
    yield text.rpartition("serving model at ")[2].strip()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT, (folder / "log").read_text()


def test_clients_at_the_same_time_get_what_each_gets_alone(server):
    async def greedy(client, number):
        return await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": f"{number}"}], temperature=0, max_tokens=9,
            extra_body={"return_token_ids": True})  # fmt: skip

    async def ask():
        async with openai.AsyncOpenAI(base_url=server, api_key="secret") as client:
            alone = [await greedy(client, number) for number in range(6)]
            return alone, await asyncio.gather(*(greedy(client, number) for number in range(6)))

    alone, together = asyncio.run(ask())
    assert [reply.choices[0].token_ids for reply in alone] == [reply.choices[0].token_ids for reply in together]
    assert len({tuple(reply.choices[0].token_ids) for reply in alone}) > 1
    assert alone[3].prompt_token_ids == list(b"u:3\na:")


def test_a_session_keeps_its_tokens_and_ends_with_its_time(server):
    """The header names it. What comes back as text is not tokenized again, unless the session has ended."""
    with openai.OpenAI(base_url=server, api_key="secret", default_headers={"x-session-id": "one"}, max_retries=0) as client:
        messages = [{"role": "user", "content": "p"}]
        more = {"return_token_ids": True}
        first = client.chat.completions.create(model="any", messages=messages, max_tokens=16, extra_body=more)
        text = first.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "q"}]
        second = client.chat.completions.create(model="any", messages=messages, max_tokens=4, extra_body=more)
        sampled = first.choices[0].token_ids
        assert second.prompt_token_ids[: 6 + len(sampled)] == [*b"u:p\na:", *sampled]
        assert "\ufffd" in text, "these bytes are no text, and would not come back"
        time.sleep(5)
        with pytest.raises(openai.BadRequestError, match="the session 'one' has ended"):
            client.chat.completions.create(model="any", messages=messages, max_tokens=4)
        third = client.chat.completions.create(model="any", messages=messages, max_tokens=4, extra_body=more)
        assert sampled != third.prompt_token_ids[6 : 6 + len(sampled)]


def test_bad_requests_are_answered_and_the_server_goes_on(server):
    with httpx.Client(base_url=server.removesuffix("/v1"), headers={"Authorization": "Bearer secret"}) as client:
        def told(route, body):
            reply = client.post(route, json=body)
            return reply.status_code, reply.json()["error"]["message"]

        assert told("/v1/completions", {"prompt": [99999]})[0] == 400
        assert "temperature is a number from 0" in told("/v1/completions", {"prompt": "a", "temperature": -1})[1]
        assert "more than --prompt_max_len" in told("/v1/completions", {"prompt": "a" * 2000})[1]
        assert client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": ""}).status_code == 401
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"]["completion_tokens"] <= 2
