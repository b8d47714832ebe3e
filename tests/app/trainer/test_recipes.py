"""The recipes of docs/environments.md and docs/preferences.md, shortened: each is learned."""

import pytest

from runs import train
from scripts.bench.recipes import RECIPES, guessing

pytestmark = pytest.mark.slow
SEEDS = {"chain": 2, "tool": 2}
"""scripts/bench/recipes.py runs each recipe with several seeds, and three recipes more: a game, an
agent that learns what the game learns (test_environments.py), and a task of reasoning-gym."""


@pytest.mark.parametrize("recipe", SEEDS)
def test_is_learned(recipe, tmp_path):
    figures = RECIPES[recipe](train, tmp_path, SEEDS[recipe])
    assert {name: figure for name, figure in figures.items() if not figure.holds} == {}


def test_the_agent_of_the_docs_plays(tmp_path):
    flags = [
        *guessing(tmp_path, 0),
        "--environment=",
        "--agent=scripts/agents/guess_number.py:play",
        "--max_steps=1",
    ]
    (row,) = train(
        "train_ppo",
        2,
        [*flags, "--rollout_batch_size=2", "--train_batch_size=32"],
        tmp_path / "run",
    )
    assert row["episodes/turns"] > 1 and row["episodes/failed"] == 0 < row["rollout/reward"]
