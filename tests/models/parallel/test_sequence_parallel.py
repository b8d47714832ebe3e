"""Why: ranks that divide a sequence must give what one rank gives, values and gradients.

Lengths and heads may be any. The reference is the same model, or the same attention, in one
process.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from algorithms.roles import rows
from flat_models import LENGTHS, SIZES, TEMPERATURE, gradients_of, make_batch, make_model, weighted
from lightrft.config import ConfigError
from lightrft.core.batch import Batch
from lightrft.models.attention.flat import ATTENTION, flat_attention
from lightrft.models.attention.layout import Layout
from lightrft.models.heads import Actor, rope_window
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.parallel.sequence_parallel import (
    NO_SEQUENCE_PARALLEL,
    SequenceParallel,
    set_sequence_parallel,
)
from lightrft.strategy import FSDPStrategy
from lightrft.strategy.backends.base import SEQUENCES
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from ranks import run_ranks
from tiny import tiny_model

KINDS = list(SEQUENCES)
PACKED = [24, 48, 16, 40, 8]
SINGLE = [136]
SHARED = [
    [*range(20), 50],
    [*range(20), 50, 51, 52],
    [90, 91, 92],
    [*range(20), *range(60, 80)],
    [90, 91, 93, 94],
    [90, 91],
    [*range(20), 50, 51, 53, 54],
    [*range(12), *range(40, 49)],
]
"""Sequences with two prompts.

There are prefixes within prefixes, one that is all of a sequence, and rows of a prompt with others
between them.
"""
NUM_HEADS = 4
HEAD_DIM = 8


def sequence_of(kind: str):
    return SEQUENCES[kind](Mesh("cpu", sp=torch.distributed.get_world_size()).sp)


def shared_layout(multiple: int, sequence: SequenceParallel = NO_SEQUENCE_PARALLEL) -> Layout:
    """Return where ranks have SHARED, filled up with one more sequence."""
    lengths = torch.tensor([len(row) for row in SHARED])
    shared = find_shared_prefixes(torch.tensor(sum(SHARED, [])), lengths)
    missing = -len(shared.computed) % multiple
    lengths = torch.cat([lengths, torch.tensor([missing] * (missing > 0), dtype=torch.int64)])
    return Layout(lengths, torch.device("cpu"), sequence, shared.append_sequence(missing))


def attention_inputs(num_tokens: int, num_kv_heads: int) -> tuple[list[Tensor], Tensor]:
    """Return query, key, value [T, H, D], and the upstream gradient of the output [T, H, D]."""
    generator = torch.Generator().manual_seed(num_kv_heads)
    shapes = [
        (num_tokens, heads, HEAD_DIM)
        for heads in (NUM_HEADS, num_kv_heads, num_kv_heads, NUM_HEADS)
    ]
    *inputs, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, upstream


def attend(
    inputs: list[Tensor], upstream: Tensor, layout: Layout, window: int | None
) -> list[Tensor]:
    """Return the output [T, H, D] and the gradients of query, key and value."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    flat = [x.transpose(0, 1).unsqueeze(0) for x in inputs]
    output = flat_attention(nn.Module(), *flat, None, layout=layout, sliding_window=window)[0][0]
    (output * upstream).sum().backward()
    return [output.detach(), *(x.grad for x in inputs)]


HEADS_AND_WINDOWS = [(2, None), (4, 13), (1, None), (2, 60)]
IN_IMAGES = torch.arange(136) % 29 < 21
"""Runs of tokens that attend to all of their run.

Some are cut by the ends of sequences and between ranks.
"""
CASES = [
    (lengths, num_kv_heads, window, None)
    for lengths in (PACKED, SINGLE)
    for num_kv_heads, window in HEADS_AND_WINDOWS
]
CASES += [(PACKED, 2, None, IN_IMAGES), (SINGLE, 4, 13, IN_IMAGES)]


