"""Talk to a model in the terminal; for a run's folder, to its final model.

lightrft chat runs/quickstart
lightrft chat Qwen/Qwen2.5-0.5B-Instruct --system_prompt "Answer briefly." --tools calculator --bf16

It starts `lightrft serve` with all other flags, such as --engine_type, --temperature, or
--generate_max_len for the whole conversation. Both end with the input, or at Ctrl-C.
"""

import asyncio
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from lightrft.app.cli import command_parser, user_errors
from lightrft.config.command_line import answer_word
from lightrft.config.references import MODEL_KEY
from lightrft.extras.agents.messages import Message
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.tool_calls import read_call
from lightrft.extras.agents.tools import Tools, answers, schemas
from lightrft.rewards.forks import end_with

LOG_POLL_SECONDS = 0.1
SERVING = re.compile(r"serving .* at (http://\S+/v1)\s")
"""What `lightrft serve` writes when it answers."""


def main(argv: list[str] | None = None) -> None:
    answer_word(argv, "serve")
    arguments, flags = command_parser("chat", __doc__).parse_known_args(argv)
    try:
        from openai import APIError, AsyncOpenAI
    except ModuleNotFoundError as error:
        sys.exit(f"lightrft chat needs {error.name}: pip install '.[agents]'")

    with user_errors(ValueError, APIError):
        names = tuple(name for text in arguments.tools for name in text.split(","))
        tools = ProgramSetup("", names, tool_seconds=arguments.tool_seconds).program().all_tools
        # Whoever writes the next line may take a day.
        flags = ["--pretrain", arguments.model, "--environment_minutes=1440", *flags]
        with _server(flags) as (url, key):
            client = AsyncOpenAI(
                base_url=url, api_key=key, default_headers={"x-session-id": "chat"}, max_retries=0
            )
            asyncio.run(talk(client, arguments.system_prompt, tools, arguments.tool_seconds))


@contextmanager
def _server(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Start a server, yield its address and key, and stop it. Raises ValueError if it ends."""
    key = secrets.token_hex(16)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightrft", "serve", "--port=0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {MODEL_KEY: key},
            start_new_session=True,  # Ctrl-C in the terminal ends the conversation first
            preexec_fn=partial(end_with, os.getpid()),
        )

        try:
            while not (found := SERVING.search(text := _text_of(log))):
                if process.poll() is not None:
                    raise ValueError("\n".join(["no server:", *text.splitlines()[-10:]]))
                time.sleep(LOG_POLL_SECONDS)
            yield found[1], key
        finally:
            process.terminate()
            process.wait()


def _text_of(log: TextIO) -> str:
    """Return what a process has written so far, perhaps only a part of the last character."""
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


async def talk(client: Any, system_prompt: str, tools: Tools, tool_seconds: float) -> None:
    """Answer each line of the input, with calls of tools in between."""
    messages: list[Message] = [{"role": "system", "content": system_prompt}] * bool(system_prompt)
    described = schemas(tools)

    async for line in _lines():
        messages.append({"role": "user", "content": line})
        while True:
            reply = await _streamed_reply(client, messages, described)
            messages.append(reply)
            calls = [each["function"] for each in reply.get("tool_calls", ())]
            if not calls:
                break

            parsed = [read_call(call["name"], call["arguments"]) for call in calls]
            for result in await answers(tools, parsed, lambda began, *, failed: None, tool_seconds):
                _show(f"[{result['name']}] {result['content']}\n")
                messages.append(result)


async def _streamed_reply(
    client: Any, messages: list[Message], tools: list[dict[str, Any]]
) -> Message:
    """Print the model's next turn while it grows, and return it as a message."""
    content = ""
    calls: list[dict[str, Any]] = []
    async for chunk in await client.chat.completions.create(
        model="any", messages=messages, stream=True, tools=tools or None
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        _show(delta.content or "")
        for call in delta.tool_calls or ():
            _show(f"\n[{call.function.name} {call.function.arguments}]")
            calls.append(call.model_dump(exclude={"index"}))
    _show("\n")

    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _lines() -> AsyncIterator[str]:
    """Yield the lines of the input that are not empty; a terminal gets a prompt."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = await asyncio.to_thread(input, prompt)
        except EOFError:
            return
        if line.strip():
            yield line
