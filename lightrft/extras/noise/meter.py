"""Measure the noise of the policy's gradient while it learns: --measure_noise."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightrft.algorithms.roles.role import DistributedRole
from lightrft.core.batch import Experience, Rows, TrainingPlan
from lightrft.core.metrics import Metrics
from lightrft.core.role import Learner
from lightrft.extras.noise.components import noise_of, normal_equations
from lightrft.extras.noise.sketch import COUNTERS, Sketcher, num_blocks
from lightrft.strategy.batching.micro_batches import regroup
from lightrft.strategy.strategy import StrategyBase

MEMORY = 0.9
"""Weight of all earlier measurements against the newest one."""
LEAST_PARTS = 8
"""Number of parts of an update, over all ranks."""


class NoiseMeter:
    """Sketches the gradients of the parts of an update, and finds how much of them is noise.

    A hook on each parameter sees the whole gradient of this rank's micro-batch, before strategies
    sum and divide it. So every strategy has the same numbers, and no second gradient is stored.
    """

    def __init__(self, strategy: StrategyBase, every: int):
        """Set up the meter for each `every`-th step."""
        self.strategy = strategy
        self.every = every
        self.steps = 0
        """Steps so far."""
        self.equations = np.zeros((3, 4))
        """Normal equations of the measurements so far, where older ones count less."""
        self._sketcher = Sketcher(strategy.device)
        self._sketches = torch.empty(0)
        """[parts, COUNTERS] of this rank."""
        self._parts: list[int] = []
        """Part that each micro-batch of the open update belongs to."""
        self._current = -1
        """Number of the newest micro-batch."""

    @contextmanager
    def reading(self, module: nn.Module, parts: list[int]) -> Iterator[None]:
        """Sketch the gradients of micro-batches that learn inside of the context.

        `parts` are the numbers of their parts, in order; further micro-batches are not read.
        """
        self._parts = parts
        self._sketches = torch.zeros(max(parts) + 1, COUNTERS, device=self.strategy.device)
        self._current = -1
        handles = [module.register_forward_pre_hook(self._begin_microbatch)]

        blocks: dict[str, int] = {}
        count = 0
        for name, parameter in module.named_parameters():
            blocks[name] = count
            count += num_blocks(self.strategy.full_shape(parameter).numel())

        seen: set[int] = set()

        def read_whole(prefix: str, module: nn.Module, inputs: Any) -> None:
            """Read the gradients of the parameters that are whole now, from now on."""
            for name, parameter in module.named_parameters(prefix):
                trained = parameter.requires_grad and not isinstance(parameter, DTensor)
                if trained and id(parameter) not in seen:
                    seen.add(id(parameter))
                    handles.append(parameter.register_hook(partial(self._read, blocks[name])))

        # FSDP2 has whole parameters in a block only while it computes, and they stay the same
        # tensors then. Other strategies have them everywhere.
        for name, each in module.named_modules():
            if each is module or isinstance(each, FSDPModule):
                handles.append(each.register_forward_pre_hook(partial(read_whole, name)))

        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_microbatch(self, module: nn.Module, inputs: Any) -> None:
        self._current += module.training

    def _read(self, first_block: int, gradient: Tensor) -> None:
        if self._current < len(self._parts):
            counters = self._sketches[self._parts[self._current]]
            self._sketcher.add(counters, gradient, first_block)

    def measure(self, groups: list[list[int]], metrics: Metrics) -> None:
        """Add what is known of the noise to the metrics. All ranks call it together.

        `groups` are the prompts of the samples in each part of this rank.
        """
        mesh = self.strategy.mesh
        sketches = mesh.sp.sum(self._sketches).cpu().numpy()
        sketched, of_ranks = zip(*mesh.data.gather((sketches, groups)), strict=True)
        all_sketches = np.concatenate(sketched).astype(float)
        parts = [Counter(each) for of_rank in of_ranks for each in of_rank]
        prompts = sorted(set().union(*parts))
        counts = np.array([[each[prompt] for prompt in prompts] for each in parts], float)

        products = all_sketches @ all_sketches.T
        if np.isfinite(products).all():  # otherwise the step is skipped
            self.equations = MEMORY * self.equations + normal_equations(products, counts)
        of_prompt = counts.sum(0)
        noise = noise_of(self.equations, (of_prompt**2).sum() / of_prompt.sum())
        scale = noise.get("scale", math.inf)  # without a signal
        if scale > 0:
            noise["signal_to_noise"] = float(of_prompt.sum()) / scale
        for name, value in noise.items():
            metrics.mean(f"noise/{name}", value)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "equations": self.equations.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.equations = state["steps"], np.array(state["equations"])


@dataclass(frozen=True, slots=True)
class MeasuredLearner(Learner):
    """A learner whose first update of a step is measured, in each step that is due."""

    meter: NoiseMeter | None = None

    def learn(self, plan: TrainingPlan, metrics: Metrics) -> list[Tensor]:
        meter, experience = self.meter, plan.experience
        meter.steps += 1
        if meter.steps % meter.every:
            return Learner.learn(self, plan, metrics)

        rows = [row for members in plan.minibatches[0] for row in members]
        groups = experience.groups.tolist()
        parts = random_parts(rows, groups, meter.strategy.mesh.data.size, seed=meter.steps)
        planned = [(part, microbatches(self.role, experience, part)) for part in parts]
        # With few prompts, some parts are empty on all ranks.
        planned = [(part, members) for part, members in planned if members]
        first = [each for _, members in planned for each in members]
        numbers = [number for number, (_, members) in enumerate(planned) for _ in members]

        plan = replace(plan, minibatches=[first, *plan.minibatches[1:]])
        with meter.reading(self.role.module, numbers):
            losses = Learner.learn(self, plan, metrics)
        meter.measure([[groups[row] for row in part] for part, _ in planned], metrics)
        return losses


def random_parts(rows: list[int], groups: list[int], num_ranks: int, *, seed: int) -> Rows:
    """Return pairs of parts of this rank's rows that share their prompts, half of each prompt's.

    So nothing tells one part from another, such as the length of its responses, by which plans make
    micro-batches; and what a prompt adds to the gradient can be told from what a sample adds.
    """
    generator = random.Random(seed)
    pairs = -(-LEAST_PARTS // (2 * num_ranks))
    ordered = sorted(rows, key=lambda row: (groups[row], row))
    prompts = [list(each) for _, each in groupby(ordered, groups.__getitem__)]
    generator.shuffle(prompts)

    halves: Rows = []
    for first in range(pairs):
        pair: Rows = [[], []]
        for number, samples in enumerate(prompts[first::pairs]):
            generator.shuffle(samples)
            # The larger half of an odd number goes to each part in turn.
            pair[0] += samples[number % 2 :: 2]
            pair[1] += samples[1 - number % 2 :: 2]
        halves += pair
    return halves


def microbatches(role: DistributedRole, experience: Experience, rows: list[int]) -> Rows:
    """Plan the micro-batches of some of this rank's rows; every rank has equally many."""
    limits = {"max_tokens": role.max_tokens, "batching": role.batching}
    planned = regroup(role.strategy.data, experience.select(rows), **limits)
    return [[rows[index] for index in members] for members in planned]


def measured(learner: Learner, every: int) -> MeasuredLearner:
    """Return the learner with a meter for each `every`-th step."""
    parts = {field.name: getattr(learner, field.name) for field in fields(learner)}
    return MeasuredLearner(**parts, meter=NoiseMeter(learner.role.strategy, every))
