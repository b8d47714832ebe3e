"""What a step is filled with: decided alike on all ranks, repeatable, and the same after a resumed
run.
"""

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightrft.algorithms.rollout.rollout import FixedBatch, GroupOutcome, History, ResumableRollout
from lightrft.algorithms.schedulers.partial import state_of
from lightrft.algorithms.schedulers.rounds import Rounds, needs_rounds
from lightrft.config import ConfigError, RewardSection, RolloutSection
from lightrft.config.errors import DataError
from lightrft.core.engine import ABORTED
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt, Sample
from lightrft.data.media_files import IMAGES, ImageFile
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.mesh import Mesh
from lightrft.rewards.runner import RewardRunner
from ranks import run_cases, run_ranks

ALONE = Axis("data", 1, 0, None)


def rows_reward(samples, mode, length, **columns):
    """The first response to a prompt of the mode `some` is right.

    Prompts of the modes `all` and `none` have only right or only wrong ones.
    """
    assert len({sample.group for sample in samples}) == 1, (
        "a function is called for one prompt at a time"
    )
    share = {"all": len(samples), "none": 0, "some": 1}[mode[0]]
    return [float(slot < share) for slot in range(len(samples))]


class Script:
    """Stands for the engine: the column of a prompt says how many tokens the response has.

    The seed draws each token.
    """

    divides_groups = True

    def __init__(self, longest: int = 100, at_once: int = 1):
        self.longest = longest
        self.calls = []
        self.tokens = 0
        self.clock = 0
        self.at_once = at_once
        self.prepared = 0

    @property
    def exchange(self) -> Axis:
        return Mesh("cpu").gloo_axis("exchange") if torch.distributed.is_initialized() else ALONE

    def length(self, seed: int, sample, slot: int) -> int:
        return sample.prompt.columns["length"]

    def open(self, seed: int) -> "ScriptedLoop":
        self.calls.append((seed, []))
        return ScriptedLoop(self, seed)

    def prepare(self, all_begun, seed: int) -> list:
        return [(seed, begun) for begun in all_begun]

    def capacity(self, loop) -> int:
        return self.at_once

    def extend(self, sample, completion) -> None:
        sample.token_ids += completion.token_ids
        sample.logprobs += completion.logprobs
        sample.weight_versions += completion.weight_versions
        sample.finish_reason = (
            None if completion.finish_reason == ABORTED else completion.finish_reason
        )


class ScriptedLoop:
    def __init__(self, script: Script, seed: int):
        self.script = script
        self.seed = seed
        self.all_begun = []

    def begin(self, prepared) -> None:
        assert all(seed == self.seed for seed, _ in prepared)
        self.script.prepared += len(prepared)
        self.add([begun for _, begun in prepared])

    def add(self, all_begun) -> None:
        self.script.calls[-1][1].extend(group.number for group, _ in all_begun)
        self.all_begun += [begun for begun in all_begun if not begun[0].complete]

    def running(self) -> set[tuple[int, int]]:
        return {
            (group.number, slot)
            for group, slots in self.all_begun
            for slot in slots
            if group.responses[slot].finish_reason is None
        }

    def steps(self, most=None):
        while self.all_begun and most != 0:
            most = most and most - 1
            self.script.clock += 1
            for begun in list(self.all_begun):
                group, slots = begun
                for slot in slots:
                    self._grow(group.responses[slot], slot)
                if all(group.responses[slot].finish_reason is not None for slot in slots):
                    self.all_begun.remove(begun)
                    if group.complete:
                        yield group

    def _grow(self, sample, slot: int) -> None:
        if sample.finish_reason is None:
            sample.token_ids.append((self.seed + 7 * slot) % 251)
            sample.logprobs.append(-0.5 - slot / 3)
            sample.weight_versions.append(3)
            self.script.tokens += 1
            if len(sample.token_ids) == min(
                self.script.length(self.seed, sample, slot), self.script.longest
            ):
                sample.finish_reason = "stop"

    def abort(self) -> None:
        self.all_begun = []

    def finish(self):
        return iter(())


