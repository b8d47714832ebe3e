"""Recipes: the settings that belong to the name of an algorithm.

Settings that the user writes take precedence.
"""

from collections.abc import Collection
from typing import Any

Recipe = dict[str, Any]

CRITIC_PRESET: Recipe = {"gamma": 1.0, "lambd": 0.95, "value_clip": 0.2, "advantages_norm": True}
NO_KL: Recipe = {"use_kl_loss": False, "init_kl_coef": 0.0}


def kl(coefficient: float, estimator: str, *, in_loss: bool) -> Recipe:
    return {"use_kl_loss": in_loss, "init_kl_coef": coefficient, "kl_estimator": estimator}


def preset(
    loss: str,
    aggregation: str,
    penalty: Recipe = NO_KL,
    *,
    clip: Collection[float] = (0.2, 0.2),
    **others: Any,
) -> Recipe:
    """Return a recipe; `clip` has the lower and the upper bound, or none if the loss has none."""
    bounds = dict(zip(("eps_clip_low", "eps_clip_high"), clip, strict=False))
    return {"policy_loss": loss, **bounds, "loss_agg_mode": aggregation} | penalty | others


PRESETS: dict[str, Recipe] = {
    # arXiv 1707.06347, as InstructGPT (arXiv 2203.02155) and before it arXiv 2009.01325 use it for
    # language models
    "ppo": preset("ppo", "token-mean", kl(0.02, "k1", in_loss=False), **CRITIC_PRESET),
    # DeepSeekMath, arXiv 2402.03300
    "grpo": preset("ppo", "seq-mean-token-mean", kl(0.04, "k3", in_loss=True)),
    # arXiv 2503.14476; the penalty begins a fifth before the longest response and is at most 1
    # where rewards are 1 and -1: with rewards of 1 and 0, --overlong_buffer_penalty_factor 0.5 has
    # the same weight
    "dapo": preset(
        "ppo", "token-mean", clip=(0.2, 0.28), dynamic_sampling=True, overlong_buffer=True
    ),
    # arXiv 2503.20783
    "dr_grpo": preset("ppo", "seq-mean-token-sum-norm"),
    # arXiv 2507.18071
    "gspo": preset("gspo", "seq-mean-token-mean", clip=(3e-4, 4e-4)),
    # arXiv 2507.20673, for one advantage per sequence
    "gmpo": preset("gmpo", "seq-mean-token-mean", clip=(0.4, 0.4)),
    # arXiv 2402.14740; the coefficient depends on the task there
    "rloo": preset("reinforce", "seq-mean-token-sum", kl(0.05, "k1", in_loss=False), clip=()),
    # arXiv 2310.10505; one response per prompt is enough, and the coefficient depends on the task
    "remax": preset("reinforce", "seq-mean-token-sum", kl(0.05, "k1", in_loss=False), clip=()),
    # arXiv 2501.03262; the coefficients depend on the task there
    "reinforce++": preset("ppo", "token-mean", kl(0.01, "k1", in_loss=False), advantages_norm=True),
    "reinforce++_baseline": preset(
        "ppo", "token-mean", kl(0.001, "k2", in_loss=True), advantages_norm=True
    ),
    # arXiv 2505.23585: exactly on policy
    "opo": preset("reinforce", "token-mean", clip=()),
    # arXiv 2506.13585: no lower bound; the upper one, a weight of 5, from ScaleRL, arXiv 2510.13786
    "cispo": preset("cispo", "token-mean", clip=(1.0, 4.0)),
    # arXiv 2511.20347
    "sapo": preset(
        "sapo", "seq-mean-token-mean", clip=(), sapo_tau_positive=1.0, sapo_tau_negative=1.05
    ),
    # arXiv 2505.12504; the clip of the drift is from the authors' code
    "cpgd": preset("cpgd", "token-mean", policy_drift_coef=0.01, policy_drift_clip=0.2),
    # arXiv 2602.04879 with binary TV; the threshold is from the authors' code
    "dppo": preset("dppo_tv", "token-mean", clip=(0.15, 0.15)),
    # arXiv 2405.19107 in the form of arXiv 2501.12599; the coefficient is from Tinker's example
    "dro": preset("dro", "seq-mean-token-sum", clip=(), policy_drift_coef=0.05),
    # arXiv 2505.02835, with the divergence of REINFORCE++
    "stable_reinforce": preset(
        "stable_reinforce",
        "seq-mean-token-mean",
        kl(0.01, "k1", in_loss=False),
        advantages_norm=True,
    ),
    # arXiv 2601.05242
    "gdpo": preset("ppo", "token-mean"),
    # arXiv 2602.02710: the sum over the tokens of a response
    "maxrl": preset("ppo", "seq-mean-token-sum"),
    # arXiv 2508.08221
    "lite_ppo": preset("ppo", "token-mean"),
    # arXiv 2504.02546: exactly on policy
    "gpg": preset("reinforce", "token-mean", clip=()),
    # arXiv 2306.13649 with samples of the actor only and the reverse divergence
    "distill": preset("ppo", "token-mean", distill_coef=1.0),
    # the same paper with the divergence of its main experiments over whole distributions
    "gkd": preset("ppo", "token-mean", distill_coef=1.0, distill_top_k=64),
}
"""--advantage_estimator name -> configuration fields."""
PRESETS["group_norm"] = PRESETS["grpo"]
PRESETS["reinforce_baseline"] = PRESETS["reinforce++_baseline"]

EPOCHS = {"num_episodes": 3}
"""Three passes over given examples, as in Alpaca and in TRL's configurations."""

COMMAND_DEFAULTS: dict[str, Recipe] = {
    # LIMA, arXiv 2305.11206: 1e-5, batches of 32 for the largest model and of 64 for smaller ones
    "train_sft": EPOCHS | {"learning_rate": 1e-5, "train_batch_size": 64},
    # InstructGPT, arXiv 2203.02155
    "train_rm": EPOCHS | {"learning_rate": 9e-6, "train_batch_size": 64},
    # the rate of TRL's PRMConfig
    "train_prm": EPOCHS | {"learning_rate": 1e-5, "train_batch_size": 64},
    # Zephyr, arXiv 2310.16944
    "train_dpo": EPOCHS | {"learning_rate": 5e-7, "train_batch_size": 32},
    # the rate of TRL's example
    "train_kto": EPOCHS | {"learning_rate": 5e-7, "train_batch_size": 32},
    # a strategy that adds up the gradients of several requests
    "tinker": {"strategy": "fsdp"},
}
"""Command -> defaults that differ from train_ppo's in the sections."""
RATE_OF_ADAPTERS = 10
"""How many times larger the best rate is for adapters than for all weights (Schulman et al., LoRA
Without Regret, 2025)."""

CORRECTIONS: dict[str, Recipe] = {
    "icepop": {
        "rollout_correction_level": "token",
        "rollout_correction_low": 0.5,
        "rollout_correction_high": 5.0,
    }
}
"""--rollout_correction name -> configuration fields, if they are not the defaults."""


def recipe(advantage_estimator: str) -> Recipe:
    """Return the fields that an estimator's name sets; none for a user's own."""
    return PRESETS.get(advantage_estimator, {})


def correction_bounds(rollout_correction: str | None) -> Recipe:
    """Return the fields that the name of a rollout correction sets."""
    return CORRECTIONS.get(rollout_correction or "", {})
