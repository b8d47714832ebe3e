"""Tools of an MCP server: `--tools "mcp:COMMAND ..."`, or `--tools mcp:http://host:8000/mcp`.

Each episode has a connection of its own, and with a command a server process of its own, so what
one sample does to the server is not seen by others. The connection begins with the first call.
"""

import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
from functools import partial
from typing import Any, TextIO

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
    Tool,
)

from lightrft.agents.tools import DescribedTool

ENDED = (CONNECTION_CLOSED, INVALID_REQUEST)
"""Codes of errors after which a connection is of no use; the second one ends a session by HTTP."""
EXECUTE = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Program that becomes the server, and is killed when the episode's process ends.

The package starts servers in a session of their own, where the kill of that process does not reach
them.
"""


class ToolServer:
    """The server of `--tools mcp:...`; it is started again after it has ended."""

    def __init__(self, reference: str):
        """Take a command or an address. Raises ValueError if there is no such command."""
        self.reference = reference
        self._command = [] if _is_url(reference) else shlex.split(reference)
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client]

        if not _is_url(reference) and not (self._command and shutil.which(self._command[0])):
            raise ValueError(
                f"--tools mcp:{reference}: it is no http(s) address, and its first word is no"
                " program"
            )

    def tools(self, seconds: float) -> dict[str, DescribedTool]:
        """Return the server's tools by name; raise ValueError if it does not list them in time."""

        try:
            listed = asyncio.run(asyncio.wait_for(self._list(), seconds))
        except TimeoutError as error:
            raise ValueError(
                f"--tools mcp:{self.reference}: it did not list its tools within {seconds:g} s"
                " (--tool_seconds)"
            ) from error
        except Exception as error:  # a server may fail in any way
            raise ValueError(f"--tools mcp:{self.reference}: {error}") from error

        return {
            tool.name: DescribedTool(
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or tool.title or "",
                        "parameters": tool.input_schema,
                    },
                },
                partial(self._call, tool.name),
            )
            for tool in listed
        }

    async def _list(self) -> list[Tool]:
        client = await self._client()
        page = await client.list_tools()
        tools = page.tools
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    async def _call(self, name: str, /, **arguments: Any) -> str:
        """Return what the model reads of a call. Raises RuntimeError if the tool says it failed."""
        client = await self._client()
        owner = self._owner
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code not in ENDED:  # the arguments are wrong, and the server lives
                raise
            owner.cancel()
            await asyncio.wait([owner])
            raise ConnectionError(
                f"the MCP server has ended ({error}); the next call starts it again"
            ) from error

        if result.is_error:
            raise RuntimeError(_result_text(result))
        return _result_text(result)

    async def _client(self) -> Client:
        """Return the connection of this episode, which begins if there is none.

        The event loop of an episode ends with its tasks, so an earlier episode's owner is done.
        """
        if self._owner is None or self._owner.done() or self._owner.cancelling():
            self._ready = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._hold(self._ready))
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        """Keep a connection open until this task is cancelled: one task opens and closes it."""
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with Client(self._transport(log)) as client:
                    ready.set_result(client)
                    await asyncio.Event().wait()
            except Exception as error:
                if ready.done():  # the calls that it fails say so themselves
                    return
                log.seek(0)
                last_line = log.read().strip().splitlines()[-1:]
                problem = ": ".join(["the MCP server cannot be used", _cause(error), *last_line])
                ready.set_exception(ConnectionError(problem))

    def _transport(self, log: TextIO) -> Any:
        """Return what the client talks to: an address, or a server process that writes to a log."""
        if not self._command:
            return self.reference
        return stdio_client(
            StdioServerParameters(
                command=sys.executable,
                args=["-I", "-S", "-c", EXECUTE, *self._command],
                env=dict(os.environ),  # keys of services lie there, as for tools of a module
            ),
            log,
        )


def _is_url(reference: str) -> bool:
    return reference.startswith(("http://", "https://"))


def _cause(error: BaseException) -> str:
    """Return the first of the errors that tasks have raised together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _result_text(result: CallToolResult) -> str:
    """Return the text of a result; a structured one without text becomes JSON."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_block_text, result.content))


def _block_text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return f"({block.type}: the model reads only text)"
