"""Every knob, where its value comes from, and what cannot be."""

from lightrft.config.addresses import address_problem
from lightrft.config.command_line import field_docs, parse
from lightrft.config.recipe import COMPARING
from lightrft.config.sections import (
    SECTIONS,
    AlgorithmSection,
    Config,
    ConfigError,
    DataSection,
    EngineSection,
    ModelSection,
    ObserveSection,
    OptimSection,
    RewardSection,
    RolloutSection,
    StrategySection,
    TrainSection,
    needs_critic,
    needs_reference,
    section_of_field,
)
from lightrft.config.validation import (
    DOORS,
    cp_problems,
    deepspeed_problems,
    flags_without_effect,
    lora_problems,
    validate,
)

__all__ = [
    "AlgorithmSection",
    "COMPARING",
    "Config",
    "ConfigError",
    "DOORS",
    "DataSection",
    "EngineSection",
    "ModelSection",
    "ObserveSection",
    "OptimSection",
    "RewardSection",
    "RolloutSection",
    "SECTIONS",
    "StrategySection",
    "TrainSection",
    "address_problem",
    "cp_problems",
    "deepspeed_problems",
    "field_docs",
    "flags_without_effect",
    "lora_problems",
    "needs_critic",
    "needs_reference",
    "parse",
    "section_of_field",
    "validate",
]
