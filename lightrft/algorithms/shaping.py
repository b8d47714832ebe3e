"""Reward shaping: change rewards before they are compared.

Rewards, groups and lengths come from all ranks.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightrft.config.sections import RewardSection
from lightrft.core.advantages import grpo


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float) -> Tensor:
    """0 up to `longest - buffer` tokens, then falling linearly to -factor at `longest`. [N] -> [N].

    Soft overlong punishment: DAPO, arXiv 2503.14476, equation 13.
    """
    excess = lengths.double() - (longest - buffer)
    return -factor * (excess / buffer).clamp(0, 1)


@dataclass
class RunningMoments:
    """Mean and standard deviation of all rewards since the first step.

    New values are merged as in Chan et al., 1979.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def update(self, values: Tensor) -> None:
        """Add the values of one step."""
        values = values.double()
        new = float(len(values))
        if not new:
            return

        shift = float(values.mean()) - self.mean
        total = self.count + new
        self.squares += (
            float((values - values.mean()).square().sum()) + shift**2 * self.count * new / total
        )
        self.mean += shift * new / total
        self.count = total

    @property
    def std(self) -> float:
        """Return the standard deviation of a population."""
        return (self.squares / max(self.count, 1.0)) ** 0.5


@dataclass
class RewardShaper:
    """Shape rewards by whatever is enabled, in a fixed order.

    The order is overlong penalty, running normalisation, clip, standardisation in groups. Every
    rank has the same rewards, so the running moments are the same everywhere.
    """

    section: RewardSection
    longest: int
    """Longest response in tokens: --generate_max_len."""
    moments: RunningMoments = field(default_factory=RunningMoments)

    @property
    def is_enabled(self) -> bool:
        """Return True if an option changes rewards."""
        section = self.section
        return (
            section.overlong_buffer
            or section.reward_running_norm
            or section.reward_clip is not None
            or section.reward_group_norm
        )

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        """Return the shaped rewards: [M] each -> [M] float32.

        `lengths` has the length of the response that ends with each reward.
        """
        section = self.section
        shaped = rewards.double()
        if section.overlong_buffer:
            buffer = section.overlong_buffer_len or max(self.longest // 5, 1)
            factor = section.overlong_buffer_penalty_factor
            shaped = shaped + overlong_penalty(
                lengths, longest=self.longest, buffer=buffer, factor=factor
            )

        if section.reward_running_norm:
            # so equal rewards have no spread: sums of equal float32 are exact in float64
            shaped = shaped.float().double()
            self.moments.update(shaped)
            center = self.moments.mean if section.reward_running_norm_minus_mean else 0.0
            shaped = (shaped - center) / (self.moments.std or 1.0)

        if section.reward_clip is not None:
            shaped = shaped.clamp(-section.reward_clip, section.reward_clip)
        if section.reward_group_norm:
            shaped = grpo(shaped.float(), groups)
        return shaped.float()  # estimators get float32 values for the same reason

    def state_dict(self) -> dict[str, Any]:
        return vars(self.moments).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = RunningMoments(**state)
