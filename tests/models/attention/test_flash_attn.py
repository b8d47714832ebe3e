"""Why: the fast kernel runs only on an accelerator, so its inputs must be proven without one.

A stand-in with the kernel's signature computes variable-length attention from its definition, one
sequence at a time.
"""

import math
import sys
from dataclasses import replace
from functools import partial
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from flat_models import (
    MODELS,
    SEEN,
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
from lightrft.models.attention import flash_attn, flat
from lightrft.models.attention.flat import ATTENTION, block_attention, flat_attention
from lightrft.models.attention.layout import Layout, Scoring
from lightrft.models.heads import Actor
from lightrft.strategy.batching.micro_batches import find_shared_prefixes

CPU = torch.device("cpu")


def torch_stand_in(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """Stand in for `torch.nn.attention.varlen.varlen_attn`."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def early_torch_stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    """Stand in for its first versions with windows: they take as many key as query heads."""
    return torch_stand_in(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def package_stand_in(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    """Stand in for `flash_attn.flash_attn_varlen_func`."""
    assert (
        causal and dropout_p == 0 and deterministic == torch.are_deterministic_algorithms_enabled()
    )
    return reference(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size
    )


def reference(query, key, value, starts_q, starts_k, max_q, max_k, scale, window_size) -> Tensor:
    assert (
        starts_q.dtype == starts_k.dtype == torch.int32
        and starts_q[0] == 0
        and starts_q[-1] == len(query)
    )
    lengths = (starts_q[1:] - starts_q[:-1]).tolist()
    assert (
        max_q == max_k == max(lengths)
        and isinstance(max_q, int)
        and torch.equal(starts_q, starts_k)
    )

    before, after = window_size
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (
            q.shape[-1] ** -0.5 if scale is None else scale
        )
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < -after) | ((distance > before) if before >= 0 else False)
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )

    return torch.cat(outputs)


KERNELS = {
    "torch": partial(flash_attn.torch_varlen, torch_stand_in),
    "early torch": partial(flash_attn.torch_varlen, early_torch_stand_in),
    "package": partial(flash_attn.package_varlen, package_stand_in),
}


def forward_stand_in(
    query,
    key,
    value,
    starts_q,
    starts_k,
    max_q,
    max_k,
    dropout,
    causal,
    return_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    """Stand in for `aten._flash_attention_forward` of sequences end to end.

    Returns the output and the log-sum-exp [H, T].
    """
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and dropout == 0 and not return_mask
    outputs = []
    lses = []
    runs = list(
        _runs(
            query,
            key,
            value,
            starts_q,
            starts_k,
            max_q,
            max_k,
            causal,
            scale,
            window_size_left,
            window_size_right,
        )
    )

    for _, _, v, scores, _ in runs:
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        lses.append(scores.logsumexp(-1))

    state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outputs), torch.cat(lses, 1), state, query.new_empty(0), query.new_empty(0)


def backward_stand_in(
    gradient,
    query,
    key,
    value,
    output,
    lse,
    starts_q,
    starts_k,
    max_q,
    max_k,
    dropout,
    causal,
    state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """Stand in for `aten._flash_attention_backward`.

    The probabilities come from the scores and the given log-sum-exp [H, T].
    """
    assert (
        gradient.is_contiguous()
        and lse.is_contiguous()
        and lse.shape == (query.shape[1], len(query))
    )
    found = []

    for q, k, v, scores, rows in _runs(
        query,
        key,
        value,
        starts_q,
        starts_k,
        max_q,
        max_k,
        causal,
        scale,
        window_size_left,
        window_size_right,
    ):
        above = gradient[rows]
        size = q.shape[-1] ** -0.5 if scale is None else scale
        probabilities = (scores - lse[:, rows, None]).exp()
        of_each = torch.einsum("qhd,khd->hqk", above, v) - (above * output[rows]).sum(
            -1
        ).t().unsqueeze(-1)
        of_scores = probabilities * of_each * size
        of_keys = (
            torch.einsum("hqk,qhd->khd", of_scores, q),
            torch.einsum("hqk,qhd->khd", probabilities, above),
        )
        of_keys = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in of_keys)
        found.append((torch.einsum("hqk,khd->qhd", of_scores, k), *of_keys))

    return tuple(torch.cat(columns) for columns in zip(*found, strict=True))


def _runs(query, key, value, starts_q, starts_k, max_q, max_k, causal, scale, before, after):
    """Yield each run's query, key and value for all heads, its scores, and where its queries are.

    Scores are [H, q, k], hidden ones -inf.
    """
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert starts_q[-1] == len(query) and starts_k[-1] == len(key) == len(value)
    lengths_q, lengths_k = ((starts[1:] - starts[:-1]).tolist() for starts in (starts_q, starts_k))
    assert (max(lengths_q), max(lengths_k)) == (max_q, max_k)

    begin = 0
    for q, k, v in zip(
        query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True
    ):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (
            q.shape[-1] ** -0.5 if scale is None else scale
        )
        # the last query is at the last key
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal or after == 0:
            hidden |= distance < 0
        if before is not None and before >= 0:
            hidden |= distance > before
        assert not hidden.all(1).any()
        yield q, k, v, scores.masked_fill(hidden, -torch.inf), slice(begin, begin + len(q))
        begin += len(q)


@pytest.fixture
def operations():
    """Replace torch's operations of flash attention by their definition, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward_stand_in, "CPU")
    library.impl("_flash_attention_backward", backward_stand_in, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gemma2", "gpt_oss")])
def test_packed_equals_each_sequence_alone(name, kernel, monkeypatch):
    """Offsets, longest sequence, scaling, windows and grouped heads, for every family; forward and
    gradients. Soft caps need all scores, and sinks need log-sum-exps, also without shared prefixes.
    """
    used = []
    monkeypatch.setattr(
        flat, "attention_kernel", lambda *where: used.append(where) or KERNELS[kernel]
    )
    assert_each_sequence_alone(name, make_batch())
    assert used == [(CPU, torch.float32)] * 2, "one choice per layer"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
def test_shared_prefixes_equal_each_sequence_alone(name, monkeypatch, operations):
    used = []
    monkeypatch.setattr(
        flat, "call_kernel", lambda *where: used.append(where) or flash_attn.FLASH_CALLS
    )
    batch = make_batch(alike=2)
    assert_each_sequence_alone(
        name, replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))
    )
    assert used == [(CPU, torch.float32)] * 2, "one choice per layer"


def assert_each_sequence_alone(name: str, batch: Batch) -> None:
    plain = make_model(name, "eager")
    model = make_model(name, ATTENTION)
    expected = one_by_one(plain, batch)
    values = Actor(model)(batch, TEMPERATURE)
    for value, known in zip(values, expected, strict=True):
        torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-5)
    weighted(expected).backward()
    weighted(values).backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain))


