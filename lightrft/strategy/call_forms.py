"""Read sampling parameters as vLLM and SGLang name them, and return samples as dictionaries."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from easydict import EasyDict

from lightrft.config.tables import table
from lightrft.core.engine import Request
from lightrft.core.samples import Completion
from lightrft.engine.requests import Sampling

SAMPLING_FORMS: dict[str, Any] = table("strategy/call_forms")


def sampling_from_dict(parameters: Mapping[str, Any], seed: int) -> Sampling:
    """Convert vLLM or SGLang sampling parameters to Sampling; `seed` is for those without one.

    Raises ValueError for parameters that are unknown, or that would change sampling in a way that
    engines here do not support.
    """
    renamed = {
        SAMPLING_FORMS["renamed"].get(name, name): value
        for name, value in parameters.items()
        if name not in SAMPLING_FORMS["presentation"]
    }
    names = {field.name for field in fields(Sampling)}
    wrong = [
        f"{name}={value!r}"
        for name, value in renamed.items()
        if name not in names and value not in SAMPLING_FORMS["neutral"].get(name, ())
    ]
    if wrong:
        raise ValueError(
            f"cannot sample with {', '.join(wrong)}; known: {', '.join(sorted(names))}"
        )

    values = {name: value for name, value in renamed.items() if name in names and value is not None}
    values["top_k"] = max(values.get("top_k", 0), 0)  # vLLM and SGLang write -1 for all tokens
    for name in ("stop", "stop_token_ids", "banned_token_ids"):
        listed = values.get(name, ())
        values[name] = (listed,) if isinstance(listed, str) else tuple(listed)

    return Sampling(**{"seed": seed} | values)


def as_dicts(requests: list[Request], completions: list[list[Completion]]) -> list[EasyDict]:
    """Return one dictionary for each sample; the samples of a prompt are adjacent."""
    return [
        EasyDict(
            prompt_token_ids=list(request.token_ids),
            output_token_ids=sample.token_ids,
            output_logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            weight_version=sample.weight_version,
        )
        for request, samples in zip(requests, completions, strict=True)
        for sample in samples
    ]
