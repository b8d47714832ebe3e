"""Why: users override verbs as Python overrides methods, and the aspects of a strategy must call
what they have overridden.
"""

import inspect

from torch import nn

from lightrft.strategy import DeepSpeedStrategy, FSDPStrategy, StrategyBase
from lightrft.strategy.phases import Phase


class Kept(FSDPStrategy):
    """A middle class that keeps models on the device, and counts."""

    def __init__(self) -> None:
        super().__init__(args={"offload_idle": True})
        self.calls: list[str] = []

    def offload_model(self, model: nn.Module) -> None:
        self.calls.append("offload_model")

    def reload_model(self, model: nn.Module) -> None:
        self.calls.append("reload_model")
        super().reload_model(model)

    def engine_lags(self, version: int | None = None) -> None:
        self.calls.append("engine_lags")
        super().engine_lags(version)


class Last(Kept):
    pass


def test_the_aspects_call_the_verbs_that_a_subclass_overrides():
    made = Last()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    made.memory.register(first, None)
    made.enter(Phase.LOGPROB, second)
    assert made.calls == ["offload_model", "reload_model"] and not made.memory.offloaded


def test_a_checkpoint_tells_the_engine_by_the_verb():
    made = Last()
    made.load_state_dict({"weight_version": 3})
    assert made.calls == ["engine_lags"]


def test_there_is_one_hierarchy_and_both_strategies_import_without_deepspeed():
    assert FSDPStrategy.__bases__ == DeepSpeedStrategy.__bases__ == (StrategyBase,)
    assert inspect.signature(StrategyBase.offload_model).parameters.keys() == {"self", "model"}
