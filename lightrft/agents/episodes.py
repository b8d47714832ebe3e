"""Episodes of one rank: their programs run in worker processes, while the engine generates the
turns of others.
"""

import pickle
import selectors
import time
import weakref
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from loguru import logger

from lightrft.agents.messages import (
    LENGTH,
    Ended,
    Message,
    Observation,
    Refused,
    Turn,
    TurnRequest,
    check_request,
    from_bytes,
)
from lightrft.agents.play import Play
from lightrft.agents.programs import ProgramSetup
from lightrft.agents.tool_calls import Parse
from lightrft.agents.turn_format import TurnFormat
from lightrft.config.errors import ConfigError
from lightrft.config.sections import EnvironmentSection
from lightrft.launch.forks import Forks, Mailbox, Worker
from lightrft.samples import Completion, Episode, Sample, TokenIds

FAILURES_IN_A_ROW = 32
"""Number of failed episodes in a row that end a run, because the environment itself must be broken.
"""
LOGGED = 5
"""Number of failed episodes of a step that are logged; the others are only counted."""
BYTES_PER_TOKEN = 64
"""Bytes that a message of a program may have for each token of its limits, which leaves room for
JSON."""
MESSAGE_BYTES = 1 << 20
"""Bytes that it may have in any case."""
CHECK_SECONDS = 0.1
"""Time between two looks at the limits of time."""


