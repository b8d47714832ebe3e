"""One number per token: what may be a scorer, with the names and the head of its folder."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.config import ModelSection
from lightrft.models.heads import Scorer
from lightrft.models.load import load_scorer


def test_the_head_of_the_folder_is_used(scorer_folder):
    expected = AutoModelForSequenceClassification.from_pretrained(scorer_folder)
    found = dict(Scorer(load_scorer(ModelSection(pretrain=scorer_folder))).hf_parameters())
    assert found.keys() == dict(expected.named_parameters()).keys()
    assert all(
        torch.equal(found[name], parameter) for name, parameter in expected.named_parameters()
    )


def test_a_language_model_gets_a_new_head(folder):
    model = load_scorer(ModelSection(pretrain=folder))
    assert model.score.weight.shape == (1, 64) and model.score.weight.abs().max() > 0
    backbone = AutoModelForCausalLM.from_pretrained(folder).model.state_dict()
    assert all(
        torch.equal(tensor, backbone[name]) for name, tensor in model.model.state_dict().items()
    )


def test_other_heads_are_refused(folder):
    with pytest.raises(
        ValueError,
        match="Qwen3ForCausalLM has lm_head above its backbone, not a head with one output",
    ):
        Scorer(AutoModelForCausalLM.from_pretrained(folder))
    with pytest.raises(ValueError, match="has score above its backbone"):
        Scorer(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2))


def test_missing_and_unexpected_weights_are_not_reported_twice(folder, tmp_path, caplog):
    """A new head is not reported; a missing weight and another shape are errors of ours."""
    section = ModelSection(pretrain=folder)
    load_scorer(section)
    with pytest.raises(
        ValueError, match="1 tensors of the model are not in the folder, the first is score.weight"
    ):
        load_scorer(section, new_head=False)
    assert "REPORT" not in caplog.text

    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"model.norm.weight has shape \(3,\) in the folder, but \(64,\) in the model",
    ):
        load_scorer(ModelSection(pretrain=str(other)))
    assert "REPORT" not in caplog.text
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    assert "LOAD REPORT" in caplog.text, "outside of our loading transformers reports as ever"