def prompts(modes: str, lengths: list[int] | None = None) -> list[Prompt]:
    """One for each letter: s(ome), a(ll), n(one) of the responses are right."""
    names = {"s": "some", "a": "all", "n": "none"}
    lengths = lengths or [5] * len(modes)
    rows = zip(modes, lengths, strict=True)
    return [
        Prompt(i, "", [1, i], {"mode": names[mode], "length": length})
        for i, (mode, length) in enumerate(rows)
    ]


def new_rollout(
    data: list[Prompt], axis: Axis = ALONE, greedy: bool = False, *, skips: bool = False, **flags
) -> ResumableRollout:
    section = RolloutSection(
        **{"rollout_batch_size": 4, "n_samples_per_prompt": 3, "generate_max_len": 100} | flags
    )
    rewards = RewardRunner(f"{__name__}:rows_reward", section=RewardSection(reward_workers=0))
    given = {"section": section, "data": axis, "seed": 7, "greedy": greedy}
    if skips or needs_rounds(section):
        scheduler = Rounds(Script(), rewards, data, skips_unreadable=skips, **given)
    else:
        scheduler = FixedBatch(Script(), rewards, data, **given)
    return ResumableRollout(scheduler, rewards)


def step(rollout: ResumableRollout, number: int = 1, metrics: Metrics | None = None):
    groups = rollout.collect(number, metrics or Metrics())
    return groups, rollout.score(groups)


def test_a_plain_step_takes_the_next_prompts_of_the_order():
    rollout = new_rollout(prompts("s" * 10))
    rows = [group.row for number in range(1, 6) for group in step(rollout, number)[0]]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10)) and rows[:10] != rows[10:]
    assert (
        len(rollout.scheduler.sampler.calls) == 5
        and len({seed for seed, _ in rollout.scheduler.sampler.calls}) == 5
    )


def test_samples_carry_rewards_and_groups():
    groups, samples = step(new_rollout(prompts("asns")))
    assert len(samples) == 12
    for group in groups:
        mode = group.samples[0].prompt.columns["mode"]
        assert [sample.reward for sample in group.samples] == {
            "all": [1, 1, 1],
            "none": [0, 0, 0],
            "some": [1, 0, 0],
        }[mode]
        assert {sample.group for sample in group.samples} == {group.number}


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([[1.0], [1.0]], False),
        ([[1.0], [0.0]], True),
        ([[1.0, 0.0], [0.0, 1.0]], True),  # turn_grpo compares turns
        ([[0.5, None, 0.5], [0.5, 0.5]], False),  # the second turn of the first is longer
    ],
)
def test_a_group_has_a_signal_if_any_reward_differs(rewards, signal):
    samples = [
        Sample(Prompt(0, "", [1]), 0, [2] * len(values), [0.0] * len(values), "", "stop")
        for values in rewards
    ]
    for sample, token_rewards in zip(samples, rewards, strict=True):
        sample.token_rewards = token_rewards
        sample.reward = sum(filter(None, token_rewards))
    assert GroupOutcome.of(Group(0, 0, samples)).has_signal is signal
    for sample in samples:
        sample.masked = True
    assert not GroupOutcome.of(Group(0, 0, samples)).has_signal


def test_dynamic_sampling_replaces_groups_without_signal():
    """Half of the prompts teach something, and a step holds only those.

    Each round draws another seed.
    """
    rollout = new_rollout(prompts("sasn" * 10), dynamic_sampling=True)
    metrics = Metrics()
    for number in range(1, 6):
        groups, samples = step(rollout, number, metrics)
        assert len(groups) == 4 and all(GroupOutcome.of(group).has_signal for group in groups)
        assert [group.number for group in groups] == sorted(group.number for group in groups)
        assert not any(sample.masked for sample in samples)
    row = metrics.reduce(ALONE)
    assert row["rollout/sampling_rounds"] >= 2 and row["rollout/groups_given_up"] >= 1
    assert len({seed for seed, _ in rollout.scheduler.sampler.calls}) == len(
        rollout.scheduler.sampler.calls
    )


