"""Verbs of device memory: enter phases, and move models and optimizers between device and host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from lightrft.backends.base import Backend, Offloaded
from lightrft.backends.offload import has_gradients, is_offloaded
from lightrft.parallel.device import current_device, release_cached_memory, synchronize
from lightrft.parallel.mesh import world_axis
from lightrft.strategy.phases import Phase, Phases


class MemoryVerbs(Backend):
    """Part of StrategyBase with the verbs of device memory. All ranks call every verb together."""

    def __init__(self) -> None:
        self._phases = Phases()
        self.undivided = set()
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._unsummed: set[nn.Module] = set()
        """Models with gradients that have not been summed over the ranks."""
        self._offloaded: dict[nn.Module | Optimizer, Offloaded] = {}

    @property
    def phase(self) -> Phase:
        return self._phases.current

    def enter(self, phase: Phase, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        """Enter `phase`: load what it needs to the device, after offloading everything else with --offload_idle.

        TRAIN needs the model in training and its optimizer, LOGPROB the model that computes log-probs, REFIT the actor, GENERATE
        none. The engine is not moved here: its own verbs wake it and put it to sleep. Raises PhaseError for illegal transitions.
        """
        self._phases.enter(phase)
        self._know(model, optimizer)
        if self.config.offload_idle:
            for other in self._models:
                if other is not model:
                    self.offload_model(other)
            for other in self._optimizers:
                if other is not optimizer:
                    self.maybe_offload_optimizer(other)
        if model is not None:
            self.reload_model(model)
        if optimizer is not None:
            self.maybe_load_optimizer(optimizer)

    @contextmanager
    def _emptied_device(self) -> Iterator[None]:
        """Enter REFIT with an empty device: inside, models and optimizers are in host memory, with or without --offload_idle.

        A model with gradients stays. Cached memory is released too. Without --offload_idle everything that was on the device is
        loaded back afterwards.
        """
        resident = [item for item in (*self._models, *self._optimizers) if item not in self._offloaded]
        self._phases.enter(Phase.REFIT)
        for model in self._models:
            if model not in self._unsummed and not self.holds_gradients(model):
                self.offload_model(model)
        for optimizer in self._optimizers:
            self.maybe_offload_optimizer(optimizer)
        self.sync_and_clear_cache()
        try:
            yield
        finally:
            for item in resident if not self.config.offload_idle else ():
                self._bring_back(item)

    def offload_model(self, model: nn.Module) -> None:
        """Move a prepared model to host memory and free its device memory; parameters stay the same objects.

        Raises RuntimeError if it holds gradients; using an offloaded model raises one too. An offloaded model is left as it is.
        """
        if model in self._unsummed or self.holds_gradients(model):
            raise RuntimeError(has_gradients(model))
        if model not in self._offloaded and not self.lives_on_host(model):
            self._offloaded[model] = self.offload_model_state(model)

    def reload_model(self, model: nn.Module) -> None:
        """Move an offloaded model back to the device, bit-identical; do nothing for one that is not offloaded."""
        self._bring_back(model)

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> None:
        """Move the optimizer's state to host memory, unless it is there already."""
        if optimizer not in self._offloaded and not self.lives_on_host(optimizer):
            self._offloaded[optimizer] = self.offload_optimizer_state(optimizer)

    def maybe_load_optimizer(self, optimizer: Optimizer) -> None:
        """Move an offloaded optimizer back to the device, bit-identical; do nothing for one that is not offloaded."""
        self._bring_back(optimizer)

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Wait until this device has finished and all ranks have called this, then release cached memory."""
        device = current_device()
        synchronize(device)
        world_axis().barrier()
        release_cached_memory(device)

    def _know(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        if model is not None and all(model is not other for other in self._models):
            self._models.append(model)
        if optimizer is not None and all(optimizer is not other for other in self._optimizers):
            self._optimizers.append(optimizer)

    def _check_here(self, *items: nn.Module | Optimizer) -> None:
        for item in items:
            if item in self._offloaded:
                raise RuntimeError(is_offloaded(item))

    def _bring_back(self, item: nn.Module | Optimizer | None) -> None:
        if item in self._offloaded:
            self._offloaded.pop(item).reload(self.device)
