"""The recipes of docs/environments.md and docs/preferences.md, shortened: each is learned."""

import pytest

from runs import train
from scripts.bench.recipes import RECIPES

pytestmark = pytest.mark.slow
SEEDS = {"chain": 0, "game": 1, "agent": 0, "tool": 2, "reasoning_gym": 1}
"""scripts/bench/recipes.py runs each recipe with several."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_is_learned(recipe, tmp_path):
    figures = RECIPES[recipe](train, tmp_path, SEEDS[recipe])
    assert {name: figure for name, figure in figures.items() if not figure.holds} == {}
