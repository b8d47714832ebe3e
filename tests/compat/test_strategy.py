"""The core needs none of the verbs of other tools, and calls those that a user overrides."""

import pytest

from lightrft.cli import train_ppo
from lightrft.compat.strategy import FSDPStrategy, StrategyBase
from lightrft.strategy.fsdp import FSDP2
from runs import PPO, prepare

VERBS = {name: own.replaces for name, own in vars(StrategyBase).items() if hasattr(own, "replaces")}
"""Verb -> (part, method) that it stands for."""


def test_a_part_calls_the_verb_that_a_subclass_overrides():
    """A verb may also be a classmethod, and set on the class after it was made."""

    class Own(FSDPStrategy):
        pass

    assert len(VERBS) == 23
    for name in VERBS:
        setattr(Own, name, lambda self, *args, name=name: (name, args))
    Own.report_memory = classmethod(lambda cls, *args: ("report_memory", args))

    made = Own()
    for name, (part, method) in VERBS.items():
        assert getattr(getattr(made, part), method)("argument") == (name, ("argument",))


def test_a_part_is_left_alone_without_an_override():
    made = FSDPStrategy()
    for part, method in VERBS.values():
        assert method not in vars(getattr(made, part))


def test_an_override_may_call_the_verb_that_it_overrides():
    class Counting(FSDPStrategy):
        calls = 0

        def engine_lags(self, version=None):
            self.calls += 1
            super().engine_lags(version)

    made = Counting()
    made.host.invalidate_weights(3)
    assert made.calls == 1


def test_a_method_of_a_part_may_be_overridden_in_a_middle_class():
    class Middle(FSDPStrategy):
        def offload_model(self, model):
            return "kept"

    class Last(Middle):
        pass

    assert Last().memory.offload_model(None) == "kept"


@pytest.mark.slow
def test_a_run_needs_no_verb_of_other_tools(tmp_path):
    """The core's own class trains, evaluates, saves and resumes."""
    assert not any(hasattr(FSDP2, name) for name in VERBS)

    flags = [flag for flag in prepare(tmp_path) if flag != "--fsdp"]
    flags += [
        "--strategy=lightrft.strategy.fsdp:FSDP2",
        "--enable_ema",
        "--offload_idle",
        "--enable_engine_sleep",
        "--save_steps=1",
        "--save_hf_ckpt",
        f"--save_path={tmp_path}/run",
    ]
    for steps in (1, 2):
        with pytest.raises(SystemExit) as end:
            train_ppo.main([*PPO, *flags, f"--max_steps={steps}", "--load_checkpoint"])
        assert end.value.code == 0
