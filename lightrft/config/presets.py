"""Recipes: the settings that belong to the name of an algorithm, from presets.yaml."""

from typing import Any

from lightrft.config.tables import table

Recipe = dict[str, Any]

PRESETS: dict[str, Recipe] = table("config/presets")["estimators"]
"""--advantage_estimator name -> configuration fields."""
COMMAND_DEFAULTS: dict[str, Recipe] = table("config/presets")["commands"]
"""Command -> defaults that differ from train_ppo's in the sections."""
CORRECTIONS: dict[str, Recipe] = table("config/presets")["corrections"]
"""--rollout_correction name -> configuration fields, if they are not the defaults."""
RATE_OF_ADAPTERS = 10
"""How many times larger the best rate is for adapters than for all weights (Schulman et al., LoRA
Without Regret, 2025)."""


def recipe(advantage_estimator: str) -> Recipe:
    """Return the fields that an estimator's name sets; none for a user's own."""
    return PRESETS.get(advantage_estimator, {})


def correction_bounds(rollout_correction: str | None) -> Recipe:
    """Return the fields that the name of a rollout correction sets."""
    return CORRECTIONS.get(rollout_correction or "", {})
