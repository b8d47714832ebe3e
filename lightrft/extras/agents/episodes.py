"""Run the episodes of one rank.

Programs run in worker processes, while the engine generates the turns of others.
"""

import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from multiprocessing.connection import Connection
from typing import Any

from loguru import logger

from lightrft.config.errors import ConfigError
from lightrft.config.sections import EnvironmentSection
from lightrft.core.samples import Completion, Episode, Sample, TokenIds
from lightrft.extras.agents.episode_state import EpisodeState, RequestedTurn
from lightrft.extras.agents.messages import (
    COUNTED,
    LENGTH,
    Ended,
    Exchanged,
    Message,
    Observation,
    Refused,
    Turn,
    TurnRequest,
    check_request,
    from_bytes,
)
from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.recording import Recording
from lightrft.extras.agents.tool_calls import Parse
from lightrft.extras.agents.turn_format import TurnFormat
from lightrft.rewards.forks import Forks, Mailbox, Worker

FAILURES_IN_A_ROW = 32
"""Number of failed episodes in a row that end a run: the environment itself must be broken."""
LOGGED = 5
"""Number of failed episodes of a step to log; others are only counted."""
MESSAGE_BYTES_PER_TOKEN = 512
"""Bytes that a message of a program may have for each token of its limits.

This leaves room for JSON, and for recorded replies with log-probs.
"""
MESSAGE_BYTES = 1 << 20
"""Bytes that it may have in any case."""
CHECK_SECONDS = 0.1
"""Time between two looks at the limits of time."""


