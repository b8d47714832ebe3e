"""Every recipe learns: a few steps of two updates each; metrics stay finite and the reward rises,
clearly and with every seed for those that people use most. The first seed runs on two ranks, the
others on one.

The task is the smallest that a random model can learn within seconds; docs/algorithms.md has curves
of the quick start's.
"""

import math
from pathlib import Path

import pytest

from lightrft.config.presets import PRESETS
from ranks import run_ranks
from runs import PPO, prepare, rows_of, run_here

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
THRICE = {"grpo", "ppo", "dapo", "gspo", "rloo", "reinforce++", "cispo"}
"""With three seeds of model, samples and order."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


def with_seeds(flags: list[str], seeds: range, folder: Path) -> None:
    for seed in seeds:
        run_here("train_ppo", [*flags, f"--seed={seed}", f"--save_path={folder / str(seed)}"], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_learns(inputs, tmp_path, name):
    flags = [*inputs, *RUN, f"--advantage_estimator={name}", *BESIDE.get(name, [])]
    seeds = range(1, 4 if name in THRICE else 2)
    for ranks, share in ((2, seeds[:1]), (1, seeds[1:])):
        if share:
            run_ranks(ranks, with_seeds, flags, share, tmp_path, timeout=400)
    for seed in seeds:
        rows = rows_of(tmp_path / str(seed))
        assert all(math.isfinite(value) for row in rows for value in row.values())
        rewards = [row["rollout/reward"] for row in rows]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, (seed, rewards)


def test_what_must_learn_with_every_seed_is_there():
    assert set(NAMES) >= THRICE
