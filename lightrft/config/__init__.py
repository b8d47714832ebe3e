"""The configuration of a run: fields with their sources, checks, and the command line."""

from lightrft.config.command_line import field_docs, load, parse
from lightrft.config.effects import flags_without_effect
from lightrft.config.errors import ConfigError
from lightrft.config.presets import PRESETS, recipe
from lightrft.config.references import RewardTerm, address_problem, reward_terms
from lightrft.config.resolve import (
    BOTH_BOUNDS,
    Arguments,
    as_config,
    check_strategy,
    deepspeed_problems,
    resolve,
    strategy_name,
    validate,
)
from lightrft.config.rules import COMPARING
from lightrft.config.sections import (
    COMMANDS,
    SECTIONS,
    AlgorithmSection,
    Config,
    DataSection,
    EngineSection,
    ModelSection,
    ObserveSection,
    OptimSection,
    PreferenceSection,
    RewardSection,
    RolloutSection,
    ServerSection,
    StrategySection,
    TrainSection,
    fields_read,
    needs_critic,
    needs_reference,
    section_of_field,
    sequence_layout,
)
from lightrft.config.summary import summary
