"""Every recipe learns: a few steps of two updates each, on two ranks; metrics stay finite and the reward rises."""

import math

import pytest

from lightrft.algorithms.presets import PRESETS
from runs import PPO, prepare, train

RUN = [flag for flag in PPO if not flag.startswith(("--init_kl_coef", "--loss_agg_mode"))]
"""Without what would win against a recipe."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


WITHOUT_REWARD = {"distill"}
"""What they learn is in test_distill.py."""
MORE = {"ppo": ["--critic_learning_rate=1e-3", "--max_steps=16"]}
"""A critic that begins from nothing needs its time, and a rate for so small a model, as the actor has."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({id(PRESETS[name]): name for name in set(PRESETS) - WITHOUT_REWARD}.values()))
def test_every_recipe_learns(inputs, tmp_path, name):
    flags = [f"--advantage_estimator={name}", "--train_batch_size=16", "--max_steps=10", *MORE.get(name, [])]
    rows = train("train_ppo", 2, [*inputs, *RUN, *flags], tmp_path)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    rewards = [row["rollout/reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, rewards