def test_few_signals_fill_a_step_up_with_groups_that_are_left_out():
    rollout = new_rollout(prompts("s" + "a" * 39), dynamic_sampling=True, dynamic_sampling_rounds=3)
    rollout.scheduler.position = rollout.scheduler.order.rows(0, 40).index(0)
    groups, _ = step(rollout)
    assert len(groups) == 4 and groups[0].row == 0
    assert [all(sample.masked for sample in group.samples) for group in groups] == [
        group.row != 0 for group in groups
    ]


def test_data_without_signal_are_an_error():
    with pytest.raises(ConfigError, match="prompts in 3 rounds.*no training signal"):
        step(new_rollout(prompts("an" * 20), dynamic_sampling=True, dynamic_sampling_rounds=3))


def test_over_sampling_stops_with_enough_complete_groups():
    """Eight prompts are begun for four, and half of them are long.

    The long ones are given up one look after the others were complete.
    """
    rollout = new_rollout(prompts("s" * 8, [10, 90] * 4), over_sampling=2.0, early_stop_every=5)
    groups, samples = step(rollout)
    assert [len(sample.token_ids) for sample in samples] == [10] * 12
    assert (
        rollout.scheduler.sampler.tokens == 4 * 3 * 10 + 4 * 3 * 15
        and rollout.scheduler.partial.local == []
    )


def test_partial_rollouts_go_on_in_the_next_step():
    data = prompts("s" * 8, [10, 35] * 4)
    rollout = new_rollout(data, over_sampling=2.0, early_stop_every=5, partial_rollout=True)
    step(rollout, 1)
    assert len(rollout.scheduler.partial.local) == 4 and all(
        len(s.token_ids) == 15 for group in rollout.scheduler.partial.local for s in group.samples
    )
    partial_groups = {
        group.number: [list(sample.token_ids) for sample in group.samples]
        for group in rollout.scheduler.partial.local
    }
    finished = {}

    for number in range(2, 6):
        finished |= {
            group.number: group
            for group in step(rollout, number)[0]
            if group.number in partial_groups
        }

    assert set(finished) == set(partial_groups)
    for number, group in finished.items():
        assert [sample.token_ids[:15] for sample in group.samples] == partial_groups[number]
        assert all(len(sample.token_ids) == len(sample.logprobs) == 35 for sample in group.samples)
        assert len({token for sample in group.samples for token in sample.token_ids}) > 1, (
            "drawn in several calls"
        )


def test_complete_groups_beyond_the_step_are_kept_for_the_next_one():
    rollout = new_rollout(prompts("s" * 8), over_sampling=2.0, partial_rollout=True)
    first = [group.number for group in step(rollout, 1)[0]]
    tokens = rollout.scheduler.sampler.tokens
    second, samples = step(rollout, 2)
    assert first == [1, 2, 3, 4] and [group.number for group in second] == [5, 6, 7, 8]
    assert sum(sample.reward for sample in samples) == 4
    assert rollout.scheduler.sampler.tokens - tokens == 4 * 3 * 5, "only the new prompts were asked"


def test_curriculum_lets_prompts_rest_that_are_too_easy_or_too_hard():
    rollout = new_rollout(
        prompts("sans" * 3), curriculum=[0.1, 0.9], curriculum_rest=3, rollout_batch_size=12
    )
    assert sorted(group.row for group in step(rollout, 1)[0]) == list(range(12))
    again = [
        group.samples[0].prompt.columns["mode"]
        for number in (2, 3)
        for group in step(rollout, number)[0]
    ]
    assert again[:18].count("some") == 18, "two passes without them"
    assert {"all", "none"} <= set(again[18:]), "and in the third they are back"


def test_the_greedy_response_is_judged_and_not_learned_from():
    groups, samples = step(new_rollout(prompts("sas" + "n"), greedy=True))
    assert len(samples) == 12
    for group in groups:
        assert len(group.responses) == 4 and group.others[0].finish_reason == "stop"
        assert {sample.greedy_reward for sample in group.samples} == {group.others[0].reward}
    assert {group.others[0].reward for group in groups} == {0.0, 1.0}


