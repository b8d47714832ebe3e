"""Families as they are published: names written down from released folders.

Real weights go there and back.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

from lightrft.engine.model_info import published_names
from lightrft.engine.testing import perturbed
from lightrft.models.converted_files import ConvertedFiles
from lightrft.models.qwen_omni import generating_class
from lightrft.models.weight_files import WeightFiles
from lightrft.models.weight_sync.names import PublishedNames

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = TEXT | {"model_type": "llama"}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
QWEN_TOWER = {
    "hidden_size": 16,
    "out_hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
}
EAR = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 4,
    "max_source_positions": 20,
}

ATTENTION = [f"self_attn.{layer}_proj.weight" for layer in "qkvo"]
DENSE = [f"mlp.{layer}_proj.weight" for layer in ("gate", "up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
TOWER_LAYER = [
    f"{layer}.{kind}"
    for layer in (
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        "layer_norm1",
        "layer_norm2",
        "mlp.fc1",
        "mlp.fc2",
    )
    for kind in ("weight", "bias")
]


def text_model(prefix: str, layer: list[str]) -> Iterator[str]:
    yield from (f"{prefix}{name}.weight" for name in ("embed_tokens", "norm"))
    yield from (f"{prefix}layers.0.{name}" for name in layer)


def experts(
    path: str, count: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> list[str]:
    return [f"{path}.experts.{index}.{name}.weight" for index in range(count) for name in names]


def tower(prefix: str, *others: str) -> Iterator[str]:
    yield from (f"{prefix}encoder.layers.0.{name}" for name in TOWER_LAYER)
    yield from (f"{prefix}{name}" for name in others)


QWEN_VISUAL = [
    "patch_embed.proj.weight",
    "merger.ln_q.weight",
    "merger.mlp.0.weight",
    "merger.mlp.0.bias",
    "merger.mlp.2.weight",
    "merger.mlp.2.bias",
    "blocks.0.norm1.weight",
    "blocks.0.norm2.weight",
    *(
        f"blocks.0.{layer}.{kind}"
        for layer in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        for kind in ("weight", "bias")
    ),
]
GEMMA = [
    *ATTENTION,
    *DENSE,
    *NORMS,
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
]

FAMILIES: list[tuple[PretrainedConfig, list[str]]] = [
    (LlamaConfig(**TEXT), ["lm_head.weight", *text_model("model.", ATTENTION + DENSE + NORMS)]),
    (
        Qwen3MoeConfig(**TEXT, moe_intermediate_size=12, num_experts=3, num_experts_per_tok=2),
        [
            "lm_head.weight",
            *text_model(
                "model.",
                [
                    *ATTENTION,
                    *NORMS,
                    "self_attn.q_norm.weight",
                    "self_attn.k_norm.weight",
                    "mlp.gate.weight",
                    *experts("mlp", 3),
                ],
            ),
        ],
    ),
    (
        Qwen2MoeConfig(
            **TEXT,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
            num_experts=3,
            num_experts_per_tok=2,
        ),
        [
            "lm_head.weight",
            *text_model(
                "model.",
                [
                    *ATTENTION,
                    *NORMS,
                    *(f"self_attn.{layer}_proj.bias" for layer in "qkv"),
                    "mlp.gate.weight",
                    *experts("mlp", 3),
                    *(f"mlp.shared_expert.{layer}_proj.weight" for layer in ("gate", "up", "down")),
                    "mlp.shared_expert_gate.weight",
                ],
            ),
        ],
    ),
    (
        MixtralConfig(**TEXT, num_local_experts=3),
        [
            "lm_head.weight",
            *text_model(
                "model.",
                [
                    *ATTENTION,
                    *NORMS,
                    "block_sparse_moe.gate.weight",
                    *experts("block_sparse_moe", 3, ("w1", "w2", "w3")),
                ],
            ),
        ],
    ),
    (
        DeepseekV3Config(
            **TEXT | {"head_dim": 4},
            first_k_dense_replace=0,
            moe_intermediate_size=12,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            q_lora_rank=4,
            kv_lora_rank=4,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
        ),
        [
            "lm_head.weight",
            *text_model(
                "model.",
                [
                    *NORMS,
                    *(
                        f"self_attn.{layer}.weight"
                        for layer in (
                            "q_a_proj",
                            "q_a_layernorm",
                            "q_b_proj",
                            "kv_a_proj_with_mqa",
                            "kv_a_layernorm",
                            "kv_b_proj",
                            "o_proj",
                        )
                    ),
                    "mlp.gate.weight",
                    "mlp.gate.e_score_correction_bias",
                    *experts("mlp", 4),
                    *(
                        f"mlp.shared_experts.{layer}_proj.weight"
                        for layer in ("gate", "up", "down")
                    ),
                ],
            ),
        ],
    ),
    (
        LlavaConfig(text_config=LLAMA, vision_config=TOWER | {"model_type": "clip_vision_model"}),
        [
            "language_model.lm_head.weight",
            *text_model("language_model.model.", ATTENTION + DENSE + NORMS),
            *(
                f"multi_modal_projector.linear_{number}.{kind}"
                for number in (1, 2)
                for kind in ("weight", "bias")
            ),
            *tower(
                "vision_tower.vision_model.",
                "embeddings.class_embedding",
                "embeddings.patch_embedding.weight",
                "embeddings.position_embedding.weight",
                "pre_layrnorm.weight",
                "pre_layrnorm.bias",
                "post_layernorm.weight",
                "post_layernorm.bias",
            ),
        ],
    ),
    (
        Gemma3Config(text_config=TEXT, vision_config=TOWER, mm_tokens_per_image=4),
        [
            *text_model("language_model.model.", GEMMA),
            "multi_modal_projector.mm_input_projection_weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
            *tower(
                "vision_tower.vision_model.",
                "embeddings.patch_embedding.weight",
                "embeddings.patch_embedding.bias",
                "embeddings.position_embedding.weight",
                "post_layernorm.weight",
                "post_layernorm.bias",
            ),
        ],
    ),
    (
        Idefics3Config(
            text_config=LLAMA,
            vision_config=TOWER,
            scale_factor=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        ),
        [
            "lm_head.weight",
            *text_model("model.text_model.", ATTENTION + DENSE + NORMS),
            "model.connector.modality_projection.proj.weight",
            *tower(
                "model.vision_model.",
                "embeddings.patch_embedding.weight",
                "embeddings.patch_embedding.bias",
                "embeddings.position_embedding.weight",
                "post_layernorm.weight",
                "post_layernorm.bias",
            ),
        ],
    ),
    (
        Qwen2_5_VLConfig(text_config=TEXT, vision_config=QWEN_TOWER, tie_word_embeddings=False),
        [
            "lm_head.weight",
            *(f"visual.{name}" for name in QWEN_VISUAL),
            *text_model(
                "model.",
                [*ATTENTION, *DENSE, *NORMS, *(f"self_attn.{layer}_proj.bias" for layer in "qkv")],
            ),
        ],
    ),
    (
        Qwen2AudioConfig(
            text_config=TEXT | {"model_type": "qwen2"}, audio_config=EAR, tie_word_embeddings=False
        ),
        [
            "language_model.lm_head.weight",
            *text_model(
                "language_model.model.",
                [*ATTENTION, *DENSE, *NORMS, *(f"self_attn.{layer}_proj.bias" for layer in "qkv")],
            ),
            *(f"multi_modal_projector.linear.{kind}" for kind in ("weight", "bias")),
            *(
                f"audio_tower.{layer}.{kind}"
                for layer in ("conv1", "conv2", "layer_norm")
                for kind in ("weight", "bias")
            ),
            "audio_tower.embed_positions.weight",
            "audio_tower.layers.0.self_attn.k_proj.weight",
            *(
                f"audio_tower.layers.0.{layer}.{kind}"
                for layer in (
                    "self_attn.q_proj",
                    "self_attn.v_proj",
                    "self_attn.out_proj",
                    "fc1",
                    "fc2",
                    "self_attn_layer_norm",
                    "final_layer_norm",
                )
                for kind in ("weight", "bias")
            ),
        ],
    ),
]


@pytest.fixture(params=FAMILIES, ids=lambda family: family[0].model_type)
def family(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, list[str]]:
    config, names = request.param
    return perturbed(generating_class(config).from_config(config), 1), names


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a stream brings, in its order."""
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


