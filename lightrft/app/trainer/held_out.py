"""Score held-out sets: the greedy and the sampled responses to each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.algorithms.rollout.scores import Estimate, PromptScores, estimates
from lightrft.core.engine import derived_seed
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt
from lightrft.models.parallel.collectives import Axis
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.strategy import StrategyBase


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One set of --eval_data and the rewards that score it."""

    name: str
    """Name in the metrics, eval/NAME/...; empty for data without a name."""
    prompts: Sequence[Prompt]
    rewards: RewardRunner

    @property
    def prefix(self) -> str:
        """Return what the names of the set's numbers begin with: nothing, or `NAME/`."""
        return f"{self.name}/" if self.name else ""

    @property
    def seed_names(self) -> tuple[str, ...]:
        """Return what makes the seed of this set different from other sets."""
        return (self.name,) if self.name else ()


def answer_all(
    sets: Sequence[HeldOut], sampler: RunSampler, *seed_names: int | str
) -> list[list[Group]]:
    """Return this rank's groups of each set, which judges in the engine have read.

    The engine is awake. All ranks call it.
    """
    answered = [
        sampler.answer(held_out.prompts, seed=derived_seed(*seed_names, *held_out.seed_names))
        for held_out in sets
    ]
    for held_out, groups in zip(sets, answered, strict=True):
        held_out.rewards.ask_judge([sample for group in groups for sample in group.responses])
    return answered


def measure_sets(
    strategy: StrategyBase,
    seed: int,
    sets: Sequence[HeldOut],
    sampler: RunSampler,
    actor: nn.Module,
    step: int,
    metrics: Metrics,
) -> None:
    """Add `eval/*` metrics of a model that learns, after a step. All ranks call it.

    The engine's weights keep their version: versions count steps, and the next step streams these
    same weights under the same version.
    """
    version = strategy.weight_version
    with strategy.engine_awake(actor):
        answered = answer_all(sets, sampler, seed, "evaluation", step)

    strategy.engine_lags(version)
    # Scoring comes after generation, because reward models may need the device.
    for held_out, groups in zip(sets, answered, strict=True):
        evaluate(held_out, groups, metrics, strategy.mesh.data)


def evaluate(
    held_out: HeldOut, groups: list[Group], metrics: Metrics, data: Axis
) -> dict[str, Estimate]:
    """Score this rank's groups from RunSampler.answer(); return estimates over all ranks.

    The means become metrics `eval/...`, or `eval/NAME/...` for a set with a name. The engine should
    be asleep if reward models score. All ranks call it. The numbers are the same to the last bit on
    any number of ranks.
    """
    for group in groups:
        held_out.rewards.begin(group.responses)
    held_out.rewards.finish([sample for group in groups for sample in group.responses])
    gathered = data.gather([PromptScores.of(group) for group in groups])
    # Sorted by prompt, so that the sums do not depend on which rank had which prompt.
    result = estimates(
        sorted((one for share in gathered for one in share), key=lambda one: one.index)
    )
    held_out.rewards.count_failures(f"eval/{held_out.prefix}reward_failures", metrics)

    if data.rank == 0:  # the other ranks would only add the same mean again
        for name, value in result.items():
            metrics.mean(f"eval/{held_out.prefix}{name}", value.mean)
        metrics.sum(f"eval/{held_out.prefix}num_samples", len(held_out.prompts))

    return result