FLAGS = {
    "dynamic_sampling": True,
    "over_sampling": 1.5,
    "early_stop_every": 3,
    "partial_rollout": True,
    "curriculum": [0.1, 0.9],
}
TAIL = {"rollout_schedule": "tail_rounds", "over_sampling": 1.5, "early_stop_every": 3}
MIXED = prompts("ssanssnassns" * 3, [7, 30, 12, 25, 9, 41, 3, 18, 22, 11, 36, 5] * 3)


def course(rollout: ResumableRollout, numbers: range) -> list:
    """What each step has learned from, on this rank."""
    steps = [step(rollout, number)[0] for number in numbers]
    return [
        [(group.number, group.row, len(group.samples[0].token_ids)) for group in groups]
        for groups in steps
    ]


def test_a_resumed_run_goes_on_alike(tmp_path):
    whole = new_rollout(MIXED, **FLAGS)
    expected = course(whole, range(1, 11))
    first = new_rollout(MIXED, **FLAGS)
    assert course(first, range(1, 6)) == expected[:5] and first.scheduler.partial.local
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = new_rollout(MIXED, **FLAGS)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert course(resumed, range(6, 11)) == expected[5:]
    assert not any(
        sample.finish_reason is None for group in step(resumed, 11)[0] for sample in group.samples
    )


def ahead_course(rollout: ResumableRollout, numbers: range, last: int) -> list:
    """What each step has learned from, while up to two later steps are generated."""
    found = []
    rollout.scheduler.total_steps = last
    for number in numbers:
        groups = rollout.collect(number, Metrics())
        rollout.score(groups)
        found.append(
            [(group.number, group.row, len(group.samples[0].token_ids)) for group in groups]
        )
    return found


def test_groups_begun_ahead_begin_anew_in_a_resumed_run(tmp_path):
    """The same prompts are learned in the same steps as without generation ahead.

    Nothing is lost when a step is taken back.
    """
    expected = course(new_rollout(MIXED), range(1, 10))
    first = new_rollout(MIXED, max_staleness=2)
    assert ahead_course(first, range(1, 5), 9) == expected[:4]
    assert [numbers for _, numbers in first.scheduler.sampler.calls[-2:]] == [
        [number for number, _, _ in step] for step in expected[4:6]
    ]
    rollback = first.scheduler.snapshot()
    assert ahead_course(first, range(5, 6), 9) == expected[4:5]
    rollback()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = new_rollout(MIXED, max_staleness=2)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    assert (
        ahead_course(resumed, range(5, 10), 9) == expected[4:]
        and not resumed.state_dict()["deferred"]
    )
    assert len(resumed.scheduler.sampler.calls) == 5, (
        "the last steps begin nothing that nobody learns from"
    )


@pytest.mark.parametrize("flags", [{}, FLAGS, {"rollout_schedule": "longest_first"}, TAIL])
def test_a_step_that_was_prepared_is_the_same(flags):
    """Nothing is drawn while a step is prepared.

    So a checkpoint, or a step that is taken back, knows nothing of it.
    """
    expected = course(new_rollout(MIXED, **flags), range(1, 10))
    rollout = new_rollout(MIXED, **flags)
    for number in range(1, 6):
        if number == 4:
            rollback = rollout.scheduler.snapshot()
            course(rollout, range(4, 5))
            rollback()
        assert course(rollout, range(number, number + 1)) == expected[number - 1 : number]
        with rollout.scheduler.preparing(number + 1):
            state = copy.deepcopy(rollout.state_dict())

    assert course(rollout, range(6, 10)) == expected[5:] and rollout.scheduler.sampler.prepared >= 5
    resumed = new_rollout(MIXED, **flags)
    resumed.load_state_dict(state)
    assert course(resumed, range(6, 10)) == expected[5:]


