"""Programs of episodes, in the forms that users write, and the worker processes that run them.

| form | recognised by | an episode |
|---|---|---|
| environment with tools | a class without `step` | `reset(**row)`, then turns whose tool calls |
| | | are answered, until one has none |
| text game | a class with `step(action)` | `reset(**row)`, then a step for each turn, until done |
| program | an async function `(engine, row)` | what the function does; the turns are |
| | | `await engine.turn(...)` |
| agent | an async function `(client, row)`, of --agent | what the function asks the |
| | | OpenAI-compatible server of its episode |
| another framework's | `prefix:name`, of ADAPTER_MODULES | what the module's `program(name, served)` |
| | | does, as a program |
"""

import asyncio
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lightrft.extras.agents.endpoint.protocol import EndpointModel
from lightrft.extras.agents.messages import Observation, to_bytes
from lightrft.extras.agents.session import EpisodeOver, EpisodeProgram, Session
from lightrft.extras.agents.tools import RUNNING, answers, call_function, tools_of
from lightrft.registry import Registry, kept_alive

environments = Registry("environment", flag="--environment")
environments.register_deferred("guess_number", "lightrft.extras.agents.games:GuessNumber")
environments.register_deferred(
    "reasoning_gym",
    "lightrft.extras.agents.adapters.reasoning_gym:SeveralAttempts",
    "reasoning-gym",
)
ADAPTER_MODULES = {
    "harbor": "lightrft.extras.agents.adapters.harbor.trials",
    "openenv": "lightrft.extras.agents.adapters.openenv",
    "verifiers": "lightrft.extras.agents.adapters.verifiers",
}
"""Prefix of --environment, and of an extra -> module for the environments of another framework."""
MAX_PROBLEM = 2000
"""Number of characters of an error that are reported."""
INTERNAL = ("/lightrft/extras/agents/", "/lightrft/registry.py")
"""Parts of the names of files that are no user's code."""
PYTHON = sysconfig.get_path("stdlib")
agents = Registry("agent", flag="--agent")
MCP = "mcp:"
"""Prefix of an MCP server in --tools, before a command or an address."""
tools = Registry("tool", flag="--tools")
tools.register_deferred("calculator", "lightrft.extras.agents.builtin_tools:calculator")
tools.register_deferred("python", "lightrft.extras.agents.builtin_tools:python")


@dataclass(frozen=True)
class ProgramSetup:
    """Settings for the processes that run episodes; see rewards/forks.py."""

    environment: str
    """Name of a class or an async function, as in --environment; empty for tools alone."""
    tools: tuple[str, ...] = ()
    """Names of functions, of modules and files with functions, or of servers, as in --tools."""
    agent: str = ""
    """Name of an async function, as in --agent."""
    served: EndpointModel | None = None
    """Information about the model that the agent's server returns."""
    tool_seconds: float = 60.0
    """Longest time of a call of a tool."""
    memory: int = 0
    """Number of bytes that an episode may allocate; 0 for no limit."""

    def prepare(self) -> Callable[[Connection], None]:
        return partial(_work, program=self.program())

    def program(self) -> "Program":
        """Import the user's code.

        Raises ValueError if that is impossible, or if it has no known form.
        """
        environment = self._environment() if self.environment else None
        if self.agent:
            environment = self._client_of(agents[self.agent])
        return Program(environment, self._tools(), self.tool_seconds)

    def _environment(self) -> Any:
        prefix, _, name = self.environment.partition(":")
        if prefix not in ADAPTER_MODULES or not name:
            return environments[self.environment]
        return importlib.import_module(ADAPTER_MODULES[prefix]).program(name, self.served)

    def _tools(self) -> dict[str, Callable[..., Any]]:
        named_tools: dict[str, Callable[..., Any]] = {}
        for name in self.tools:
            found = self._tools_of_one(name)
            if twice := found.keys() & named_tools:
                raise ValueError(
                    f"--tools {name}: another tool is named {min(twice)} too; the model calls tools"
                    " by name, so only one of the two can be used"
                )
            named_tools |= found
        return named_tools

    def _tools_of_one(self, name: str) -> dict[str, Callable[..., Any]]:
        if name.startswith(MCP):
            from lightrft.extras.agents.adapters.mcp import ToolServer

            return {**ToolServer(name.removeprefix(MCP)).tools(self.tool_seconds)}

        one = tools[name] if name in tools or ":" in name else tools.module(name)
        try:
            found = tools_of(one, name.rpartition(":")[2])
        except ValueError as error:
            raise ValueError(f"--tools {name}: {error}") from error
        if not found:
            raise ValueError(f"--tools {name}: it has no public functions of its own")
        return found

    def _client_of(self, agent: Any) -> EpisodeProgram:
        if not inspect.iscoroutinefunction(agent):
            raise ValueError(
                f"--agent {self.agent}: {agent!r} is not an async function (client, row)"
            )
        from lightrft.extras.agents.endpoint.client import converse

        return partial(converse, agent, served=self.served)


