"""Why: sequences lie end to end, and nothing but the layout keeps them apart. One leak and every gradient is wrong.

The reference is transformers' eager attention on each sequence alone.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrft.models.attention import ATTENTION, Layout
from lightrft.models.heads import Actor
from lightrft.types import Batch

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "mistral window": ("mistral", {"sliding_window": 3, "head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
                               "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3 untied": ("gemma3_text", {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
                                      "query_pre_attn_scalar": 16, "tie_word_embeddings": False}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": False}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
}  # fmt: skip
LENGTHS = [5, 1, 11, 8, 2, 9, 1, 16]
TEMPERATURE = 0.8


def make_model(name: str, attention: str) -> PreTrainedModel:
    kind, extra = MODELS[name]
    config = AutoConfig.for_model(kind, **(SIZES | {"tie_word_embeddings": False} | extra))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that an error there shows
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def make_batch(lengths: list[int] = LENGTHS) -> Batch:
    generator = torch.Generator().manual_seed(5)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.7
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    mask[starts] = False
    return Batch(
        lengths=torch.tensor(lengths),
        input_ids=torch.randint(3, 61, (total,), generator=generator),
        loss_mask=mask,
        rows=torch.arange(len(lengths)),
    )


def one_by_one(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of learned tokens from the model's own logits, each sequence alone; 0 elsewhere."""
    logprobs, entropies = [], []
    for ids in batch.input_ids.split(batch.lengths.tolist()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE
        logp = logits.log_softmax(-1)[:-1]
        logprobs.append(torch.cat([torch.zeros(1), logp.gather(-1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([torch.zeros(1), -(logp.exp() * logp).sum(-1)]))
    return tuple(torch.where(batch.loss_mask, torch.cat(values), 0.0) for values in (logprobs, entropies))


def weighted(values: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that weighs every token, and both results, differently."""
    logprobs, entropy = values
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + 0.3 * (entropy * torch.linspace(1, -2, len(entropy))).sum()


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert actual[name] is not None, f"no gradient for {name}"
        difference = (actual[name] - gradient).norm().item()
        assert difference <= 1e-4 * gradient.norm().item() + 1e-7, f"{name}: off by {difference} of {gradient.norm().item()}"


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_each_sequence_alone(name):
    batch = make_batch()
    reference, model = make_model(name, "eager"), make_model(name, ATTENTION)
    expected, values = one_by_one(reference, batch), Actor(model)(batch, TEMPERATURE)
    for value, known in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-5)
    weighted(expected).backward()
    weighted(values).backward()
    assert_same_gradients(gradients_of(model), gradients_of(reference))
    assert all(gradient.abs().max() > 0 for gradient in gradients_of(reference).values() if gradient is not None)


@pytest.mark.parametrize("name", ["qwen2 window", "mistral window", "gemma3"])
def test_the_window_is_seen_at_these_lengths(name):
    """Without its window the model gives other numbers, so the equality above speaks of windows too."""
    batch = make_batch()
    model = make_model(name, ATTENTION)
    with torch.no_grad():
        windowed = Actor(model)(batch, TEMPERATURE)[0]
        for layer in model.base_model.layers:
            layer.self_attn.sliding_window = None
            layer.self_attn.config.sliding_window = None
        assert (windowed - Actor(model)(batch, TEMPERATURE)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen2 window"])
@pytest.mark.parametrize("changed", [0, 3, 7])
def test_changing_one_sequence_leaves_the_others_as_they_are(name, changed):
    batch, other = make_batch(), make_batch()
    places = other.sequence_ids == changed
    other.input_ids[places] = 3 + (other.input_ids[places] * 7 + 11) % 58
    actor = Actor(make_model(name, ATTENTION)).eval()
    with torch.no_grad():
        before, after = actor(batch, TEMPERATURE), actor(other, TEMPERATURE)
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[~places], second[~places])
    assert not torch.equal(before[0], after[0])


def test_gradients_do_not_leak_between_sequences():
    """The embedding of a token that only an unlearned sequence holds gets no gradient."""
    model = make_model("llama", ATTENTION)
    batch = Batch(
        lengths=torch.tensor([3, 4]),
        input_ids=torch.tensor([10, 11, 12, 20, 21, 22, 23]),
        loss_mask=torch.tensor([False, False, False, False, True, True, True]),
        rows=torch.arange(2),
    )
    Actor(model)(batch, 1.0)[0].sum().backward()
    rows = model.get_input_embeddings().weight.grad.abs().sum(1)
    assert rows[10:13].tolist() == [0.0] * 3 and (rows[20:23] > 0).all()


def test_sequences_of_one_token_only():
    batch = make_batch([1, 1, 1])
    logprobs, entropy = Actor(make_model("qwen3", ATTENTION))(batch, 1.0)
    assert logprobs.tolist() == entropy.tolist() == [0.0] * 3


def test_a_batch_that_learns_nothing_still_gives_every_parameter_a_gradient():
    """Sharded parameters meet in collectives: a rank without work must go through the same backward pass."""
    model = make_model("llama", ATTENTION)
    batch = make_batch([1])
    Actor(model)(batch, 1.0)[0].sum().backward()
    assert all(gradient is not None and not gradient.any() for gradient in gradients_of(model).values())


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_gradient_checkpointing_changes_nothing(name):
    batch = make_batch()
    plain, checkpointed = make_model(name, ATTENTION), make_model(name, ATTENTION)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    counted = count_calls(checkpointed.base_model.layers[0].self_attn)
    for model in (plain, checkpointed):
        weighted(Actor(model).train()(batch, TEMPERATURE)).backward()
    assert_same_gradients(gradients_of(checkpointed), gradients_of(plain))
    assert counted == ["call", "call"], "the layer was not computed again in the backward pass"


def count_calls(module: torch.nn.Module) -> list[str]:
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("call"))
    return calls


def test_layout_by_hand():
    """Lengths 3, 1, 4: a block of the single token, a block of the two that fit in four."""
    layout = Layout.of(torch.tensor([3, 1, 4]), torch.device("cpu"))
    assert [block.tolist() for block in layout.blocks] == [[[3]], [[0, 1, 2, 2], [4, 5, 6, 7]]]
    assert layout.places.tolist() == [1, 2, 3, 0, 5, 6, 7, 8]


def test_padding_stays_under_a_half():
    lengths = torch.arange(1, 200)
    layout = Layout.of(lengths, torch.device("cpu"))
    assert sum(block.numel() for block in layout.blocks) < 2 * int(lengths.sum())
    flat = torch.cat([block.flatten() for block in layout.blocks])
    assert torch.equal(flat[layout.places], torch.arange(int(lengths.sum())))


def test_attention_that_blocks_cannot_hold_is_refused_by_name():
    config = AutoConfig.for_model("gemma2", **SIZES, head_dim=8, attn_logit_softcapping=50.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    with pytest.raises(ValueError, match="Gemma2Attention uses soft-capped or sink attention"):
        model.base_model(input_ids=torch.ones(1, 3, dtype=torch.int64), layout=Layout.of(torch.tensor([3]), torch.device("cpu")))
