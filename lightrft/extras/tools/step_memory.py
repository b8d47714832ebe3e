"""Bytes of a training step on one rank, for a model without weights.

FSDP2's own operations run on tensors that have only a shape. torch's FSDPMemTracker counts every
storage while it lives, on rank 0 of a fake process group. Layers and tokens add bytes in
proportion, so two small traces give the bytes of a model of any depth: tests/bench/test_memory.py
compares them with what real ranks take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightrft.algorithms.roles.operations import count_parameters
from lightrft.config.facts import EXPERTS
from lightrft.config.sections import ModelSection
from lightrft.engine.model_info import has_recurrent_state
from lightrft.extras.tools.step_time import head_size
from lightrft.models.attention.recurrent import only_memory
from lightrft.models.logits.logprobs import DEVICE_CHUNK
from lightrft.models.lora import add_adapters
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.parallel.recompute import KEPT, once
from lightrft.strategy.fsdp import FSDPStrategy

VISITORS = 1.5
"""Tokens that visit the rank of the most popular experts, relative to the mean, in the worst layer
of a micro-batch. A few more may end a run, so this is above the mean of many layers."""
TRACED_LAYERS = (3, 4)
"""Numbers of layers that are traced.

With fewer, not everything that a peak holds exists at the same time.
"""
TRACED_ATTENTION = "traced"
_known: dict[tuple[str, str, int, int], "StepBytes"] = {}
"""Results of step_bytes() by argument.

A plan tries flags, and most do not change the step.
"""
_counts: dict[str, tuple[int, int]] = {}
"""Results of parameter_counts() by argument: counting creates all layers of a model."""
GATHERED = ("Unsharded Param", "All Gather", "Reduce Scatter")


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes on one rank."""

    parameters: float
    """Masters, and frozen parameters."""
    gradients: float
    """Gradients between two micro-batches."""
    optimizer: float
    activations: float
    """Bytes that the forward pass keeps in addition to parameters and gradients."""
    at_head: float
    """Everything at the end of the forward pass, from the second step on."""
    peak: float
    """The most at any moment, from the second step on, without the head's own memory."""

    def plus(self, factor: float, other: "StepBytes") -> "StepBytes":
        """Return self + factor * other."""
        return StepBytes(
            *(getattr(self, name) + factor * getattr(other, name) for name in StepBytes.__slots__)
        )


class LearningModel(nn.Module):
    """A model with a product of the head for one token: the head's own memory is head_bytes()."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return hidden, F.linear(hidden[:1], self.model.get_output_embeddings().weight)


def _attention(_: nn.Module, *qkv: Tensor | None, **__: Any) -> tuple[Tensor, None]:
    """Keep what attention of flat batches keeps; the mask of others has tokens^2 elements."""
    product = F.scaled_dot_product_attention(*qkv[:3], is_causal=True, enable_gqa=True)
    return product.transpose(1, 2), None


def _kept_attention(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
    return once(lambda: _attention(*inputs, **options)[0]), None


AttentionInterface.register(TRACED_ATTENTION, _attention)
AttentionInterface.register(KEPT + TRACED_ATTENTION, _kept_attention)


class FakeRankStrategy(FSDPStrategy):
    """A rank over a fake process group, where the other ranks do not exist.

    It has no monitor, and nothing that waits for an answer.
    """

    # The tracker knows FSDP's modules only, so even one rank gathers its parameters here.
    _shards = True

    def setup_distributed(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self._mesh = Mesh("cpu", ep=self.config.strategy.ep_size)


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Make this process rank 0 of `world`; the others answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch keeps layouts of shards with this mesh, and would take them for those of another
        # rank in a process that is forked from this one.
        _clear_sharding_prop_cache()


def step_bytes(
    shape: PretrainedConfig, options: dict[str, Any], *, world: int, tokens: int
) -> StepBytes:
    """Return the bytes of a step with micro-batches of `tokens` tokens.

    They come from traces of three and four layers, or of one more period of layers where these
    differ. `options` are the arguments of the strategy,
    without tensor and sequence parallelism: of_tensor_parallel() divides a model.
    """
    key = (shape.to_json_string(), repr(options), world, tokens)
    if key not in _known:
        period = layer_period(shape)
        first = period * -(-TRACED_LAYERS[0] // period)
        more = (shape.get_text_config().num_hidden_layers - first) / period
        with fake_group(world):
            traces = [
                _trace(with_layers(shape, layers), options, tokens)
                for layers in ((first, first + period) if more else (first,))
            ]
        _known[key] = traces[0].plus(more, traces[1].plus(-1, traces[0])) if more else traces[0]
    return _known[key]


def _trace(shape: PretrainedConfig, options: dict[str, Any], tokens: int) -> StepBytes:
    strategy = FakeRankStrategy(seed=0, args=options)
    strategy.setup_distributed()
    model = empty_model(shape, strategy.config.model)
    with only_memory(model), FakeTensorMode(allow_non_fake_inputs=True):
        return trace_step(strategy, model, tokens)


def trace_step(strategy: FSDPStrategy, model: PreTrainedModel, tokens: int) -> StepBytes:
    """Measure two micro-batches and a step of a model from empty_model().

    Inside of FakeTensorMode nothing is computed.
    """
    model.to_empty(device="cpu")
    model.tie_weights()  # tied parameters have got memory of their own
    model = LearningModel(model)
    with unset_fake_temporarily():  # optimizers compute tables
        optimizer = strategy.create_optimizer(model, lr=1e-6)
    strategy.make_ready(model)
    strategy.distribute(model, optimizer)
    tracker = FSDPMemTracker(model, optimizer)
    peaks = []
    between = {}
    forward = {}

    with tracker:
        for last in (False, True):
            hidden, logits = model(torch.randint(0, 1000, (tokens,)))
            forward = _now(tracker)
            loss = hidden.sum() + logits.sum()
            del hidden, logits
            strategy.accumulate(loss, model, last)
            del loss
            dist.barrier()  # a thread of gloo may have a gradient for a moment after it was reduced
            between = between or _now(tracker)
            peaks.append(total(tracker.get_tracker_snapshot("peak")))
            tracker.reset_mod_stats()

        optimizer.step()
        after = _now(tracker)

    gradients = between["Total"] - between["Sharded Param"] - between["Activation"]
    others = gradients + sum(forward[name] for name in GATHERED)
    activations = forward["Total"] - forward["Sharded Param"] - others
    optimizer_states = after["OptState"]

    return StepBytes(
        after["Sharded Param"],
        gradients,
        optimizer_states,
        activations,
        forward["Total"] + optimizer_states,
        max(peaks) + optimizer_states,
    )


def empty_model(shape: PretrainedConfig, section: ModelSection) -> PreTrainedModel:
    """Return a model with the adapters of --lora_rank.

    All other parameters are on the meta device.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            shape, dtype=torch.float32, attn_implementation=TRACED_ATTENTION
        )
    if section.lora_rank:
        add_adapters(model, section)
    return model


