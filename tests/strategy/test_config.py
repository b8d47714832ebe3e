import copy
import pickle
import sys
from argparse import Namespace

import pytest
from easydict import EasyDict

from lightrft.config import (
    Config,
    ConfigError,
    as_config,
    check_strategy,
    deepspeed_problems,
    section_of_field,
    sequence_layout,
)
from lightrft.strategy import FSDPStrategy, get_strategy

VALUES = {"fsdp": True, "bf16": True, "engine_tp_size": 2, "my_flag": 3}


@pytest.mark.parametrize(
    "args", [VALUES, EasyDict(VALUES), Namespace(**VALUES)], ids=lambda args: type(args).__name__
)
def test_from_whatever_the_caller_holds(args):
    config = as_config(args)
    assert (config.model.bf16, config.engine.engine_tp_size, config.engine.engine_sleep_level) == (
        True,
        2,
        2,
    )
    assert (config.bf16, config.engine_tp_size, config.my_flag) == (True, 2, 3)
    assert config.extra_args == {"my_flag": 3}


def test_a_strategy_reads_the_configuration_of_the_run_itself():
    whole = Config()
    assert as_config(whole) is whole and FSDPStrategy(args=whole).config is whole
    whole.model.bf16 = True
    assert whole.bf16 and whole.advantage_estimator == "grpo" and whole.max_norm == 1.0


def test_defaults():
    assert as_config(None) == Config()
    assert as_config(Namespace(engine_tp_size=None)).engine.engine_tp_size == 1


def test_names_of_sections_that_strategies_do_not_read_belong_to_the_caller():
    config = as_config({"use_wandb": "a key", "seed": None})
    assert config.extra_args == {"use_wandb": "a key", "seed": None}
    assert config.use_wandb == "a key" and config.seed is None, (
        "not the defaults of fields that were never set"
    )


def test_unknown_attribute_and_unknown_kind_of_args():
    config = as_config(VALUES)
    with pytest.raises(AttributeError, match="no 'my_flagg'"):
        _ = config.my_flagg
    with pytest.raises(TypeError, match="not list"):
        as_config([1])


def test_copies_and_pickles():
    config = as_config(VALUES)
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert copied == config and copied.my_flag == 3


@pytest.mark.parametrize(
    "values, says",
    [
        ({"engine_type": "tgi"}, "engine_type 'tgi': unknown"),
        ({"timeout_minutes": 0}, "above 0"),
        ({"arrival_minutes": 0}, "above 0"),
        ({"sp_impl": "ring"}, "sp_impl: invalid choice 'ring'; choose from auto, ulysses, zigzag"),
        (
            {"cp_size": 2, "sp_impl": "ulysses"},
            "--cp_size 2 is short for .* contradicts --sp_impl ulysses: set only one",
        ),
        (
            {"offload_idle": True, "fsdp_cpu_offload": True},
            "--offload_idle with --fsdp_cpu_offload, which leaves nothing to move",
        ),
    ],
)
def test_check(values, says):
    with pytest.raises(ValueError, match=says):
        check_strategy(as_config(values))
    config = Config()
    for name, value in values.items():
        setattr(getattr(config, section_of_field()[name]), name, value)
    with pytest.raises(ValueError, match=says):
        check_strategy(config)


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({}, (1, "ulysses")),
        ({"sp_size": 2}, (2, "ulysses")),
        ({"sp_size": 2, "sp_impl": "zigzag"}, (2, "zigzag")),
        ({"cp_size": 4}, (4, "zigzag")),
        ({"cp_size": 4, "sp_size": 4, "sp_impl": "zigzag"}, (4, "zigzag")),
    ],
)
def test_cp_size_is_short_for_zigzag(values, layout):
    config = as_config(values)
    check_strategy(config)
    assert sequence_layout(config.strategy) == layout


def test_get_strategy():
    made = get_strategy(
        Namespace(fsdp=True, seed=5, max_norm=0.5, train_batch_size=64, micro_train_batch_size=None)
    )
    assert isinstance(made, FSDPStrategy)
    assert (made.seed, made.max_norm, made.train_batch_size, made.micro_train_batch_size) == (
        5,
        0.5,
        64,
        None,
    )
    config = Config()
    config.strategy.fsdp = True
    config.train.seed = 9
    assert get_strategy(config).seed == 9


def test_without_fsdp_it_is_deepspeed():
    made = get_strategy({"fsdp": False, "zero_stage": 3, "seed": 4})
    assert type(made).__name__ == "DeepSpeedStrategy" and (made.config.zero_stage, made.seed) == (
        3,
        4,
    )


def test_deepspeed_that_is_missing_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "lightrft.strategy.deepspeed", raising=False)
    with pytest.raises(ConfigError, match=r"`pip install deepspeed`, or shard with FSDP2: --fsdp"):
        get_strategy({"fsdp": False})
    assert type(get_strategy({})) is FSDPStrategy, "what is installed is taken where nobody chose"


def test_a_users_strategy_is_named_as_rewards_are(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lightrft.strategy import FSDPStrategy\nclass Mine(FSDPStrategy):\n    pass\ndef"
        " no_class(): ...\n"
    )
    assert type(get_strategy({"strategy": f"{tmp_path}/mine.py:Mine"})).__name__ == "Mine"
    assert type(get_strategy({"strategy": "lightrft.strategy.fsdp:FSDPStrategy"})) is FSDPStrategy

    for name, message in (
        ("mine.py:no_class", "is not a subclass of StrategyBase"),
        ("mine.py:Yours", "has no object 'Yours'"),
    ):
        with pytest.raises(ValueError, match=f"--strategy .*{message}"):
            get_strategy({"strategy": f"{tmp_path}/{name}"})


@pytest.mark.parametrize(
    "values, says",
    [
        ({"zero_stage": 0, "bf16": True}, "no float32 master weights: use 1, 2 or 3"),
        ({"tp_size": 2}, "--tp_size needs --fsdp"),
        ({"dp_replicate": 2}, "--dp_replicate needs --fsdp; with DeepSpeed, --zpg is similar"),
        ({"fsdp_cpu_offload": True}, "with ZeRO, use --adam_offload and --param_offload"),
        (
            {"zero_stage": 0, "adam_offload": True},
            "--adam_offload does not support --zero_stage 0: use 1, 2 or 3",
        ),
        ({"param_offload": True}, "--param_offload needs --zero_stage 3"),
        ({"zpg": 2}, "--zpg needs --zero_stage 3"),
        ({"optimizer": "muon"}, "--optimizer muon needs --fsdp"),
        ({"optimizer": "adamw_8bit"}, "--optimizer adamw_8bit needs --fsdp"),
    ],
)
def test_what_zero_cannot_do(values, says):
    """Before a process group exists, and from the command line."""
    with pytest.raises(ValueError, match=says):
        get_strategy(values).setup_distributed()
    config = Config()
    sections = {"bf16": config.model, "optimizer": config.optim}
    for name, value in values.items():
        setattr(sections.get(name, config.strategy), name, value)
    assert any(says.split(":")[0] in problem for problem in deepspeed_problems(config))
