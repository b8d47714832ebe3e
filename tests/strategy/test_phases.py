"""One at a time has the device, and what takes turns follows the table."""

from itertools import product

import pytest
import torch
from torch import nn

from lightrft.engine.build import build_engine
from lightrft.strategy import FSDPStrategy
from lightrft.strategy.device_memory import Phases
from lightrft.strategy.phases import Phase, PhaseError
from ranks import run_ranks
from strategy.training import load, strategy

TRAIN, LOGPROB, REFIT, GENERATE = Phase
LEGAL = {
    (TRAIN, LOGPROB),
    (TRAIN, REFIT),
    (LOGPROB, TRAIN),
    (LOGPROB, REFIT),
    (REFIT, GENERATE),
    (GENERATE, REFIT),
}
"""Without the engine's sleep, which alone leads from REFIT and GENERATE to LOGPROB."""


@pytest.mark.parametrize(("here", "there"), list(product(Phase, Phase)))
def test_every_transition(here, there):
    phases = Phases()
    phases.current = here
    if here is there or (here, there) in LEGAL:
        phases.enter(there)
        assert phases.current is there
    else:
        with pytest.raises(PhaseError):
            phases.enter(there)
        assert phases.current is here


@pytest.mark.parametrize(
    ("here", "after"), [(TRAIN, TRAIN), (LOGPROB, LOGPROB), (REFIT, LOGPROB), (GENERATE, LOGPROB)]
)
def test_the_engine_sleeps(here, after):
    phases = Phases()
    phases.current = here
    phases.leave_engine()
    assert phases.current is after


def test_the_error_names_both_phases_and_the_ways():
    phases = Phases()
    with pytest.raises(PhaseError) as caught:
        phases.enter(GENERATE)
    assert (
        str(caught.value)
        == "phase GENERATE cannot begin in phase TRAIN; the ways from TRAIN are: LOGPROB by"
        " prepare_for_logprobs() or finish_training(); REFIT by offload_before_refit() or"
        " engine_awake()"
    )
    phases.enter(REFIT)
    phases.enter(GENERATE)
    with pytest.raises(PhaseError) as caught:
        phases.enter(TRAIN)
    assert (
        str(caught.value)
        == "phase TRAIN cannot begin in phase GENERATE; the ways from GENERATE are: REFIT by"
        " offload_before_refit() or update_engine_weights(); LOGPROB by finish_generation(): the"
        " engine must sleep"
    )


def here(*models: nn.Module) -> list[bool]:
    return [next(model.parameters()).device.type != "meta" for model in models]


def optimizer_here(optimizer) -> bool:
    return all(state["exp_avg"].device.type != "meta" for state in optimizer.state.values())


def who_is_here(folder: str, flag: bool):
    """(phase, [actor, reference], optimizer) along one step."""
    made = strategy(
        pretrain=folder, engine_type="hf", prompt_max_len=8, generate_max_len=8, offload_idle=flag
    )
    actor = load(folder)
    reference = load(folder).requires_grad_(False)
    optimizer = made.create_optimizer(actor, lr=1e-2)
    made.prepare((actor, optimizer), reference)
    for parameter in actor.parameters():
        parameter.grad = parameter.detach().clone()
    made.optimizer_step(optimizer, actor)
    seen = []

    def look():
        seen.append((made.phase, here(actor, reference), optimizer_here(optimizer)))

    def build(*args, **kwargs):
        look()
        return build_engine(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightrft.engine.build.build_engine", build)
        made.setup_inference_engine(actor=actor)

    look()
    with made.engine_awake(actor):
        look()
    look()

    for model in (actor, reference):
        made.enter(Phase.LOGPROB, model)
        look()

    made.enter(Phase.TRAIN, actor, optimizer)
    look()
    made.update_engine_weights(actor)
    look()

    return seen


def test_idle_models_leave_the_device(folder):
    assert run_ranks(1, who_is_here, folder, True)[0] == [
        (REFIT, [False, False], False),
        (LOGPROB, [False, False], False),
        (GENERATE, [False, False], False),
        (LOGPROB, [False, False], False),
        (LOGPROB, [True, False], False),
        (LOGPROB, [False, True], False),
        (TRAIN, [True, False], True),
        (REFIT, [True, False], False),
    ]


def test_without_the_flag_they_leave_only_while_the_engine_is_built(folder):
    (phase, there, optimizer), *later = run_ranks(1, who_is_here, folder, False)[0]
    assert (phase, there, optimizer) == (REFIT, [False, False], False)
    assert {(*there, optimizer) for _, there, optimizer in later} == {(True, True, True)}


class Keeping(FSDPStrategy):
    """Models stay on the device."""

    def offload_model(self, model):
        pass


def kept(folder: str) -> list[bool]:
    """Return whether the actor is on the device before, while and after the engine is built.

    The strategy overrides the verb.
    """
    made = Keeping(
        seed=1,
        args={"pretrain": folder, "engine_type": "hf", "prompt_max_len": 8, "generate_max_len": 8},
    )
    made.setup_distributed()
    actor = made.prepare(load(folder))
    seen = here(actor)

    def build(*args, **kwargs):
        seen.extend(here(actor))
        return build_engine(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightrft.engine.build.build_engine", build)
        made.setup_inference_engine(actor=actor)
    return seen + here(actor)


def test_the_engine_is_built_through_the_verbs_that_a_strategy_overrides(folder):
    assert run_ranks(1, kept, folder) == [[True, True, True]]


def determinism(flags: dict) -> list[bool]:
    """Return whether torch is deterministic in each phase.

    The phases are training, twice while the engine has the device, training again, and the end.
    """
    torch.use_deterministic_algorithms(flags.pop("before", False))
    made = strategy(**flags)
    found = []
    for phase in (TRAIN, REFIT, GENERATE):
        made.enter(phase)
        found.append(torch.are_deterministic_algorithms_enabled())
    made.memory.phases.leave_engine()
    found.append(torch.are_deterministic_algorithms_enabled())
    made.close()
    return [*found, torch.are_deterministic_algorithms_enabled()]


def test_kernels_are_deterministic_while_models_have_the_device():
    assert run_ranks(1, determinism, {"deterministic": True}) == [[True, False, False, True, False]]
    for chosen_by_the_caller in (False, True):
        assert run_ranks(1, determinism, {"before": chosen_by_the_caller}) == [
            [chosen_by_the_caller] * 5
        ]
