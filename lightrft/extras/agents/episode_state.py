"""The state of an episode: turns, and the conversations that they belong to."""

from collections import Counter
from dataclasses import dataclass, field
from operator import ne
from typing import NamedTuple

from lightrft.core.engine import derived_seed
from lightrft.core.samples import Completion, Episode, Prompt, Sample, TokenIds
from lightrft.extras.agents.messages import BEGINNING, Ended, Message, TurnRequest
from lightrft.rewards.forks import Mailbox, Worker


class PlayedTurn(NamedTuple):
    """A turn at the end of a conversation, or inside of one."""

    conversation: Sample
    token_ids: list[int]
    """Tokens as the engine returned them."""
    num_tokens: int
    """Number of tokens of the conversation's response up to the end of the turn."""
    num_messages: int


@dataclass(slots=True, eq=False)
class RequestedTurn:
    """A turn that a program has asked for, and that the model has not sampled yet."""

    state: "EpisodeState"
    conversation: Sample
    """Sample that the turn belongs to."""
    request: TurnRequest
    seed_numbers: tuple[int, ...]
    """Numbers that the seed is derived from, whatever the order of requests at the same time."""


@dataclass(slots=True, eq=False)
class EpisodeState:
    """An episode that has begun.

    The first conversation is the sample of the group. A conversation that leaves it after an
    earlier turn is a branch: a sample that repeats the tokens up to there. These are learned in the
    other one.
    """

    sample: Sample
    seed_numbers: tuple[int, ...]
    """Numbers that the seeds of the turns are derived from."""
    most_branches: int
    worker: Worker | None = None
    mailbox: Mailbox | None = None
    """The socket of the worker."""
    turns: list[PlayedTurn] = field(default_factory=list)
    sampling: list[Sample] = field(default_factory=list)
    """Conversations whose next turn the model samples."""
    contexts: Counter[int] = field(default_factory=Counter)
    """Digest of the tokens before a turn -> how many turns have followed these tokens."""
    row: int = field(init=False)
    """Digest of the prompt of the row."""
    num_replies: int = 0
    """Number of replies that were sent to the program."""
    num_exchanges: int = 0
    """Number of exchanges that were recorded."""
    until: float = 0.0
    """Latest time for the program to ask for the next turn, in seconds of time.monotonic().

    It is infinite while the model samples.
    """
    last_turn_after: float = float("inf")
    """No turn begins after this time, in seconds of time.monotonic()."""

    def __post_init__(self) -> None:
        self.row = _digest(self.sample)

    def requested(self, conversation: Sample, request: TurnRequest) -> RequestedTurn:
        """Return the next turn of a conversation, which the model samples from now on.

        An episode of one turn draws exactly what a plain response would draw.
        """
        context = _digest(conversation)
        repeated = self.contexts[context]
        self.contexts[context] += 1
        first = context == self.row and not repeated
        numbers = self.seed_numbers if first else (*self.seed_numbers, context, repeated)
        self.sampling.append(conversation)
        self.until = float("inf")
        return RequestedTurn(self, conversation, request, numbers)

    @property
    def episode(self) -> Episode:
        assert self.sample.episode is not None
        return self.sample.episode

    def context(self, request: TurnRequest) -> PlayedTurn | None:
        """Return the turn that a requested turn follows; None where a conversation begins."""
        if not self.turns or request.after == BEGINNING:
            return None
        return self.turns[-1 if request.after is None else request.after]

    def begin(self, prompt: Prompt, messages: list[Message], role: str) -> Sample:
        """Return a conversation of a role that begins with a new prompt."""
        conversation = self.sample
        if self.turns or self.sampling:
            conversation = self._branch(prompt, Episode())
        conversation.prompt = prompt
        conversation.episode.role = role
        conversation.episode.messages = messages
        return conversation

    def read(
        self, turn: PlayedTurn, token_ids: list[int], messages: list[Message], role: str
    ) -> Sample:
        """Return the conversation of a role where the model reads an observation after a turn.

        It is a new branch if the turn is another role's, or if other turns have followed it or are
        being sampled.
        """
        before = turn.conversation
        end = turn.num_tokens
        continued = end < len(before.token_ids) or any(each is before for each in self.sampling)
        if continued or before.episode.role != role:
            messages_before = before.episode.messages[: turn.num_messages]
            # The tokens up to here are learned in the conversation that had them first.
            shared = Episode(sampled=[False] * end, messages=messages_before, role=role)
            branch = self._branch(before.prompt, shared)
            branch.token_ids = before.token_ids[:end]
            branch.logprobs = before.logprobs[:end]
            branch.weight_versions = before.weight_versions[:end]
            before = branch

        count = len(token_ids)
        before.token_ids += token_ids
        before.logprobs += [0.0] * count
        before.weight_versions += before.weight_versions[-1:] * count
        before.episode.sampled += [False] * count
        before.episode.messages += messages
        return before

    def add(self, sample: Sample, completion: Completion, text: str) -> None:
        """Add a turn of the model; the conversation has its tokens already."""
        sample.episode.sampled += [True] * len(completion.token_ids)
        sample.episode.messages.append({"role": "assistant", "content": text})
        sample.episode.num_turns += 1
        self.sample.text = text
        lengths = len(sample.token_ids), len(sample.episode.messages)
        self.turns.append(PlayedTurn(sample, completion.token_ids, *lengths))

    def end(self, ended: Ended) -> None:
        """Take over what the program reports.

        A reward for a turn of a branch counts for the latest turn before it.
        """
        episode = self.episode
        ends = [
            (number, turn.num_tokens - 1)
            for number, turn in enumerate(self.turns)
            if turn.conversation is self.sample
        ]
        episode.rewards = [
            (max((end for number, end in ends if number <= turn), default=-1), reward)
            for turn, reward in ended.rewards
        ]

        episode.role_rewards = ended.role_rewards
        episode.tool_calls = ended.tool_calls
        episode.tool_errors = ended.tool_errors
        episode.tool_seconds = ended.tool_seconds
        for replaced, count in ended.overridden.items():
            name = replaced.partition(" ")[0]
            episode.overridden[name] = episode.overridden.get(name, 0) + count
        episode.drift = self._drift()

    def _drift(self) -> int:
        """Count the tokens that are not learned as they were sampled: 0 unless there is a bug."""
        wrong = 0
        for sample, token_ids, end, _ in self.turns:
            wrong += sum(map(ne, sample.token_ids[end - len(token_ids) : end], token_ids))
        learned = sum(sum(sample.episode.sampled) for sample in self.sample.rows)
        return wrong + abs(learned - sum(len(turn.token_ids) for turn in self.turns))

    def _branch(self, prompt: Prompt, episode: Episode) -> Sample:
        """Begin a conversation beside the others. Raises ValueError if there are too many."""
        if len(self.episode.branches) >= self.most_branches:
            raise ValueError(
                f"the episode has {self.most_branches} other conversations already, as many as"
                " --agent_branches allows: continue one of them"
            )
        branch = Sample(
            prompt, self.sample.group, [], [], "", self.sample.finish_reason, episode=episode
        )
        self.episode.branches.append(branch)
        return branch


def _digest(sample: Sample) -> int:
    """Return a number that the tokens of a sample determine."""
    token_ids = TokenIds(sample.prompt.token_ids + sample.token_ids)
    return derived_seed(token_ids.tobytes().hex())
