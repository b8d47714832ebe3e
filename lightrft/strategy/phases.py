"""Say what a run is doing, because that decides what must be in device memory."""

from enum import Enum


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
