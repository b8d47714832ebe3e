"""Why: a state that runs from one sequence of a flat batch into the next is wrong in silence.

The reference is transformers' own computation of each sequence alone.
"""

import inspect
import itertools
import sys
from dataclasses import replace
from functools import wraps

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flat_models import (
    HYBRIDS,
    LENGTHS,
    SIZES,
    TEMPERATURE,
    assert_same_gradients,
    gradients_of,
    make_batch,
    make_model,
    one_by_one,
    weighted,
)
from lightrft.core.batch import Batch, SharedPrefix
from lightrft.models.attention import recurrent
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.attention.layout import Layout
from lightrft.models.attention.recurrent import CONVOLUTION_KERNEL, SCANS, _levels, adapted
from lightrft.models.heads import Actor
from lightrft.models.load import not_flat
from lightrft.strategy.batching.micro_batches import find_shared_prefixes

LONG = [70, 70, 75, 90]
"""Longer than the chunks of every family."""
ALONE = (LENGTHS, 0), (LONG, 0)
"""Batches without shared prefixes. They are slow tests, because all families take seconds."""


def batch_of(lengths: list[int], alike: int) -> Batch:
    batch = make_batch(lengths, alike)
    return replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("lengths", "alike"),
    [
        *[pytest.param(*case, marks=pytest.mark.slow) for case in (*ALONE, ([9] * 4, 2))],
        *[(LENGTHS, 3), (LONG, 28)],
    ],
)
def test_packed_equals_each_sequence_alone(name, lengths, alike):
    """Also with prefixes that are computed once, and with a prefix of prefixes."""
    batch = batch_of(lengths, alike)
    assert alike == 0 or len(batch.shared.computed) < batch.num_tokens
    # A shared prefix moves the borders of a family's chunks, and each chunk is rounded.
    assert_each_alone(name, batch, near=1e-5 if lengths is not LONG else 1e-4)


def assert_each_alone(name: str, batch: Batch, near: float) -> None:
    reference = make_model(name, "eager")
    model = make_model(name, ATTENTION)
    expected = one_by_one(reference, batch)
    values = Actor(model)(batch, TEMPERATURE)
    for value, known in zip(values, expected, strict=True):
        torch.testing.assert_close(value, known, rtol=near, atol=near)

    weighted(expected).backward()
    weighted(values).backward()
    assert_same_gradients(gradients_of(model), gradients_of(reference))


@pytest.mark.parametrize("name", HYBRIDS)
def test_transformers_own_functions_would_leak(name, monkeypatch):
    """Without the functions of this project the same batch gives other log-probs, or an error."""
    batch = make_batch()
    model = make_model(name, ATTENTION)
    family = sys.modules[type(model.get_decoder()).__module__]
    expected = Actor(model)(batch, TEMPERATURE)[0]

    for function in (CONVOLUTION_KERNEL, *SCANS):
        if hasattr(family, function):
            monkeypatch.setattr(family, function, getattr(family, function).__wrapped__)
    with torch.no_grad():
        try:
            leaked = Actor(model)(batch, TEMPERATURE)[0]
        except ValueError as error:  # some functions, from transformers 5.24 on
            assert "can't keep packed sequences apart" in str(error)
        else:
            assert (leaked - expected).abs().max() > 1e-2


def test_a_shared_prefix_is_computed_once():
    """Every token goes through the layer once."""
    batch = batch_of([130] * 4, 50).select([0, 2])
    batch = replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))
    model = make_model("qwen3_5", ATTENTION)
    seen = []
    layer = model.get_decoder().layers[0].linear_attn
    layer.in_proj_qkv.register_forward_hook(lambda *call: seen.append(call[2].shape[1]))
    with torch.no_grad():
        Actor(model)(batch, TEMPERATURE)

    layout = Layout(batch.lengths, torch.device("cpu"), shared=batch.shared)
    levels, _ = _levels(layout, in_blocks=True)
    assert seen == [50 + 80 + 80]
    assert [len(level.source) for level in levels] == [50, 160], "no padding here"


A_TREE = SharedPrefix(
    computed=torch.tensor([0, 1, 2, 3, 6, 10, 11]),
    indices=torch.tensor([0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 5, 6]),
)
"""Sequences `a b c d`, `a b e` and `a b c f g`: `a b` is read twice and then `c` once.

computed  a b c d e f g
"""


def test_levels_by_hand():
    layout = Layout(torch.tensor([4, 3, 5]), torch.device("cpu"), shared=A_TREE)
    (first, second, third), order = _levels(layout, in_blocks=True)

    assert first.shapes == [(1, 2)] and first.source.tolist() == [0, 1]
    assert [(block.keeps_states, block.parents) for block in first.blocks] == [(True, None)]
    # `c` continues `a b` and is continued; `e` only continues it
    assert second.shapes == [(1, 1), (1, 1)] and second.source.tolist() == [2, 4]
    assert [block.keeps_states for block in second.blocks] == [True, False]
    assert [block.parents.tolist() for block in second.blocks] == [[0], [0]]
    # `d` and `f g` continue `c`, in blocks of their widths
    assert sorted(third.source.tolist()) == [3, 5, 6]
    assert all(block.parents.tolist() == [0] for block in third.blocks)
    everything = torch.cat([level.source for level in (first, second, third)])
    assert everything[order].tolist() == list(range(7))

    (first, second, third), order = _levels(layout, in_blocks=False)
    assert [level.source.tolist() for level in (first, second, third)] == [
        [0, 1],
        [2, 4],
        [3, 5, 6],
    ]
    offsets = [level.blocks[0].offsets.tolist() for level in (first, second, third)]
    assert offsets == [[0, 2], [0, 1, 2], [0, 1, 3]]
    assert third.blocks[0].parents.tolist() == [0, 0]
    assert order.tolist() == [0, 1, 2, 4, 3, 5, 6]


