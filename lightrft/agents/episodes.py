"""Episodes of one rank: their programs run in worker processes, while the engine generates the turns of others."""

import selectors
import time
import weakref
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from loguru import logger

from lightrft.agents.messages import LENGTH, Ended, Message, Observation, Refused, Turn, TurnRequest
from lightrft.agents.play import Play
from lightrft.agents.programs import ProgramSetup
from lightrft.agents.tool_calls import Parse
from lightrft.agents.turn_format import TurnFormat
from lightrft.config.errors import ConfigError
from lightrft.config.sections import EnvironmentSection
from lightrft.launch.forks import Forks, Worker
from lightrft.samples import Completion, Episode, Sample, TokenIds

FAILURES_IN_A_ROW = 32
"""Number of failed episodes in a row that end a run, because the environment itself must be broken."""
LOGGED = 5
"""Number of failed episodes of a step that are logged; the others are only counted."""
CHECK_SECONDS = 0.1
"""Time between two looks at the limits of time."""


class Episodes:
    """Runs the programs of episodes.

    A program that fails, dies or takes too long costs its own sample, from which nothing is learned.
    """

    def __init__(
        self,
        setup: ProgramSetup,
        section: EnvironmentSection,
        format: TurnFormat,
        parse: Parse,
        *,
        longest: int,
        other_rewards: str = "",
    ):
        """Set up the episodes of a rank. `longest` is the number of tokens of a response, its observations included.

        `other_rewards` names the rewards of the run if none of them is the environment's.
        """
        self.other_rewards = other_rewards
        self.section, self.format, self.parse, self.longest = section, format, parse, longest
        self._forks = Forks(setup)
        weakref.finalize(self, self._forks.close)
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[Play] = deque()
        self._idle: list[Worker] = []
        self._plays: dict[Worker, Play] = {}
        self._ended: list[Sample] = []
        self._checked = 0.0
        self._in_a_row = self._logged = 0

    @property
    def running(self) -> list[Play]:
        """Return the episodes that have not ended."""
        return [*self._waiting, *self._plays.values()]

    def begin(self, sample: Sample, *seed_parts: int) -> None:
        """Begin the episode of a sample, when a worker is free."""
        sample.episode, self._logged = Episode(), 0
        self._waiting.append(Play(sample, seed_parts))

    def attach(self, sample: Sample, socket: Connection, *seed_parts: int) -> None:
        """Begin an episode whose program sends its requests over a socket, and is no worker process."""
        sample.episode = Episode()
        self._register(Play(sample, seed_parts, Worker(None, socket)))

    def poll(self, seconds: float) -> list[Play]:
        """Handle what the programs have sent, after waiting for it at most `seconds`; return the episodes whose turn it is.

        Raises ConfigError if the environment cannot be imported, or if many episodes in a row have failed.
        """
        while self._waiting and len(self._plays) < self.section.environment_workers:
            self._start(self._waiting.popleft())
        ready = [self._handle_message(self._plays[key.data]) for key, _ in self._selector.select(seconds if self._plays else 0)]
        now = time.monotonic()
        if now - self._checked > CHECK_SECONDS:
            self._checked = now
            for play in [play for play in self._plays.values() if play.until < now]:
                self._fail(play, f"it asked for no turn for {60 * self.section.environment_minutes:g} s (--environment_minutes)")
        return [play for play in ready if play is not None]

    def generated(self, play: Play, completion: Completion, text: str) -> None:
        """Give a turn of the model, which its conversation has, and its decoded text to the program of the episode."""
        play.add(completion, text)
        sample, end = play.conversation, -len(completion.token_ids)
        last = len(sample.token_ids) >= self.longest or not self._has_turns_left(play)
        play.episode.finish_reason = LENGTH if last else "stop"
        play.until = time.monotonic() + 60 * self.section.environment_minutes
        context = TokenIds([*sample.prompt.token_ids, *sample.token_ids[:end]])
        opened = self.format.opens_thinking(context)
        content, calls = self.parse(opened + self.format.decode(completion.token_ids))
        content = content.removeprefix(opened)
        self._send(play, Turn(text, completion.token_ids, completion.finish_reason, last, calls, content if calls else text,
                              completion.logprobs, context))  # fmt: skip

    def take_ended(self) -> list[Sample]:
        """Return the samples whose episodes have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self) -> None:
        """End all episodes where they are."""
        self._waiting.clear()
        for play in list(self._plays.values()):
            self._leave(play, reuse=False)

    def close(self) -> None:
        """End the worker processes."""
        self.abort()
        self._forks.close()
        self._selector.close()

    def _start(self, play: Play) -> None:
        try:
            play.worker = self._idle.pop() if self._idle else Worker(*self._forks.fork())
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._register(play)
        self._send(play, play.sample.prompt.columns)

    def _register(self, play: Play) -> None:
        self._plays[play.worker] = play
        now = time.monotonic()
        play.until = now + 60 * self.section.environment_minutes
        if self.section.episode_minutes is not None:
            play.last_turn_after = now + 60 * self.section.episode_minutes
        self._selector.register(play.worker.socket, selectors.EVENT_READ, play.worker)

    def _has_turns_left(self, play: Play) -> bool:
        return len(play.turns) < self.section.max_turns and time.monotonic() < play.last_turn_after

    def _send(self, play: Play, message: Any) -> None:
        try:
            play.worker.socket.send(message)
        except OSError:
            self._died(play)

    def _handle_message(self, play: Play) -> Play | None:
        """Handle a message of a program; return its episode if the model is to sample a turn."""
        try:
            message: TurnRequest | Ended = play.worker.socket.recv()
        except (EOFError, OSError):
            self._died(play)
            return None
        if isinstance(message, Ended):
            self._end(play, message)
            return None
        try:
            return self._observe(play, message)
        except (ValueError, TypeError, KeyError) as error:
            self._send(play, Refused(f"the observation cannot be rendered: {error}"))
            return None

    def _observe(self, play: Play, request: TurnRequest) -> Play | None:
        """Let the model read an observation; return None if no turn can follow it."""
        before = play.context(request)
        if before is None:
            prompt, token_ids, used = self.format.prompt(play.sample.prompt, request), [], 0
        else:
            last = before.conversation.token_ids[before.num_tokens - 1]
            token_ids = self.format.tokens(request, last, before.conversation.prompt.columns)
            used = before.num_tokens
        if not self._has_turns_left(play) or used + len(token_ids) >= self.longest:
            play.episode.finish_reason = LENGTH
            self._send(play, Turn("", [], LENGTH, is_last=True))
            return None
        if before is None:
            play.begin(prompt)
            play.conversation.episode.messages += _messages(request.observation)
        else:
            play.read(before, token_ids, _messages(request.observation))
        play.max_tokens, play.sampling, play.until = request.max_tokens, request.sampling, float("inf")
        return play

    def _end(self, play: Play, ended: Ended) -> None:
        if self.other_rewards and any(reward for _, reward in ended.rewards):
            raise ConfigError(
                f"the environment or agent gives rewards, which --reward {self.other_rewards} ignores: add environment to "
                "--reward, with the weight 0 to ignore them (environment:0)"
            )
        play.end(ended)
        if ended.problem:
            self._fail(play, ended.problem, reuse=not ended.calls_running)
            return
        self._in_a_row = 0
        self._leave(play, reuse=not ended.calls_running)
        play.sample.finish_reason = play.episode.finish_reason or "stop"
        self._ended.append(play.sample)

    def _died(self, play: Play) -> None:
        self._failed(play, f"its process {self._leave(play, reuse=False)}")

    def _fail(self, play: Play, problem: str, *, reuse: bool = False) -> None:
        self._leave(play, reuse=reuse)
        self._failed(play, problem)

    def _failed(self, play: Play, problem: str) -> None:
        """Learn nothing from an episode. Raises ConfigError if many in a row have failed."""
        sample = play.sample
        play.episode.problem, play.episode.rewards = problem, []
        sample.masked, sample.finish_reason = True, "stop"
        self._ended.append(sample)
        if play.worker.process is None:
            return
        self._in_a_row += 1
        message = f"--environment: the episode of prompt {sample.prompt.index} ({sample.prompt.text[-200:]!r}) failed: {problem}"
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise ConfigError(f"{message}. {self._in_a_row} episodes in a row have failed: the environment itself is broken")
        if self._logged < LOGGED:
            self._logged += 1
            logger.warning(message)

    def _leave(self, play: Play, *, reuse: bool) -> str:
        """Take an episode out, and kill its process unless it can run another one; return a text on how the process ended."""
        self._selector.unregister(play.worker.socket)
        del self._plays[play.worker]
        if play.worker.process is None:
            play.worker.socket.close()
            return "has closed its connection"
        if reuse:
            self._idle.append(play.worker)
            return ""
        try:
            return self._forks.end(play.worker)
        except (OSError, EOFError):
            self._forks.close()
            return "has ended, with the process that starts the workers"


def _messages(observation: Observation) -> list[Message]:
    if not observation:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [each if isinstance(each, dict) else {"role": "user", "content": f"token {each}"} for each in observation]
