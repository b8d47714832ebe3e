"""Estimate the seconds of a step by phase, from products, bytes and a device's peaks."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from lightrft.config.facts import EXPERTS
from lightrft.engine.model_info import num_attention_layers
from lightrft.models.parallel.peaks import Device

MFU = 0.35
"""Share of the peak that training and log-probs are assumed to reach.

Published are 0.33 to 0.39 for 8B in torchtitan on H100 and 0.36 for 4B in prime-rl on H200, both
with long sequences.
"""
DECODING = 0.6
"""Share of the peak bandwidth that decoding is assumed to reach."""
LINK = 0.6
"""The same for the link between devices."""
MAX_DECODING = 256
"""Largest number of sequences that an engine decodes at the same time."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step on all ranks."""

    samples: int
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a response, on average."""
    passes: int
    """Forward passes for log-probs, values and scores, over all samples."""
    epochs: int
    recomputes: bool
    """True if the backward pass computes the forward pass once more."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank gathers and reduces with FSDP2."""

    microbatches: int
    updates: int
    gathered: float
    """Bytes of the parameters, gathered once for each pass."""
    reduced: float
    """Bytes of the gradients that are reduced."""
    gathers_once: bool
    """True with --gather_parameters_once."""
    reduces_once: bool
    """True with --reduce_gradients_once."""

    def of_updates(self, shards: int) -> float:
        """Return the bytes that a rank receives from the other shards in the updates of a step."""
        # The first micro-batch gathers for the forward and the backward pass in any case.
        gathers = 2 * (self.updates if self.gathers_once else self.microbatches)
        reductions = self.updates if self.reduces_once else self.microbatches
        return (gathers * self.gathered + reductions * self.reduced) * (shards - 1) / shards

    def between_replicas(self, shards: int, replicas: int) -> float:
        """Return the bytes that a rank receives when replicas sum their shards of gradients."""
        return 2 * self.updates * self.reduced / shards * (replicas - 1) / replicas


def token_flops(shape: PretrainedConfig, parameters: int, length: int) -> float:
    """Return the operations of a forward pass for a token: products and causal attention.

    The sequence has `length` tokens.
    """
    text = shape.get_text_config()
    heads = text.num_attention_heads * (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )
    return 2 * parameters + 2 * num_attention_layers(shape) * heads * length


def seconds(
    shape: PretrainedConfig,
    parameters: int,
    active: int,
    work: StepWork,
    device: Device,
    *,
    training: int,
    scoring: int,
    engines: int,
    engine_tp: int,
    cache_tokens: float,
    bytes_per_value: int,
) -> dict[str, float]:
    """Return seconds by phase.

    `training` ranks have rows in an optimizer step, `scoring` ranks in the passes over all samples,
    and `engines` of `engine_tp` ranks each have prompts. Ranks without any add no speed. `active`
    is the number of parameters that compute a token: fewer than `parameters` with experts.
    """
    length = work.prompt + work.response
    tokens = work.samples * length
    forward = token_flops(shape, active, length)
    compute = device.flops * MFU
    of_an_engine = work.samples / engines
    at_once = max(1.0, min(of_an_engine, MAX_DECODING, cache_tokens / length))
    # A decoding step reads the weights once for all sequences, and the cache of each.
    read = _read(
        shape, parameters, active, at_once
    ) * bytes_per_value + at_once * length / 2 * kv_bytes(shape, bytes_per_value)
    steps = work.response * of_an_engine / at_once
    prefill = of_an_engine * work.prompt * forward / (compute * engine_tp)

    return {
        "generate": steps * read / (device.bandwidth * DECODING * engine_tp) + prefill,
        "log-probs": work.passes * tokens * forward / (compute * scoring),
        "train": work.epochs
        * tokens
        * forward
        * (4 if work.recomputes else 3)
        / (compute * training),
        "weight sync": parameters * bytes_per_value / (device.link * LINK),
    }


def _read(shape: PretrainedConfig, parameters: int, active: int, num_tokens: float) -> float:
    """Return the number of parameters that so many tokens use together.

    Each token has experts that are chosen at random.
    """
    if active == parameters:
        return parameters
    text = shape.get_text_config()
    unused = 1 - text.num_experts_per_tok / num_experts(text)
    return parameters - (parameters - active) * unused ** (num_tokens - 1)


def num_experts(text: PretrainedConfig) -> int:
    """Return the number of experts of a layer; each family has another name for it."""
    return next(getattr(text, name) for name in EXPERTS if hasattr(text, name))


def visit_bytes(shape: PretrainedConfig, bytes_per_value: int, ep: int) -> float:
    """Return the bytes that a rank sends in a forward pass for a token that visits the experts.

    The token goes to each of the chosen experts of each layer, and a result comes back. One of `ep`
    experts is on the rank itself.
    """
    text = shape.get_text_config()
    layers = text.num_hidden_layers - getattr(text, "first_k_dense_replace", 0)
    values = 2 * layers * text.num_experts_per_tok * text.hidden_size
    return values * bytes_per_value * (ep - 1) / ep


def kv_bytes(shape: PretrainedConfig, bytes_per_value: int) -> float:
    """Return the bytes of the keys and values of a token."""
    text = shape.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * num_attention_layers(shape) * text.num_key_value_heads * head * bytes_per_value
