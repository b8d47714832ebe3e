"""Recipes: the choices that go with the name of an algorithm. What the user writes next to the name wins."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (arXiv 2402.03300): mean per response, clip 0.2, k3 divergence 0.04 in the loss
    "grpo": {
        "policy_loss": "ppo",
        "loss_agg_mode": "seq-mean-token-mean",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "use_kl_loss": True,
        "init_kl_coef": 0.04,
        "kl_estimator": "k3",
    },
}
"""--advantage_estimator name -> configuration fields."""
PRESETS["group_norm"] = PRESETS["grpo"]


CORRECTIONS: dict[str, dict[str, Any]] = {
    "icepop": {"rollout_correction_level": "token", "rollout_correction_low": 0.5, "rollout_correction_high": 5.0},
}
"""--rollout_correction name -> configuration fields, where they are not the defaults."""


def recipe(advantage_estimator: str) -> dict[str, Any]:
    """The fields that an estimator's name stands for; none for a user's own."""
    return PRESETS.get(advantage_estimator, {})


def correction_bounds(rollout_correction: str | None) -> dict[str, Any]:
    """The fields that the name of a rollout correction stands for."""
    return CORRECTIONS.get(rollout_correction or "", {})