def trained_parameters(shape: PretrainedConfig, section: ModelSection) -> int:
    """Return the number of parameters that learn: the adapters', if there are any."""
    if not section.lora_rank:
        return num_parameters(shape)
    parameters = empty_model(shape, section).parameters()
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def head_bytes(
    shape: PretrainedConfig, tokens: int, tp: int, width: int, *, of_sequences: bool = False
) -> float:
    """Return the bytes that token_logprobs() needs on an accelerator.

    These are the logits of a chunk, and float32 gradients of the inputs. A chunk of a loss
    `of_sequences` may have as many logits as the weight has elements. A gradient of logits takes
    the place of the logits only if the values have four bytes; `width` is the bytes of a value.
    """
    text = shape.get_text_config()
    rows = -(-text.vocab_size // tp)
    of_logit = 4 if width == 4 else 4 + width
    chunk = max(DEVICE_CHUNK, rows * text.hidden_size if of_sequences else 0)
    return of_logit * min(tokens * rows, chunk) + 4 * (rows + tokens) * text.hidden_size


def layer_period(shape: PretrainedConfig) -> int:
    """Return after how many layers their kinds repeat; 1 if all keep the same memory."""
    if not has_recurrent_state(shape):
        return 1
    kinds = shape.get_text_config().layer_types
    periods = range(1, len(kinds) + 1)
    return next(p for p in periods if all(kinds[i] == kinds[i % p] for i in range(len(kinds))))


def with_layers(shape: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a copy with another number of layers."""
    shape = deepcopy(shape)
    text = shape.get_text_config()
    text.num_hidden_layers = layers
    if types := getattr(text, "layer_types", None):
        text.layer_types = [types[layer % len(types)] for layer in range(layers)]
    return shape


def of_tensor_parallel(shape: PretrainedConfig, tp: int) -> PretrainedConfig:
    """Return a model with the layer shapes of one of `tp` tensor-parallel ranks."""
    shape = deepcopy(shape)
    text = shape.get_text_config()
    text.head_dim = head_size(text)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(text, name, getattr(text, name) // tp)
    text.vocab_size = -(-text.vocab_size // tp)
    text.pad_token_id = None
    return shape


def of_expert_parallel(shape: PretrainedConfig, ep: int) -> PretrainedConfig:
    """Return a model with the experts of one of `ep` ranks, and some more if a token needs them.

    They compute the tokens of the most popular experts.
    """
    shape = deepcopy(shape)
    text = shape.get_text_config()
    name = next(name for name in EXPERTS if hasattr(text, name))
    setattr(text, name, max(getattr(text, name) // ep, 2 * text.num_experts_per_tok))
    text.num_experts_per_tok = ceil(VISITORS * text.num_experts_per_tok)
    return shape


def parameter_counts(shape: PretrainedConfig) -> tuple[int, int]:
    """Return the number of parameters of the model, and how many of them compute one token.

    Tied ones count once.
    """
    key = shape.to_json_string()
    if key not in _counts:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
        _counts[key] = count_parameters(
            ((name, parameter.shape) for name, parameter in model.named_parameters()), shape
        )
    return _counts[key]


def num_parameters(shape: PretrainedConfig) -> int:
    """Return the number of parameters of the model, tied ones once."""
    return parameter_counts(shape)[0]


def _now(tracker: MemTracker) -> dict[str, int]:
    (snapshot,) = tracker.get_tracker_snapshot("current").values()
    return {getattr(kind, "value", kind): size for kind, size in snapshot.items()}


def total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return sum(sizes["Total"] for sizes in snapshot.values())
