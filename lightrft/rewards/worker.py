"""Processes that call a reward function: one imports it once, and forks the workers, which take one call after the other.

pool.py starts that process, and communicates with it and with the workers over sockets. A killed worker is replaced by a fork,
without a second import. They start without the rank's memory, threads, sockets and devices, and end with the rank in any case.
Linux only.
"""

import asyncio
import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

from lightrft.config.references import JUDGE, SERVER, reward_terms
from lightrft.rewards.conventions import RewardFunction
from lightrft.rewards.functions import Reward, rewards
from lightrft.rewards.judge_settings import JudgeSettings
from lightrft.rewards.weighted import WeightedRewards

FORK = 0
"""Request for a worker; any other number is the process id of a worker that has ended."""
PR_SET_PDEATHSIG = 1
PACKAGE, ASYNCIO = Path(__file__).parent, Path(asyncio.__file__).parent
STACK_SIGNAL = signal.SIGUSR1
"""Signal at which a worker writes its stack to the socket of its calls; it is of no further use after that."""


@dataclass(frozen=True)
class Setup:
    """Settings for the process that forks workers."""

    name: str
    """Name of the function, or terms of several, as in --reward."""
    key: str | None = None
    """Column that names the rewards of a row, as in --reward_key."""
    models: tuple[str, ...] = ()
    """Labels of reward models, which that column may name, too."""
    chat: bool = False
    """True if prompts are chats."""
    memory: int = 0
    """Number of bytes that a call may allocate; 0 for no limit."""
    seconds: float = 0.0
    """Longest time of a request to a server, in seconds."""
    patience: float = 0.0
    """Longest time that a server may be away, in seconds."""
    judge: JudgeSettings | None = None
    """Settings of the reward `judge`."""

    def function(self) -> RewardFunction | WeightedRewards:
        """Import the function, or all of them. Raises ValueError if one cannot be imported."""
        functions = [(term, self._function(term.name)) for term in reward_terms(self.name)]
        (term, function), *others = functions
        return WeightedRewards(functions, self.key, self.models) if others or self.key or term.weight != 1 else function

    def _function(self, name: str) -> RewardFunction:
        limits = {"seconds": self.seconds, "patience": self.patience}
        if name == JUDGE and self.judge is not None:
            found = _with_http(name, lambda: _judge(self.judge, **limits))
        else:
            found = _with_http(name, lambda: _on_server(name, **limits)) if name.startswith(SERVER) else rewards[name]
        return RewardFunction(found, chat=self.chat)


def main(fd: int) -> None:
    """Import the function that is named over the socket `fd`, then fork workers on request until the rank closes the socket."""
    _end_with_parent()
    control = Connection(fd)
    setup: Setup = pickle.loads(control.recv_bytes())
    try:
        function = setup.function()
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}")
        return
    control.send("")
    while True:
        try:
            request = control.recv()
        except EOFError:
            return
        if request == FORK:
            _fork(control, function, setup.memory)
        else:
            control.send(os.waitpid(request, 0)[1])


def _fork(control: Connection, function: RewardFunction, memory: int) -> None:
    """Start a worker, and send its process id and its socket to the rank."""
    theirs, ours = Pipe()
    process = os.fork()
    if process == 0:
        control.close()
        theirs.close()
        os.setsid()  # processes that it starts are killed with it
        _end_with_parent()
        _limit_memory(memory)
        faulthandler.register(STACK_SIGNAL, file=ours.fileno(), all_threads=False)
        _work(ours, function)
        os._exit(0)
    ours.close()
    control.send(process)
    send_handle(control, theirs.fileno(), 0)
    theirs.close()


def _work(calls: Connection, function: RewardFunction) -> None:
    """Reply to each list of samples with (values, "") or (None, problem) until the rank closes the socket."""
    while True:
        try:
            samples = calls.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((function.judge(pickle.loads(samples)), ""))
        except BaseException as error:
            answer = pickle.dumps((None, f"{type(error).__name__}: {error}{place(error)}"))
            if isinstance(error, MemoryError):  # its memory may not be freed
                calls.send_bytes(answer)
                return
        sys.stdout.flush()
        calls.send_bytes(answer)


def place(error: BaseException) -> str:
    """Return the last line of the user's file in the error's traceback; empty if the function was not entered."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = list(dropwhile(lambda one: Path(one.filename).parent in (PACKAGE, ASYNCIO), frames))
    own = [one for one in frames if one.filename == frames[0].filename]
    return f", at {own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _with_http(name: str, build: Callable[[], Reward]) -> Reward:
    """Return what `build` returns; raise ValueError with the command that installs a missing package."""
    try:
        return build()
    except ModuleNotFoundError as error:
        raise ValueError(f"--reward {name} needs {error.name}: pip install httpx tenacity") from error


def _on_server(url: str, **limits: float) -> Reward:
    from lightrft.rewards.remote import RemoteReward

    return RemoteReward(url, **limits)


def _judge(settings: JudgeSettings, **limits: float) -> Reward:
    from lightrft.rewards.judge import Judge

    return Judge(settings, **limits)


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        limit = int(used.split()[1]) * 1024 + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