class Program:
    """Code of an episode: it runs between the turns of the model."""

    def __init__(self, environment: Any, tools: dict[str, Callable[..., Any]], tool_seconds: float):
        self.environment = environment
        self.tools = tools
        self.tool_seconds = tool_seconds

        is_class = inspect.isclass(environment)
        if not (environment is None or is_class or inspect.iscoroutinefunction(environment)):
            raise ValueError(
                f"--environment: {environment!r} is neither a class nor an async function (engine,"
                " row)"
            )

        self.steps = is_class and callable(getattr(environment, "step", None))
        if environment is not None and tools and (self.steps or not is_class):
            raise ValueError(
                "--tools are for environments whose turns call tools: a game and an agent read the"
                " turns themselves"
            )

    @property
    def all_tools(self) -> dict[str, Callable[..., Any]]:
        """Return the tools that prompts describe.

        These are the tools of --tools, and the public methods of the environment.
        """
        if self.steps or not inspect.isclass(self.environment):
            return self.tools
        methods = tools_of(self.environment)
        return self.tools | {name: _unbound(one) for name, one in methods.items()}

    async def run(self, session: Session, row: dict[str, Any]) -> None:
        """Run an episode about a row of the data."""
        if self.environment is not None and not inspect.isclass(self.environment):
            reward = await self.environment(session, row)
            if reward is not None:
                session.reward(reward)
            return

        environment = self.environment() if self.environment is not None else None
        try:
            first = None
            if hasattr(environment, "reset"):
                first = await call_function(environment.reset, **row)
            play = self._game if self.steps else self._use_tools
            await play(environment, session, first)
            if hasattr(environment, "get_reward"):
                session.reward(await call_function(environment.get_reward))
        finally:
            if hasattr(environment, "close"):
                await call_function(environment.close)

    async def _use_tools(self, environment: Any, session: Session, first: Observation) -> None:
        tools = self.tools | (tools_of(environment) if environment is not None else {})
        turn = await session.turn(first)
        while turn.tool_calls and not turn.is_last:
            turn = await session.turn(
                await answers(tools, turn.tool_calls, session.count_call, self.tool_seconds)
            )

    async def _game(self, environment: Any, session: Session, first: Observation) -> None:
        observation = first
        done = False
        while not done:
            turn = await session.turn(observation)
            observation, reward, done = await call_function(environment.step, turn.text)
            if reward is not None:
                session.reward(reward)
            done = done or turn.is_last


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature that a method has when it is called."""
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()

    def tool() -> None:
        pass

    tool.__name__ = method.__name__
    tool.__doc__ = method.__doc__
    tool.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    tool.__annotations__ = {
        name: kind for name, kind in method.__annotations__.items() if name != "self"
    }
    return tool


def _work(connection: Connection, program: Program) -> None:
    """Run an episode for each row of the data that comes over the socket, until the rank closes it.

    Each has a separate event loop that ends with whatever a program has left in it.
    """
    while True:
        try:
            row = connection.recv()
        except (EOFError, OSError):  # the rank has ended
            return

        session = Session(connection)
        try:
            with kept_alive():
                asyncio.run(program.run(session, row))
            session.check_rewards()
        except EpisodeOver:
            pass
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[:MAX_PROBLEM]
            session.ended.problem = told + _location(error)

        sys.stdout.flush()
        session.ended.calls_running = bool(RUNNING)
        connection.send_bytes(to_bytes(session.ended))


def _location(error: BaseException) -> str:
    """Return the last line of the user's code in the error's traceback.

    Lines of libraries that it calls are left out.
    """
    packages = tuple(map(sysconfig.get_path, ("purelib", "platlib")))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(internal in frame.filename for internal in INTERNAL)
        and (frame.filename.startswith(packages) or not frame.filename.startswith(PYTHON))
    ]
    # The user's code may be an installed package, too.
    users = [frame for frame in frames if not frame.filename.startswith(packages)] or frames
    if not users and error.__cause__:  # raised instead of what would end the process
        return _location(error.__cause__)
    return f", at {users[-1].filename}:{users[-1].lineno} ({users[-1].name})" if users else ""