def test_torchs_kernel_takes_what_it_is_given():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    known = signature(varlen.varlen_attn).parameters
    if "window_size" not in known:
        pytest.skip("this torch has no windows in it")
    ours = signature(torch_stand_in if "enable_gqa" in known else early_torch_stand_in).parameters
    assert list(known)[:7] == list(ours)[:7] and set(ours) <= set(known)
    assert all(known[name].kind == ours[name].kind for name in ours)


def test_torch_comes_first_then_the_package_then_none(monkeypatch):
    torchs = {"varlen_attn": torch_stand_in}
    windowless = {"varlen_attn": lambda query, is_causal: 0}
    package = {"flash_attn_varlen_func": package_stand_in}
    for of_torch, of_package, expected in (
        (torchs, None, flash_attn.torch_varlen),
        (torchs, package, flash_attn.torch_varlen),
        (windowless, package, flash_attn.package_varlen),
        (None, package, flash_attn.package_varlen),
        (windowless, None, None),
    ):
        for name, content in (("torch.nn.attention.varlen", of_torch), ("flash_attn", of_package)):
            module = ModuleType(name)
            vars(module).update(content or {})
            # None: the import fails
            monkeypatch.setitem(sys.modules, name, module if content else None)
        chosen = flash_attn.flash_kernel.__wrapped__()
        assert (chosen and chosen.func) is expected


