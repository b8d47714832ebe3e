"""Parts of a step that can be repeated, for the command line too."""

from typing import Literal

Stage = Literal["reward", "advantage", "loss", "gradient"]
STAGES: dict[Stage, tuple[str, ...]] = {
    "reward": ("prompts", "samples", "logprobs", "rewards"),
    "advantage": ("outputs", "advantages", "plan"),
    "loss": ("loss",),
    "gradient": ("gradient", "weights"),
}
"""Stage -> phases that it repeats."""
