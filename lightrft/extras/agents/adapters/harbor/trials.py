"""Trials of Harbor as episodes: `--environment harbor:FOLDER --prompt_data harbor:FOLDER`.

Harbor needs Python 3.12, so it runs as the program `harbor`, once for each episode. Its agent talks
to the server of the episode, and the trial's verifier gives the reward. Options after `?` are flags
of `harbor trial start`, such as `env=podman` or `agent=terminus-2`; `kwarg.NAME=VALUE` is an
argument of the agent.
"""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.endpoint.server import Address, serving
from lightrft.extras.agents.session import EpisodeProgram, Session

TASK = "task"
"""Column with the folder of a task."""
HARBOR_VARIABLE = "HARBOR"
"""Environment variable with the path of the program, if it is not in PATH."""
PROCESS = "process_environment:ProcessEnvironment"
"""The environment `env=process` of this folder, as Harbor imports it."""
ARGUMENTS = {"enable_summarize": "false", "record_terminal_session": "false"}
"""Arguments of the agent unless others are given: a summary would begin another conversation."""


def program(reference: str, served: EndpointModel) -> EpisodeProgram:
    """Return the program that runs a trial of a row's task, and returns the verifier's reward.

    Raises ValueError if the program harbor is missing.
    """
    executable = shutil.which(os.environ.get(HARBOR_VARIABLE, "harbor"))
    if executable is None:
        raise ValueError(
            "--environment harbor: there is no program harbor: install it with Python 3.12 (pip"
            f" install 'harbor>=0.26'), and put it in PATH or its path in {HARBOR_VARIABLE}"
        )

    _, _, query = reference.partition("?")
    options = {"agent": "terminus-2"} | dict(parse_qsl(query))
    if options.get("env") == "process":
        options["env"] = PROCESS
    arguments = ARGUMENTS | {
        name.removeprefix("kwarg."): value
        for name, value in options.items()
        if name.startswith("kwarg.")
    }
    flags = [f"--{name}={value}" for name, value in options.items() if "." not in name]
    limits = {"max_input_tokens": served.max_length, "max_output_tokens": served.max_length}
    costs = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    arguments["model_info"] = json.dumps(limits | costs)

    async def play(session: Session, row: dict[str, Any]) -> float | None:
        if TASK not in row:
            raise ValueError("the row has no task of Harbor: its data is --prompt_data harbor:NAME")
        async with serving(session, served) as address:
            with tempfile.TemporaryDirectory(prefix="harbor_") as folder:
                every = arguments | {"api_base": address.url}
                command = [executable, "trial", "start", f"--path={row[TASK]}", *flags]
                command += [f"--model=openai/{served.name}", f"--trials-dir={folder}"]
                command += [f"--agent-kwarg={name}={value}" for name, value in every.items()]
                output = await _run(command, address)
                return _reward(Path(folder), output, limited=session.limited)

    return play


async def _run(command: list[str], address: Address) -> str:
    """Run a trial to its end, and return what it says.

    It has the process group of the episode, so it ends with it.
    """
    here = str(Path(__file__).parent)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OPENAI_API_KEY": address.key, "PYTHONPATH": here},
    )
    output, _ = await process.communicate()
    return output.decode(errors="replace")


def _reward(folder: Path, output: str, *, limited: bool) -> float | None:
    """Return the reward of the trial in a folder: the one named `reward`, or the mean of several.

    None if a limit of the episode left the trial without one. Raises RuntimeError if it has failed.
    """
    (file,) = [*folder.glob("*/result.json")] or [None]
    if file is None:
        raise RuntimeError("Harbor: " + " ".join(output.strip().splitlines()[-3:]))

    result = json.loads(file.read_text())
    rewards = (result.get("verifier_result") or {}).get("rewards") or {}
    if rewards:
        return float(rewards.get("reward", sum(rewards.values()) / len(rewards)))
    if limited:
        return None
    failure = result.get("exception_info") or {}
    raise RuntimeError(
        f"Harbor: {failure.get('exception_type')}: {failure.get('exception_message')}"
    )