def test_the_choice_by_device_and_type(monkeypatch):
    flash = object()
    monkeypatch.setattr(flash_attn, "flash_kernel", lambda: flash)
    monkeypatch.setattr(flat, "has_flash_attention", lambda device: device.type == "cuda")
    cuda = torch.device("cuda", 0)
    assert (
        flat.attention_kernel(cuda, torch.bfloat16)
        is flat.attention_kernel(cuda, torch.float16)
        is flash
    )

    assert (
        flat.attention_kernel(cuda, torch.float32)
        is flat.attention_kernel(CPU, torch.bfloat16)
        is block_attention
    )
    monkeypatch.setattr(flash_attn, "flash_kernel", lambda: None)
    assert flat.attention_kernel(cuda, torch.bfloat16) is block_attention


def test_dropout_that_the_kernel_does_not_have():
    query = torch.zeros(3, 2, 8)
    layout = Layout(torch.tensor([3]), CPU)
    with pytest.raises(ValueError, match="no dropout; set attention_dropout"):
        KERNELS["torch"](query, query, query, layout, Scoring(dropout=0.1))


APART = [[1, 2, 3, 4, 5], [9], [*range(100, 170)], [*range(200, 328)], [*range(400, 433)], [0]]
TOGETHER = [
    [*range(100), *range(200, 270)],
    [*range(100), 300],
    [*range(100), *range(200, 240), *range(400, 490)],
    [*range(500, 517)],
    [*range(500, 512), 600, 601],
    [0],
]
"""Sequences of tokens with and without shared prefixes, and prefixes within those.

A filler of one token is at the end.
"""
IMAGES = [
    [1, 2, *[SEEN] * 70, 3, *[SEEN] * 256, 4],
    [5, *[SEEN] * 40],
    [1, 2, *[SEEN] * 70, 3, *[SEEN] * 256, 6, 7],
    [0],
]
CASES = {
    "plain": (APART, (4, 4), (64, 64), None),
    "grouped heads": (APART, (8, 2), (128, 128), None),
    "256 columns": (APART, (4, 2), (256, 256), None),
    "a window": (APART, (8, 2), (64, 64), 5),
    "narrow values": (APART, (4, 4), (192, 128), None),
    "shared": (TOGETHER, (4, 4), (64, 64), None),
    "shared, grouped heads": (TOGETHER, (8, 2), (128, 128), None),
    "shared, 256 columns": (TOGETHER, (4, 2), (256, 256), None),
    "shared, a window": (TOGETHER, (8, 2), (64, 64), 30),
    "shared, narrow values": (TOGETHER, (4, 4), (192, 128), None),
    "images": (IMAGES, (8, 2), (64, 64), None),
    "images, a window": (IMAGES, (4, 2), (256, 256), 50),
}
"""Sequences, query and key heads, columns of queries and of values, window."""


