"""Conversations in a terminal, with the server that agents have."""

import json
import os
import subprocess

import pytest

from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.extras.commands.debug.chat import SERVING, _text_of
from player import Player, ids
from warm import warm_python

pytest.importorskip("openai", reason="openai is not installed")
pytestmark = pytest.mark.slow

TALKS = """
import io
import sys

from lightrft.extras.agents.builtin_tools import calculator
from lightrft.extras.commands.debug.chat import talk


async def talks(client, row):
    sys.stdin = io.StringIO(row["input"])
    sys.stdout = open(row["output"], "w")
    await talk(client, row["system_prompt"], {"calculator": calculator}, 5.0)
"""
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_tools_are_called_between_lines(tmp_path):
    (tmp_path / "agent.py").write_text(TALKS)
    arguments = {"expression": "7*8"}
    call = f"so<tool_call>{json.dumps({'name': 'calculator', 'arguments': arguments})}</tool_call>$"
    row = {
        "prompt": "p",
        "input": "7*8?\n\nthanks\n",
        "output": str(tmp_path / "output"),
        "system_prompt": "s",
    }
    player = Player(agent=f"{tmp_path}/agent.py:talks", chat=True, longest=400)
    (sample,) = player.play([[call, "56$", "bye$"]], rows=[row])
    player.episodes.close()

    assert sample.episode.problem == ""
    assert sample.prompt.token_ids == ids("calculator;s:s$\nu:7*8?$\na:")
    assert sample.token_ids == ids(f"{call}\nt:56$\na:56$\nu:thanks$\na:bye$")
    shown = f"so\n[calculator {json.dumps(arguments)}]\n[calculator] 56\n56\nbye\n"
    assert (tmp_path / "output").read_text() == shown


def test_the_address_is_found_between_other_lines(tmp_path):
    """Why: a word of a later line was the address, and a part of a progress bar ended the chat."""
    lines = "see the page at http://help.org\nserving m at http://0.0.0.0:81/v1\nbegun at 12:00\n█"
    (tmp_path / "log").write_bytes(lines.encode()[:-1])
    with (tmp_path / "log").open() as log:
        assert SERVING.search(_text_of(log))[1] == "http://0.0.0.0:81/v1"


def chat(*arguments, lines=""):
    return subprocess.run(
        [warm_python(), "-m", "lightrft", "chat", *arguments],
        input=lines.encode(),
        capture_output=True,
        timeout=300,
        env=os.environ,
    )


def test_a_run_answers_each_line_of_the_input(tmp_path):
    tiny_qwen3(tmp_path / "run" / "model", seed=0)
    (tmp_path / "run" / "model" / "chat_template.jinja").write_text(TEMPLATE)
    flags = [f"{tmp_path}/run", "--engine_type=hf", "--bf16=false", "--temperature=0.01"]

    ended = chat(*flags, "--generate_max_len=60", lines="one\n\n" + "more\n" * 8)
    assert ended.returncode == 2, "nine lines and answers have no room"
    assert b"a limit of the episode leaves no room" in ended.stderr and ended.stdout != b""

    ended = chat(*flags, "--no_such_flag=1", lines="one\n")
    assert ended.returncode == 2 and ended.stdout == b""
    assert b"no server:" in ended.stderr and b"--no_such_flag" in ended.stderr
