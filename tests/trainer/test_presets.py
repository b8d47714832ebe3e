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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({id(PRESETS[name]): name for name in set(PRESETS) - WITHOUT_REWARD}.values()))
def test_every_recipe_learns(inputs, tmp_path, name):
    flags = [f"--advantage_estimator={name}", "--train_batch_size=16", "--max_steps=10"]
    rows = train("train_ppo", 2, [*inputs, *RUN, *flags], tmp_path)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    rewards = [row["rollout/reward"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, rewards
