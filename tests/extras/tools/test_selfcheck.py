"""A small copy of a model shows errors of a family that are silent in training."""

import inspect
import random
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flat_models import HYBRIDS, SIZES
from lightrft.__main__ import main as lightrft
from lightrft.app.trainer import selfcheck
from lightrft.app.trainer.selfcheck import (
    PACKED,
    SHARED,
    check_model,
    compare_small_copy,
    differences,
)
from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.core.batch import Batch
from lightrft.models import heads
from lightrft.models.attention import flat
from lightrft.models.attention.flat import ATTENTION, flat_attention
from lightrft.models.attention.recurrent import CONVOLUTION_KERNEL, SCANS
from lightrft.models.parallel.sequence_parallel import SequenceParallel
from ranks import run_cases, run_ranks
from strategy.training import strategy
from tiny import VOCABULARY, byte_tokenizer

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
    for function in (CONVOLUTION_KERNEL, *SCANS):
        original = getattr(getattr(family, function, None), "__wrapped__", None)
        if original is not None:
            monkeypatch.setattr(family, function, original)
    monkeypatch.setattr("lightrft.models.load.install", lambda model: True)
    assert found(config).keys() == {PACKED, SHARED}


def test_positions_that_run_on(monkeypatch):
    """Rotary embeddings only know distances, so a shared prefix shows it, or learned positions."""
    run_on = property(lambda batch: torch.arange(batch.num_tokens))
    monkeypatch.setattr(Batch, "position_ids", run_on)
    assert found(AutoConfig.for_model("qwen3")).keys() == {SHARED}
    assert PACKED in found(AutoConfig.for_model("gpt2"))


@pytest.mark.parametrize(
    "change",
    [lambda state: None, lambda state: state.roll(1, 0)],
    ids=["no state", "the state of another prompt"],
)
def test_a_shared_prefix_with_another_state(change, monkeypatch):
    """The function of the family gets another state than the one after the prompt."""
    compare_small_copy(hybrid("qwen3_5"))
    family = sys.modules["transformers.models.qwen3_5.modeling_qwen3_5"]
    name = "torch_chunk_gated_delta_rule"
    right = getattr(family, name).__wrapped__

    def wrong(*args, initial_state=None, **options):
        state = initial_state if initial_state is None else change(initial_state)
        return right(*args, initial_state=state, **options)

    wrong.__signature__ = inspect.signature(right)
    monkeypatch.setattr(family, name, wrong)  # loading a model adapts it to flat batches
    problems = found(hybrid("qwen3_5"))
    assert problems.keys() == {SHARED}
    assert "linear_attn (Qwen3_5GatedDeltaNet)" in problems[SHARED]


def test_attention_without_its_shared_prefix(monkeypatch):
    """Responses do not attend to their prompt."""
    monkeypatch.setattr(flat.Layout, "_prefixes", lambda layout: iter(()))
    monkeypatch.setattr(flat.Layout, "copies_are_faster", lambda layout, width: False)
    assert found(AutoConfig.for_model("qwen3")).keys() == {SHARED}


def compared(layout: dict, family: str, *, wrong: bool = False) -> list:
    """Return the comparisons of a rank under a layout."""
    made = strategy(**layout)
    options = {
        "sequence": made.sequence,
        "tensor": made.mesh.tensor if made.mesh.tp.size > 1 else None,
        "tensor_sequence": bool(layout.get("tp_sequence_parallel")),
        "device": made.device,
    }
    if wrong:
        # Positions that begin with 0 on every rank
        SequenceParallel.positions = lambda self, size, device: torch.arange(
            size // self.axis.size, device=device
        )
    return [
        (comparison.name, comparison.differs)
        for comparison in compare_small_copy(AutoConfig.for_model(family), **options)
    ]


SPLIT = f"{SHARED}, split over 2 ranks"


def test_the_layout_of_the_run():
    cases = {
        "ulysses": ({"sp_size": 2}, "qwen3"),
        "a state under ulysses": ({"sp_size": 2}, "qwen3_next"),
        "zigzag": ({"sp_size": 2, "sp_impl": "zigzag"}, "gpt_oss"),
        "tp": ({"tp_size": 2}, "qwen3"),
        "tp with sequences": ({"tp_size": 2, "tp_sequence_parallel": True}, "llama"),
    }
    expected = [(PACKED, False), (SHARED, False), (SPLIT, False)]
    assert run_cases(2, compared, cases) == dict.fromkeys(cases, [expected] * 2)


def test_an_error_of_the_layout_alone():
    for result in run_ranks(2, partial(compared, wrong=True), {"sp_size": 2}, "qwen3"):
        assert result == [(PACKED, False), (SHARED, False), (SPLIT, True)]


def checked(folder: str, *, scores: bool = False) -> tuple[str, bool, float]:
    """Return what check_model() says, whether generators are as before, and its seconds."""
    made = strategy()
    torch.manual_seed(7)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    begin = time.process_time()
    said = ""
    try:
        check_model(ModelSection(pretrain=folder), made, scores=scores)
        check_model(ModelSection(critic_pretrain=folder), made, "critic_pretrain", scores=True)
    except ConfigError as error:
        said = str(error)

    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return said, after == states, time.process_time() - begin


def test_it_changes_nothing_and_takes_no_time(tmp_path):
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    said, unchanged, seconds = run_ranks(1, checked, str(tmp_path))[0]
    assert (said, unchanged) == ("", True)
    assert seconds < SECONDS


def test_a_family_is_refused_by_name(tmp_path):
    """Doge masks keys by their values, in a mask that only its own attention makes."""
    AutoConfig.for_model("doge").save_pretrained(tmp_path)
    said = run_ranks(1, checked, str(tmp_path))[0][0]
    assert f"--pretrain {tmp_path}: this family (doge) would be trained wrongly" in said
    assert "first in model.layers.0.self_attn (DogeAttention)" in said
    assert f"lightrft selfcheck {tmp_path}" in said


def test_what_is_known_to_be_impossible_is_said_as_such(tmp_path):
    AutoConfig.for_model("jamba").save_pretrained(tmp_path)
    assert "carries a recurrent state" in run_ranks(1, checked, str(tmp_path))[0][0]


def test_a_model_with_scores_needs_no_logits(tmp_path):
    """The output layer of Phi has a bias, so it cannot generate here."""
    AutoConfig.for_model("phi").save_pretrained(tmp_path)
    assert "its output layer has a bias" in run_ranks(1, checked, str(tmp_path))[0][0]
    scores = partial(checked, scores=True)
    assert run_ranks(1, scores, str(tmp_path))[0][0] == ""


@pytest.mark.parametrize("family", ["llama", "doge"])
@pytest.mark.slow
def test_the_command(family, tmp_path, capsys):
    """The recipe says which model, and how it is trained."""
    config = AutoConfig.for_model(family, **SIZES | {"vocab_size": VOCABULARY})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        f"model:\n  pretrain: {tmp_path}\nstrategy:\n  fsdp: true\nengine:\n  engine_type: hf\n"
    )
    with pytest.raises(SystemExit) as ended:
        lightrft(["selfcheck", "--config", str(recipe)])

    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == (1 if family == "doge" else 0), said
    assert PACKED in said and "Log-probs of hf and trainer (FSDPStrategy)" in said
    assert ("resumed after one of two steps 0.0e+00" in said) == (family == "llama")
    assert ("(DogeAttention)" in said) == (family == "doge")
