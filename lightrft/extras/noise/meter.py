"""Measure the noise of the policy's gradient while it learns: --measure_noise."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightrft.core.batch import Experience, Rows, TrainingPlan
from lightrft.core.metrics import Metrics
from lightrft.core.role import Learner
from lightrft.extras.noise.components import Noise, normal_equations
from lightrft.extras.noise.sketch import COUNTERS, Sketcher
from lightrft.models.parallel.collectives import Axis

MEMORY = 0.9
"""Weight of all earlier measurements against the newest one."""
MOST_MICROBATCHES = 256
"""Micro-batches of an update that are measured, over all ranks."""
LEAST_MICROBATCHES = 8
"""Likewise; fewer are split further."""
SPLIT_MICROBATCHES = 4
"""Micro-batches of an update that are split so that prompts have samples in several, over all ranks."""


class NoiseMeter:
    """Sketches the gradients of an update's micro-batches, and finds how much of them is noise.

    A hook on each parameter sees the whole gradient of this rank's micro-batch, before strategies
    sum and divide it. So every strategy has the same numbers, and no second gradient is stored.
    """

    def __init__(self, every: int, data: Axis, sequence: Axis, device: torch.device):
        """Set up the meter for each `every`-th step; the ranks of `sequence` divide sequences."""
        self.every = every
        self.data = data
        self.sequence = sequence
        self.device = device
        self.steps = 0
        """Steps so far."""
        self.equations = np.zeros((3, 4))
        """Normal equations of the measurements so far, where older ones count less."""
        self._sketcher = Sketcher(device)
        self._sketches = torch.empty(0)
        """[M, COUNTERS] of the micro-batches of the open update."""
        self._current = -1
        """Number of the newest micro-batch."""

    @contextmanager
    def reading(self, module: nn.Module, num_microbatches: int) -> Iterator[None]:
        """Sketch the gradients of the first micro-batches that learn inside of the context."""
        count = min(num_microbatches, max(MOST_MICROBATCHES // self.data.size, 1))
        self._sketches = torch.zeros(count, COUNTERS, device=self.device)
        self._current = -1
        handles = [module.register_forward_pre_hook(self._begin_microbatch)]

        # FSDP2 has whole parameters in a block only while it computes, and they stay the same
        # tensors then. Other strategies have them everywhere.
        numbers = {name: number for number, (name, _) in enumerate(module.named_parameters())}
        seen: set[int] = set()
        for name, each in module.named_modules():
            if each is module or isinstance(each, FSDPModule):
                hook = partial(self._read_parameters, name, numbers, seen, handles)
                handles.append(each.register_forward_pre_hook(hook))

        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_microbatch(self, module: nn.Module, inputs: Any) -> None:
        self._current += module.training

    def _read_parameters(
        self,
        prefix: str,
        numbers: dict[str, int],
        seen: set[int],
        handles: list[RemovableHandle],
        module: nn.Module,
        inputs: Any,
    ) -> None:
        """Read the gradients of the parameters that are whole now, from now on."""
        for name, parameter in module.named_parameters(prefix):
            if (
                parameter.requires_grad
                and not isinstance(parameter, DTensor)
                and id(parameter) not in seen
            ):
                seen.add(id(parameter))
                handles.append(parameter.register_hook(partial(self._read, numbers[name])))

    def _read(self, number: int, gradient: Tensor) -> None:
        if self._current < len(self._sketches):
            self._sketcher.add(self._sketches[self._current], gradient, number)

    def measure(self, plan: TrainingPlan, metrics: Metrics) -> None:
        """Add what is known of the noise to the metrics. All ranks call it together."""
        update = plan.updates[0]
        mine = [plan.experience.groups[rows].tolist() for rows in update[: len(self._sketches)]]
        sketches = self.sequence.sum(self._sketches).cpu().numpy()
        sketched, groups_of, sizes = zip(
            *self.data.gather((sketches, mine, sum(map(len, update)))), strict=True
        )

        microbatches = [groups for of_rank in groups_of for groups in of_rank]
        groups = sorted({group for each in microbatches for group in each})
        counts = np.array([[each.count(group) for group in groups] for each in microbatches], float)
        all_sketches = np.concatenate(sketched).astype(float)
        self.equations *= MEMORY
        self.equations += normal_equations(all_sketches @ all_sketches.T, counts)

        of_prompt = counts.sum(0)
        noise = Noise.solve(self.equations, (of_prompt**2).sum() / of_prompt.sum())
        for field in fields(noise):
            if (value := getattr(noise, field.name)) is not None:
                metrics.max(f"noise/{field.name}", value)
        ratio = sum(sizes) / noise.scale if noise.scale else 0.0
        metrics.max("noise/signal_to_noise", max(ratio, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "equations": self.equations.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.equations = state["steps"], np.array(state["equations"])


@dataclass(frozen=True, slots=True)
class MeasuredLearner(Learner):
    """A learner whose first update of a step is measured, in each step that is due."""

    meter: NoiseMeter | None = None

    def learn(self, plan: TrainingPlan, metrics: Metrics) -> list[Tensor]:
        self.meter.steps += 1
        if self.meter.steps % self.meter.every:
            return Learner.learn(self, plan, metrics)

        first = split(plan.minibatches[0], plan.experience, self.meter.data.size)
        plan = replace(plan, minibatches=[first, *plan.minibatches[1:]])
        with self.meter.reading(self.role.module, len(plan.updates[0])):
            losses = Learner.learn(self, plan, metrics)
        self.meter.measure(plan, metrics)
        return losses


def split(update: Rows, experience: Experience, num_ranks: int) -> Rows:
    """Return the micro-batches of an update, where some are pairs that share their prompts.

    A plan has all samples of a prompt in one micro-batch, and then nothing tells what a prompt adds
    to their gradients from what each sample adds. All ranks split equally many.
    """
    count = min(-(-SPLIT_MICROBATCHES // num_ranks), len(update))
    pairs = max(-(-LEAST_MICROBATCHES // (2 * num_ranks * count)), 1)
    groups = experience.groups.tolist()
    halves: Rows = []
    for members in update[:count]:
        prompts = sorted({groups[row] for row in members})
        for first in range(pairs):
            chosen = set(prompts[first::pairs])
            rows = sorted((row for row in members if groups[row] in chosen), key=groups.__getitem__)
            halves += [rows[::2], rows[1::2]]
    return [*halves, *update[count:]]


def measured(learner: Learner, every: int, data: Axis, sequence: Axis) -> MeasuredLearner:
    """Return the learner with a meter for each `every`-th step."""
    meter = NoiseMeter(every, data, sequence, learner.role.strategy.device)
    parts = {field.name: getattr(learner, field.name) for field in fields(learner)}
    return MeasuredLearner(**parts, meter=meter)