def test_a_history_takes_back_the_rows_that_changed_since_the_step_began():
    """It also takes back a row that changed twice, and again after it was taken back.

    What earlier steps recorded stays.
    """
    history = History(4)
    values = lambda: [each.tolist() for each in (history.epochs, history.solved, history.lengths)]  # noqa: E731
    outcome = lambda row, solved: GroupOutcome(0, row, True, solved, 8 * solved)  # noqa: E731
    history.snapshot()
    history.record([outcome(0, 0.5)], 3)

    before = values()
    rollback = history.snapshot()
    for _ in range(2):
        history.record([outcome(0, 0.25), outcome(2, 1.0), outcome(0, 0.75)], 4)
        assert values() == [[4, -1, 4, -1], [0.75, 0, 1, 0], [6, 0, 8, 0]]
        rollback()
        assert values() == before == [[3, -1, -1, -1], [0.5, 0, 0, 0], [4, 0, 0, 0]]


def test_tail_rounds_ahead_lose_no_group_and_learn_from_none_twice():
    """Rounds of the next pass may begin before the last groups of this one have been deferred.

    There are 36 prompts and 9 steps.
    """
    rollout = new_rollout(MIXED, max_staleness=2, **TAIL)
    first = ahead_course(rollout, range(1, 6), 9)
    resumed = new_rollout(MIXED, max_staleness=2, **TAIL)
    resumed.load_state_dict(rollout.state_dict())
    learned = [
        number for step in first + ahead_course(resumed, range(6, 10), 9) for number, _, _ in step
    ]
    left = [number for _, number, _ in resumed.scheduler.deferred]
    assert (
        len(learned) == 36
        and sorted(learned + left) == list(range(1, resumed.scheduler.number + 1))
        and left
    )


def test_a_resumed_run_with_shorter_responses_loses_those_that_are_too_long():
    first = new_rollout(MIXED, **FLAGS | {"early_stop_every": 1})
    course(first, range(1, 6))
    lengths = [
        max(len(sample.token_ids) + (sample.finish_reason is None) for sample in g.responses)
        for g in first.scheduler.partial.local
    ]
    assert min(lengths) < max(lengths)
    resumed = new_rollout(MIXED, **FLAGS, generate_max_len=max(lengths) - 1)
    resumed.load_state_dict(first.state_dict())

    short = [
        group.number
        for group, length in zip(first.scheduler.partial.local, lengths, strict=True)
        if length < max(lengths)
    ]
    assert [group.number for group in resumed.scheduler.partial.local] == short


def on_ranks(state: dict | None = None) -> tuple[list, dict, list[int], list]:
    """Take steps 1 to 8, or steps 9 to 12 of a run that resumes.

    Return the state after them, which groups continue here, and what is learned later.
    """
    rollout = new_rollout(copy.deepcopy(MIXED), Mesh("cpu").data, **FLAGS)
    if state is not None:
        rollout.load_state_dict(state)
    steps = course(rollout, range(1, 9) if state is None else range(9, 13))
    state = copy.deepcopy(rollout.state_dict())
    partial_groups = [group.number for group in rollout.scheduler.partial.local]
    assert [
        group.number
        for group in rollout.scheduler.partial.of_all
        if group.rank == rollout.scheduler.data.rank
    ] == partial_groups
    rollback = rollout.scheduler.snapshot()
    first = course(rollout, range(9, 10))
    rollback()
    assert course(rollout, range(9, 10)) == first, "a step that is taken back comes again"
    rollback()

    return steps, state, partial_groups, course(rollout, range(9, 13))


@cache
def from_the_beginning(ranks: int) -> list[tuple]:
    """The results of on_ranks(), of all ranks."""
    return run_ranks(ranks, on_ranks)


def joined_steps(found: list, index: int) -> list:
    return [sorted(sum(steps, [])) for steps in zip(*(each[index] for each in found), strict=True)]


def give_files(data: list[Prompt], folder: Path | str) -> None:
    for prompt in data:
        prompt.location = f"rows:{prompt.index}"
        file = Path(folder, f"{prompt.index}.png")
        prompt.multi_modal = {IMAGES: [ImageFile(file.name, file)]}


