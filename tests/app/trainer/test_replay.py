"""Samples of a run that are learned from again: training alone, without an engine and without
rewards.
"""

import json
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from app.trainer.in_turn import train_in_turn
from lightrft.app.run.recorded_samples import RecordedSamples
from lightrft.config.errors import DataError
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Drafts, Episode, Prompt, Sample
from runs import PPO, prepare, train

SETTINGS = [
    "--reward_running_norm",
    "--use_kl_loss=false",
    "--init_kl_coef=0.1",
    "--train_batch_size=16",
    "--max_steps=3",
]


@pytest.mark.slow
def test_a_replay_has_the_same_numbers(tmp_path):
    """The reward of the second run raises; and a step that is not there is named."""
    flags = prepare(tmp_path)
    (tmp_path / "raises.py").write_text(
        "def judge(samples, **columns):\n    raise RuntimeError('a replay asks no reward')\n"
    )
    dumps = [*flags, *PPO, *SETTINGS, f"--dump_rollouts={tmp_path / 'dump'}"]
    replay = [
        *flags,
        *PPO,
        *SETTINGS,
        f"--reward={tmp_path / 'raises.py'}:judge",
        f"--replay_rollouts={tmp_path / 'dump'}",
    ]
    runs = [(dumps, tmp_path / "first"), (replay, tmp_path / "second")]
    first, second = train_in_turn("train_ppo", 2, runs)

    same = [
        name
        for name in first[0]
        if name.startswith(("train/", "rollout/reward", "rollout/kl", "rollout/response"))
    ]
    assert len(same) > 10 and len(first) == 3
    assert [{name: row[name] for name in same} for row in first] == [
        {name: row[name] for name in same} for row in second
    ]
    assert "time/generate" in first[0] and "time/generate" not in second[0]

    before, after = (
        load_file(tmp_path / run / "model" / "model.safetensors") for run in ("first", "second")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    with pytest.raises(RuntimeError, match="has no samples of step 4 for 2 replicas of data"):
        train("train_ppo", 2, [*replay, "--max_steps=4"], tmp_path / "third")


@pytest.mark.slow
def test_samples_that_cannot_be_written_end_the_run(tmp_path):
    """A thread writes the samples.

    When a checkpoint is complete, the samples of its steps are there, or the run has failed.
    """
    flags = [
        *prepare(tmp_path),
        *PPO,
        *SETTINGS,
        f"--dump_rollouts={tmp_path / 'dump'}",
        "--save_steps=1",
    ]
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "step_000003").write_text("in the way")
    with pytest.raises(RuntimeError, match="FileExistsError.*step_000003"):
        train("train_ppo", 1, flags, tmp_path / "run")
    complete = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step?")}
    # the second one may be under way when the samples fail
    assert "step1" in complete and "step3" not in complete
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", 1),
        ("{", 1),
        ("[]", 1),
        ('{"version": 1}\n{"prompt', 2),
        ('{"version": 1}\n{}', 2),
        ('{"version": 1}\n[]', 2),
        ('{"version": 1}\n{"prompt": {"index": 99, "token_ids": []}}', 2),
        ('{"version": 1}\n' + "[" * 9000, 2),
    ],
)
def test_a_broken_line_is_named(tmp_path, content, line):
    alone = SimpleNamespace(size=1, rank=0)
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "step_000001" / "replica_0_of_1.jsonl").write_text(content)
    samples = RecordedSamples(str(tmp_path), SimpleNamespace(data=alone, model_parallel=alone))
    with pytest.raises(
        DataError, match=f"--replay_rollouts .*replica_0_of_1.jsonl:{line} is no line of a dump"
    ):
        samples.read(1, [])


def test_all_of_a_sample_is_recorded_except_experts(tmp_path):
    """Experts [tokens, layers, k] would be many times as large as the rest."""
    alone = SimpleNamespace(size=1, rank=0)
    samples = RecordedSamples(str(tmp_path), SimpleNamespace(data=alone, model_parallel=alone))
    prompt = Prompt(0, "a", [97], {"label": "b"})
    rest = {
        "text": "b",
        "finish_reason": "length",
        "weight_versions": [3, 4],
        "drafts": Drafts(1, 2, 1),
        "reward": 0.5,
        "reward_components": {"style": 0.5},
        "masked": True,
        "greedy_reward": 0.25,
        "token_rewards": [None, 0.5],
        "experts": np.zeros((2, 1, 2), np.uint8),
    }
    branch = Sample(prompt, 0, [98, 99], [-1.0, -2.0], **rest, episode=Episode([True, False]))
    turns = {
        "sampled": [True, False],
        "messages": [{"role": "assistant", "content": "b"}],
        "rewards": [(1, 0.5)],
        "finish_reason": "stop",
        "tool_calls": 1,
        "tool_errors": 1,
        "tool_seconds": 0.5,
        "problem": "late",
        "num_turns": 1,
        "role": "solver",
        "role_rewards": {"solver": 0.5},
        "overridden": {"temperature": 2},
        "branches": [branch],
        "drift": 1,
    }
    sample = Sample(prompt, 7, [98, 99], [-1.0, -2.0], **rest, episode=Episode(**turns))
    # so that a new field is added here
    assert {each.name for each in fields(Episode)} == turns.keys()
    named = {"prompt", "group", "token_ids", "logprobs", "episode"}
    assert {each.name for each in fields(Sample)} == rest.keys() | named

    writer = SimpleNamespace(submit=lambda work: work())
    samples.write(1, [sample], 3, Metrics(), writer=writer)
    found, version = samples.read(1, [prompt])
    assert (found, version) == ([sample], 3)
    assert found[0].experts is found[0].episode.branches[0].experts is None


def test_tokens_that_the_policy_never_samples_are_named(tmp_path):
    """Such tokens have no log-prob.

    They come from a dump of a model with more tokens, or from before padding was excluded.
    """
    alone = SimpleNamespace(size=1, rank=0)
    samples = RecordedSamples(str(tmp_path), SimpleNamespace(data=alone, model_parallel=alone))
    prompt = Prompt(0, "a", [97], {})
    sample = Sample(prompt, 0, [98, 300], [-1.0, -1.0], text="b", finish_reason="stop")
    writer = SimpleNamespace(submit=lambda work: work())
    samples.write(1, [sample], 1, Metrics(), writer=writer)
    assert samples.read(1, [prompt], {299})[0][0].token_ids == [98, 300]
    with pytest.raises(
        DataError, match="replica_0_of_1.jsonl:2 .*the policy never samples the token 300"
    ):
        samples.read(1, [prompt], {299, 300})
