"""Flags and keys of other tools: those of LightRFT and OpenRLHF are translated, those of TRL and
verl are answered with ours.
"""

from lightrft.config.other_tools.openrlhf import (
    DEFAULTS,
    DOTTED,
    IGNORED,
    REFUSED,
    RENAMED,
    translate_flags,
)
from lightrft.config.other_tools.trl import TRL_FLAGS
from lightrft.config.other_tools.verl import VERL_KEYS, verl_problems

__all__ = [
    "DEFAULTS",
    "DOTTED",
    "IGNORED",
    "REFUSED",
    "RENAMED",
    "TRL_FLAGS",
    "VERL_KEYS",
    "translate_flags",
    "verl_problems",
]
