"""The configuration of a run: fields with their sources, checks, and the command line."""

from lightrft.config.command_line import field_docs, parse
from lightrft.config.effects import flags_without_effect
from lightrft.config.errors import ConfigError
from lightrft.config.references import reward_terms
from lightrft.config.resolve import as_config, check_strategy, deepspeed_problems, resolve, validate
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
    needs_reference,
    section_of_field,
    sequence_layout,
)
from lightrft.config.summary import summary
