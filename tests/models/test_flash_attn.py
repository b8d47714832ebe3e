"""Why: the fast kernel runs only on an accelerator, so what is handed to it must be proven where there is none.

A stand-in with the kernel's signature computes variable-length attention from its definition, one sequence at a time.
"""

import sys
from dataclasses import replace
from functools import partial
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch import Tensor

from flat_models import MODELS, TEMPERATURE, assert_same_gradients, gradients_of, make_batch, make_model, one_by_one, weighted
from lightrft.data.pasts import shared_pasts
from lightrft.models import attention, flash_attn
from lightrft.models.attention import ATTENTION, block_attention
from lightrft.models.heads import Actor
from lightrft.models.layout import Layout

CPU = torch.device("cpu")


def torch_stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):  # fmt: skip
    """As `torch.nn.attention.varlen.varlen_attn`."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def early_torch_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """As in its first versions with windows, which take as many key as query heads."""
    return torch_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def package_stand_in(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """As `flash_attn.flash_attn_varlen_func`."""
    assert causal and dropout_p == 0
    return reference(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window_size)


def reference(query, key, value, starts_q, starts_k, max_q, max_k, scale, window_size) -> Tensor:
    assert starts_q.dtype == starts_k.dtype == torch.int32 and starts_q[0] == 0 and starts_q[-1] == len(query)
    lengths = (starts_q[1:] - starts_q[:-1]).tolist()
    assert max_q == max_k == max(lengths) and isinstance(max_q, int) and torch.equal(starts_q, starts_k)
    before, after = window_size
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < -after) | ((distance > before) if before >= 0 else False)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


KERNELS = {
    "torch": partial(flash_attn.torch_varlen, torch_stand_in),
    "early torch": partial(flash_attn.torch_varlen, early_torch_stand_in),
    "package": partial(flash_attn.package_varlen, package_stand_in),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_each_sequence_alone(name, kernel, monkeypatch):
    """Offsets, longest sequence, scaling, windows, grouped heads, shared pasts, for every family; forward and gradients."""
    used = []
    monkeypatch.setattr(attention, "attention_kernel", lambda *where: used.append(where) or KERNELS[kernel])
    batch = make_batch(alike=2)
    batch = replace(batch, shared=shared_pasts(batch.input_ids, batch.lengths))
    plain, model = make_model(name, "eager"), make_model(name, ATTENTION)
    expected, values = one_by_one(plain, batch), Actor(model)(batch, TEMPERATURE)
    for value, known in zip(values, expected, strict=True):
        torch.testing.assert_close(value, known, rtol=1e-5, atol=1e-5)
    weighted(expected).backward()
    weighted(values).backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain))
    assert used == [(CPU, torch.float32)] * 2, "one choice per layer"


def test_torchs_kernel_takes_what_it_is_given():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    known = signature(varlen.varlen_attn).parameters
    if "window_size" not in known:
        pytest.skip("this torch has no windows in it")
    ours = signature(torch_stand_in if "enable_gqa" in known else early_torch_stand_in).parameters
    assert list(known)[:7] == list(ours)[:7] and set(ours) <= set(known)
    assert all(known[name].kind == ours[name].kind for name in ours)


def test_torch_comes_first_then_the_package_then_none(monkeypatch):
    torchs, windowless = {"varlen_attn": torch_stand_in}, {"varlen_attn": lambda query, is_causal: 0}
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
            monkeypatch.setitem(sys.modules, name, module if content else None)  # None: the import fails
        chosen = flash_attn.flash_kernel.__wrapped__()
        assert (chosen and chosen.func) is expected


def test_the_choice_by_device_and_type(monkeypatch):
    flash = object()
    monkeypatch.setattr(flash_attn, "flash_kernel", lambda: flash)
    monkeypatch.setattr(attention, "has_flash_attention", lambda device: device.type == "cuda")
    cuda = torch.device("cuda", 0)
    assert attention.attention_kernel(cuda, torch.bfloat16) is attention.attention_kernel(cuda, torch.float16) is flash
    assert attention.attention_kernel(cuda, torch.float32) is attention.attention_kernel(CPU, torch.bfloat16) is block_attention
    monkeypatch.setattr(flash_attn, "flash_kernel", lambda: None)
    assert attention.attention_kernel(cuda, torch.bfloat16) is block_attention


def test_dropout_that_the_kernel_does_not_have():
    query = torch.zeros(3, 2, 8)
    layout = Layout(torch.tensor([3]), CPU)
    with pytest.raises(ValueError, match="no dropout; set attention_dropout"):
        KERNELS["torch"](query, query, query, layout, scaling=None, window=None, dropout=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
def test_the_real_kernel_agrees_with_blocks(window):
    if flash_attn.flash_kernel() is None:
        pytest.skip("no variable-length flash attention in this installation")
    device = torch.device(torch.accelerator.current_accelerator())
    lengths = torch.tensor([5, 1, 70, 128, 33])
    layout, total = Layout(lengths, device), int(lengths.sum())
    results = []
    for kernel in (flash_attn.flash_kernel(), block_attention):
        torch.manual_seed(0)
        inputs = [torch.randn(total, heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)]
        output = kernel(*inputs, layout, scaling=0.1, window=window, dropout=0.0)
        (output * torch.linspace(-1, 1, 64, device=device)).sum().backward()
        results.append([output, *(x.grad for x in inputs)])
    for flash, blocks in zip(*results, strict=True):
        torch.testing.assert_close(flash.float(), blocks.float(), rtol=3e-2, atol=3e-2)