def with_files(folder: str) -> tuple[list, list]:
    """Return the rows of each step; some files are no images.

    One was never an image, and another stops being one after the third step.
    """
    data = prompts("s" * 12)
    give_files(data, folder)
    rollout = new_rollout(data, Mesh("cpu").data, skips=True)
    metrics = Metrics()

    steps = []
    for number in range(1, 10):
        groups = rollout.collect(number, metrics)
        steps.append([(group.number, group.row) for group in groups])
        rollout.score(groups)
        Mesh("cpu").data.gather(None)  # all have chosen
        if number == 3:
            Path(folder, "7.png").write_bytes(b"not any more")
        with rollout.scheduler.preparing(number + 1):
            pass

    left_out = metrics.reduce(ALONE)["rollout/prompts_left_out"]
    for prompt in data:
        Path(folder, f"{prompt.index}.png").unlink(missing_ok=True)
    Mesh("cpu").data.gather(None)
    with pytest.raises(DataError, match="the media of no prompt can be read any more"):
        rollout.collect(10, metrics), rollout.collect(11, metrics)

    return steps, left_out


def test_prompts_whose_files_cannot_be_read_any_more_are_left_out_on_all_ranks(tmp_path):
    """Other prompts replace them, in the order of the data."""
    found = {}
    for ranks in (1, 2):
        for index in range(12):
            Image.new("RGB", (4, 4)).save(tmp_path / f"{index}.png")
        (tmp_path / "5.png").write_bytes(b"never")
        found[ranks] = run_ranks(ranks, with_files, str(tmp_path))

    ((alone, left_out),) = found[1]
    assert (
        joined_steps(found[2], 0) == alone
        and left_out == 2
        and all(len(groups) == 4 for groups in alone)
    )
    rows = [row for groups in alone for _, row in groups]
    expected = [
        row for row in new_rollout(prompts("s" * 12)).scheduler.order.rows(0, 24) if row != 5
    ]
    assert (
        rows[:12] == expected[:12]
        and set(rows[:11]) == {*range(12)} - {5}
        and 7 not in rows[12:]
        and 5 not in rows
    )


def test_ranks_decide_alike_and_together_as_one():
    """The ranks agree on which groups fill a step, and on what continues and is remembered.

    One rank alone decides the same.
    """
    (alone,), pair = from_the_beginning(1), from_the_beginning(2)
    assert joined_steps(pair, 0) == alone[0] and all(len(groups) == 4 for groups in alone[0])
    for _, state, *_ in pair:
        assert state["position"] == alone[1]["position"] and state["number"] == alone[1]["number"]
        assert all(
            torch.equal(state["history"][name], alone[1]["history"][name])
            for name in state["history"]
        )


@pytest.mark.slow
def test_partial_groups_are_on_one_rank_and_all_in_a_checkpoint():
    """Each group stays on the rank that began it.

    A run goes on alike from a checkpoint, on as many ranks or on others, and from an old
    checkpoint.
    """
    (alone,), pair = from_the_beginning(1), from_the_beginning(2)
    (_, state, first, _), (_, other, second, _) = pair
    assert sorted(first + second) == alone[2] and first and second and not other["partial"]
    assert [group["number"] for group in state["partial"]] == alone[2]
    assert [
        sum(len(tokens) for tokens, *_ in group["responses"]) for group in state["partial"]
    ] == [sum(len(tokens) for tokens, *_ in group["responses"]) for group in alone[1]["partial"]]
    resumed = run_ranks(2, on_ranks, state)
    assert [each[0] for each in resumed] == [each[3] for each in pair], (
        "groups stay where they were"
    )
    for ranks in (1, 3):
        assert joined_steps(run_ranks(ranks, on_ranks, state), 0) == joined_steps(pair, 3)


