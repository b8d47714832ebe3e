"""Say what a run is doing, because that decides what must be in device memory."""

import os
from enum import Enum

import torch


class Phase(Enum):
    """Activity of a run. It decides what must be in device memory.

    With --offload_idle nothing else is there.
    """

    TRAIN = "TRAIN"
    """One model in training with an optimizer; the engine sleeps."""
    LOGPROB = "LOGPROB"
    """One model at a time, without an optimizer; the engine sleeps."""
    REFIT = "REFIT"
    """The actor, and the engine's weights that come from it; the engine's cache sleeps."""
    GENERATE = "GENERATE"
    """Engine with weights and cache."""


OF_ENGINE = (Phase.REFIT, Phase.GENERATE)
"""Phases in which the engine has the device."""
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
"""Legal transitions, [from][to]: the verbs that make them. The engine never shares the device with
an optimizer, and the engine's cache never with a model."""


class PhaseError(RuntimeError):
    """Illegal transition between phases."""

    def __init__(self, current: Phase, target: Phase):
        ways = "; ".join(f"{to.value} by {verbs}" for to, verbs in WAYS[current].items())
        super().__init__(
            f"phase {target.value} cannot begin in phase {current.value}; the ways from"
            f" {current.value} are: {ways}"
        )


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
        torch.utils.deterministic.fill_uninitialized_memory = False
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
