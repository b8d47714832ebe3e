"""Why: --scheduler takes a class of the user: one that extends FixedBatch, and one from nothing."""

import json
from pathlib import Path

import pytest

from lightrft.app.cli import MAINS
from runs import PPO, prepare

OWN = """
from collections import Counter

from lightrft.core.groups import Group
from lightrft.algorithms.rollout.rollout import GroupOutcome
from lightrft.algorithms.rollout.rollout import FixedBatch


class Backwards(FixedBatch):
    '''Takes the last prompts of the data first.'''

    def __init__(self, *args, order, **options):
        super().__init__(*args, order=self, **options)
        self.num_rows = order.num_rows

    def rows(self, first, count):
        return [self.num_rows - 1 - row % self.num_rows for row in range(first, first + count)]


class FirstOnly:
    '''Takes the first prompt of the data in every step: what a scheduler needs, and no more.'''

    def __init__(self, sampler, rewards, prompts, *, data, seed, n_samples_per_prompt):
        self.sampler, self.rewards, self.prompts = sampler, rewards, prompts
        self.data, self.seed, self.count = data, seed, n_samples_per_prompt
        self.steps = 0

    def generate(self, step):
        self.steps += 1
        first = Group.begin(step, 0, self.prompts[0], self.count)
        self.groups = [first] if self.data.rank == 0 else []
        loop = self.sampler.open(self.seed + step)
        loop.add([(group, group.slots) for group in self.groups])
        yield from loop.steps()
        yield from loop.finish()

    def selected(self, metrics):
        return self.groups

    def scored(self, groups):
        pass

    def snapshot(self):
        steps = self.steps
        return lambda: setattr(self, "steps", steps)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class AsksForMore(FixedBatch):
    def __init__(self, *args, moon, **options):
        super().__init__(*args, **options)


class OtherOrder(FixedBatch):
    def __init__(self, prompts, *, seed):
        pass


def function(*args):
    pass
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "mine.py").write_text(OWN)
    return folder, [*PPO, *prepare(folder)]


def train(inputs: tuple[Path, list[str]], run: str, *flags: str, scheduler: str) -> int:
    folder, given = inputs
    name = scheduler if scheduler == "fixed_batch" else f"{folder}/mine.py:{scheduler}"
    with pytest.raises(SystemExit) as ended:
        MAINS["train_ppo"](
            [*given, f"--scheduler={name}", f"--save_path={folder}/{run}", "--save_steps=1", *flags]
        )
    return ended.value.code


def labels_of(folder: Path) -> list[list[str]]:
    """Return the labels of the samples that are shown of each step, without repetition."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    steps = sorted({row["step"] for row in rows})
    return [
        list(dict.fromkeys(row["label"] for row in rows if row["step"] == step)) for step in steps
    ]


@pytest.mark.slow
def test_a_subclass_of_fixed_batch_trains_and_resumes_where_it_was(inputs):
    folder, flags = inputs
    file = next(flag.partition("=")[2] for flag in flags if flag.startswith("--prompt_data="))
    labels = [json.loads(line)["label"] for line in Path(file).read_text().splitlines()][::-1]
    options = ("--rollout_batch_size=2", "--train_batch_size=8", "--load_checkpoint")
    for steps in (1, 2):
        assert train(inputs, "own", *options, f"--max_steps={steps}", scheduler="Backwards") == 0
    assert [sorted(each, reverse=True) for each in labels_of(folder / "own")] == [
        labels[:2],
        labels[2:4],
    ]


@pytest.mark.slow
def test_a_scheduler_from_nothing_trains_and_another_kind_is_refused(inputs, capfd):
    folder, _ = inputs
    options = ("--train_batch_size=4", "--n_samples_per_prompt=4", "--load_checkpoint")
    assert train(inputs, "first", *options, "--max_steps=2", scheduler="FirstOnly") == 0
    assert [len(each) for each in labels_of(folder / "first")] == [1, 1]

    capfd.readouterr()
    assert train(inputs, "first", *options, "--max_steps=3", scheduler="fixed_batch") == 2
    said = capfd.readouterr().err
    assert "the state of the scheduler FirstOnly, and --scheduler FixedBatch cannot" in said


@pytest.mark.parametrize(
    ("scheduler", "flag", "said"),
    [
        ("function", "--seed=1", "lacks generate, selected, scored, snapshot"),
        ("Group", "--seed=1", "lacks generate, selected, scored, snapshot"),
        ("AsksForMore", "--seed=1", "argument: 'moon'"),
        ("OtherOrder", "--seed=1", "is not made of sampler, rewards, prompts"),
        ("absent", "--seed=1", "has no object 'absent'"),
        ("Backwards", "--dynamic_sampling", "only rounds, or a subclass of Rounds, knows flags"),
        ("fixed_batch", "--partial_rollout", "only rounds, or a subclass of Rounds, knows flags"),
    ],
)
def test_what_is_no_scheduler_for_the_flags_is_refused(inputs, capfd, scheduler, flag, said):
    assert train(inputs, "refused", flag, "--overwrite", scheduler=scheduler) == 2
    error = capfd.readouterr().err
    assert said in error and "loading" not in error
