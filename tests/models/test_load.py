"""Why: a model whose head or attention does more than is computed here must be refused, not trained wrongly."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrft.config import ModelSection
from lightrft.models.attention import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.load import load_model, load_tokenizer
from tiny import byte_tokenizer, tiny_model

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}


def build(kind: str, **extra) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | extra)))


def saved(folder: Path, kind: str, **extra) -> ModelSection:
    build(kind, **extra).save_pretrained(folder)
    return ModelSection(pretrain=str(folder))


def test_a_folder_loads_in_float32_with_flat_attention(tmp_path):
    section = ModelSection(pretrain=tiny_model(tmp_path))
    model = load_model(section)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == ATTENTION and model.config.use_cache is False
    assert load_tokenizer(section).eos_token_id == 258


def test_bf16_weights_on_disk_become_float32_masters(tmp_path):
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_model(ModelSection(pretrain=str(tmp_path))).parameters()} == {torch.float32}


def test_a_folder_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_model(tmp_path / "model")
    assert load_tokenizer(ModelSection(pretrain="~/model")).eos_token_id == 258
    with pytest.raises(ValueError, match="--pretrain ~/absent: no such folder"):
        load_model(ModelSection(pretrain="~/absent"))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./absent", "absent", "a/b/c"])
@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_missing_folder(name, load):
    with pytest.raises(ValueError, match=f"--pretrain {name}: no such folder, and not a hub name"):
        load(ModelSection(pretrain=name))


def test_a_hub_name_may_have_no_owner(tmp_path, monkeypatch):
    """As gpt2; the hub is not asked here, its cache holds the model."""
    tiny_model(tmp_path / "models--gpt2" / "snapshots" / "1")
    (tmp_path / "models--gpt2" / "refs").mkdir()
    (tmp_path / "models--gpt2" / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(ModelSection(pretrain="gpt2")).eos_token_id == 258


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_folder_without_a_model(tmp_path, load):
    with pytest.raises(ValueError, match="the folder has no config.json"):
        load(ModelSection(pretrain=str(tmp_path)))


def test_tokenizer_without_an_end_token(tmp_path):
    tiny_model(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its tokenizer has no end token"):
        load_tokenizer(ModelSection(pretrain=str(tmp_path)))


HEADS = {
    "soft-capped": ("gemma3_text", {"final_logit_softcapping": 30.0, "head_dim": 8}, "Gemma3ForCausalLM.*soft-capped"),
    "bias": ("phi", {}, "PhiForCausalLM.*its output layer has a bias"),
    "scaled in an unknown way": ("hyperclovax", {"logits_scaling": 2.0}, "HyperCLOVAX.*its logits are scaled"),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_that_are_not_computed_are_refused_by_name(case):
    kind, extra, message = HEADS[case]
    with pytest.raises(ValueError, match=message):
        Actor(build(kind, **extra))


FLAT = {
    "soft-capped attention": ("gemma2", {"head_dim": 8, "num_key_value_heads": 1}, "Gemma2ForCausalLM.*soft-capped"),
    "own attention": ("bloom", {"n_head": 2, "n_layer": 1}, "BloomForCausalLM.*not exchangeable"),
    "recurrent": ("mamba", {"state_size": 4}, "MambaForCausalLM.*recurrent state"),
    "chunked": ("llama4_text", {"head_dim": 8, "num_key_value_heads": 1, "intermediate_size_mlp": 24, "num_local_experts": 1,
                                "layer_types": ["chunked_attention"]}, "Llama4ForCausalLM.*layers of type chunked_attention"),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True, "head_dim": 8}, "Gemma3ForCausalLM.*bidirectional"),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAT)
def test_models_that_would_mix_sequences_are_refused_by_name(tmp_path, case):
    kind, extra, message = FLAT[case]
    section = saved(tmp_path, kind, **extra)
    with pytest.raises(ValueError, match=message):
        load_model(section)
