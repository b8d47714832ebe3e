"""The model, as the code of an environment or of an agent sees it."""

import asyncio
import time
from multiprocessing.connection import Connection

from lightrft.agents.messages import Observation, Turn, TurnRequest


class EpisodeOver(Exception):
    """Raised by turn() after the last turn of an episode."""


class Session:
    """One episode's access to the model. Its turns are sampled by the engine, and exactly these tokens are learned from."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._over = False
        self.turns: list[Turn] = []
        """Turns so far."""
        self.rewards: list[tuple[int, float]] = []
        self.tool_calls = self.tool_errors = 0
        self.tool_seconds = 0.0

    async def turn(self, observation: Observation = None) -> Turn:
        """Let the model read `observation` and return its turn; without one it answers the prompt.

        Raises EpisodeOver if a limit was reached before (Turn.is_last).
        """
        if self._over:
            raise EpisodeOver
        self._connection.send(TurnRequest(observation))
        turn: Turn = await asyncio.to_thread(self._connection.recv)
        self.turns.append(turn)
        self._over = turn.is_last
        return turn

    def reward(self, value: float) -> None:
        """Give a reward for the latest turn; the rewards of an episode add up."""
        self.rewards.append((max(len(self.turns) - 1, 0), float(value)))

    def count_call(self, began: float, *, failed: bool) -> None:
        """Count a call of a tool that began at this time.perf_counter()."""
        self.tool_calls += 1
        self.tool_errors += failed
        self.tool_seconds += time.perf_counter() - began
