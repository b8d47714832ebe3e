"""The state of an episode: turns, and the conversations that they belong to."""

from dataclasses import dataclass, field
from operator import ne
from typing import NamedTuple

from lightrft.core.samples import Completion, Episode, Prompt, Sample
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
class EpisodeState:
    """An episode that has begun.

    The first conversation is the sample of the group. A conversation that leaves it after an
    earlier turn is a branch: a sample that repeats the tokens up to there. These are learned in the
    other one.
    """

    sample: Sample
    seed_numbers: tuple[int, ...]
    """Numbers that the seeds of the turns are derived from."""
    worker: Worker | None = None
    mailbox: Mailbox | None = None
    """The socket of the worker."""
    turns: list[PlayedTurn] = field(default_factory=list)
    conversation: Sample = field(init=False)
    """Sample that the next turn, or the latest one, belongs to."""
    max_tokens: int | None = None
    """Largest number of tokens of the next turn, if the program has set one."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters of the next turn that replace the run's."""
    num_replies: int = 0
    """Number of replies that were sent to the program."""
    until: float = 0.0
    """Latest time for the program to ask for the next turn, in seconds of time.monotonic().

    It is infinite while the model samples.
    """
    last_turn_after: float = float("inf")
    """No turn begins after this time, in seconds of time.monotonic()."""

    def __post_init__(self) -> None:
        self.conversation = self.sample

    @property
    def is_sampling(self) -> bool:
        """Return True while the model samples a turn that the program has asked for."""
        return self.until == float("inf")

    @property
    def episode(self) -> Episode:
        assert self.sample.episode is not None
        return self.sample.episode

    def context(self, request: TurnRequest) -> PlayedTurn | None:
        """Return the turn that a requested turn follows; None where a conversation begins."""
        if not self.turns or request.after == BEGINNING:
            return None
        return self.turns[-1 if request.after is None else request.after]

    def begin(self, prompt: Prompt) -> None:
        """Begin a conversation with a new prompt."""
        if self.turns:
            self.conversation = self._branch(prompt, Episode())
        else:
            self.sample.prompt = prompt

    def read(self, turn: PlayedTurn, token_ids: list[int], messages: list[Message]) -> None:
        """Let the model read an observation after a turn.

        If other turns have followed that turn, this begins a branch.
        """
        before = turn.conversation
        end = turn.num_tokens
        if end < len(before.token_ids):
            messages_before = before.episode.messages[: turn.num_messages]
            # The tokens up to here are learned in the conversation that had them first.
            branch = self._branch(
                before.prompt, Episode(sampled=[False] * end, messages=messages_before)
            )
            branch.token_ids = before.token_ids[:end]
            branch.logprobs = before.logprobs[:end]
            branch.weight_versions = before.weight_versions[:end]
            before = branch

        self.conversation = before
        count = len(token_ids)
        before.token_ids += token_ids
        before.logprobs += [0.0] * count
        before.weight_versions += before.weight_versions[-1:] * count
        before.episode.sampled += [False] * count
        before.episode.messages += messages

    def add(self, completion: Completion, text: str) -> None:
        """Add a turn of the model; the conversation has its tokens already."""
        sample = self.conversation
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
        episode.tool_calls = ended.tool_calls
        episode.tool_errors = ended.tool_errors
        episode.tool_seconds = ended.tool_seconds
        episode.drift = self._drift()

    def _drift(self) -> int:
        """Count the tokens that are not learned as they were sampled: 0 unless there is a bug."""
        wrong = 0
        for sample, token_ids, end, _ in self.turns:
            wrong += sum(map(ne, sample.token_ids[end - len(token_ids) : end], token_ids))
        learned = sum(sum(sample.episode.sampled) for sample in self.sample.rows)
        return wrong + abs(learned - sum(len(turn.token_ids) for turn in self.turns))

    def _branch(self, prompt: Prompt, episode: Episode) -> Sample:
        branch = Sample(
            prompt, self.sample.group, [], [], "", self.sample.finish_reason, episode=episode
        )
        self.episode.branches.append(branch)
        return branch
