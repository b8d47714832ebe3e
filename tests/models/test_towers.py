"""Models of images and text learn from text as in plain transformers, without their towers."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    LlavaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
)

from lightrft.config import ModelSection
from lightrft.core.batch import Batch
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.lora import adapted_layers, freeze_parameters

pytestmark = pytest.mark.slow

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "initializer_range": 0.2,
}
SECTIONS = {"type": "default", "mrope_section": [1, 1, 2]}
CONFIGS = [
    LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_scaling": SECTIONS},
        tie_word_embeddings=False,
        vision_config={
            "hidden_size": 16,
            "out_hidden_size": 16,
            "intermediate_size": 24,
            "depth": 1,
            "num_heads": 2,
        },
    ),
]
ROWS = [[5, 6, 7, 8, 9], [1, 2, 3], [10, 11, 12, 3, 14, 15, 7]]


@pytest.fixture(params=CONFIGS, ids=lambda config: config.model_type)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    config: PretrainedConfig = request.param
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_language_part_learns_as_in_plain_transformers(folder: str) -> None:
    section = ModelSection(pretrain=folder)
    actor = Actor(freeze_parameters(load_model(section), section))
    mask = torch.tensor([number > 0 for row in ROWS for number in range(len(row))])
    batch = Batch(
        lengths=torch.tensor([len(row) for row in ROWS]),
        input_ids=torch.tensor(sum(ROWS, [])),
        loss_mask=mask,
        rows=torch.arange(len(ROWS)),
        learned=None,
    )
    found, _ = actor(batch, 1.0)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    logprobs = [plain(input_ids=torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in ROWS]
    expected = [
        logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        for logits, row in zip(logprobs, ROWS, strict=True)
    ]
    torch.testing.assert_close(found[mask], torch.cat(expected), rtol=0, atol=1e-5)
    found.sum().backward()
    torch.cat(expected).sum().backward()
    theirs = dict(plain.named_parameters())

    trained = {
        name: parameter
        for name, parameter in actor.language_model.named_parameters()
        if parameter.requires_grad
    }
    assert trained.keys() == {
        name for name, parameter in theirs.items() if parameter.grad is not None
    }
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_towers_have_no_adapters(folder: str) -> None:
    section = ModelSection(pretrain=folder, lora_rank=2)
    layers = adapted_layers(freeze_parameters(load_model(section), section))
    assert len(layers) == 7 and all(
        name.startswith("model.language_model.layers.0.") for name in layers
    )