@pytest.mark.slow
def test_names_are_those_of_released_folders_and_lead_back(
    family: tuple[PreTrainedModel, list[str]], tmp_path: Path
) -> None:
    model, expected = family
    published = dict(PublishedNames.of(model).rename(weights(model).items()))
    assert sorted(published) == sorted(expected)
    save_file(
        {name: tensor.contiguous() for name, tensor in published.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model.config.save_pretrained(tmp_path)

    loaded, found = generating_class(model.config).from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    again = weights(loaded)
    assert again.keys() == weights(model).keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights(model).items())
    check_slices(ConvertedFiles(loaded, WeightFiles.of(tmp_path)), again)


def check_slices(files: ConvertedFiles, expected: dict[str, Tensor]) -> None:
    """Check that rows, no rows, and columns are the same as in from_pretrained()."""
    for name, tensor in expected.items():
        whole = tuple(slice(0, size) for size in tensor.shape)
        assert files.shapes[name] == tuple(tensor.shape)
        for dim in range(tensor.ndim):
            size = tensor.shape[dim]
            for rows in (
                slice(0, size),
                slice(0, size // 2),
                slice(size // 2, size),
                slice(size, size),
                slice(0, 0),
            ):
                cut = (*whole[:dim], rows, *whole[dim + 1 :])
                read = torch.full_like(tensor[cut], torch.nan if tensor.is_floating_point() else -1)
                for index, values in files.read(name, cut):
                    read[index] = values
                assert torch.equal(read, tensor[cut]), f"{name} {cut}"


def test_experts_are_cut_where_they_are_published_one_by_one() -> None:
    names = published_names(FAMILIES[3][0])
    gate_up, down = (
        torch.randn(names.shapes[f"model.layers.0.mlp.experts.{name}"])
        for name in ("gate_up_proj", "down_proj")
    )
    stream = iter(
        [
            ("model.layers.0.mlp.experts.gate_up_proj", gate_up),
            ("model.layers.0.mlp.gate.weight", torch.ones(3, 16)),
            ("model.layers.0.mlp.experts.down_proj", down),
        ]
    )
    found = dict(names.rename(stream))
    path = "model.layers.0.block_sparse_moe"
    assert len(found) == 10 and torch.equal(found[f"{path}.gate.weight"], torch.ones(3, 16))

    for index in range(3):
        assert torch.equal(found[f"{path}.experts.{index}.w1.weight"], gate_up[index, :24])
        assert torch.equal(found[f"{path}.experts.{index}.w3.weight"], gate_up[index, 24:])
        assert torch.equal(found[f"{path}.experts.{index}.w2.weight"], down[index])


def test_nothing_is_held_that_needs_nothing_else() -> None:
    names = published_names(FAMILIES[3][0])
    came: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, shape in names.shapes.items():
            came.append(name)
            yield name, torch.zeros(shape)

    for name, _ in names.rename(stream()):
        assert name in names.pieces(came[-1])


def test_experts_that_are_published_turned_are_turned_back_even_when_square() -> None:
    """Both forms have the same shape here, so no shape tells them apart."""
    vision = QWEN_TOWER | {"deepstack_visual_indexes": [0]}
    text = TEXT | {"num_experts": 3, "moe_intermediate_size": 8}
    names = published_names(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    weight = torch.randn(names.shapes[name])
    assert weight.shape == (3, 16, 16)
    ((published, tensor),) = names.rename([(name, weight)])
    assert published == name and torch.equal(tensor, weight.transpose(1, 2))


def test_what_an_engine_does_not_know_is_said_with_a_way_out() -> None:
    names = published_names(FAMILIES[3][0])
    said = names.unknown_weights_message(
        ["model.norm.weight", "model.layers.0.mlp.experts.down_proj"], "vllm"
    )
    assert said.startswith(
        f"vllm has no parameter for 2 of the {len(names.shapes)} weights of MixtralForCausalLM,"
        " such as model"
    )
    assert (
        "model.layers.0.mlp.experts.down_proj (published as"
        " model.layers.0.block_sparse_moe.experts.0.w2.weight)" in said
    )
    assert "--engine_type hf" in said and "register_checkpoint_conversion_mapping" in said
