"""Resolve the fields that the user wrote into a configuration that can run, for the command line
and for Python alike.
"""

import os
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from lightrft.config.effects import flags_without_effect
from lightrft.config.errors import ConfigError, refuse
from lightrft.config.facts import RunFacts
from lightrft.config.presets import COMMAND_DEFAULTS, RATE_OF_ADAPTERS, correction_bounds, recipe
from lightrft.config.rules import COMMANDS_OF_RULES, RULES, problems_of
from lightrft.config.sections import (
    OF_ZERO,
    PPO,
    SECTIONS,
    TRAINING,
    Config,
    ModelSection,
    StrategySection,
    aliases,
    field_types,
    fields_read,
    options,
    section_of_field,
)
from lightrft.config.values import typed_value

BOTH_BOUNDS = {"eps_clip": ("eps_clip_low", "eps_clip_high")}
"""Flags that set several fields at once, with these fields."""


Arguments = Config | Namespace | Mapping[str, Any] | None
"""Configuration, parsed flags, a dict or an EasyDict."""

READ_BY_STRATEGIES = ("model", "data", "strategy", "engine", "rollout", "optim")
"""Sections that strategies read. Names of other sections in arguments may belong to the user's own
program."""


def as_config(args: Arguments) -> Config:
    """Return `args` itself if it is a Config, else a Config with its values; other names go to
    `extra_args`.

        config = as_config({"bf16": True, "my_flag": 3})
        config.model.bf16, config.bf16, config.my_flag        # True, True, 3

    A known name with the value None keeps the default, like an omitted argparse flag. Raises
    ConfigError for a value of the wrong type, and TypeError for arguments of another kind.
    """
    if isinstance(args, Config):
        return args
    if not isinstance(args, Namespace | Mapping | None):
        raise TypeError(
            "a strategy's args are a Config, an argparse Namespace, a mapping or None, not"
            f" {type(args).__name__}"
        )

    values = vars(args) if isinstance(args, Namespace) else dict(args or {})
    read_fields = {
        field.name for section in READ_BY_STRATEGIES for field in fields(SECTIONS[section])
    } | aliases().keys()
    read = {name: value for name, value in values.items() if name in read_fields}
    config = Config.of(**{name: value for name, value in read.items() if value is not None})
    config.extra_args = {name: value for name, value in values.items() if name not in read_fields}

    return config


def resolve(
    config: Config,
    command: str = "train_ppo",
    world_size: int | None = None,
    *,
    has_bf16: bool = False,
) -> list[str]:
    """Fill in the fields that the user did not set, check everything, and return a sentence for
    each flag that has no effect.

    The recipe of --advantage_estimator, the bounds of --rollout_correction and the strategy for
    this machine are filled in. A configuration that is resolved for `command` stays as it is.
    `world_size` is the number of processes, by default the launcher's. With `has_bf16` the device
    has fast bfloat16, and --bf16 is the default. Raises one ConfigError with all problems.
    """
    if config.command == command:
        return []

    convert_values(config)
    config.expand(COMMAND_DEFAULTS.get(command, {}))
    _follow(config, command)

    algorithm = config.algorithm
    if config.engine.rollout_quantization != "none" and command in PPO:
        _correct_quantized_rollouts(config)
    if config.engine.exact and not config.rollout.partial_rollout:
        config.expand({"mismatch_limit": 0.0})
    config.expand(
        recipe(algorithm.advantage_estimator) | correction_bounds(algorithm.rollout_correction)
    )
    if algorithm.eps_clip is not None:
        config.expand(dict.fromkeys(BOTH_BOUNDS["eps_clip"], algorithm.eps_clip))

    strategy = config.strategy
    strategy.put("strategy", strategy_name(strategy))
    strategy.put("fsdp", strategy.strategy == "fsdp")
    if has_bf16 and not (strategy.strategy == "deepspeed" and strategy.zero_stage == 0):
        config.expand({"bf16": True})

    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    if strategy.dp_replicate == 0:
        strategy.put("dp_replicate", _data_ranks(config, world_size))
    validate(config, command=command, world_size=world_size)
    config.command = command

    return [*config.notices, *flags_without_effect(config, command)]


