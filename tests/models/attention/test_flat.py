"""Why: sequences lie end to end, and nothing but the layout keeps them apart.

One leak and every gradient is wrong. The reference is transformers' eager attention on each
sequence alone.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flat_models import (
    LENGTHS,
    MODELS,
    SEEN,
    SIZES,
    TEMPERATURE,
    assert_same_gradients,
    gradients_of,
    make_batch,
    make_model,
    masked,
    one_by_one,
    weighted,
)
from lightrft.core.batch import Batch
from lightrft.models.attention import flat
from lightrft.models.attention.flat import ATTENTION, attention_kernel, block_attention
from lightrft.models.attention.layout import LONG_SEQUENCE, Layout, Scoring
from lightrft.models.heads import Actor
from lightrft.strategy.batching.micro_batches import find_shared_prefixes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "lengths, alike, copies",
    [
        *[(LENGTHS, 0, False), (LENGTHS, 3, False), ([9] * 4, 2, True)],
        *[
            pytest.param(*case, marks=pytest.mark.slow)  # the sweep takes seconds
            for case in product((LENGTHS, [9] * 4), (2, 3), (False, True))
            if case not in ((LENGTHS, 3, False), ([9] * 4, 2, True))
        ],
    ],
)
def test_packed_equals_each_sequence_alone(name, lengths, alike, copies, monkeypatch):
    """Also where pasts are shared and computed once, whether attention copies them or not."""
    monkeypatch.setattr("lightrft.models.attention.layout.CALL_WORK", math.inf if copies else 0)
    batch = make_batch(lengths, alike)
    batch = replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))
    assert alike == 0 or len(batch.shared.computed) < batch.num_tokens
    reference = make_model(name, "eager")
    model = make_model(name, ATTENTION)

    expected = one_by_one(reference, batch)
    values = Actor(model)(batch, TEMPERATURE)
    for value, known in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-5)

    weighted(expected).backward()
    weighted(values).backward()
    assert_same_gradients(gradients_of(model), gradients_of(reference))
    assert all(
        gradient.abs().max() > 0
        for gradient in gradients_of(reference).values()
        if gradient is not None
    )


@pytest.mark.parametrize(
    "prompt, dtype, copied",
    [(16, torch.float32, 1), (16, torch.bfloat16, 0), (100, torch.float32, 0)],
)
def test_short_prefixes_alone_are_copied(prompt, dtype, copied, monkeypatch):
    """Attention within a long prefix would be repeated.

    In bfloat16 its gradient would be rounded for each copy.
    """
    calls = []
    monkeypatch.setattr(
        flat,
        "block_attention",
        lambda *args, **options: calls.append(args) or block_attention(*args, **options),
    )
    ids = torch.cat(
        [torch.cat([torch.arange(prompt), torch.full((4,), 200 + row)]) for row in range(8)]
    )
    lengths = torch.full((8,), prompt + 4)
    layout = Layout(lengths, torch.device("cpu"), shared=find_shared_prefixes(ids, lengths))
    query, key, value = (
        torch.randn(1, heads, layout.num_computed, 32, dtype=dtype) for heads in (4, 2, 2)
    )
    flat.flat_attention(torch.nn.Module(), query, key, value, None, layout=layout)
    assert len(calls) == copied


@pytest.mark.parametrize("name", ["qwen2 window", "mistral window", "gemma3"])
def test_the_window_is_seen_at_these_lengths(name):
    """Without its window the model gives other numbers, so the equality above covers it."""
    batch = make_batch()
    model = make_model(name, ATTENTION)
    with torch.no_grad():
        windowed = Actor(model)(batch, TEMPERATURE)[0]
        for layer in model.base_model.layers:
            layer.self_attn.sliding_window = None
            layer.self_attn.config.sliding_window = None
        assert (windowed - Actor(model)(batch, TEMPERATURE)[0]).abs().max() > 1e-2


def test_a_window_that_only_the_mask_applies():
    """Phi-3.5-MoE passes it to no attention function; in training its router draws experts."""
    models = []
    for attention in ("eager", ATTENTION):
        config = AutoConfig.for_model("phimoe", **SIZES, sliding_window=4, num_local_experts=2)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        models.append(model.eval())
    batch = make_batch()
    with torch.no_grad():
        expected = one_by_one(models[0], batch)
        for value, known in zip(Actor(models[1])(batch, TEMPERATURE), expected, strict=True):
            torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-5)


IMAGE = [SEEN] * 4
LARGE = [SEEN] * 9
WITH_IMAGES = [
    [1, 2, *IMAGE, 3, *LARGE, 4],
    [1, 2, *IMAGE, 3, *LARGE, 5, 6],
    [7, 8],
    LARGE,
    [6, *IMAGE, 9],
    [1, 2, *IMAGE, 3, *LARGE],
]
"""The first, the second and the last sequence begin with the same images.