def concatenated(function):
    """Return a function like a kernel of flash-linear-attention, which takes `cu_seqlens`."""

    def kernel(q, k, v, g, beta, initial_state=None, output_final_state=False, **options):
        offsets = options.pop("cu_seqlens", None)
        if offsets is None:  # the reference, without a layout
            return function(q, k, v, g=g, beta=beta, **options)

        assert len(q) == 1 and offsets[-1] == q.shape[1]
        outputs = []
        states = []
        for run, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
            initial = None if initial_state is None else initial_state[run : run + 1]
            tensors = [x[:, start:stop] for x in (q, k, v)]
            output, state = function(
                *tensors,
                g=g[:, start:stop],
                beta=beta[:, start:stop],
                initial_state=initial,
                output_final_state=output_final_state,
                **options,
            )
            outputs.append(output)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None

    return wraps(function)(kernel)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
@pytest.mark.parametrize(("lengths", "alike"), [(LENGTHS, 0), (LENGTHS, 3), (LONG, 28)])
def test_kernels_for_concatenated_runs(name, lengths, alike, monkeypatch):
    """On a GPU a level is one call without padding."""
    batch = batch_of(lengths, alike)
    model = make_model(name, ATTENTION)
    family = sys.modules[type(model.get_decoder()).__module__]
    (function,) = [function for function in SCANS if hasattr(family, function)]
    kernel = concatenated(getattr(family, function).__wrapped__)
    monkeypatch.setattr(family, function, adapted(kernel, function))
    monkeypatch.setattr(recurrent, "has_varlen_kernel", lambda scan, device: True)
    monkeypatch.setattr(recurrent, "_called_on", lambda device, function: function)

    assert_each_alone(name, batch, near=1e-5 if lengths is not LONG else 1e-4)


WORKS = "def chunk_gated_delta_rule(): ..."
BROKEN = "raise RuntimeError('another version of triton is needed')"


@pytest.mark.parametrize(("content", "works"), [(WORKS, True), (BROKEN, False)])
def test_a_kernel_that_cannot_be_imported_is_not_given_concatenated_runs(
    content, works, monkeypatch, tmp_path
):
    """transformers then computes in plain torch, which ignores where the runs begin."""
    package = tmp_path / "fla" / "ops"
    package.mkdir(parents=True)
    (package / "gated_delta_rule.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)

    gpu = torch.device("cuda", 0)
    recurrent._is_importable.cache_clear()
    found = {name: recurrent.has_varlen_kernel(scan, gpu) for name, scan in SCANS.items()}
    recurrent._is_importable.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]
    assert found == {
        "torch_chunk_gated_delta_rule": works,
        "chunk_kimi_delta_attention": False,
        "mamba2_chunk_scan": False,
    }
    assert not recurrent.has_varlen_kernel(recurrent.DELTA_RULE_SCAN, torch.device("cpu"))


def test_a_package_of_kernels_for_accelerators_is_not_called_on_a_cpu(monkeypatch):
    """As where flash-linear-attention is installed: the self-check of a start runs on the CPU."""
    model = make_model("qwen3_5", ATTENTION)
    family = sys.modules[type(model.get_decoder()).__module__]
    for function in (CONVOLUTION_KERNEL, "torch_chunk_gated_delta_rule"):

        @wraps(inspect.unwrap(getattr(family, function)))
        def kernel(*args, **options):
            raise AssertionError("needs an accelerator")

        monkeypatch.setattr(family, function, adapted(kernel, function))
    assert_each_alone("qwen3_5", batch_of(LENGTHS, 3), near=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "nemotron_h"])
def test_gradient_checkpointing_changes_nothing(name):
    batch = batch_of(LENGTHS, 3)
    plain = make_model(name, ATTENTION)
    checkpointed = make_model(name, ATTENTION)
    checkpointed.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    for model in (plain, checkpointed):
        weighted(Actor(model).train()(batch, TEMPERATURE)).backward()
    assert_same_gradients(gradients_of(checkpointed), gradients_of(plain))


def test_calls_without_a_layout_are_as_before():
    """Another caller of transformers in the same process gets the same numbers."""
    make_model("qwen3_5", ATTENTION)  # replaces the functions of the family
    model = make_model("qwen3_5", "eager")
    ids = make_batch().input_ids[None]
    cached = model(input_ids=ids[:, :20], use_cache=True)
    rest = model(input_ids=ids[:, 20:], past_key_values=cached.past_key_values)
    whole = model(input_ids=ids).logits[:, 20:]
    torch.testing.assert_close(rest.logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_loading_accepts_the_family(name):
    assert not_flat(make_model(name, "eager")) == []


@pytest.mark.parametrize("family", ["jamba", "minimax"])
def test_other_states_are_refused(family):
    config = AutoConfig.for_model(family, **SIZES)
    assert not_flat(AutoModelForCausalLM.from_config(config))