class Episodes:
    """Runs the programs of episodes.

    A program that fails, dies or takes too long costs its own sample, from which nothing is
    learned.
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
        """Set up the episodes of a rank.

        `longest` is the number of tokens of a response, its observations included.

        `other_rewards` names the rewards of the run if none of them is the environment's.
        """
        self.other_rewards = other_rewards
        self.section = section
        self.format = format
        self.parse = parse
        self.longest = longest
        self._largest_message = MESSAGE_BYTES + BYTES_PER_TOKEN * (
            longest + format.section.prompt_max_len
        )
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
        sample.episode = Episode()
        self._logged = 0
        self._waiting.append(Play(sample, seed_parts))

    def attach(self, sample: Sample, socket: Connection, *seed_parts: int) -> None:
        """Begin an episode whose program sends its requests over a socket, and is no worker
        process.
        """
        sample.episode = Episode()
        self._register(Play(sample, seed_parts, Worker(None, socket)))

    def poll(self, seconds: float) -> list[Play]:
        """Handle what the programs have sent, after waiting for it at most `seconds`; return the
        episodes whose turn it is.

        Raises ConfigError if the environment cannot be imported, or if many episodes in a row have
        failed.
        """
        while self._waiting and len(self._plays) < self.section.environment_workers:
            self._start(self._waiting.popleft())
        selected = self._selector.select(seconds if self._plays else 0)
        ready = [
            play for key, _ in selected if (play := self._handle_messages(self._plays[key.data]))
        ]

        now = time.monotonic()
        if now - self._checked > CHECK_SECONDS:
            self._checked = now
            for play in list(self._plays.values()):
                self._flush(play)
            for play in [play for play in self._plays.values() if play.until < now]:
                self._fail(
                    play,
                    f"it asked for no turn for {60 * self.section.environment_minutes:g} s"
                    " (--environment_minutes)",
                )

        return ready

    def refuse(self, play: Play, problem: str) -> None:
        """End an episode whose turn the engine cannot sample."""
        self._fail(play, f"the engine cannot sample its turn: {problem}")

    def generated(self, play: Play, completion: Completion, text: str) -> None:
        """Give a turn of the model, which its conversation has, and its decoded text to the program
        of the episode.

        It is lost if the program has ended since it asked.
        """
        if self._plays.get(play.worker) is not play:
            return

        play.add(completion, text)
        sample = play.conversation
        end = -len(completion.token_ids)
        last = len(sample.token_ids) >= self.longest or not self._has_turns_left(play)
        play.episode.finish_reason = LENGTH if last else "stop"
        play.until = time.monotonic() + 60 * self.section.environment_minutes
        context = TokenIds([*sample.prompt.token_ids, *sample.token_ids[:end]])
        opened = self.format.opens_thinking(context)
        content, calls = self.parse(opened + self.format.decode(completion.token_ids))
        content = content.removeprefix(opened)
        self._reply(
            play,
            Turn(
                text,
                completion.token_ids,
                completion.finish_reason,
                last,
                calls,
                content if calls else text,
                completion.logprobs,
                context,
            ),
        )

    def take_ended(self) -> list[Sample]:
        """Return the samples whose episodes have ended since the last call."""
        ended = self._ended
        self._ended = []
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
        play.mailbox = Mailbox(play.worker.socket, longest=self._largest_message)
        now = time.monotonic()
        play.until = now + 60 * self.section.environment_minutes
        if self.section.episode_minutes is not None:
            play.last_turn_after = now + 60 * self.section.episode_minutes
        self._selector.register(play.worker.socket, selectors.EVENT_READ, play.worker)

    def _has_turns_left(self, play: Play) -> bool:
        return len(play.turns) < self.section.max_turns and time.monotonic() < play.last_turn_after

    def _send(self, play: Play, message: Any) -> None:
        try:
            play.mailbox.send(pickle.dumps(message))
        except OSError:
            self._died(play)

    def _reply(self, play: Play, reply: Turn | Refused) -> None:
        play.num_replies += 1
        self._send(play, reply)

    def _flush(self, play: Play) -> None:
        try:
            play.mailbox.flush()
        except OSError:
            self._died(play)

    def _handle_messages(self, play: Play) -> Play | None:
        """Handle what a program has sent; return its episode if the model is to sample a turn."""
        try:
            messages = [from_bytes(content) for content in play.mailbox.receive()]
        except (EOFError, OSError):
            self._died(play)
            return None
        except ValueError as error:
            self._fail(
                play,
                f"what it has sent is no message ({error}): does it write to a descriptor that is"
                " not its own?",
            )
            return None

        # The first message may end the episode: those behind it are then nobody's.
        ready = None
        for message in messages:
            if self._plays.get(play.worker) is not play:
                break
            ready = self._handle_message(play, message) or ready
        return ready if self._plays.get(play.worker) is play else None

    def _handle_message(self, play: Play, message: TurnRequest | Ended) -> Play | None:
        if isinstance(message, Ended):
            self._end(play, message)
            return None
        if play.is_sampling:
            self._fail(play, "it has asked for a turn before it had the one that it asked for")
            return None

        try:
            check_request(message, len(play.turns))
            return self._observe(play, message)
        except (
            Exception
        ) as error:  # a request that cannot be read is a matter of its program, whatever it raises
            self._reply(play, Refused(f"the observation cannot be rendered: {error}"))
            return None

    def _observe(self, play: Play, request: TurnRequest) -> Play | None:
        """Let the model read an observation; return None if no turn can follow it."""
        before = play.context(request)
        if before is None:
            prompt = self.format.prompt(play.sample.prompt, request)
            token_ids = []
            used = 0
        else:
            last = before.conversation.token_ids[before.num_tokens - 1]
            token_ids = self.format.tokens(request, last, before.conversation.prompt.columns)
            used = before.num_tokens

        if not self._has_turns_left(play) or used + len(token_ids) >= self.longest:
            play.episode.finish_reason = LENGTH
            self._reply(play, Turn("", [], LENGTH, is_last=True))
            return None
        if not used and not (token_ids or prompt.token_ids):
            raise ValueError("the prompt has no tokens: the model has nothing to answer")

        if before is None:
            play.begin(prompt)
            play.conversation.episode.messages += _messages(request.observation)
        else:
            play.read(before, token_ids, _messages(request.observation))

        play.max_tokens = request.max_tokens
        play.sampling = request.sampling
        play.until = float("inf")

        return play

    def _end(self, play: Play, ended: Ended) -> None:
        if self.other_rewards and any(reward for _, reward in ended.rewards):
            raise ConfigError(
                f"the environment or agent gives rewards, which --reward {self.other_rewards}"
                " ignores: add environment to --reward, with the weight 0 to ignore them"
                " (environment:0)"
            )

        # A process serves the next episode only if nothing of this one is left in it or on its way.
        reuse = (
            not ended.calls_running
            and ended.num_replies == play.num_replies
            and not play.is_sampling
        )
        play.end(ended)
        if ended.problem:
            self._fail(play, ended.problem, reuse=reuse)
            return
        self._in_a_row = 0
        self._leave(play, reuse=reuse)
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
        play.episode.problem = problem
        play.episode.rewards = []
        sample.masked = True
        sample.finish_reason = "stop"
        self._ended.append(sample)

        if play.worker.process is None:
            return

        self._in_a_row += 1
        message = (
            f"--environment: the episode of prompt {sample.prompt.index}"
            f" ({sample.prompt.text[-200:]!r}) failed: {problem}"
        )
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise ConfigError(
                f"{message}. {self._in_a_row} episodes in a row have failed: the environment itself"
                " is broken"
            )

        if self._logged < LOGGED:
            self._logged += 1
            logger.warning(message)

    def _leave(self, play: Play, *, reuse: bool) -> str:
        """Take an episode out, and kill its process unless it can run another one; return a text on
        how the process ended.
        """
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
    return [
        each if isinstance(each, dict) else {"role": "user", "content": f"token {each}"}
        for each in observation
    ]