def long_and_short() -> int:
    """Return the tokens of this rank in the second pass, when lengths are known.

    A few prompts are ten times as long as the others.
    """
    rollout = new_rollout(
        prompts("s" * 16, [50, 50, 50, 50] + [5] * 12), Mesh("cpu").data, rollout_batch_size=16
    )
    step(rollout, 1)
    before = rollout.scheduler.sampler.tokens
    step(rollout, 2)
    return rollout.scheduler.sampler.tokens - before


def tail_on_ranks(state: dict | None = None) -> tuple[list, dict]:
    """Take steps 1 to 5, or steps 6 to 9 of a run that resumes and takes a step back.

    Return the state after them.
    """
    rollout = new_rollout(copy.deepcopy(MIXED), Mesh("cpu").data, **TAIL)
    if state is not None:
        rollout.load_state_dict(state)
    rollback = rollout.scheduler.snapshot()
    before = course(rollout, range(20, 21))
    rollback()
    assert before == course(rollout, range(20, 21)), (
        "tail rounds do not depend on the number of the step"
    )
    rollback()

    return course(rollout, range(1, 6) if state is None else range(6, 10)), rollout.state_dict()


def test_tail_rounds_are_alike_on_all_ranks_and_resume(tmp_path):
    whole = joined_steps([(course(new_rollout(MIXED, **TAIL), range(1, 10)),)], 0)
    for ranks, others in ((1, 2), (2, 1)):
        first = run_ranks(ranks, tail_on_ranks)
        assert (
            joined_steps(first, 0) == whole[:5]
            and first[0][1]["deferred"]
            and first[0][1]["deferred"] == first[-1][1]["deferred"]
        )
        torch.save(first[0][1], tmp_path / "state.pt")
        second = run_ranks(
            others, tail_on_ranks, torch.load(tmp_path / "state.pt", weights_only=True)
        )
        assert joined_steps(second, 0) == whole[5:]


def longest_first() -> tuple[list, int, list[int]]:
    """Return what is learned in two steps, and the time and the order of the second.

    The lengths are known in the second step.
    """
    lengths = [10] * 11 + [60] + [10] * 4
    rollout = new_rollout(
        prompts("s" * 16, lengths),
        Mesh("cpu").data,
        rollout_batch_size=16,
        early_stop_every=5,
        rollout_schedule="longest_first",
    )
    first = course(rollout, range(1, 2))
    before = rollout.scheduler.sampler.clock
    second = step(rollout, 2)[0]
    rows = rollout.scheduler.order.rows(0, 32)

    return (
        first + [[(g.number, g.row, len(g.samples[0].token_ids)) for g in second]],
        rollout.scheduler.sampler.clock - before,
        [rows[number - 1] for number in rollout.scheduler.sampler.calls[-1][1]],
    )


def test_the_longest_prompts_begin_first_on_any_rank_with_room():
    """Of 16 prompts one is as long as six others.

    One rank has that one, and the other has nearly everything else.
    """
    ((alone, _, _),), pair = run_ranks(1, longest_first), run_ranks(2, longest_first)
    assert joined_steps([(found,) for found, *_ in pair], 0) == [sorted(groups) for groups in alone]
    (_, _, order), (_, _, other) = pair
    assert 11 in (order[0], other[0]) and sorted([len(order), len(other)]) in (
        [5, 11],
        [6, 10],
        [7, 9],
    )
    time = max(clock for _, clock, _ in pair)
    assert time <= 60 + 5 * (10 + 10), "a rank that becomes free waits for two looks at most"


UNEVEN = prompts("s" * 12, [3, 30, 4, 6, 25, 5, 3, 9, 40, 2, 7, 12])
DIVIDED = {
    "plain": {},
    "dynamic": {"dynamic_sampling": True},
    "greedy": {"greedy": True},
    "over": {"over_sampling": 2.0, "dynamic_sampling": True},
    "partial": {"over_sampling": 2.0, "partial_rollout": True},
}


class Uneven(Script):
    def length(self, seed: int, sample, slot: int) -> int:
        return sample.prompt.columns["length"] + slot % 3