@dataclass(eq=False)
class Episodes:
    """Runs the programs of episodes.

    A program that fails, dies or takes too long loses only one sample: nothing is learned from it.
    """

    setup: InitVar[ProgramSetup]
    section: EnvironmentSection
    format: TurnFormat
    parse: Parse
    longest: int
    """Largest number of tokens of a response, observations included."""
    other_rewards: str = ""
    """Rewards of the run if none of them is the environment's."""
    recording: Recording | None = None

    def __post_init__(self, setup: ProgramSetup) -> None:
        self._max_message_bytes = MESSAGE_BYTES + MESSAGE_BYTES_PER_TOKEN * (
            self.longest + self.format.section.prompt_max_len
        )

        self._forks = Forks(setup)
        weakref.finalize(self, self._forks.close)
        self.draw = 0
        """Seed of the episodes that are played now."""
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[EpisodeState] = deque()
        self._idle: list[Worker] = []
        self._active: dict[Worker, EpisodeState] = {}
        self._ended: list[Sample] = []
        self._checked = 0.0
        self._in_a_row = self._logged = 0
        self._named: set[str] = set()
        """Names of overridden sampling parameters that were logged."""

    @property
    def running(self) -> list[EpisodeState]:
        """Return the episodes that have not ended."""
        return [*self._waiting, *self._active.values()]

    @property
    def busy(self) -> bool:
        """Return True while a program computes, which asks for a turn or ends its episode later."""
        can_begin = self._waiting and len(self._active) < self.section.environment_workers
        return bool(can_begin) or any(not each.sampling for each in self._active.values())

    def begin(self, sample: Sample, *seed_numbers: int) -> None:
        """Begin the episode of a sample, when a worker is free."""
        sample.episode = Episode()
        self._logged = 0
        self._waiting.append(EpisodeState(sample, seed_numbers, self.section.agent_branches))

    def attach(self, sample: Sample, socket: Connection, *seed_numbers: int) -> None:
        """Begin an episode whose program sends requests over a socket, and is no worker process."""
        sample.episode = Episode()
        most = self.section.agent_branches
        self._register(EpisodeState(sample, seed_numbers, most, Worker(None, socket)))

    def poll(self, seconds: float) -> list[RequestedTurn]:
        """Handle what the programs have sent; return the turns of the model that they ask for.

        It waits at most `seconds`. Raises ConfigError if the environment cannot be imported, or if
        many episodes in a row have failed.
        """
        while self._waiting and len(self._active) < self.section.environment_workers:
            self._start(self._waiting.popleft())
        selected = self._selector.select(seconds if self._active else 0)
        requested = [
            turn for key, _ in selected for turn in self._handle_messages(self._active[key.data])
        ]

        now = time.monotonic()
        # Not in every call, because these checks look at each episode.
        if now - self._checked > CHECK_SECONDS:
            self._checked = now
            for state in list(self._active.values()):
                self._flush(state)
            for state in [state for state in self._active.values() if state.until < now]:
                self._fail(
                    state,
                    f"it asked for no turn for {60 * self.section.environment_minutes:g} s"
                    " (--environment_minutes)",
                )

        return requested

    def is_active(self, state: EpisodeState) -> bool:
        """Return whether an episode has begun and has not ended."""
        return self._active.get(state.worker) is state

    def refuse(self, requested: RequestedTurn, problem: str) -> None:
        """Tell a program that the engine cannot sample the turn that it asks for."""
        self._sampled(requested)
        refused = Refused(f"the engine cannot sample this turn: {problem}")
        self._reply(requested.request, requested.state, refused)

    def _sampled(self, requested: RequestedTurn) -> None:
        """Note that a turn is not sampled any more; the program's time begins with the last one."""
        state = requested.state
        state.sampling = [each for each in state.sampling if each is not requested.conversation]
        if not state.sampling:
            state.until = time.monotonic() + 60 * self.section.environment_minutes

    def generated(self, requested: RequestedTurn, completion: Completion, text: str) -> None:
        """Give the program of an episode a turn of the model and its decoded text.

        The conversation has the turn already. It is lost if the program has ended since it asked.
        """
        state = requested.state
        if not self.is_active(state):
            return

        self._sampled(requested)
        sample = requested.conversation
        text, stopped = before_stop(text, requested.request.stop)
        state.add(sample, completion, text)
        end = -len(completion.token_ids)
        last = len(sample.token_ids) >= self.longest or not self._has_turns_left(state)
        state.episode.finish_reason = LENGTH if last else "stop"
        context = TokenIds([*sample.prompt.token_ids, *sample.token_ids[:end]])
        content, calls = self.format.read_calls(self.parse, completion.token_ids, context)
        turn = Turn(
            text,
            completion.token_ids,
            completion.finish_reason,
            last,
            calls,
            before_stop(content, requested.request.stop)[0] if calls else text,
            completion.logprobs,
            context,
            stopped,
            len(state.turns) - 1,
            opened=self.format.opens_thinking(context, skip_special_tokens=True),
        )
        self._reply(requested.request, state, turn)

    def take_ended(self) -> list[Sample]:
        """Return the samples whose episodes have ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    def abort(self) -> None:
        """End all episodes where they are."""
        self._waiting.clear()
        for state in list(self._active.values()):
            self._leave(state, reuse=False)

    def close(self) -> None:
        """End the worker processes."""
        self.abort()
        self._forks.close()
        self._selector.close()

    def _start(self, state: EpisodeState) -> None:
        try:
            state.worker = self._idle.pop() if self._idle else Worker(*self._forks.fork())
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._register(state)
        self._send(state, state.sample.prompt.columns)

    def _register(self, state: EpisodeState) -> None:
        self._active[state.worker] = state
        state.mailbox = Mailbox(state.worker.socket, longest=self._max_message_bytes)
        now = time.monotonic()
        state.until = now + 60 * self.section.environment_minutes
        if self.section.episode_minutes is not None:
            state.last_turn_after = now + 60 * self.section.episode_minutes
        self._selector.register(state.worker.socket, selectors.EVENT_READ, state.worker)

    def _has_turns_left(self, state: EpisodeState) -> bool:
        return (
            len(state.turns) + len(state.sampling) < self.section.max_turns
            and time.monotonic() < state.last_turn_after
        )

    def _send(self, state: EpisodeState, message: Any) -> None:
        try:
            state.mailbox.send(pickle.dumps(message))
        except OSError:
            self._fail(state)

    def _reply(self, request: TurnRequest, state: EpisodeState, reply: Turn | Refused) -> None:
        state.num_replies += 1
        self._send(state, (request.number, reply))

    def _flush(self, state: EpisodeState) -> None:
        try:
            state.mailbox.flush()
        except OSError:
            self._fail(state)

    def _handle_messages(self, state: EpisodeState) -> list[RequestedTurn]:
        """Handle what a program has sent; return the turns that the model is to sample."""
        try:
            messages = [from_bytes(content) for content in state.mailbox.receive()]
        except (EOFError, OSError):
            self._fail(state)
            return []
        except ValueError as error:
            self._fail(
                state,
                f"what it has sent is no message ({error}): does it write to a descriptor that is"
                " not its own?",
            )
            return []

        # A message may end the episode. Later ones then belong to nobody.
        requested = []
        for message in messages:
            if not self.is_active(state):
                return []
            if isinstance(message, Ended):
                self._end(state, message)
            elif isinstance(message, Exchanged) and self.recording is not None:
                self.recording.add(self.draw, state, message)
            elif turn := self._requested(state, message):
                requested.append(turn)
        return requested if self.is_active(state) else []

    def _requested(self, state: EpisodeState, request: TurnRequest) -> RequestedTurn | None:
        """Return the turn that a program asks for; None if it gets another reply."""
        try:
            check_request(request, len(state.turns))
            return self._observe(state, request)
        # Whatever a request raises that cannot be read, only its own program has to know.
        except Exception as error:
            problem = Refused(f"the request cannot be answered: {error}")
            self._reply(request, state, problem)
            return None

    def _observe(self, state: EpisodeState, request: TurnRequest) -> RequestedTurn | None:
        """Let the model read an observation; return None if no turn can follow it."""
        before = state.context(request)
        if before is None:
            prompt = self.format.prompt(state.sample.prompt, request)
            token_ids = []
            used = 0
        else:
            last = before.conversation.token_ids[before.num_tokens - 1]
            token_ids = self.format.tokens(request, last, before.conversation.prompt.columns)
            used = before.num_tokens

        if request.counts:
            begun = before.conversation if before else None
            read = [*begun.prompt.token_ids, *begun.token_ids[:used]] if begun else prompt.token_ids
            counted = TokenIds([*read, *token_ids])
            self._reply(request, state, Turn("", [], COUNTED, context_ids=counted))
            return None

        # A turn without tokens tells the program that the episode is over.
        if not self._has_turns_left(state) or used + len(token_ids) >= self.longest:
            state.episode.finish_reason = LENGTH
            self._reply(request, state, Turn("", [], LENGTH, is_last=True))
            return None
        if not used and not (token_ids or prompt.token_ids):
            raise ValueError("the prompt has no tokens: the model has nothing to answer")

        messages = _messages(request.observation)
        if before is None:
            conversation = state.begin(prompt, messages, request.role)
        else:
            conversation = state.read(before, token_ids, messages, request.role)

        return state.requested(conversation, request)

    def _end(self, state: EpisodeState, ended: Ended) -> None:
        rewards = [*ended.role_rewards.values(), *(reward for _, reward in ended.rewards)]
        if self.other_rewards and any(rewards):
            raise ConfigError(
                f"the environment or agent gives rewards, which --reward {self.other_rewards}"
                " ignores: add environment to --reward, with the weight 0 to ignore them"
                " (environment:0)"
            )

        # A process serves the next episode only if nothing of this one is left in it or on its way.
        reuse = (
            not ended.calls_running
            and ended.num_replies == state.num_replies
            and not state.sampling
        )
        state.end(ended)
        for name, value in (replaced.split(" ", 1) for replaced in ended.overridden):
            if name not in self._named:
                self._named.add(name)
                logger.warning(
                    f"a request of the agent has {name} {value}, and the run's is used instead:"
                    " --agent_sampling refuse answers with an error"
                )
        if ended.problem:
            self._fail(state, ended.problem, reuse=reuse)
            return
        self._in_a_row = 0
        self._leave(state, reuse=reuse)
        state.sample.finish_reason = state.episode.finish_reason or "stop"
        self._ended.append(state.sample)

    def _fail(self, state: EpisodeState, problem: str = "", *, reuse: bool = False) -> None:
        """Learn nothing from an episode; without a problem its process is at its end.

        Raises ConfigError if many in a row have failed.
        """
        ending = self._leave(state, reuse=reuse)
        problem = problem or f"its process {ending}"
        sample = state.sample
        state.episode.problem = problem
        state.episode.rewards = []
        state.episode.role_rewards = {}
        sample.masked = True
        sample.finish_reason = "stop"
        self._ended.append(sample)

        # Without a worker of ours there is no environment to blame.
        if state.worker.process is None:
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

    def _leave(self, state: EpisodeState, *, reuse: bool) -> str:
        """Take an episode out; return a text on how the process ended.

        The process is killed unless it can run another episode.
        """
        self._selector.unregister(state.worker.socket)
        del self._active[state.worker]
        if state.worker.process is None:
            state.worker.socket.close()
            return "has closed its connection"
        if reuse:
            self._idle.append(state.worker)
            return ""

        try:
            return self._forks.end(state.worker)
        except (OSError, EOFError):
            self._forks.close()
            return "has ended, with the process that starts the workers"


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return what of a text is before the first of several texts, and which one that is."""
    found = [(text.index(each), each) for each in stop if each in text]
    if not found:
        return text, ""
    begin, stopped = min(found)
    return text[:begin], stopped


def _messages(observation: Observation) -> list[Message]:
    if not observation:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [
        entry if isinstance(entry, dict) else {"role": "user", "content": f"token {entry}"}
        for entry in observation
    ]
