"""Recipes: the settings that belong to the name of an algorithm, from presets.yaml.

Settings that the user writes take precedence.
"""

from pathlib import Path
from typing import Any

import yaml

Recipe = dict[str, Any]

_TABLES: dict[str, dict[str, Recipe]] = yaml.safe_load(
    Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
)
PRESETS = _TABLES["estimators"]
"""--advantage_estimator name -> configuration fields."""
COMMAND_DEFAULTS = _TABLES["commands"]
"""Command -> defaults that differ from train_ppo's in the sections."""
RATE_OF_ADAPTERS = 10
"""How many times larger the best rate is for adapters than for all weights (Schulman et al., LoRA
Without Regret, 2025)."""


def recipe(advantage_estimator: str) -> Recipe:
    """Return the fields that an estimator's name sets; none for a user's own."""
    return PRESETS.get(advantage_estimator, {})


def correction_bounds(rollout_correction: str | None) -> Recipe:
    """Return the fields that the name of a rollout correction sets."""
    return _TABLES["corrections"].get(rollout_correction or "", {})
