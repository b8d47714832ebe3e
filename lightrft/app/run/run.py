"""What a run is made of before anything is loaded with it."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.rollout.media_expansion import Expander
from lightrft.config.sections import Config
from lightrft.strategy.strategy import StrategyBase


@dataclass(frozen=True, slots=True)
class Run:
    """What data and models are loaded with, and what learns is built with."""

    config: Config
    strategy: StrategyBase
    tokenizer: Tokenizer | None = None
    """None stands for the tokenizer of --pretrain, if it has one."""
    expand: Expander | None = None
    """Expands prompts with media for the model; None if all prompts are text."""