def attended(
    case: str, device: torch.device, dtype: torch.dtype, *, by_hand: bool = False
) -> list[Tensor]:
    """Return the output [U, H, D], and the gradients of queries, keys and values.

    `by_hand` computes them from the definition, each sequence alone.
    """
    rows, (heads, kv_heads), (columns, value_columns), window = CASES[case]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor(sum(rows, []))
    shared = find_shared_prefixes(ids, lengths)
    in_images = ids == SEEN
    layout = Layout(
        lengths, device, shared=shared, bidirectional=in_images if in_images.any() else None
    )
    generator = torch.Generator().manual_seed(0)

    shapes = [
        (heads, columns),
        (kv_heads, columns),
        (kv_heads, value_columns),
        (heads, value_columns),
    ]
    *inputs, upstream = (
        torch.randn(layout.num_computed, *shape, generator=generator).to(device, dtype)
        for shape in shapes
    )

    inputs = [x.requires_grad_() for x in inputs]
    if by_hand and in_images.any():
        whole = [x[shared.indices].split(lengths.tolist()) for x in inputs]
        output = torch.cat(
            [
                masked(*x, row, window, 0.1)
                for *x, row in zip(*whole, ids.split(lengths.tolist()), strict=True)
            ]
        )
        output = output[shared.computed]
    elif by_hand:
        whole = inputs if shared is None else [x[shared.indices] for x in inputs]
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        output = reference(
            *whole, starts, starts, longest, longest, 0.1, (-1 if window is None else window - 1, 0)
        )
        output = output if shared is None else output[shared.computed]
    else:
        flat = [x.transpose(0, 1).unsqueeze(0) for x in inputs]
        output = flat_attention(
            nn.Module(), *flat, None, layout=layout, scaling=0.1, sliding_window=window
        )[0][0]

    (output * upstream).sum().backward()
    return [output.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize(
    ("capability", "installed", "active"),
    [((9, 0), True, ["FA3"]), ((8, 0), True, []), ((10, 0), True, []), ((9, 0), False, [])],
)
def test_newer_kernels_run_on_hopper_if_they_are_installed(
    monkeypatch, capability, installed, active
):
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(flash_attn, "find_spec", lambda name: object() if installed else None)
    flash_attn.activate_newer_kernels.__wrapped__()
    assert activated == active


@pytest.mark.parametrize("kernel", ["cpu", "cpu, copies", "flash"])
@pytest.mark.parametrize("case", CASES)
def test_every_shape_of_attention(case, kernel, monkeypatch, operations):
    """On the CPU, in float32: its own kernels, and all inputs of flash attention's kernels."""
    monkeypatch.setattr(
        "lightrft.models.attention.layout.CALL_WORK", math.inf if kernel == "cpu, copies" else 0
    )
    if kernel == "flash":
        monkeypatch.setattr(flat, "has_flash_attention", lambda device: True)
        monkeypatch.setattr(flat, "_flash", lambda device, dtype: True)
        if flash_attn.flash_kernel() is None:
            monkeypatch.setattr(flat, "attention_kernel", lambda *where: KERNELS["torch"])

    for found, known in zip(
        attended(case, CPU, torch.float32),
        attended(case, CPU, torch.float32, by_hand=True),
        strict=True,
    ):
        torch.testing.assert_close(found, known, rtol=1e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_real_kernels_are_close_to_float32(case):
    """In bfloat16.

    If it fails, the log has the signature, which differs between versions of torch.
    """
    device = torch.device(torch.accelerator.current_accelerator())
    if flat.attention_kernel(device, torch.bfloat16) is block_attention:
        pytest.skip("no variable-length flash attention in this installation")
    print(signature(flash_attn.flash_kernel().args[0]))
    expected = attended(case, CPU, torch.float32, by_hand=True)
    for found, known in zip(attended(case, device, torch.bfloat16), expected, strict=True):
        assert (found.cpu().float() - known).norm() <= 2e-2 * known.norm()


@pytest.mark.parametrize("window", [None, 20])
def test_the_gradient_of_a_shared_prefix_is_not_rounded_once_per_sample(window):
    """In bfloat16, 256 samples read the keys and values; the error is one rounding, not 256."""
    rows = [[*range(30), 100 + row] for row in range(256)]
    lengths = torch.tensor([len(row) for row in rows])
    layout = Layout(lengths, CPU, shared=find_shared_prefixes(torch.tensor(sum(rows, [])), lengths))
    generator = torch.Generator().manual_seed(0)
    *inputs, upstream = (
        torch.randn(30 + 256, 2, 16, generator=generator).bfloat16() for _ in range(4)
    )

    results = []
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = (
            x.to(dtype).transpose(0, 1).unsqueeze(0).requires_grad_() for x in inputs
        )
        output = flat_attention(
            nn.Module(), query, key, value, None, layout=layout, sliding_window=window
        )[0][0]
        (output * upstream.abs().to(dtype)).sum().backward()
        results.append(value.grad[0, :, :30].float())

    assert (results[0] - results[1]).norm() <= 5e-3 * results[1].norm()


@pytest.mark.parametrize("window", [None, 40])
def test_nothing_is_kept_for_every_row(window):
    """For 16 rows with one prompt the backward pass keeps queries, keys, values and output once."""
    prompt = 64
    samples = 16
    columns = 16
    rows = [[*range(prompt), 100 + row, 200 + row] for row in range(samples)]
    lengths = torch.tensor([len(row) for row in rows])
    layout = Layout(lengths, CPU, shared=find_shared_prefixes(torch.tensor(sum(rows, [])), lengths))
    tokens = prompt + 2 * samples
    query, key, value = (
        torch.randn(1, heads, tokens, columns, requires_grad=True) for heads in (4, 2, 2)
    )

    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.update({x.data_ptr(): x.numel()}) or x, lambda x: x
    ):
        flat_attention(nn.Module(), query, key, value, None, layout=layout, sliding_window=window)

    assert sum(kept.values()) == tokens * ((4 + 2 + 2 + 4) * columns + 4), "and the log-sum-exp"