def attention_of_ranks(kind: str) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return, per case, the four tensors in the order of the whole batch.

    The same is returned where sequences share prefixes.
    """
    sequence = sequence_of(kind)
    results = []
    cpu = torch.device("cpu")
    for lengths, num_kv_heads, window, in_images in CASES:
        inputs, upstream = attention_inputs(sum(lengths), num_kv_heads)
        here = sequence.positions(sum(lengths), cpu)
        layout = Layout(torch.tensor(lengths), cpu, sequence, bidirectional=in_images)
        mine = attend([x[here] for x in inputs], upstream[here], layout, window)
        results.append([sequence.gather(x) for x in mine])
    return results, shared_attention_of_ranks(sequence)


def shared_attention_of_ranks(sequence: SequenceParallel) -> list[list[Tensor]]:
    results = []
    layout = shared_layout(8, sequence)
    here = sequence.positions(layout.num_computed, layout.device)
    for num_kv_heads, window in HEADS_AND_WINDOWS:
        inputs, upstream = attention_inputs(layout.num_computed, num_kv_heads)
        mine = attend([x[here] for x in inputs], upstream[here], layout, window)
        results.append([sequence.gather(x) for x in mine])
    return results


def each_row_alone(num_kv_heads: int, window: int | None) -> list[Tensor]:
    """Return attention of computed tokens and its gradients.

    The rows have copies of everything that they share.
    """
    layout = shared_layout(8)
    inputs, upstream = attention_inputs(layout.num_computed, num_kv_heads)
    inputs = [x.requires_grad_() for x in inputs]
    whole = [x[layout.shared.indices].transpose(0, 1).unsqueeze(0) for x in inputs]
    apart = Layout(layout.lengths, layout.device)
    output = flat_attention(nn.Module(), *whole, None, layout=apart, sliding_window=window)[0][0][
        layout.shared.computed
    ]
    (output * upstream).sum().backward()
    return [output.detach(), *(x.grad for x in inputs)]


def test_shared_prefixes_are_read_as_if_each_row_had_them():
    assert len(shared_layout(8).calls(None)) == 5, "four levels of prefixes"
    for (num_kv_heads, window), found in zip(
        HEADS_AND_WINDOWS, shared_attention_of_ranks(NO_SEQUENCE_PARALLEL), strict=True
    ):
        for mine, known in zip(found, each_row_alone(num_kv_heads, window), strict=True):
            torch.testing.assert_close(mine, known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_that_of_one_rank(sp, kind):
    results = run_ranks(sp, attention_of_ranks, kind)
    for index, case in enumerate(HEADS_AND_WINDOWS):
        for _, shared in results:
            for found, known in zip(shared[index], each_row_alone(*case), strict=True):
                torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)

    results = [whole for whole, _ in results]
    for index, (lengths, num_kv_heads, window, in_images) in enumerate(CASES):
        layout = Layout(torch.tensor(lengths), torch.device("cpu"), bidirectional=in_images)
        expected = attend(*attention_inputs(sum(lengths), num_kv_heads), layout, window)
        for result in results:
            for found, known in zip(result[index], expected, strict=True):
                torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)


def round_trip(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's positions, the result of a gather, and the gradient of its slice."""
    sequence = sequence_of(kind)
    here = sequence.positions(24, torch.device("cpu"))
    mine = torch.stack([here, -here], 1).float().requires_grad_()
    whole = sequence.gather(mine)
    (whole * torch.arange(48.0).view(24, 2)).sum().backward()
    used, unused = (torch.ones(len(here), requires_grad=True) for _ in range(2))
    first, _ = sequence.gather_all(used * here, unused * here)
    (first * torch.arange(24.0)).sum().backward()
    assert torch.equal(used.grad, here.float() ** 2) and unused.grad is None

    rows = torch.ones(3, requires_grad=True)
    pairs = torch.ones(3, 2, requires_grad=True)
    of_rows, of_pairs = sequence.sums(rows, pairs)
    (of_pairs * torch.arange(6.0).view(3, 2)).sum().backward()
    size = sequence.axis.size
    assert of_rows.tolist() == [size] * 3 and of_pairs.tolist() == [[size] * 2] * 3
    assert torch.equal(pairs.grad, torch.arange(6.0).view(3, 2)) and rows.grad is None
    return here, whole.detach(), mine.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sp", [2, 4])
