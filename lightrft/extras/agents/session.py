"""The model, as the code of an environment or of an agent sees it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from lightrft.algorithms.rollout.episode_roles import POLICY, ROLE_MARK
from lightrft.extras.agents.history import TurnHistory, clean_message
from lightrft.extras.agents.messages import (
    COUNTED,
    Ended,
    Exchanged,
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
        self.name = ""
        """Beginning of the ids of turns, where several sessions have the same clients."""
        self.turns: list[Turn] = []
        """Turns so far."""
        self.history = TurnHistory()
        self._over = False
        self._numbers = count()
        self._refused = -1
        """Number of a request that follows the latest one without a turn."""
        self._waiting: dict[int, tuple[asyncio.Future[Turn], dict[str, Any]]] = {}
        """Number of a request -> the turn to come, and what of the request the history keeps."""

        self.stored: dict[str, list[Message]] = {}
        """Id of a response -> the messages up to it, for clients that send the id back."""
        self.limited = False
        """True if a limit of the episode left no room for the latest turn."""
        self.ended = Ended()
        """What will be reported at the end."""

    async def turn(self, observation: Observation = None) -> Turn:
        """Let the model read `observation` and return its turn; without one it answers the prompt.

        Raises EpisodeOver if a limit was reached before (Turn.is_last), and ValueError for an
        observation that cannot be read.
        """
        while self._waiting:  # turns that were not waited for are earlier ones
            await asyncio.wait([turn for turn, _ in self._waiting.values()])
        if self._over:
            raise EpisodeOver
        turn = await self.request(TurnRequest(observation))
        self._over = turn.is_last
        return turn

    async def chat(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> Turn:
        """Return the turn that follows the messages of a chat.

        `tools` has the schemas of tools that it may call; `max_tokens` and `role` are options.
        Messages that were sent and turns that were returned before are recognised and not tokenized
        again; see history.py. If the messages continue none of them, they begin a separate
        conversation, which is learned like the first one.

        The turn has no tokens if a limit of the episode leaves no room for it. Raises ValueError
        for messages that cannot be read.
        """
        request, messages = self._read_chat(messages, tools, options)
        return await self.request(request, messages=messages, tools=tools)

    async def growing_chat(
        self, messages: list[Message], *, in_pieces: bool, **options: Any
    ) -> AsyncIterator[Turn]:
        """Yield the turn that follows the messages of a chat as it grows, at last the complete one.

        Before that it has no finish reason. The turn of an episode, or one that is not wanted
        `in_pieces`, is yielded once: in an episode each request for tokens is a turn that is
        learned.
        """
        yield await self.chat(messages, **options)

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

        after, rest = self.history.of_chat(messages, tools, options.get("role", POLICY))
        return TurnRequest(rest, after, tools=tools or [], **options), messages

    async def complete(self, text: str, **options: Any) -> Turn:
        """Return the turn that follows a text, without the chat template; otherwise like chat()."""
        after, rest = self.history.of_text(text, options.get("role", POLICY))
        return await self.request(TurnRequest(rest, after, plain=True, **options), text=text)

    async def generate(self, token_ids: list[int], **options: Any) -> Turn:
        """Return the turn that follows these tokens; otherwise like chat()."""
        after, rest = self.history.of_token_ids(token_ids, options.get("role", POLICY))
        return await self.request(TurnRequest(rest, after, **options))

    async def request(self, request: TurnRequest, **sent: Any) -> Turn:
        """Return the turn of a request, and remember what was `sent` (see TurnHistory.add()).

        Several requests can wait at the same time. One that is cancelled is answered all the same,
        and its turn belongs to the episode.
        """
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        content = to_bytes(replace(request, number=number))
        if not self._waiting:
            loop.add_reader(self.connection.fileno(), self._receive)
        turn = loop.create_future()
        self._waiting[number] = turn, {"role": request.role, **sent}

        await self._send(content)
        return await asyncio.shield(turn)

    @property
    def waits(self) -> bool:
        """Return True while a reply is still to come."""
        return bool(self._waiting)

    def close(self) -> None:
        """Close the connection, whatever is still to come over it."""
        if self._waiting:
            self._stop_reading()
        self._close()

    def _close(self) -> None:
        self.connection.close()

    async def _send(self, content: bytes) -> None:
        """Send a request, also if it is cancelled meanwhile."""
        self.connection.send_bytes(content)

    def _receive(self) -> None:
        """Give the next reply to the request that waits for it."""
        try:
            number, reply = self.connection.recv()
        except (EOFError, OSError) as error:
            self._stop_reading()
            for turn, _ in self._waiting.values():
                _fail(turn, error)
            self._waiting.clear()
            return

        self.ended.num_replies += 1
        turn, sent = self._waiting.pop(number)
        if not self._waiting:
            self._stop_reading()
        if isinstance(reply, Refused):
            _fail(turn, ValueError(reply.problem))
            return

        reply = replace(reply, id=f"{self.name}{reply.number}")
        if reply.token_ids:
            self.turns.append(reply)
            self.history.add(reply, **sent)
        if not (reply.token_ids or reply.finish_reason == COUNTED):
            self.limited, self._refused = True, next(self._numbers)
        elif number > self._refused:  # it was asked for after the limit was reached
            self.limited = False
        turn.set_result(reply)

    def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self.connection.fileno())

    def record(self, *exchange: Any) -> None:
        """Let the rank write an exchange of the server, with the fields of Exchanged."""
        self.connection.send_bytes(to_bytes(Exchanged(*exchange)))

    def reward(self, value: float | Mapping[str, float]) -> None:
        """Give a reward for the latest turn; the rewards of an episode add up.

        A mapping has a reward for all turns of each role.
        """
        if isinstance(value, Mapping):
            self.ended.role_rewards.update({str(role): float(one) for role, one in value.items()})
        else:
            self.ended.rewards.append((max(len(self.turns) - 1, 0), float(value)))

    def check_rewards(self) -> None:
        """Raise ValueError unless either turns have rewards, or all roles with turns."""
        if self.ended.role_rewards and self.ended.rewards:
            raise ValueError("the reward is a number, or a number for each role, not both")
        missing = {*self.history.roles} - self.ended.role_rewards.keys()
        if self.ended.role_rewards and missing:
            raise ValueError(
                f"the role {min(missing)!r} has turns and no reward, and {sorted(self.ended.role_rewards)}"
                " have one: return a number for each role (a request names its role as the model"
                f" {ROLE_MARK}ROLE; without a role it is {POLICY!r})"
            )

    def count_call(self, began: float, *, failed: bool) -> None:
        """Count a call of a tool that began at this time.perf_counter()."""
        self.ended.tool_calls += 1
        self.ended.tool_errors += failed
        self.ended.tool_seconds += time.perf_counter() - began


def _fail(turn: asyncio.Future[Turn], error: Exception) -> None:
    turn.set_exception(error)
    turn.exception()  # the request may have been given up, and asyncio would log that


EpisodeProgram = Callable[[Session, dict[str, Any]], Awaitable[float | None]]
"""Function from a session and the columns of a row to the reward, or None."""
