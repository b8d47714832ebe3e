"""The model, as the code of an environment or of an agent sees it."""

import asyncio
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

from lightrft.extras.agents.history import TurnHistory, clean_message
from lightrft.extras.agents.messages import (
    Message,
    Observation,
    Refused,
    Turn,
    TurnRequest,
    to_bytes,
)


class EpisodeOver(Exception):
    """Raised by turn() after the last turn of an episode."""


class Session:
    """One episode's access to the model.

    The engine samples the turns, and exactly these tokens are learned from.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self._one_at_a_time = asyncio.Lock()
        self._over = False
        self._unwanted = 0
        """Number of replies that are still to come for cancelled requests."""
        self.turns: list[Turn] = []
        """Turns so far."""
        self.history = TurnHistory()
        self.limited = False
        """True if a limit of the episode left no room for the latest turn."""
        self.num_replies = 0
        """Number of replies that were read."""
        self.rewards: list[tuple[int, float]] = []
        self.tool_calls = self.tool_errors = 0
        self.tool_seconds = 0.0

    async def turn(self, observation: Observation = None) -> Turn:
        """Let the model read `observation` and return its turn; without one it answers the prompt.

        Raises EpisodeOver if a limit was reached before (Turn.is_last), and ValueError for an
        observation that cannot be read.
        """
        if self._over:
            raise EpisodeOver
        turn = await self.request(TurnRequest(observation))
        self._over = turn.is_last
        return turn

    async def chat(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> Turn:
        """Return the turn that follows the messages of a chat.

        `tools` has the schemas of tools that it may call; `max_tokens` is an option. Messages that
        were sent and turns that were returned before are recognised and not tokenized again; see
        history.py. If the messages continue none of them, they begin a separate conversation,
        which is learned like the first one.

        The turn has no tokens if a limit of the episode leaves no room for it. Raises ValueError
        for messages that cannot be read.
        """
        request, messages = self._read_chat(messages, tools, options)
        return await self.request(request, messages=messages, tools=tools)

    async def growing_chat(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> AsyncIterator[Turn]:
        """Yield the turn that follows the messages of a chat as it grows, at last the complete one.

        Before that it has no finish reason. The turn of an episode is yielded once, when it is
        complete, because each request for tokens is a turn that is learned.
        """
        yield await self.chat(messages, tools=tools, **options)

    def _read_chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> tuple[TurnRequest, list[Message]]:
        """Return the request for the turn that follows messages, and the messages cleaned."""
        total = len(messages)
        messages = [
            clean_message(message, f"message {number} of {total}")
            for number, message in enumerate(messages, 1)
        ]
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError(
                "the last message is a turn of the assistant, or there is none: the model has"
                " nothing to answer"
            )

        after, rest = self.history.of_chat(messages, tools)
        return TurnRequest(rest, after, tools=tools or [], **options), messages

    async def complete(self, text: str, **options: Any) -> Turn:
        """Return the turn that follows a text, without the chat template; otherwise like chat()."""
        after, rest = self.history.of_text(text)
        return await self.request(TurnRequest(rest, after, plain=True, **options), text=text)

    async def generate(self, token_ids: list[int], **options: Any) -> Turn:
        """Return the turn that follows these tokens; otherwise like chat()."""
        after, rest = self.history.of_token_ids(token_ids)
        return await self.request(TurnRequest(rest, after, **options))

    async def request(self, request: TurnRequest, **sent: Any) -> Turn:
        """Return the turn of a request, and remember what was `sent` (see TurnHistory.add()).

        Requests at the same time wait for each other.
        """
        async with self._one_at_a_time:
            content = to_bytes(request)
            # A cancelled request has been answered all the same. Its turn belongs to the episode.
            while self._unwanted:
                unwanted = await self._poll()
                self._unwanted -= 1
                if isinstance(unwanted, Turn) and unwanted.token_ids:
                    self.turns.append(unwanted)
                    self.history.add(unwanted)

            try:
                await self._send(content)
                reply = await self._poll()
            except asyncio.CancelledError:
                self._unwanted += 1
                raise

            if isinstance(reply, Refused):
                raise ValueError(reply.problem)

            if reply.token_ids:
                self.turns.append(reply)
                self.history.add(reply, **sent)

            self.limited = not reply.token_ids

        return reply

    async def _send(self, content: bytes) -> None:
        """Send a request, also if it is cancelled meanwhile."""
        self.connection.send_bytes(content)

    async def _poll(self) -> Turn | Refused:
        """Return the next message, without a thread that waits for it."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.connection.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.connection.fileno())
        self.num_replies += 1
        return self.connection.recv()

    def reward(self, value: float) -> None:
        """Give a reward for the latest turn; the rewards of an episode add up."""
        self.rewards.append((max(len(self.turns) - 1, 0), float(value)))

    def count_call(self, began: float, *, failed: bool) -> None:
        """Count a call of a tool that began at this time.perf_counter()."""
        self.tool_calls += 1
        self.tool_errors += failed
        self.tool_seconds += time.perf_counter() - began
