"""Why: a head or attention that does more than is computed here must be refused.

Otherwise the model would be trained wrongly.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrft.config import ModelSection
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.empty import empty_parameters
from lightrft.models.heads import Actor
from lightrft.models.load import load_model, load_scorer, load_tokenizer
from lightrft.models.weight_files import WeightFiles
from tiny import byte_tokenizer, tiny_model

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
}


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
    assert {
        parameter.dtype
        for parameter in load_model(ModelSection(pretrain=str(tmp_path))).parameters()
    } == {torch.float32}


def test_a_folder_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_model(tmp_path / "model")
    assert load_tokenizer(ModelSection(pretrain="~/model")).eos_token_id == 258
    with pytest.raises(ValueError, match="--pretrain ~/absent: neither an existing folder"):
        load_model(ModelSection(pretrain="~/absent"))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./absent", "absent", "a/b/c"])
@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_missing_folder(name, load):
    with pytest.raises(
        ValueError, match=f"--pretrain {name}: neither an existing folder nor a hub name"
    ):
        load(ModelSection(pretrain=name))


def test_a_hub_name_may_have_no_owner(tmp_path, monkeypatch):
    """Such as gpt2; the hub is not asked here, because its cache holds the model."""
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
    "bias": ("phi", {}, "PhiForCausalLM.*its output layer has a bias"),
    "scaled in an unknown way": (
        "llama",
        {"logits_scaling": 2.0},
        "LlamaForCausalLM.*its logits are scaled",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_that_are_not_computed_are_refused_by_name(case):
    kind, extra, message = HEADS[case]
    with pytest.raises(ValueError, match=message):
        Actor(build(kind, **extra))


FLAT = {
    "own attention": ("bloom", {"n_head": 2, "n_layer": 1}, "BloomForCausalLM.*cannot be replaced"),
    "recurrent": ("mamba", {"state_size": 4}, "MambaForCausalLM.*recurrent state"),
    "chunked": (
        "llama4_text",
        {
            "head_dim": 8,
            "num_key_value_heads": 1,
            "intermediate_size_mlp": 24,
            "num_local_experts": 1,
            "layer_types": ["chunked_attention"],
        },
        "Llama4ForCausalLM.*layers of type chunked_attention",
    ),
    "bidirectional": (
        "gemma3_text",
        {"use_bidirectional_attention": True, "head_dim": 8},
        "Gemma3ForCausalLM.*bidirectional",
    ),
}


@pytest.mark.parametrize("case", FLAT)
def test_models_that_would_mix_sequences_are_refused_by_name(tmp_path, case):
    kind, extra, message = FLAT[case]
    section = saved(tmp_path, kind, **extra)
    with pytest.raises(ValueError, match=message):
        load_model(section)


# -- damaged folders


def change(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = value(tensors[name])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return changed


def in_shards(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    def damaged(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="100KB")
        damage(folder)

    return damaged


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    cut(folder / "pytorch_model.bin", 1000)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def shard(folder: Path) -> Path:
    return folder / "model-00003-of-00007.safetensors"


def move_tensors(folder: Path) -> None:
    """Put a tensor into the index as one of another shard."""
    index = folder / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace(
            '"model.norm.weight": "model-00007', '"model.norm.weight": "model-00003'
        )
    )


def unlisted(folder: Path) -> None:
    """Take a tensor out of the index that its shard has."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_bytes())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))


def not_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"abc")


def config_with(**entries):
    def changed(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | entries))

    return changed


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
DAMAGED = {
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "cannot read the weights .*no file named",
    ),
    "empty": (
        lambda folder: cut(folder / "model.safetensors", 0),
        "/model.safetensors is empty: 0 bytes",
    ),
    "cut": (
        lambda folder: cut(folder / "model.safetensors", 5000),
        "/model.safetensors is damaged .*: 5000 bytes",
    ),
    "pointer": (
        lambda folder: (folder / "model.safetensors").write_bytes(LFS),
        "is a git-lfs pointer .*git lfs pull",
    ),
    "no shard": (
        in_shards(lambda folder: shard(folder).unlink()),
        "/model-00003-of-00007.safetensors does not exist, but",
    ),
    "cut shard": (
        in_shards(lambda folder: cut(shard(folder), -100)),
        "/model-00003-of-00007.safetensors is damaged",
    ),
    "index": (
        in_shards(lambda folder: cut(folder / "model.safetensors.index.json", 9)),
        "model.safetensors.index.json is no",
    ),
    "other index": (
        in_shards(move_tensors),
        "/model-00003-of-00007.safetensors lacks 1 tensors .* model.norm.weight",
    ),
    "shape": (
        change("model.norm.weight", lambda tensor: tensor[:32].clone()),
        r"has shape .32,. in the folder, but .64,. in",
    ),
    "int8": (
        change("lm_head.weight", lambda tensor: tensor.to(torch.int8)),
        "/model.safetensors: lm_head.weight is of dtype I8",
    ),
    "pickled": (pickled, "transformers cannot read the weights"),
    "not pickled": (not_pickled, "transformers cannot read the weights .IndexError"),
    "rotations": (
        config_with(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "its config.json describes no model .KeyError: 'spiral'",
    ),
    "config": (
        lambda folder: cut(folder / "config.json", 5),
        "config.json cannot be read as JSON: ",
    ),
}