def divided(flags: dict, schedule: str) -> tuple[list, list[int], list]:
    """Return all samples of four steps on this rank.

    Also return the groups whose chunks it generated, and the responses that it carries.
    """
    rollout = new_rollout(
        copy.deepcopy(UNEVEN),
        Mesh("cpu").data,
        n_samples_per_prompt=8,
        early_stop_every=2,
        rollout_schedule=schedule,
        **flags,
    )
    rollout.scheduler.sampler = Uneven(at_once=4)
    steps = [step(rollout, number)[0] for number in range(1, 5)]
    learned = [
        [
            (
                group.number,
                sample.token_ids,
                sample.logprobs,
                sample.weight_versions,
                sample.reward,
                sample.greedy_reward,
            )
            for group in groups
            for sample in group.samples
        ]
        for groups in steps
    ]
    partial = rollout.scheduler.partial.local if "partial_rollout" in flags else []
    partial_groups = [(group.number, state_of(group)["responses"]) for group in partial]

    return (
        learned,
        [number for _, numbers in rollout.scheduler.sampler.calls for number in numbers],
        partial_groups,
    )


@cache
def divided_over_two_ranks() -> dict[tuple[str, str], list]:
    """Return what each rank says, for each case and schedule."""
    cases = {
        (case, schedule): (flags, schedule)
        for case, flags in DIVIDED.items()
        for schedule in ("longest_first", "fifo")
        if schedule == "longest_first" or "over_sampling" not in flags
    }
    return run_cases(2, divided, cases)


@pytest.mark.parametrize("case", DIVIDED)
def test_divided_groups_are_complete_at_home(case):
    """Ranks share the responses of a prompt.

    Each learns in the same order what `fifo` would have given it.
    """
    flags = DIVIDED[case]
    pair = divided_over_two_ranks()[case, "longest_first"]
    both = set(pair[0][1]) & set(pair[1][1])
    assert len(both) > 4, "groups were divided"

    for learned, _, partial_groups in pair:
        for samples in learned:
            lengths = {number: [] for number, *_ in samples}
            for number, token_ids, logprobs, versions, *_ in samples:
                lengths[number].append(len(token_ids))
                assert len(logprobs) == len(versions) == len(token_ids)
            assert all(
                [each - found[0] for each in found] == [0, 1, 2, 0, 1, 2, 0, 1]
                for found in lengths.values()
            )
        assert partial_groups == [] or case == "partial"

    if "over_sampling" not in flags:
        assert [learned for learned, *_ in pair] == [
            learned for learned, *_ in divided_over_two_ranks()[case, "fifo"]
        ]

    if case == "partial":
        assert any(
            0 < len(token_ids)
            for _, _, partial_groups in pair
            for _, responses in partial_groups
            for token_ids, *_ in responses
        )

    assert all(
        sum(len(samples) for samples in steps) == 8 * 4
        for steps in zip(*(learned for learned, *_ in pair), strict=True)
    )


def test_ranks_get_as_much_work_by_the_lengths_of_the_last_visit():
    tokens = run_ranks(2, long_and_short)
    assert sum(tokens) == 3 * (4 * 50 + 12 * 5)
    assert max(tokens) - min(tokens) <= 3 * 50, "not more than one long prompt"


def test_groups_that_have_begun_go_on_without_their_files(tmp_path):
    """Only prompts that are drawn later are left out, among them the same ones in the next pass."""
    data = copy.deepcopy(MIXED)
    give_files(data, tmp_path)
    for index in range(len(data)):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{index}.png")
    rollout = new_rollout(data, skips=True, **FLAGS)
    whole = new_rollout(MIXED, **FLAGS)
    assert course(rollout, range(1, 6)) == course(whole, range(1, 6))
    begun = {group.number: group.row for group in rollout.scheduler.partial.local}
    for row in begun.values():
        (tmp_path / f"{row}.png").unlink()
    (found,), (expected,) = (course(each, range(6, 7)) for each in (rollout, whole))
    kept = [[group for group in groups if group[0] in begun] for groups in (found, expected)]
    assert kept[0] == kept[1] != [] and rollout.scheduler.media.left_out == {9}