Images are shorter and longer than a window.
"""


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_an_image_see_all_of_it(window, shares, dtype):
    """Values and gradients equal a mask for each sequence, as transformers makes it for Gemma 3."""
    ids = torch.tensor(sum(WITH_IMAGES, []))
    lengths = torch.tensor(list(map(len, WITH_IMAGES)))
    shared = find_shared_prefixes(ids, lengths) if shares else None
    layout = Layout(lengths, CPU, shared=shared, bidirectional=ids == SEEN)
    indices = shared.indices if shared else torch.arange(len(ids))
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(layout.num_computed, heads, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    upstream = torch.randn(layout.num_computed, 4, 8, generator=generator)
    rows = [x[indices].double().split(lengths.tolist()) for x in inputs]
    expected = torch.cat(
        [
            masked(*row, tokens, window)
            for *row, tokens in zip(*rows, ids.split(lengths.tolist()), strict=True)
        ]
    )
    expected = expected[shared.computed] if shared else expected
    known = torch.autograd.grad((expected * upstream).sum(), inputs)
    flat_inputs = [x.transpose(0, 1).unsqueeze(0) for x in inputs]
    output = flat.flat_attention(
        torch.nn.Module(), *flat_inputs, None, layout=layout, sliding_window=window
    )[0][0]

    copied = flat.copied_attention(*inputs, layout, Scoring(window=window))
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for values in (output, copied):
        torch.testing.assert_close(values.float(), expected.float(), **exact)
        gradients = torch.autograd.grad((values * upstream).sum(), inputs)
        for gradient, correct in zip(gradients, known, strict=True):
            torch.testing.assert_close(gradient.float(), correct.float(), **exact)


def test_images_by_hand():
    """Of `a I I I b` the first two of three tokens see two more and one more, in reverse order.

    Of `I I` the first sees one.
    """
    layout = Layout(
        torch.tensor([5, 2]), CPU, bidirectional=torch.tensor([0, 1, 1, 1, 0, 1, 1]).bool()
    )
    first, following = layout.calls(None)
    assert (
        first.query_lengths == [5, 2]
        and following.query_lengths == following.key_lengths == [2, 1]
        and following.causal
    )
    assert following.queries.rows.tolist() == [2, 1, 5] and following.keys.rows.tolist() == [
        3,
        2,
        6,
    ]
    assert layout.run_ids.tolist() == [-1, 0, 0, 0, -1, 1, 1]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen2 window"])
@pytest.mark.parametrize("changed", [0, 3, 7])
def test_changing_one_sequence_leaves_the_others_as_they_are(name, changed):
    batch = make_batch()
    other = make_batch()
    tokens = other.sequence_ids == changed
    other.input_ids[tokens] = 3 + (other.input_ids[tokens] * 7 + 11) % 58

    actor = Actor(make_model(name, ATTENTION)).eval()
    with torch.no_grad():
        before = actor(batch, TEMPERATURE)
        after = actor(other, TEMPERATURE)

    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[~tokens], second[~tokens])
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
    """Sharded parameters meet in collectives: a rank without work must go through the same backward
    pass.
    """
    model = make_model("llama", ATTENTION)
    batch = make_batch([1])
    Actor(model)(batch, 1.0)[0].sum().backward()
    assert all(
        gradient is not None and not gradient.any() for gradient in gradients_of(model).values()
    )


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_gradient_checkpointing_changes_nothing(name):
    batch = make_batch()
    plain = make_model(name, ATTENTION)
    checkpointed = make_model(name, ATTENTION)
    checkpointed.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    counted = count_calls(checkpointed.base_model.layers[0].self_attn)
    for model in (plain, checkpointed):
        weighted(Actor(model).train()(batch, TEMPERATURE)).backward()
    assert_same_gradients(gradients_of(checkpointed), gradients_of(plain))
    assert counted == ["call", "call"], "the layer was not computed again in the backward pass"


def count_calls(module: torch.nn.Module) -> list[str]:
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("call"))
    return calls


CPU = torch.device("cpu")


def test_layout_by_hand():
    """Lengths 3, 1, 4: a block for the single token, and a block for the two that fit in four."""
    blocks = Layout(torch.tensor([3, 1, 4]), CPU).blocks
    assert blocks.shapes == [(1, 1), (2, 4)]
    assert blocks.source.tolist() == [3, 0, 1, 2, 2, 4, 5, 6, 7]
    assert blocks.positions.tolist() == [1, 2, 3, 0, 5, 6, 7, 8]


def test_long_sequences_are_grouped_by_length_without_padding():
    blocks = Layout(
        torch.tensor([LONG_SEQUENCE + 3, 2, LONG_SEQUENCE + 1, LONG_SEQUENCE + 3]), CPU
    ).blocks
    assert blocks.shapes == [(1, 2), (2, LONG_SEQUENCE + 3), (1, LONG_SEQUENCE + 1)]
    assert len(blocks.source) == len(blocks.positions) == 3 * LONG_SEQUENCE + 9


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [([5, 5, 5], [(3, 5)]), ([1], [(1, 1)]), ([1, 2, 90, 70], [(1, 1), (1, 2), (1, 90), (1, 70)])],
)
def test_blocks_that_are_flat_already_are_not_gathered(lengths, shapes):
    blocks = Layout(torch.tensor(lengths), CPU).blocks
    assert (blocks.shapes, blocks.source, blocks.positions) == (shapes, None, None)


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_found_again_and_padding_stays_under_a_half(seed):
    lengths = torch.randint(
        1, 3 * LONG_SEQUENCE, (100,), generator=torch.Generator().manual_seed(seed)
    )
    blocks = Layout(lengths, CPU).blocks
    size = sum(count * width for count, width in blocks.shapes)
    assert len(blocks.source) == size < 2 * int(lengths.sum())
    assert torch.equal(blocks.source[blocks.positions], torch.arange(int(lengths.sum())))
    assert sum(count for count, _ in blocks.shapes) == len(lengths)


def test_the_layout_never_reads_from_the_device():
    """The tensors of a batch move, and the lengths stay on the host, so nobody waits for an
    accelerator.
    """
    batch = make_batch().to("meta")
    assert batch.input_ids.is_meta and batch.position_ids.is_meta and batch.sequence_ids.is_meta
    layout = Layout(batch.lengths, batch.input_ids.device)
    assert layout.blocks.source.is_meta and layout.offsets.is_meta and layout.longest == 16


def test_no_accelerator_means_blocks():
    for dtype in (torch.float32, torch.bfloat16):
        assert attention_kernel(CPU, dtype) is block_attention


def packed(model: PreTrainedModel, batch: Batch, **call: Any) -> Tensor:
    with torch.no_grad():
        return model(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], **call
        ).logits[0]


def alone(model: PreTrainedModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return torch.cat(
            [
                model(ids[None], use_cache=False).logits[0]
                for ids in batch.input_ids.split(batch.lengths.tolist())
            ]
        )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_own_attention_over_restarting_positions_agrees(name, attention):
    batch = make_batch()
    theirs = packed(make_model(name, attention), batch, attention_mask=None, use_cache=False)
    ours = packed(
        make_model(name, ATTENTION), batch, layout=Layout(batch.lengths, CPU), use_cache=False
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        {"use_cache": True},
        {},
        {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.int64), "use_cache": False},
    ],
    ids=["cache", "cache by default", "mask of ones"],
)
def test_calls_that_make_sequences_see_each_other_elsewhere_do_not_here(call):
    """In transformers' own attention each of these joins packed sequences, without a word."""
    batch = make_batch()
    ours = packed(make_model("qwen3", ATTENTION), batch, layout=Layout(batch.lengths, CPU), **call)
    torch.testing.assert_close(
        ours, alone(make_model("qwen3", "eager"), batch), rtol=1e-5, atol=1e-5
    )
