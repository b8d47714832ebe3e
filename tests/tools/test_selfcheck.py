"""A small copy of a model shows errors of a family that are silent in training."""

import sys
import time
from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, PretrainedConfig

from flat_models import HYBRIDS, SIZES
from lightrft.attention import flat, recurrent
from lightrft.attention.flat import ATTENTION, flat_attention
from lightrft.attention.recurrent import CONVOLUTION, SCANS
from lightrft.models import heads
from lightrft.tools import selfcheck
from lightrft.tools.selfcheck import PACKED, SHARED, compare_small_copy, differences

SECONDS = 2.0


def gemma2() -> PretrainedConfig:
    return AutoConfig.for_model("gemma2", num_hidden_layers=26)


def hybrid(name: str) -> PretrainedConfig:
    kind, extra = HYBRIDS[name]
    return AutoConfig.for_model(kind, **SIZES | extra)


def attention_without(*names: str, **instead):
    """Return an attention that forgets some of its arguments."""

    def forgetful(*args, **options):
        return flat_attention(
            *args, **{k: v for k, v in options.items() if k not in names}, **instead
        )

    return forgetful


def found(config: PretrainedConfig) -> dict[str, str]:
    """Return what each comparison finds, and check that this takes no time."""
    compare_small_copy(AutoConfig.for_model("llama"))  # imports are part of any run
    begin = time.process_time()
    different = differences(config)
    assert time.process_time() - begin < SECONDS
    return {each.name: each.finding for each in different}


def test_a_window_that_only_the_mask_has(monkeypatch):
    monkeypatch.setattr(flat, "configured_window", lambda module: None)
    problems = found(AutoConfig.for_model("phimoe", sliding_window=2048))
    assert problems.keys() == {PACKED, SHARED}
    assert "model.layers.0.self_attn (PhimoeAttention)" in problems[PACKED]


@pytest.mark.parametrize(
    ("config", "forgotten", "module"),
    [
        (AutoConfig.for_model("gpt_oss"), "s_aux", "model.layers.0.self_attn (GptOssAttention)"),
        (gemma2(), "softcap", "model.layers.0.self_attn (Gemma2Attention)"),
    ],
)
def test_an_argument_of_attention_that_is_dropped(config, forgotten, module, monkeypatch):
    """A sink, and a soft cap of scores."""
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, attention_without(forgotten))
    assert module in found(config)[PACKED]


def test_a_bidirectional_mask(monkeypatch):
    """Attention that sees the tokens after each token."""

    def bidirectional(module, query, key, value, mask, *, layout, scaling=None, **options):
        outputs = []
        for q, k, v in zip(
            *(x[0].split(layout.lengths.tolist(), 1) for x in (query, key, value)), strict=True
        ):
            k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
            scores = (q @ k.transpose(1, 2)) * scaling
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs)[None], None

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, bidirectional)
    monkeypatch.setattr(selfcheck, "find_shared_prefixes", lambda *args: None)
    assert (
        "model.layers.0.self_attn (Qwen3Attention)" in found(AutoConfig.for_model("qwen3"))[PACKED]
    )


@pytest.mark.parametrize(
    ("function", "ignored", "config"),
    [
        ("logit_softcap", None, gemma2()),
        ("logit_scale", 1.0, AutoConfig.for_model("cohere")),
        ("logit_scale", 1.0, AutoConfig.for_model("granite", logits_scaling=8.0)),
    ],
)
def test_a_cap_or_scale_of_logits_that_is_ignored(function, ignored, config, monkeypatch):
    monkeypatch.setattr(heads, function, lambda model: ignored)
    assert "first in the head" in found(config)[PACKED]


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_a_state_that_runs_into_the_next_sequence(name, monkeypatch):
    """transformers' own functions know no borders on a CPU."""
    config = hybrid(name)
    compare_small_copy(config)  # installs the functions of this project
    family = sys.modules[f"transformers.models.{name}.modeling_{name}"]
    for function in (CONVOLUTION, *SCANS):
        original = getattr(getattr(family, function, None), "__wrapped__", None)
        if original is not None:
            monkeypatch.setattr(family, function, original)
    monkeypatch.setattr("lightrft.models.load.install", lambda model: True)
    assert found(config).keys() == {PACKED, SHARED}


def test_positions_that_run_on(monkeypatch):
    """Rotary embeddings only know distances, so a shared prefix shows it, or learned positions."""
    monkeypatch.setattr(heads, "positions", lambda model, batch: torch.arange(batch.num_tokens))
    assert found(AutoConfig.for_model("qwen3")).keys() == {SHARED}
    assert PACKED in found(AutoConfig.for_model("gpt2"))


def test_a_shared_prefix_without_its_state(monkeypatch):
    """Responses begin with an empty state."""
    levels = recurrent._levels

    def without(layout):
        found, places = levels(layout)
        return [
            replace(level, keeps_state=[False] * len(level.keeps_state)) for level in found
        ], places

    monkeypatch.setattr(recurrent, "_levels", without)
    config = hybrid("qwen3_5")
    problems = found(config)
    assert problems.keys() == {SHARED}
    assert "linear_attn (Qwen3_5GatedDeltaNet)" in problems[SHARED]


def test_a_shared_prefix_with_a_wrong_state(monkeypatch):
    """Responses begin with the state of another prompt."""
    levels = recurrent._levels

    def first_parents(layout):
        found, places = levels(layout)
        wrong = [
            replace(level, parents=[p if p is None else torch.zeros_like(p) for p in level.parents])
            for level in found
        ]
        return wrong, places

    monkeypatch.setattr(recurrent, "_levels", first_parents)
    assert found(hybrid("qwen3_5")).keys() == {SHARED}


def test_attention_without_its_shared_prefix(monkeypatch):
    """Responses do not attend to their prompt."""
    monkeypatch.setattr(flat.Layout, "_prefixes", lambda layout: iter(()))
    monkeypatch.setattr(flat.Layout, "copies_are_faster", lambda layout, width: False)
    assert found(AutoConfig.for_model("qwen3")).keys() == {SHARED}