def test_a_gather_restores_the_order_and_keeps_its_own_gradient(sp, kind):
    results = run_ranks(sp, round_trip, kind)
    assert torch.cat([here for here, _, _ in results]).sort().values.tolist() == list(range(24))
    for here, whole, gradient in results:
        assert torch.equal(whole, torch.stack([torch.arange(24), -torch.arange(24)], 1).float())
        assert torch.equal(gradient, torch.arange(48.0).view(24, 2)[here]), "its own slice, once"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_do_not_divide_are_named(kind):
    with pytest.raises(ValueError, match="25 tokens are not a multiple of"):
        SEQUENCES[kind](Axis("sp", 2, 0, None)).spans(25)


MODELS = ["llama", "qwen3", "qwen2 window", "gemma3"]
BATCHES = [(LENGTHS, 0), ([24, 48, 16, 40, 7], 0), ([1], 0), ([57], 0), ([24, 28, 16, 40, 7], 12)]
"""Lengths, and the number of tokens that the sequences have in common at their beginning."""


def batch_of(lengths: list[int], alike: int) -> Batch:
    batch = make_batch(lengths, alike)
    return replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))


def models_for(kind: str) -> list[str]:
    return MODELS + (["qwen3_5", "lfm2", "nemotron_h"] if kind == "ulysses" else [])


