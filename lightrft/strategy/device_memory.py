"""Decide what is in device memory: models and optimizers move between the device and the host.

The phase of the run says who has the device: a model in training, one that computes log-probs, or
the engine.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from lightrft.core.metrics import GB
from lightrft.models.parallel.device import current_device, memory_in_use, peak_memory
from lightrft.models.parallel.mesh import process_rank
from lightrft.strategy.backends.base import Backend
from lightrft.strategy.backends.offload import Offloaded, has_gradients, is_offloaded
from lightrft.strategy.phases import OF_ENGINE, WAYS, Phase, PhaseError


class Phases:
    """Current phase of a run. It begins in TRAIN, because prepared models are ready to train."""

    def __init__(self) -> None:
        self.current = Phase.TRAIN
        self.deterministic = False

    def begin_deterministic(self) -> None:
        """Allow only deterministic algorithms of torch while models have the device.

        The engine's phases allow all, because sampling needs nondeterministic kernels.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        self.deterministic = True
        torch.use_deterministic_algorithms(self.current not in OF_ENGINE)

    def end_deterministic(self) -> None:
        """Restore torch's default choice of algorithms, if begin_deterministic() was called."""
        if self.deterministic:
            self.deterministic = False
            torch.use_deterministic_algorithms(False)

    def enter(self, phase: Phase, *, engine_sleeps: bool = False) -> None:
        """Enter `phase`; the current one is always legal.

        Raises PhaseError if the table has no such transition, or if the engine must sleep first;
        `engine_sleeps` says that it does.
        """
        if phase is self.current:
            return
        engine_stays = self.current in OF_ENGINE and phase is Phase.LOGPROB and not engine_sleeps
        if phase not in WAYS[self.current] or engine_stays:
            raise PhaseError(self.current, phase)

        self.current = phase
        if self.deterministic:
            torch.use_deterministic_algorithms(phase not in OF_ENGINE)

    def leave_engine(self) -> None:
        """Change from REFIT or GENERATE to LOGPROB, because the engine sleeps."""
        if self.current in OF_ENGINE:
            self.enter(Phase.LOGPROB, engine_sleeps=True)


