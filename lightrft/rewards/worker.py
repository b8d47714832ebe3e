"""Worker processes of a reward function: they take one call after the other from pool.py."""

import asyncio
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from multiprocessing.connection import Connection
from pathlib import Path

from lightrft.config.references import JUDGE, SERVER, reward_terms
from lightrft.config.sections import RewardSection
from lightrft.rewards.conventions import RewardFunction
from lightrft.rewards.functions import rewards
from lightrft.rewards.weighted import WeightedRewards

SKIPPED_FOLDERS = (
    Path(__file__).parent,
    Path(__file__).parents[1] / "algorithms" / "roles",
    Path(asyncio.__file__).parent,
)
"""Folders to skip when looking for the user's line in a traceback.

They hold our calls, requests to servers, and the event loop.
"""


MAX_MESSAGE = 2000
"""Number of characters of an error that are reported."""


@dataclass(frozen=True)
class Setup:
    """Settings for the process that forks workers."""

    name: str
    """Name of the function, or terms of several, as in --reward."""
    section: RewardSection = field(default_factory=RewardSection)
    models: tuple[str, ...] = ()
    """Labels of reward models; the column --reward_key may name these, too."""
    chat: bool = False
    """True if prompts are chats."""

    @property
    def memory(self) -> int:
        """Return the number of bytes that a call may allocate; 0 for no limit."""
        return int(self.section.reward_memory_gb * 1e9)

    def function(self) -> RewardFunction | WeightedRewards:
        """Import the function, or all of them. Raises ValueError if one cannot be imported."""
        functions = [(term, self._function(term.name)) for term in reward_terms(self.name)]
        (term, function), *others = functions
        key = self.section.reward_key
        if others or key or term.weight != 1:
            return WeightedRewards(functions, key, self.models)
        return function

    def prepare(self) -> Callable[[Connection], None]:
        """Import the function; return what a worker runs."""
        return partial(_work, function=self.function())

    def _function(self, name: str) -> RewardFunction:
        section = self.section
        limits = {"seconds": 60 * section.reward_minutes, "patience": 60 * section.server_minutes}
        if name == JUDGE:
            from lightrft.rewards.judge import Judge

            function = Judge(section, **limits)
        elif name.startswith(SERVER):
            from lightrft.rewards.remote import RemoteReward

            function = RemoteReward(name, **limits)
        else:
            function = rewards[name]
        return RewardFunction(function, chat=self.chat)


def _work(calls: Connection, function: RewardFunction | WeightedRewards) -> None:
    """Reply to each list of samples until the rank closes the socket.

    A reply is (values, "", True), or (None, problem, usable). A worker is not usable after a
    MemoryError, as the memory may not be freed; the rank ends it.
    """
    while True:
        try:
            samples = calls.recv_bytes()
        except (EOFError, OSError):  # the rank has ended
            return
        try:
            answer = pickle.dumps((function.judge(pickle.loads(samples)), "", True))
        except BaseException as error:
            problem = f"{said(error)}{location(error)}"
            answer = pickle.dumps((None, problem, not isinstance(error, MemoryError)))
        sys.stdout.flush()
        calls.send_bytes(answer)


def said(error: BaseException) -> str:
    """Return the class and the message of an error; a long message is cut."""
    message = str(error)
    cut = f" ... ({len(message)} characters)" if len(message) > MAX_MESSAGE else ""
    return f"{type(error).__name__}: {message[:MAX_MESSAGE]}{cut}"


def location(error: BaseException) -> str:
    """Return the last line of the user's file in the error's traceback.

    It is empty if the function was not entered.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frames = list(dropwhile(lambda one: Path(one.filename).parent in SKIPPED_FOLDERS, frames))
    frames = [one for one in frames if one.filename == frames[0].filename]
    return f", at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
