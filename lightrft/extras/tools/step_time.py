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
MFU_RECOMPUTED = 0.31
"""The same of training that recomputes activations, which does not count: as on one H200."""
MFU_EXPERTS = 0.25
"""The same of mixtures of experts, whose products are small and whose tokens are sorted."""
IMBALANCE = 1.3
"""Tokens of the rank with the most popular experts, relative to the mean, if ranks divide them."""
DECODING = 0.6
"""Share of the peak bandwidth that decoding is assumed to reach."""
LINK = 0.6
"""The same for the link between devices."""
MAX_DECODING = 256
"""Largest number of sequences that an engine decodes at the same time."""
SUM_START = 12e-6
"""Seconds until a sum over the ranks of an engine begins; a layer has two of them."""
SAMPLE_SECONDS = 8e-6
"""Seconds for which a token is sampled from logits in float32."""
HOST_LINK = 250e9
"""Bytes per second between the memory of a host and all of its devices, in both directions."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step on all ranks."""

    samples: int
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a response, on average. The longest of many has twice as many."""
    passes: int
    """Forward passes for log-probs, values and scores, over all samples."""
    epochs: int
    recomputed: float
    """Share of the forward pass that the backward pass computes once more."""


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


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the bytes and the products of a model follow from."""

    shape: PretrainedConfig
    parameters: int
    active: int
    """Parameters that compute a token: fewer with experts."""
    width: int
    """Bytes of a value."""

    @property
    def text(self) -> PretrainedConfig:
        """Return the shape of the language model."""
        return self.shape.get_text_config()

    @property
    def table(self) -> int:
        """Return the number of parameters of the embeddings."""
        return self.text.vocab_size * self.text.hidden_size

    def token_flops(self, length: int) -> float:
        """Return the operations of a forward pass for a token: products and causal attention.

        The sequence has `length` tokens.
        """
        heads = self.text.num_attention_heads * head_size(self.text)
        return 2 * self.active + 2 * num_attention_layers(self.shape) * heads * length

    def read_bytes(self, num_tokens: float) -> float:
        """Return the bytes of the parameters that so many tokens use together.

        Each token has experts that are chosen at random.
        """
        others = 0.0
        if self.active < self.parameters:
            unused = 1 - self.text.num_experts_per_tok / num_experts(self.text)
            others = (self.parameters - self.active) * unused ** (num_tokens - 1)
        return self.width * (self.parameters - others)

    def visit_bytes(self, ep: int) -> float:
        """Return the bytes that a rank sends in a forward pass for a token that visits the experts.

        The token goes to each of the chosen experts of each layer, and a result comes back. One of
        `ep` experts is on the rank itself.
        """
        text = self.text
        layers = text.num_hidden_layers - getattr(text, "first_k_dense_replace", 0)
        values = 2 * layers * text.num_experts_per_tok * text.hidden_size
        return values * self.width * (ep - 1) / ep

    def cache_bytes(self) -> float:
        """Return the bytes of the keys and values of a token."""
        heads = self.text.num_key_value_heads * num_attention_layers(self.shape)
        return 2 * heads * head_size(self.text) * self.width


def head_size(text: PretrainedConfig) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def seconds(
    model: ModelSizes,
    work: StepWork,
    device: Device,
    *,
    training: int,
    scoring: int,
    engines: int,
    engine_tp: int,
    cache_tokens: float,
    imbalance: float = 1.0,
) -> dict[str, float]:
    """Return seconds by phase.

    `training` ranks have rows in an optimizer step, `scoring` ranks in the passes over all samples,
    and `engines` of `engine_tp` ranks each have prompts. Ranks without any add no speed. The rank
    that all others wait for computes `imbalance` times the mean of the tokens.
    """
    length = work.prompt + work.response
    tokens = work.samples * length
    forward = model.token_flops(length)
    dense = model.active == model.parameters
    shares = peak_shares(dense=dense, recomputed=work.recomputed)
    compute, of_training = (device.flops * share for share in shares)

    of_an_engine = work.samples / engines
    at_once = max(1.0, min(of_an_engine, MAX_DECODING, cache_tokens / length))
    # While requests wait, all places are taken; then ever fewer, until the longest response ends.
    full, tail = work.response * (of_an_engine / at_once - 1), 2 * work.response
    # A step reads the weights once for all sequences, and the cache of each.
    read = full * model.read_bytes(at_once) + tail * model.read_bytes(max(at_once / 2, 1))
    lengths = work.prompt + work.response / 2
    read += of_an_engine * work.response * lengths * model.cache_bytes()
    decoding = read / (device.bandwidth * DECODING * engine_tp)
    decoding += of_an_engine * work.response * SAMPLE_SECONDS
    if engine_tp > 1:
        rows = at_once * model.text.hidden_size * model.width
        sums = SUM_START + 2 * rows * (engine_tp - 1) / engine_tp / (device.link * LINK)
        decoding += (full + tail) * 2 * model.text.num_hidden_layers * sums
    prefill = of_an_engine * work.prompt * forward / (compute * engine_tp)

    return {
        "generate": decoding + prefill,
        "log-probs": work.passes * tokens * forward * imbalance / (compute * scoring),
        "train": 3 * work.epochs * tokens * forward * imbalance / (of_training * training),
        "weight sync": model.width * model.parameters / (device.link * LINK),
    }


def peak_shares(*, dense: bool, recomputed: float) -> tuple[float, float]:
    """Return the shares of the peak that log-probs and training are assumed to reach."""
    if not dense:
        return MFU_EXPERTS, MFU_EXPERTS
    return MFU, 1 / (1 / MFU + recomputed * (1 / MFU_RECOMPUTED - 1 / MFU))


def num_experts(text: PretrainedConfig) -> int:
    """Return the number of experts of a layer; each family has another name for it."""
    return next(getattr(text, name) for name in EXPERTS if hasattr(text, name))
