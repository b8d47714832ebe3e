"""A folder in FP8 or MXFP4 becomes a plain folder with the numbers that it stands for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from flat_models import MODELS, SIZES
from lightrft.app.cli import export
from lightrft.config import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.models.load import load_model
from lightrft.strategy.checkpoint.dequantize import convert, from_fp8, from_mxfp4
from lightrft.strategy.checkpoint.model_folders import converted_folder

BLOCK = [16, 16]


def save_quantized(folder: Path, tensors: dict, config: dict, settings: dict) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def fp8_folder(folder: Path) -> Path:
    """Write a Qwen3 as Qwen does: matrices of layers in FP8 with a scale for each block."""
    config = AutoConfig.for_model("qwen3", **SIZES, head_dim=16)
    torch.manual_seed(0)
    tensors = {}
    for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor.bfloat16()
            continue
        blocks = tensor.reshape(tensor.shape[0] // 16, 16, tensor.shape[1] // 16, 16)
        scales = blocks.abs().amax((1, 3)) / 448
        tensors[name] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view_as(tensor)
        tensors[name + "_scale_inv"] = scales
    settings = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}
    return save_quantized(folder, tensors, config.to_dict(), settings)


def mxfp4_folder(folder: Path) -> Path:
    """Write a gpt-oss as OpenAI does: random bytes for experts, and exponents near those of 1."""
    sizes = SIZES | {"hidden_size": 32, "intermediate_size": 64} | MODELS["gpt_oss"][1]
    config = AutoConfig.for_model("gpt_oss", **sizes)
    torch.manual_seed(0)
    tensors = {}
    for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            groups = experts, rows, columns // 32
            tensors[name + "_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            tensors[name + "_scales"] = torch.randint(120, 126, groups, dtype=torch.uint8)
        else:
            tensors[name] = tensor.bfloat16()
    return save_quantized(folder, tensors, config.to_dict(), {"quant_method": "mxfp4"})


FOLDERS = {
    "fp8": (fp8_folder, lambda: FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)),
    "mxfp4": (mxfp4_folder, lambda: Mxfp4Config(dequantize=True)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "lightrft" / "dequantized"


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_numbers_are_those_of_transformers(tmp_path, kind):
    write, reader = FOLDERS[kind]
    source = write(tmp_path / "quantized")
    reference = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=reader(), dtype=torch.bfloat16
    )
    folder = convert(source, tmp_path / "plain")

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert getattr(plain.config, "quantization_config", None) is None
    expected = reference.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor)), name
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_scales_by_hand():
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]).to(torch.float8_e4m3fn)
    blocks = torch.tensor([[10.0, 0.5], [3.0, 0.25]])
    assert from_fp8(values, torch.tensor(2.0), None).tolist() == [[2, 4, 8], [16, 32, 64]]
    assert from_fp8(values, torch.tensor([[2.0], [3.0]]), None).tolist() == [
        [2, 4, 8],
        [24, 48, 96],
    ]
    # the last block of a row is narrower
    assert from_fp8(values, blocks, [1, 2]).tolist() == [[10, 20, 2], [24, 48, 8]]
    assert from_fp8(values, torch.tensor([[128], [126]], dtype=torch.uint8), None).tolist() == [
        [2, 4, 8],
        [4, 8, 16],
    ]
    with pytest.raises(ValueError, match=r"scales of shape \[2, 2\] do not fit .* \[2, 3\]"):
        from_fp8(values, blocks, [2, 2])


def test_halves_of_bytes_by_hand():
    """0x2B: 1011 is -1.5 in the lower half, which comes first, and 0010 is 1."""
    blocks = torch.full((1, 1, 1, 16), 0x2B, dtype=torch.uint8)
    values = from_mxfp4(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert values.shape == (1, 32, 1) and values.dtype == torch.bfloat16
    assert values[0, :4, 0].tolist() == [-3.0, 2.0, -3.0, 2.0]


def test_a_quantized_folder_is_a_model_like_any_other(tmp_path, cache):
    """The first use converts it, and later ones find the folder."""
    source = fp8_folder(tmp_path / "Tiny-FP8")
    folder = converted_folder(str(source), "--pretrain")
    assert Path(folder).parts[: len(cache.parts)] == cache.parts
    assert Path(folder).name == "Tiny-FP8"
    time = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    assert converted_folder(str(source), "--pretrain") == folder
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == time

    model = load_model(ModelSection(pretrain=folder))
    assert model.get_decoder().layers[0].mlp.up_proj.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="its weights are quantized .fp8.: `lightrft export"):
        load_model(ModelSection(pretrain=str(source)))


@pytest.mark.parametrize(
    "name",
    ["config.json", "chat_template.jinja", "tokenizer.json", "README.md", "model.safetensors"],
)
def test_a_changed_file_is_converted_anew(tmp_path, name):
    """Also if it keeps its size and its time."""
    source = fp8_folder(tmp_path / "Tiny-FP8")
    file = source / name
    for text in ("README.md", "tokenizer.json", "chat_template.jinja", "config.json"):
        with open(source / text, "a") as opened:
            opened.write(" ")
    first = converted_folder(str(source), "--pretrain")

    before = file.stat()
    content = file.read_bytes()
    changed = content[:-1] + (b"\0" if content[-1] else b"\1")
    changed = changed if name == "model.safetensors" else content[:-1] + b"\n"
    file.write_bytes(changed)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = Path(converted_folder(str(source), "--pretrain"))
    assert str(second) != first
    if name not in ("config.json", "model.safetensors"):
        assert (second / name).read_bytes() == changed


def test_folders_of_one_name_have_copies_of_their_own(tmp_path):
    first = fp8_folder(tmp_path / "a" / "Tiny-FP8")
    second = tmp_path / "b" / "Tiny-FP8"
    shutil.copytree(first, second)
    (second / "chat_template.jinja").write_text("another one")
    folders = {converted_folder(str(source), "--pretrain") for source in (first, second)}
    templates = {(Path(folder) / "chat_template.jinja").read_text() for folder in folders}
    assert len(folders) == 2 and templates == {"{{ messages }}", "another one"}


def test_export_writes_a_quantized_folder_as_a_plain_one(tmp_path):
    source = mxfp4_folder(tmp_path / "quantized")
    export.main([str(source), str(tmp_path / "folder")])
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert "quantization_config" not in config and config["model_type"] == "gpt_oss"


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.qweight": torch.zeros(4, 4, dtype=torch.int32)},
        {"a.weight_packed": torch.zeros(4, 4, dtype=torch.uint8)},
        {"a.weight": torch.zeros(4, 4, dtype=torch.int8)},
        {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)},
    ],
)
def test_another_quantization_is_named(tmp_path, tensors):
    source = save_quantized(tmp_path / "q", tensors, {}, {"quant_method": "awq"})
    with pytest.raises(
        ConfigError, match=r"--pretrain: .*q is quantized \(awq\): .* Use the unquantized model"
    ):
        converted_folder(str(source), "--pretrain")
    assert not list((tmp_path / "home" / "lightrft" / "dequantized").rglob("config.json"))


@pytest.mark.slow
def test_one_file_is_in_memory_at_a_time(tmp_path):
    """A model of 256 MB is written in files of 32 MB with less than 160 MB on top."""
    tensors = {}
    for number in range(16):
        tensors[f"{number}.weight"] = torch.ones(2**11, 2**12).to(torch.float8_e4m3fn)
        tensors[f"{number}.weight_scale_inv"] = torch.ones(16, 32)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = save_quantized(tmp_path / "q", tensors, {}, settings)
    program = f"""
import resource
from pathlib import Path
from lightrft.strategy.checkpoint.dequantize import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(Path({str(source)!r}), Path({str(tmp_path / "plain")!r}), file_bytes=2**25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    assert int(run.stdout.split()[-1]) * 1024 < 160 * 2**20
    files = sorted((tmp_path / "plain").glob("*.safetensors"))
    assert len(files) == 8
    assert sum(tensor.nbytes for file in files for tensor in load_file(file).values()) == 2**28