class DeviceMemory:
    """The models and optimizers of a run, and the phase that says which of them need the device.

    strategy.enter(Phase.TRAIN, model, optimizer)
    strategy.offload_model(reference)
    strategy.report_memory("models are ready;")
    """

    def __init__(self, strategy: Backend):
        self.strategy = strategy
        self.phases = Phases()
        self.items: list[nn.Module | Optimizer] = []
        """Models and optimizers of the run."""
        self.unsummed: set[nn.Module] = set()
        """Models with gradients that were not summed over the ranks yet."""
        self.offloaded: dict[nn.Module | Optimizer, Offloaded] = {}

    def register(self, *items: nn.Module | Optimizer | None) -> None:
        for item in items:
            if item is not None and all(item is not other for other in self.items):
                self.items.append(item)

    def forget(self) -> None:
        """Drop the references to all models and optimizers that are on the device."""
        self.items = []

    # -- phases

    @property
    def phase(self) -> Phase:
        return self.phases.current

    def enter(
        self, phase: Phase | str, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """Enter `phase`, also by name, and load the model and the optimizer that it needs to the device.

        TRAIN needs the model in training and its optimizer, LOGPROB the model that computes
        log-probs, REFIT the actor, and GENERATE nothing. With --offload_idle, everything else is
        offloaded first. The engine is not moved here; it wakes and sleeps by itself. Raises
        PhaseError for an illegal transition. With --overlap, models compute log-probs while the
        engine generates, and the phase stays GENERATE.
        """
        phase = phase if isinstance(phase, Phase) else Phase[phase.upper()]
        overlapping = (self.phases.current, phase) == (Phase.GENERATE, Phase.LOGPROB)
        # The engine keeps the device then; the models compute beside it.
        if overlapping and self.strategy.config.rollout.overlap:
            return

        self.phases.enter(phase)
        self.register(model, optimizer)

        if self.strategy.config.strategy.offload_idle:
            # Everything leaves before anything comes, so the device never holds both.
            for other in self.items:
                if other is not model and other is not optimizer:
                    self.offload(other)

        if model is not None:
            self.strategy.reload_model(model)
        if optimizer is not None:
            self.strategy.maybe_load_optimizer(optimizer)

    # -- moves

    def holds_gradients(self, model: nn.Module) -> bool:
        return model in self.unsummed or self.strategy.holds_gradients(model)

    def offload_model(self, model: nn.Module) -> None:
        """Move a prepared model to host memory, unless it is there already.

        Parameters stay the same objects; using them before reload_model() raises RuntimeError.
        Raises RuntimeError too if the model holds gradients, because they would be lost.
        """
        if self.holds_gradients(model):
            raise RuntimeError(has_gradients(model))
        if model not in self.offloaded and not self.strategy.lives_on_host(model):
            self.offloaded[model] = self.strategy.offload_model_state(model)

    def offload_optimizer(self, optimizer: Optimizer) -> None:
        """Move the optimizer's state to host memory, unless it is there already."""
        if optimizer not in self.offloaded and not self.strategy.lives_on_host(optimizer):
            self.offloaded[optimizer] = self.strategy.offload_optimizer_state(optimizer)

    def reload_model(self, model: nn.Module) -> None:
        """Move a model back to the device, bit-identical, if it is offloaded."""
        if model in self.offloaded:
            self.offloaded.pop(model).reload(self.strategy.device)

    def reload_optimizer(
        self, optimizer: Optimizer, device: torch.device | int | str | None = None
    ) -> None:
        """Move an optimizer back to the device, bit-identical, if it is offloaded.

        `device` is accepted for code of LightRFT: an optimizer returns to the device of this rank.
        """
        if optimizer in self.offloaded:
            self.offloaded.pop(optimizer).reload(self.strategy.device)

    def offload(self, item: nn.Module | Optimizer) -> None:
        if isinstance(item, nn.Module):
            self.strategy.offload_model(item)
        else:
            self.strategy.maybe_offload_optimizer(item)

    def reload(self, item: nn.Module | Optimizer | None) -> None:
        if isinstance(item, nn.Module):
            self.strategy.reload_model(item)
        elif item is not None:
            self.strategy.maybe_load_optimizer(item)

    def check_loaded(self, *items: nn.Module | Optimizer) -> None:
        """Raise RuntimeError with the remedy if an item is offloaded."""
        for item in items:
            if item in self.offloaded:
                raise RuntimeError(is_offloaded(item))

    @contextmanager
    def loaded(self, *items: nn.Module | Optimizer | None) -> Generator[bool]:
        """Keep items on the device inside the context; offload them again afterwards.

        Yields True if any of them was offloaded.
        """
        offloaded = [item for item in items if item is not None and item in self.offloaded]
        for item in offloaded:
            self.reload(item)

        yield bool(offloaded)

        for item in offloaded:
            self.offload(item)

    @contextmanager
    def emptied(self) -> Generator[None]:
        """Enter REFIT with an empty device, with or without --offload_idle.

        Only models with gradients stay. Everything comes back afterwards, except with
        --offload_idle.
        """
        resident = [item for item in self.items if item not in self.offloaded]
        self.phases.enter(Phase.REFIT)

        for item in self.items:
            if isinstance(item, Optimizer) or not self.holds_gradients(item):
                self.offload(item)
        self.strategy.sync_and_clear_cache()

        try:
            yield
        finally:
            if not self.strategy.config.strategy.offload_idle:
                for item in resident:
                    self.reload(item)


def memory_report(prefix: str = "") -> dict[str, float]:
    """Return the memory in use and the peak in GB, of the accelerator or of this process.

    Rank 0 also logs its own. Other ranks need not call this.
    """
    device = current_device()
    memory = {
        "memory/in_use_gb": memory_in_use(device) / GB,
        "memory/peak_gb": peak_memory(device) / GB,
    }
    if process_rank() == 0:
        values = (f"{name.split('/')[1]} {value:.2f}" for name, value in memory.items())
        logger.info("{}", " ".join([f"{prefix} memory:".lstrip(), *values]))

    return memory
