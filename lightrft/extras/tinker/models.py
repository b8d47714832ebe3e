"""Several trained models that take turns in one actor, and snapshots of them for sampling."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightrft.algorithms.roles.policy import Policy
from lightrft.extras.tinker.records import RequestRefused
from lightrft.models.parallel.device import local_tensor
from lightrft.strategy.phases import Phase

Shards = list[Tensor]
"""This rank's shard of each trained parameter, in host memory."""


@dataclass(slots=True)
class TrainedModel:
    """Weights that one client trains: all of them with full fine-tuning, else an adapter."""

    name: str
    version: int = 0
    """Number of changes of the parameters so far."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Sum of the gradients since the last optimizer step, of each trained parameter."""
    parameters: Shards = field(default_factory=list)
    """Parameters while another model has the actor."""
    moments: list[dict[str, Any]] = field(default_factory=list)
    """State of the optimizer meanwhile, of each parameter."""
    problem: str = ""
    """Why the model cannot be used until other weights are loaded; empty: it can."""

    @property
    def key(self) -> Hashable:
        """Return the name of the parameters as they are now."""
        return self.name, self.version


class Models:
    """The models of all clients. One of them at a time has the actor and the optimizer.

    Only trained parameters differ between them, and each rank moves its own shards. All ranks call
    every method together.
    """

    def __init__(self, policy: Policy, *, num_snapshots: int):
        """Take the actor as it is as the beginning of each model, and keep `num_snapshots`."""
        self.policy = policy
        self.num_snapshots = num_snapshots
        self.trained = [each for each in policy.actor.parameters() if each.requires_grad]
        self.models: dict[str, TrainedModel] = {}
        self.current: TrainedModel | None = None
        """Model that has the actor; None while a snapshot has it."""
        self.sampled: set[Hashable] = set()
        """Keys of parameters that clients may sample from."""
        self._beginning = self._copy()
        self._snapshots: OrderedDict[Hashable, Shards] = OrderedDict()

    def create(self, name: str) -> TrainedModel:
        """Make a model with the parameters of --pretrain, and give it the actor."""
        self.policy.strategy.enter(Phase.TRAIN, self.policy.actor, self.policy.optimizer)
        self._set_aside()
        self._put(self._beginning)
        self.policy.optimizer.state.clear()
        self.current = self.models[name] = TrainedModel(name, gradients=[None] * len(self.trained))
        return self.current

    def drop(self, name: str) -> None:
        """Forget a model; snapshots of it stay."""
        model = self.models.pop(name)
        if self.current is model:
            self.current = None

    def usable(self, name: str) -> TrainedModel:
        """Return a model. Raises RequestRefused if it is broken."""
        model = self.models[name]
        if model.problem:
            raise RequestRefused(model.problem)
        return model

    def take(self, name: str) -> TrainedModel:
        """Give a model the actor and the optimizer. Raises RequestRefused if it is broken."""
        model = self.usable(name)
        self.policy.strategy.enter(Phase.TRAIN, self.policy.actor, self.policy.optimizer)
        if self.current is not model:
            self._set_aside()
            self._put(model.parameters)
            self._put_moments(model.moments)
            self.current = model
            model.parameters = []
            model.moments = []
        return model

    def take_key(self, key: Hashable) -> None:
        """Give the actor to the parameters of this key. Raises RequestRefused if they are gone."""
        for model in self.models.values():
            if model.key == key:
                self.take(model.name)
                return

        shards = self._beginning
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            shards = self._snapshots[key]
        elif key is not None:
            raise RequestRefused(
                "the weights of this sampling client are gone: the server keeps the newest"
                f" {self.num_snapshots} that were sampled from. Create another client, or save"
                " weights by name (save_weights_for_sampler)"
            )
        self.policy.strategy.enter(Phase.TRAIN, self.policy.actor, self.policy.optimizer)
        self._set_aside()
        self._put(shards)

    def keep(self, key: Hashable) -> None:
        """Keep the actor's parameters for sampling."""
        self._snapshots[key] = self._copy()
        while len(self._snapshots) > self.num_snapshots:
            self._snapshots.popitem(last=False)

    def has(self, key: Hashable) -> bool:
        return key in self._snapshots

    def changes(self, model: TrainedModel) -> None:
        """Note that the parameters of the current model are about to change."""
        # A copy is made only now, as most clients sample before the next step and not after it.
        if model.key in self.sampled:
            self.sampled.discard(model.key)
            self.keep(model.key)
        model.version += 1

    def check(self, model: TrainedModel, cause: str) -> None:
        """Look at the parameters of the current model after a change.

        Raises RequestRefused, now and whenever the model is used, if they are too large or are no
        numbers.
        """
        if not self.are_finite():
            model.problem = (
                f"the weights of {model.name} are too large or no numbers since {cause}: load saved"
                " weights into it (load_state), or begin again with a smaller learning rate"
            )
            raise RequestRefused(model.problem)

    def are_finite(self) -> bool:
        """Return True if the norm of the actor's trained parameters is finite, on all ranks."""
        norm = get_total_norm([local_tensor(each).detach() for each in self.trained])
        return all(self.policy.strategy.mesh.world.gather(bool(norm.isfinite())))

    def collect_gradients(self, model: TrainedModel) -> None:
        """Move the gradients of the actor to the model's sum."""
        # Each request sums its own gradients over the ranks, and an actor that has none can leave
        # the device.
        for index, parameter in enumerate(self.trained):
            gradient = parameter.grad
            parameter.grad = None
            total = model.gradients[index]
            if gradient is not None:
                model.gradients[index] = gradient if total is None else total.add_(gradient)

    def give_gradients(self, model: TrainedModel) -> None:
        """Move the model's gradients to the actor, for an optimizer step."""
        for parameter, gradient in zip(self.trained, model.gradients, strict=True):
            parameter.grad = gradient
        model.gradients = [None] * len(self.trained)

    # -- internals

    def _set_aside(self) -> None:
        """Copy the current model to host memory, so that others can have the actor."""
        model = self.current
        self.current = None
        if model is not None:
            model.parameters = self._copy()
            state = self.policy.optimizer.state
            model.moments = [
                {name: _saved(name, value) for name, value in state.get(parameter, {}).items()}
                for parameter in self.trained
            ]

    def _copy(self) -> Shards:
        return [local_tensor(each).detach().to("cpu", copy=True) for each in self.trained]

    @torch.no_grad()
    def _put(self, shards: Shards) -> None:
        for parameter, shard in zip(self.trained, shards, strict=True):
            local_tensor(parameter).copy_(shard)

    @torch.no_grad()
    def _put_moments(self, moments: list[dict[str, Any]]) -> None:
        state = self.policy.optimizer.state
        state.clear()
        for parameter, saved in zip(self.trained, moments, strict=True):
            for name, value in saved.items():
                # A moment is sharded like the parameter.
                if name != STEP_STATE:
                    moment = torch.empty_like(parameter)
                    local_tensor(moment).copy_(value)
                    value = moment
                state[parameter][name] = value


STEP_STATE = "step"
"""State of AdamW that is a number, and not sharded."""


def _saved(name: str, value: Tensor) -> Tensor:
    return value if name == STEP_STATE else local_tensor(value).to("cpu", copy=True)
