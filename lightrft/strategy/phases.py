"""Who has the device: one model that learns, one model that is asked, or the engine. Changing hands follows a table."""

import os
from enum import Enum

import torch


class Phase(Enum):
    """What is in device memory, and nothing else with --offload_idle."""

    TRAIN = "TRAIN"
    """The model that learns with its optimizer; the engine sleeps."""
    LOGPROB = "LOGPROB"
    """One model at a time, without optimizer; the engine sleeps."""
    REFIT = "REFIT"
    """The actor and the engine's weights, which take over the actor's; the engine's cache sleeps."""
    GENERATE = "GENERATE"
    """The engine, weights and cache."""


WAYS: dict[Phase, dict[Phase, str]] = {
    Phase.TRAIN: {
        Phase.LOGPROB: "prepare_for_logprobs() or finish_training()",
        Phase.REFIT: "offload_before_refit() or engine_awake()",
    },
    Phase.LOGPROB: {
        Phase.TRAIN: "prepare_for_training()",
        Phase.REFIT: "offload_before_refit() or engine_awake()",
    },
    Phase.REFIT: {
        Phase.GENERATE: "prepare_for_generation()",
        Phase.LOGPROB: "finish_generation(): the engine must sleep",
    },
    Phase.GENERATE: {
        Phase.REFIT: "offload_before_refit() or update_engine_weights()",
        Phase.LOGPROB: "finish_generation(): the engine must sleep",
    },
}
"""[from][to]: the verbs that go there. The optimizer never meets the engine, nor a model the engine's cache."""


class PhaseError(RuntimeError):
    """Somebody wants the device while another has it."""

    def __init__(self, here: Phase, there: Phase):
        ways = "; ".join(f"{to.value} by {verbs}" for to, verbs in WAYS[here].items())
        super().__init__(f"phase {there.value} cannot begin in phase {here.value}; the ways from {here.value} are: {ways}")


class Phases:
    """Where a run is. It begins in TRAIN: what prepare() returns is ready to learn."""

    def __init__(self) -> None:
        self.current = Phase.TRAIN
        self.deterministic = False

    def begin_deterministic(self) -> None:
        """Let torch choose kernels that give the same bits in every run, and refuse others, while models have the device.

        Not while the engine has it, whose sampling needs some of those.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.deterministic = True
        torch.use_deterministic_algorithms(not self.engine_has_the_device)

    def end_deterministic(self) -> None:
        """Let torch choose as it does by itself, unless begin_deterministic() was not called: then it is the caller's choice."""
        if self.deterministic:
            self.deterministic = False
            torch.use_deterministic_algorithms(False)

    def enter(self, phase: Phase) -> None:
        """Staying is always legal. PhaseError where the table has no way, or the way needs the engine to sleep first."""
        if phase is self.current:
            return
        if phase not in WAYS[self.current] or (self.engine_has_the_device and phase is Phase.LOGPROB):
            raise PhaseError(self.current, phase)
        self._become(phase)

    def leave_engine(self) -> None:
        """The engine sleeps: from REFIT and GENERATE to LOGPROB."""
        if self.engine_has_the_device:
            self._become(Phase.LOGPROB)

    def _become(self, phase: Phase) -> None:
        self.current = phase
        if self.deterministic:
            torch.use_deterministic_algorithms(not self.engine_has_the_device)

    @property
    def engine_has_the_device(self) -> bool:
        return self.current in (Phase.REFIT, Phase.GENERATE)
