"""Every recipe learns: a few steps of two updates each; metrics stay finite and the reward rises.

The task is the smallest that a random model can learn within seconds; docs/algorithms.md has curves
of the quick start's.
"""

import math

import pytest

from app.trainer.in_turn import train_in_turn
from lightrft.config.presets import PRESETS
from runs import PPO, prepare

RUN = [flag for flag in PPO if not flag.startswith(("--init_kl_coef", "--loss_agg_mode"))]
RUN += ["--actor_learning_rate=2e-2", "--train_batch_size=16", "--max_steps=6"]
"""Without what would win against a recipe, and with a learning rate at which six steps suffice."""
WITHOUT_REWARD = {"distill", "gkd"}
"""What they learn is in test_distill.py."""
NAMES = sorted(
    {
        id(preset): name for name, preset in reversed(PRESETS.items()) if name not in WITHOUT_REWARD
    }.values()
)
BESIDE = {
    "ppo": ["--critic_learning_rate=1e-2", "--max_steps=8"],
    "remax": ["--max_steps=12"],
    "dapo": ["--overlong_buffer_penalty_factor=0.1"],
}
"""A critic has to learn first; the greedy response of a random model is far from its mean, which is
a noisy baseline; where six tokens are all there is, nearly every response is long, and a run would
learn from the penalty for that alone."""
ON_TWO_RANKS = {"grpo", "ppo", "dapo", "gspo", "rloo", "reinforce++", "cispo"}
"""What people use most; the others run on one rank."""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> dict[str, list[float]]:
    """Return the reward of each step of every recipe, with metrics that are all finite."""
    folder = tmp_path_factory.mktemp("runs")
    inputs = prepare(folder)
    found = {}
    for ranks in (1, 2):
        names = [name for name in NAMES if (name in ON_TWO_RANKS) == (ranks == 2)]
        runs = [
            (
                [
                    *(*inputs, *RUN, "--seed=1", f"--advantage_estimator={name}"),
                    *BESIDE.get(name, []),
                ],
                folder / name,
            )
            for name in names
        ]
        for name, rows in zip(names, train_in_turn("train_ppo", ranks, runs), strict=True):
            assert all(math.isfinite(value) for row in rows for value in row.values()), name
            found[name] = [row["rollout/reward"] for row in rows]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_learns(rewards, name):
    of_steps = rewards[name]
    assert sum(of_steps[-3:]) / 3 > sum(of_steps[:2]) / 2 + 0.1, of_steps


def test_what_people_use_most_is_there():
    assert set(NAMES) >= ON_TWO_RANKS