@pytest.mark.parametrize("makes", [nullcontext, empty_parameters])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_an_error_that_names_the_file(tmp_path, case, makes):
    damage, message = DAMAGED[case]
    section = ModelSection(pretrain=tiny_model(tmp_path))
    damage(tmp_path)
    for load in (load_model, load_scorer):
        with makes(), pytest.raises(ValueError, match=f"--pretrain {tmp_path}: .*{message}"):
            load(section)


def test_tensors_that_an_index_lacks_are_found(tmp_path):
    tiny_model(tmp_path)
    in_shards(unlisted)(tmp_path)
    names = WeightFiles.of(tmp_path).files
    assert names["model.norm.weight"].name == "model-00007-of-00007.safetensors"


def test_weights_that_are_not_finite_are_an_error(tmp_path):
    section = ModelSection(pretrain=tiny_model(tmp_path))
    for number in (torch.nan, torch.inf):
        change(
            "lm_head.weight",
            lambda tensor, number=number: tensor.index_fill(0, torch.tensor([7]), number),
        )(tmp_path)
        with pytest.raises(
            ValueError,
            match=f"--pretrain {tmp_path}: lm_head.weight has values that are not finite",
        ):
            load_model(section)


@pytest.mark.parametrize("makes", [nullcontext, empty_parameters])
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("gpt_neox", "gpt_neox.layers.0.attention"),
        ("gpt2", "transformer.h.0.attn"),
        ("gpt_bigcode", "transformer.h.0.attn"),
    ],
)
def test_masks_beside_the_weights_are_left_out(tmp_path, kind, path, makes):
    section = saved(tmp_path, kind, max_position_embeddings=8)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    names = load_model(section).state_dict().keys()
    mask = torch.ones(8, 8).tril()[None, None]
    for dtype in (torch.bool, torch.uint8, torch.float32):
        masks = {f"{path}.bias": mask.to(dtype), f"{path}.masked_bias": torch.tensor(-1e9)}
        save_file(weights | masks, file, metadata={"format": "pt"})
        with makes():
            assert load_model(section).state_dict().keys() == names


@pytest.mark.parametrize("makes", [nullcontext, empty_parameters])
@pytest.mark.parametrize("kind", ["gpt_neo", "gptj"])
def test_attention_that_cannot_be_replaced_is_refused(tmp_path, kind, makes):
    layers = {"attention_types": [[["global"], 1]]} if kind == "gpt_neo" else {"rotary_dim": 4}
    section = saved(tmp_path, kind, max_position_embeddings=8, **layers)
    for load in (load_model, load_scorer):
        with makes(), pytest.raises(ValueError, match=f"attention implementation of {kind} cannot"):
            load(section)


def test_integers_are_not_weights(tmp_path):
    """Some folders hold a mask or a table of positions; these are not quantized weights."""
    section = ModelSection(pretrain=tiny_model(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.position_ids": torch.arange(4)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )

    with pytest.raises(
        ValueError,
        match="1 tensors in the folder are not in the model, the first is model.position_ids",
    ):
        load_model(section)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize(
    ("content", "reason"),
    [(b'{"a": 1,}', "line 1 column 9"), (b"", "line 1 column 1"), (b"[1]", "'list' object")],
)
def test_a_broken_file_is_named(tmp_path, file, content, reason):
    section = ModelSection(pretrain=tiny_model(tmp_path))
    (tmp_path / file).write_bytes(content)
    for load in (load_tokenizer, load_model):
        with pytest.raises(ValueError, match=f"--pretrain {tmp_path}: {file} cannot be .*{reason}"):
            load(section)


def test_a_folder_without_a_tokenizer(tmp_path):
    section = ModelSection(pretrain=tiny_model(tmp_path))
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(
        ValueError, match=f"--pretrain {tmp_path} has no tokenizer: the folder has no vocabulary"
    ):
        load_tokenizer(section)
