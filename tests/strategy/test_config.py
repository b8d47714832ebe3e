import copy
import pickle
from argparse import Namespace
from dataclasses import fields

import pytest
from easydict import EasyDict

from lightrft.config import SECTIONS, Config
from lightrft.strategy import FSDPStrategy, StrategyConfig, get_strategy
from lightrft.strategy.config import sequence_layout

VALUES = {"fsdp": True, "bf16": True, "engine_tp_size": 2, "my_flag": 3}


@pytest.mark.parametrize("args", [VALUES, EasyDict(VALUES), Namespace(**VALUES)], ids=lambda args: type(args).__name__)
def test_from_whatever_the_caller_holds(args):
    config = StrategyConfig.from_args(args)
    assert (config.bf16, config.engine_tp_size, config.my_flag) == (True, 2, 3)
    assert config.extra_args == {"my_flag": 3}
    assert config.engine_sleep_level == 2
    assert StrategyConfig.from_args(config) == config


def test_from_the_typed_configuration():
    whole = Config()
    whole.model.bf16, whole.rollout.generate_max_len = True, 7
    config = StrategyConfig.from_args(whole)
    assert (config.bf16, config.generate_max_len) == (True, 7)
    assert config.extra_args["advantage_estimator"] == "grpo" and config.max_norm == 1.0
    knobs = {name for section in SECTIONS.values() for name in section.__dataclass_fields__}
    assert {f.name for f in fields(config)} - knobs == {"extra_args"}


def test_defaults():
    assert StrategyConfig.from_args(None) == StrategyConfig()
    assert StrategyConfig.from_args(Namespace(engine_tp_size=None)).engine_tp_size == 1


def test_unknown_attribute_and_unknown_kind_of_args():
    config = StrategyConfig.from_args(VALUES)
    with pytest.raises(AttributeError, match="no 'my_flagg'"):
        _ = config.my_flagg
    with pytest.raises(TypeError, match="not list"):
        StrategyConfig.from_args([1])


def test_copies_and_pickles():
    config = StrategyConfig.from_args(VALUES)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize("values, says", [
    ({"engine_type": "tgi"}, "unknown engine_type 'tgi'; known: auto"), ({"timeout_minutes": 0}, "above 0"),
    ({"sp_impl": "ring"}, "unknown sp_impl 'ring'; known: auto, ulysses, zigzag"),
    ({"cp_size": 2, "sp_impl": "ulysses"}, "--cp_size 2 is short for .* contradicts --sp_impl ulysses: drop one"),
])
def test_check(values, says):
    with pytest.raises(ValueError, match=says):
        StrategyConfig.from_args(values).check()


@pytest.mark.parametrize(("values", "layout"), [
    ({}, (1, "ulysses")), ({"sp_size": 2}, (2, "ulysses")), ({"sp_size": 2, "sp_impl": "zigzag"}, (2, "zigzag")),
    ({"cp_size": 4}, (4, "zigzag")), ({"cp_size": 4, "sp_size": 4, "sp_impl": "zigzag"}, (4, "zigzag")),
])
def test_cp_size_is_short_for_zigzag(values, layout):
    config = StrategyConfig.from_args(values)
    config.check()
    assert sequence_layout(config) == layout


def test_get_strategy():
    made = get_strategy(Namespace(fsdp=True, seed=5, max_norm=0.5, train_batch_size=64, micro_train_batch_size=None))
    assert isinstance(made, FSDPStrategy)
    assert (made.seed, made.max_norm, made.train_batch_size, made.micro_train_batch_size) == (5, 0.5, 64, None)
    config = Config()
    config.strategy.fsdp, config.train.seed = True, 9
    assert get_strategy(config).seed == 9


def test_deepspeed_is_not_there_yet():
    with pytest.raises(ValueError, match="pass --fsdp"):
        get_strategy({"fsdp": False})
