"""Build sampling parameters from flags."""

from typing import Any

from lightrft.config.sections import RolloutSection
from lightrft.engine.requests import Sampling


def sampling_of(section: RolloutSection, **own: Any) -> Sampling:
    """Build the sampling parameters from the flags; `own` values override them."""
    from_flags = {
        "n": section.n_samples_per_prompt,
        "max_tokens": section.generate_max_len,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "min_p": section.min_p,
        "stop": tuple(section.stop),
        "stop_token_ids": tuple(section.stop_token_ids),
        "first_token_temperature": section.first_token_temperature,
        "min_tokens": section.min_tokens,
        "banned_token_ids": tuple(section.banned_token_ids),
    }
    return Sampling(**from_flags | own)


def greedy_sampling(section: RolloutSection, **own: Any) -> Sampling:
    """Build parameters for one greedy response, with the flags' limits."""
    return sampling_of(
        section, **{"n": 1, "temperature": 0.0, "first_token_temperature": None} | own
    )