def _follow(config: Config, command: str) -> None:
    """Let defaults follow from what the user set: batches from each other, the rate from LoRA."""
    optim = config.optim
    if config.model.lora_rank > 0 and "learning_rate" not in optim.written and command in TRAINING:
        optim.put("learning_rate", RATE_OF_ADAPTERS * optim.learning_rate)
    if command in PPO and "train_batch_size" not in config.train.written:
        samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        config.train.put("train_batch_size", samples)


def _correct_quantized_rollouts(config: Config) -> None:
    """Turn truncated importance sampling on, unless the ratio is used or corrected otherwise."""
    algorithm = config.algorithm
    if "rollout_correction" in algorithm.written or algorithm.use_engine_logprobs:
        return
    algorithm.put("rollout_correction", "tis")
    config.notices.append(
        f"--rollout_quantization {config.engine.rollout_quantization}: the engine's probabilities"
        " differ from the trainer's, so --rollout_correction is tis; none turns it off"
    )


def _data_ranks(config: Config, world_size: int) -> int:
    """Return how many ranks can have a whole model; 1 with ZeRO, which has no replicas."""
    strategy = config.strategy
    together = max(strategy.sp_size, strategy.cp_size) * strategy.tp_size
    ranks = (world_size - config.rollout.rollout_ranks) // max(together, 1)
    return max(ranks, 1) if strategy.fsdp else 1


def check_strategy(config: Config) -> None:
    """Raise ConfigError for values that no strategy can use, in a configuration that resolve() may
    not have seen.
    """
    convert_values(config)
    read = {field.name for cls in (ModelSection, StrategySection) for field in fields(cls)}
    if problems := range_problems(config, read) + strategy_problems(config):
        raise ConfigError("; ".join(problems))


def strategy_name(section: StrategySection, default: str = "fsdp") -> str:
    """Return fsdp, deepspeed, or the import path of the user's own strategy.

    `default` is the answer if neither --strategy, --fsdp nor a flag of ZeRO is written. Raises
    ConfigError if the first two contradict each other.
    """
    name = section.strategy
    fsdp = section.fsdp if "fsdp" in section.written else None
    if name == "auto" and fsdp is None:
        return "deepspeed" if OF_ZERO & section.written else default
    if name == "auto":
        return "fsdp" if fsdp else "deepspeed"
    if (name, fsdp) in (("fsdp", False), ("deepspeed", True)):
        raise ConfigError(f"--strategy {name} contradicts --fsdp {str(fsdp).lower()}: set only one")
    return name


def convert_values(config: Config) -> None:
    """Convert each field to the declared type.

    Raises ConfigError for invalid values, including NaN and infinity.
    """
    problems = []
    for name, owner in section_of_field().items():
        section = getattr(config, owner)
        try:
            section.put(name, typed_value(field_types()[name], getattr(section, name)))
        except ValueError as error:
            problems.append(f"--{name}: {error}")

    refuse(problems)


def validate(config: Config, *, command: str, world_size: int) -> None:
    """Raise one ConfigError with every problem of the configuration."""
    run = RunFacts(config, command, world_size)
    problems = range_problems(config, fields_read(command))
    for group, commands in COMMANDS_OF_RULES.items():
        problems += problems_of(RULES[group], run) if command in commands else []

    if run.strategy == "deepspeed":
        problems += problems_of(RULES["deepspeed"], run)
    if run.has_positive_sizes:
        problems += problems_of(RULES["layout"], run)

    refuse(problems)


def range_problems(config: Config, read: Collection[str]) -> list[str]:
    """Return the fields among `read` whose values are out of bounds."""
    problems = []
    for name, section in section_of_field().items():
        bound = options()[name].bound
        value = getattr(getattr(config, section), name)
        if name in read and bound and value is not None and (problem := bound.problem(value)):
            problems.append(f"--{name} {problem}")
    return problems


def strategy_problems(config: Config) -> list[str]:
    """Return the settings that no strategy can use, on any number of ranks."""
    run = RunFacts(config)
    return problems_of(RULES["strategy"] + RULES["routers"], run)


def deepspeed_problems(config: Config) -> list[str]:
    """Return the settings that ZeRO does not support, each with the solution."""
    return problems_of(RULES["deepspeed"], RunFacts(config))