def model_of_ranks(kind: str, checkpointing: bool) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Return, per model and batch, values, and gradients summed over the ranks."""
    sequence = sequence_of(kind)
    results = []
    for name in models_for(kind):
        for case in BATCHES:
            model = make_model(name, ATTENTION)
            if checkpointing:
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )

            actor = Actor(model).train()
            set_sequence_parallel(actor, sequence)
            values = actor(batch_of(*case), TEMPERATURE)
            weighted(values).backward()
            gradients = {
                name: sequence.axis.sum(gradient) for name, gradient in gradients_of(model).items()
            }
            results.append(([value.detach() for value in values], gradients))

    return results


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sp", "checkpointing"), [(2, False), (4, True)])
def test_an_actor_on_several_ranks_is_that_of_one(sp, checkpointing, kind):
    """Lengths that do not divide, a batch of one token, one long sequence; two key-value heads on
    four ranks.
    """
    results = run_ranks(sp, model_of_ranks, kind, checkpointing)
    cases = [(name, *case) for name in models_for(kind) for case in BATCHES]
    for index, (name, *case) in enumerate(cases):
        model = make_model(name, ATTENTION)
        expected = Actor(model)(make_batch(*case), TEMPERATURE)
        weighted(expected).backward()

        for result in results:
            values, gradients = result[index]
            for value, known in zip(values, expected, strict=True):
                torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-5)
            for parameter, known in gradients_of(model).items():
                assert (gradients[parameter] - known).norm() <= 1e-4 * known.norm() + 1e-6, (
                    name,
                    case,
                    parameter,
                )


def test_a_recurrent_state_is_not_split_by_zigzag():
    actor = Actor(make_model("qwen3_5", ATTENTION))
    with pytest.raises(ValueError, match="its recurrent state runs .*: use --sp_impl ulysses"):
        set_sequence_parallel(actor, SEQUENCES["zigzag"](Axis("sp", 2, 0, None)))


def scores_of_ranks(kind: str, folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    scorer = rows.scorer(folder)
    sequence = sequence_of(kind)
    set_sequence_parallel(scorer, sequence)
    scores = scorer(batch_of(LENGTHS, 3))
    (scores * torch.linspace(-1, 1, len(scores))).sum().backward()
    return scores.detach(), {
        name: sequence.axis.sum(gradient) for name, gradient in gradients_of(scorer).items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_scorer_on_two_ranks_is_that_of_one(tmp_path, kind):
    folder = rows.dense_scorer(tiny_model(tmp_path), seed=1)
    scorer = rows.scorer(folder)
    expected = scorer(make_batch(LENGTHS, 3))
    (expected * torch.linspace(-1, 1, len(expected))).sum().backward()
    for scores, gradients in run_ranks(2, scores_of_ranks, kind, folder):
        torch.testing.assert_close(scores, expected.detach(), rtol=1e-5, atol=1e-5)
        for name, known in gradients_of(scorer).items():
            assert (gradients[name] - known).norm() <= 1e-4 * known.norm() + 1e-6, name


def test_zigzag_by_hand():
    """Lengths 3, 1, 4 on two ranks.

    The first has tokens 0 1 and 6 7, and the last two see the two before them.
    """
    zigzag = SEQUENCES["zigzag"](Axis("sp", 2, 0, None))
    assert zigzag.positions(8, torch.device("cpu")).tolist() == [0, 1, 6, 7]
    first, before = Layout(torch.tensor([3, 1, 4]), torch.device("cpu"), zigzag).calls(None)
    assert first.query_lengths == [2, 2] and first.keys.rows.tolist() == [0, 1, 6, 7]
    assert (before.query_lengths, before.key_lengths) == ([2], [2])
    assert (before.queries.rows, before.keys.rows) == (slice(2, 4), slice(4, 6))


# -- errors


def test_heads_that_do_not_divide():
    actor = Actor(make_model("llama", ATTENTION))
    with pytest.raises(
        ValueError,
        match=(
            "--sp_size 3 --sp_impl ulysses does not support LlamaForCausalLM: .* 4 attention heads"
        ),
    ):
        set_sequence_parallel(actor, SEQUENCES["ulysses"](Axis("sp", 3, 0, None)))
    with pytest.raises(ValueError, match="sp_size 2 does not divide its 1 attention heads"):
        set_sequence_parallel(actor, SEQUENCES["ulysses"](Axis("sp", 2, 0, None)), tp=4)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_that_follow_the_longest_sequence_are_refused_beyond_their_window(kind):
    """Up to there a sequence's log-probs are its own, on any number of ranks.

    It does not matter what else is in the micro-batch.
    """
    config = LlamaConfig(**SIZES | {"max_position_embeddings": 16}, rope_parameters=ROPES[kind])
    torch.manual_seed(3)
    actor = Actor(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION))
    assert rope_window(actor.language_model) == 16
    together = make_batch([5, 16, 2])
    alone = make_batch([5])
    torch.testing.assert_close(
        actor(together, 1.0)[0][:5],
        actor(
            replace(alone, input_ids=together.input_ids[:5], loss_mask=together.loss_mask[:5]), 1.0
        )[0],
        rtol=1e-5,
        atol=1e-5,
    )
    set_sequence_parallel(actor, SEQUENCES["ulysses"](Axis("sp", 2, 0, None)))  # is not refused

    with pytest.raises(
        ConfigError, match="a sequence of 17 tokens is longer than the 16 .* --generate_max_len"
    ):
        actor(make_batch([5, 17]), 1.0)


def refused() -> str:
    FSDPStrategy(args={"fsdp": True, "sp_size": 2}).setup_distributed()
    with pytest.raises(ValueError) as sizes:
        Mesh("cpu", sp=3)
    return str(sizes.value)


def test_what_cannot_be_divided_is_refused():
    sizes = run_ranks(2, refused)[0]
    assert "2 processes cannot be split into" in sizes and "sp_size 3" in sizes
