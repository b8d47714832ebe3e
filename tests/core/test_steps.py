"""Why: what a step collects depends on seeds, groups and slots, and on no rank or batch."""

from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch
from torch import nn

from lightrft.core.batch import Batch, TrainingPlan
from lightrft.core.engine import Decoding, WholeRequests, derived_seed
from lightrft.core.metrics import Metrics
from lightrft.core.order import Order
from lightrft.core.rewards import CallFunction
from lightrft.core.rollout import NextPrompts, Rollout
from lightrft.core.sampler import Sampler
from lightrft.core.samples import Completion, Prompt
from lightrft.core.step import Step
from lightrft.core.strategy import OneProcess

PROMPTS = [Prompt(row, str(row), [row]) for row in range(7)]


class Echo:
    """Answers each sample with the prompt's last token and the low byte of the sample's seed."""

    def __init__(self):
        self.asked = []
        self.version = 0

    def open(self, sampling):
        return WholeRequests(self.generate)

    def load_weights(self, named_tensors, version):
        self.version = version

    def generate(self, requests):
        self.asked.append(requests)
        return [
            [
                Completion([each.token_ids[-1], seed % 256], [-0.5, -1.0], "stop")
                for seed in each.seeds
            ]
            for each in requests
        ]


@dataclass
class Rank:
    """One of several data ranks that take turns in this test, so their sums are not looked at."""

    size: int
    rank: int

    def sum(self, value):
        return value


def scheduler_of(rank: int, size: int, engine: Echo) -> NextPrompts:
    sampler = Sampler(OneProcess(engine), lambda ids: " ".join(map(str, ids)), Decoding(n=3))
    return NextPrompts(sampler, PROMPTS, data=Rank(size, rank), num_prompts=4, seed=5)


def responses(schedulers: list[NextPrompts], step: int) -> dict[tuple[int, int], list[int]]:
    groups = chain.from_iterable(each.generate(step) for each in schedulers)
    return {
        (group.number, slot): sample.token_ids
        for group in groups
        for slot, sample in enumerate(group.samples)
    }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_draws_the_same(size):
    alone = [scheduler_of(0, 1, Echo())]
    several = [scheduler_of(rank, size, Echo()) for rank in range(size)]
    for step in (1, 2, 3):
        whole = responses(alone, step)
        assert len(whole) == 4 * 3 and responses(several, step) == whole


def test_a_response_draws_from_the_seed_of_its_step_group_and_slot():
    drawn = responses([scheduler_of(0, 1, Echo())], 2)
    rows = Order(7, 5).rows(0, 4)
    of_step = derived_seed(5, 2, 0, 0)
    assert drawn == {
        (number, slot): [row, derived_seed(of_step, number, slot) % 256]
        for number, row in enumerate(rows, 1)
        for slot in range(3)
    }


def test_an_aborted_response_goes_on_with_a_request_of_its_own():
    engine = Echo()
    scheduler = scheduler_of(0, 1, engine)
    (group, *_) = scheduler.generate(1)
    first, second, third = group.samples
    first.finish_reason = second.finish_reason = None
    second.token_ids = []

    loop = scheduler.sampler.open(seed=9)
    loop.add([(group, group.slots)])
    assert loop.running() == {(group.number, 0), (group.number, 1)}
    assert list(loop.steps()) == [group]
    new, rest = engine.asked[-1]
    assert new.seeds == (derived_seed(9, group.number, 1),)
    assert rest.seeds == (derived_seed(9, group.number, 0),)
    assert rest.sampling.max_tokens == 1024 - 2 and new.sampling.max_tokens == 1024
    assert len(first.token_ids) == 4 and len(third.token_ids) == 2


def test_an_abort_ends_the_requests_and_not_the_responses():
    scheduler = scheduler_of(0, 1, Echo())
    (group, *_) = scheduler.generate(1)
    for sample in group.samples:
        sample.finish_reason = None
    loop = scheduler.sampler.open(seed=9)
    loop.add([(group, group.slots)])
    loop.abort()
    assert not loop.running() and list(loop.steps()) == []
    assert [len(sample.token_ids) for sample in group.samples] == [2, 2, 2] and not group.complete


def test_a_scheduler_goes_on_where_its_state_was():
    scheduler = scheduler_of(0, 1, Echo())
    list(scheduler.generate(1))
    undo = scheduler.snapshot()
    other = scheduler_of(0, 1, Echo())
    other.load_state_dict(scheduler.state_dict())
    second = responses([scheduler], 2)
    assert responses([other], 2) == second
    undo()
    assert responses([scheduler], 2) == second


def test_a_column_of_a_caller_moves_with_its_tokens_and_sequences():
    batch = Batch(torch.tensor([2, 1]), torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.bool))
    batch.rows = torch.tensor([0, 1])
    batch.set_column("mine", torch.tensor([0.1, 0.2, 0.3]))
    batch.set_column("difficulty", torch.tensor([1.0, 2.0]), per="sequence")
    selected = batch.select([1]).to("cpu")
    assert selected.mine.tolist() == pytest.approx([0.3]) and selected.difficulty.tolist() == [2.0]


@dataclass
class Recorder:
    """A learner that records what it is asked to learn."""

    role: "Recorder | None" = None
    module: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))
    phase: str = "train"
    first_step: int = 1
    learned: list = field(default_factory=list)

    def learn(self, plan, metrics):
        self.learned.append(plan)
        return [torch.zeros(())]


def test_a_step_scores_measures_and_learns_in_order():
    seen = []
    engine = Echo()
    scheduler = scheduler_of(0, 1, engine)
    rollout = Rollout(scheduler, CallFunction(lambda samples: [len(each.text) for each in samples]))
    actor, late = Recorder(), Recorder(first_step=2)
    actor.role = late.role = actor

    def make(samples, metrics):
        seen.append(("made", len(samples)))
        return TrainingPlan(samples, [[[0]]])

    def measure(number, samples, version, metrics):
        seen.append((number, version, {sample.reward == len(sample.text) for sample in samples}))

    step = Step(scheduler.sampler.strategy, rollout, make, [late, actor], measures=[measure])
    records = [step(number, Metrics()) for number in (1, 2)]
    assert seen == [(1, 1, {True}), ("made", 12), (2, 2, {True}), ("made", 12)]
    assert engine.version == 2
    assert [len(each.learned) for each in (late, actor)] == [1, 2]
    assert [len(each.losses) for each in records] == [1, 2]
    assert records[1].batch is actor.learned[1].experience
