"""Tools of an MCP server: `--tools "mcp:COMMAND ..."`, or `--tools mcp:http://host:8000/mcp`.

Each episode has a connection of its own, and with a command a server process of its own, so what
one sample does to the server is not seen by others. The connection begins with the first call.
"""

import asyncio
import json
import os
import shlex
import shutil
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
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from lightrft.extras.agents.tools import DescribedTool

PERHAPS_ENDED = (CONNECTION_CLOSED, INVALID_REQUEST)
"""Codes of errors after which a connection may be of no use; the second one ends a session by HTTP.

Servers that live send them too.
"""
LAST_BYTES = 4096
"""Bytes at the end of a server's log where its last line is looked for."""


class ToolServer:
    """The server of `--tools mcp:...`; it is started again after it has ended."""

    def __init__(self, reference: str):
        """Take a command or an address. Raises ValueError if there is no such command."""
        self.reference = reference
        try:
            self._command = [] if _is_url(reference) else shlex.split(reference)
        except ValueError as error:  # a quote is not closed
            raise ValueError(f"--tools mcp:{reference}: {error}") from error
        self._log: TextIO | None = None
        self._owner: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client]

        if not _is_url(reference) and not (self._command and shutil.which(self._command[0])):
            raise ValueError(
                f"--tools mcp:{reference}: it is no http(s) address, and its first word is no"
                " program"
            )

    def tools(self, seconds: float) -> dict[str, DescribedTool]:
        """Return the server's tools by name.

        Raises ValueError if it does not list them in time, has none, or two of the same name.
        """
        try:
            listed = asyncio.run(self._list(seconds))
            names = [tool.name for tool in listed]
            if not (names and all(names)):
                raise ValueError("it lists no tools, or one without a name")
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"two of its tools are named {twice[0]}")
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

    async def _list(self, seconds: float) -> list[Tool]:
        try:
            return await asyncio.wait_for(self._pages(), seconds)
        except TimeoutError as error:
            problem = f"it did not list its tools within {seconds:g} s (--tool_seconds)"
            raise ValueError(": ".join([problem, *self._last_line()])) from error

    async def _pages(self) -> list[Tool]:
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
            if error.code not in PERHAPS_ENDED or await _lives(client):
                raise
            reason = ": ".join([str(error), *self._last_line()])
            owner.cancel()
            await asyncio.wait([owner])
            raise ConnectionError(
                f"the MCP server has ended ({reason}); the next call starts it again"
            ) from error

        if result.is_error:
            raise RuntimeError(_result_text(result) or "the tool failed without a message")
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
            self._log = log
            try:
                async with Client(self._transport(log)) as client:
                    ready.set_result(client)
                    await asyncio.Event().wait()
            except Exception as error:
                if ready.done():  # the calls that it fails say so themselves
                    return
                problem = ["the MCP server cannot be used", _cause(error), *self._last_line()]
                ready.set_exception(ConnectionError(": ".join(problem)))

    def _last_line(self) -> list[str]:
        """Return the last line that the server has written to its log; none if there is no line."""
        if self._log is None or self._log.closed:
            return []
        begin = max(os.fstat(self._log.fileno()).st_size - LAST_BYTES, 0)
        text = os.pread(self._log.fileno(), LAST_BYTES, begin).decode(errors="replace")
        return text.strip().splitlines()[-1:]

    def _transport(self, log: TextIO) -> Any:
        """Return what the client talks to: an address, or a server process that writes to a log."""
        if not self._command:
            return self.reference
        server = StdioServerParameters(
            command=self._command[0],
            args=self._command[1:],
            env=dict(os.environ),  # keys of services lie there, as for tools of a module
            encoding_error_handler="replace",  # one wrong byte would end all reading
        )
        return stdio_client(server, log)


def _is_url(reference: str) -> bool:
    return reference.startswith(("http://", "https://"))


async def _lives(client: Client) -> bool:
    """Return whether a server still answers."""
    try:
        await client.list_tools(cache_mode="bypass")
    except Exception:  # it may have ended in any way
        return False
    return True


def _cause(error: BaseException) -> str:
    """Return the first of the errors that tasks have raised together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _result_text(result: CallToolResult) -> str:
    """Return the text of a result; a structured one without text becomes JSON."""
    texts = [_block_text(block) for block in result.content]
    lines = [
        f"({block.type}: the model reads only text)" if text is None else text
        for block, text in zip(result.content, texts, strict=True)
    ]
    if result.structured_content is not None and all(text is None for text in texts):
        lines.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(lines)


def _block_text(block: ContentBlock) -> str | None:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ResourceLink):
        return f"{block.name}: {block.uri}"
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return None
