"""A GGUF file becomes a folder with its numbers, settings and tokenizer.

Or it is refused with the reason.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gguf_files import (
    TEMPLATE,
    random_model,
    tokenizer_of,
    trained_sentencepiece,
    vocabulary,
    write_gguf,
)
from lightrft import versions
from lightrft.app.cli import MAINS, export
from lightrft.config import Config, ConfigError
from lightrft.strategy.checkpoint import model_folders
from lightrft.strategy.checkpoint.gguf import convert
from lightrft.strategy.checkpoint.model_folders import converted_folder, name_folders
from ranks import run_ranks
from runs import prepare

F32 = GGMLQuantizationType.F32
Q8_0 = GGMLQuantizationType.Q8_0
ROPE = {"rope_theta": 3e5, "rope_type": "default"}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_parameters": ROPE}, "smollm"),
    "llama, its own head": (
        "llama",
        {"tie_word_embeddings": False, "rope_parameters": ROPE},
        "smollm",
    ),
    "llama 3": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA_3, "head_dim": 32},
        "llama-bpe",
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": ROPE}, "qwen2"),
    "qwen3": (
        "qwen3",
        {"tie_word_embeddings": False, "rope_parameters": ROPE, "head_dim": 32},
        "qwen2",
    ),
}
TEXTS = [
    "the he 12 1234, it's ab",
    "a:\n\n12 he",
    "xyz xyzab  12\n\n\nhe",
    "<start>user\nü 😀<end>",
]


def divisors(model: PreTrainedModel) -> np.ndarray:
    """Return the tensor that llama.cpp's converter makes from Llama 3's rotary settings."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(0, 32, 2, dtype=torch.float32) / 32)
    return (plain / scaled).numpy()


def written(file: Path, name: str = "llama", kind: GGMLQuantizationType = F32, **options):
    """Write the file of a model; return the model and the numbers in it."""
    family, settings, pieces = MODELS[name]
    model = random_model(family, **settings)
    if name == "llama 3":
        options["extra"] = {"rope_freqs.weight": divisors(model)}
    return model, write_gguf(file, model, kind, options.pop("pieces", pieces), **options)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "lightrft" / "gguf"


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_settings_and_tokenizer_match_the_model(tmp_path, name, kind):
    model, held = written(tmp_path / "m.gguf", name, kind)
    folder = convert(tmp_path / "m.gguf", tmp_path / "folder")

    rounded = {name: tensor.bfloat16() for name, tensor in held.items()}
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == rounded.keys()
    assert all(torch.equal(stored[name], rounded[name]) for name in stored)

    ids = torch.arange(3, 103)[None]
    model.load_state_dict({name: tensor.float() for name, tensor in rounded.items()}, strict=False)
    model.tie_weights()
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = tokenizer_of(MODELS[name][2])
    for text in TEXTS:
        start = [1] if name == "llama 3" else []
        assert tokenizer(text)["input_ids"] == start + original.encode(text).ids
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_logits_of_a_mixture_of_experts(tmp_path):
    sizes = {
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    model = random_model("qwen3_moe", rope_parameters=ROPE, **sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    write_gguf(tmp_path / "m.gguf", model, F32, "qwen2")

    read = AutoModelForCausalLM.from_pretrained(
        convert(tmp_path / "m.gguf", tmp_path / "folder"), dtype=torch.float32
    )
    ids = torch.arange(3, 103)[None]
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_tokens_of_sentencepiece(tmp_path):
    processor = trained_sentencepiece()
    model = random_model("llama", vocab_size=processor.vocab_size())
    write_gguf(tmp_path / "m.gguf", model, F32, processor)
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "m.gguf", tmp_path / "folder"))
    for text in ["the cat", "numbers 3412  hello\n\nworld zü 😀", "a"]:
        assert tokenizer(text)["input_ids"] == [processor.bos_id(), *processor.encode(text)]

    write_gguf(
        tmp_path / "n.gguf",
        model,
        F32,
        processor,
        settings={"tokenizer.ggml.add_space_prefix": False},
    )
    with pytest.raises(
        ConfigError, match="does not read its setting tokenizer.ggml.add_space_prefix"
    ):
        convert(tmp_path / "n.gguf", tmp_path / "other")


def test_the_folder_looks_like_an_ordinary_model(tmp_path):
    written(tmp_path / "m.gguf", kind=Q8_0)
    folder = convert(tmp_path / "m.gguf", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert not {"quantization_config", "_model_name_or_path"} & config.keys()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation.keys() - {"transformers_version"} == {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    assert len(AutoTokenizer.from_pretrained(folder)) == len(vocabulary()), (
        "no token without a row in the model"
    )


def test_neighbouring_files_have_no_influence(tmp_path):
    written(tmp_path / "m.gguf")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "generation_config.json",
    ):
        (tmp_path / name).write_text("{}")

    folder = convert(tmp_path / "m.gguf", tmp_path / "folder")
    assert (
        len(AutoTokenizer.from_pretrained(folder)) > 256
        and not (folder / "preprocessor_config.json").exists()
    )


ONES = np.ones(8, dtype=np.float32)
REFUSED = {
    "a tensor too much": (
        {"extra": {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}},
        "numbers, but transformers reads",
    ),
    "a tensor too few": (
        {"without": "model.norm.weight"},
        "1 tensors of the model are not in it, the first is model.norm.weight",
    ),
    "other frequencies": (
        {"extra": {"rope_freqs.weight": ONES + np.arange(8, dtype=np.float32)}},
        "not Llama 3's",
    ),
    "scaled positions": (
        {"settings": {"llama.rope.scaling.type": "yarn"}},
        "does not read its setting rope.scaling.type yarn",
    ),
    "a window": (
        {"settings": {"llama.attention.sliding_window": 64}},
        "does not read its setting attention.sliding_window 64",
    ),
    "unknown pieces": ({"pieces": "newest"}, "its pre-tokenizer 'newest' is unknown"),
    "a part": (
        {"settings": {"split.count": 3}},
        "is one of 3 parts: join them with llama-gguf-split --merge",
    ),
    "heads of other sizes": (
        {"settings": {"llama.attention.key_length": 8}},
        r"(q_proj.weight has shape \(64, 64\).*, but \(32, 64\))|"
        r"(k_proj.weight has shape \(32, 64\).*, but \(16, 64\))",
    ),
    "an unknown family": ({"settings": {"general.architecture": "whale"}}, "whale"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_read_completely_is_refused(tmp_path, case):
    options, reason = REFUSED[case]
    if case == "an unknown family":
        written(tmp_path / "m.gguf")
        content = (tmp_path / "m.gguf").read_bytes()
        (tmp_path / "m.gguf").write_bytes(content.replace(b"llama", b"whale"))
    else:
        written(tmp_path / "m.gguf", **options)

    with pytest.raises(ConfigError, match=f"m.gguf.*{reason}") as refused:
        convert(tmp_path / "m.gguf", tmp_path / "folder")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "folder").exists()


def test_a_base_of_the_frequencies_that_is_not_read_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", random_model("starcoder2", rope_parameters=ROPE), F32, "smollm")
    with pytest.raises(ConfigError, match="does not read its setting rope.freq_base 300000.0"):
        convert(tmp_path / "m.gguf", tmp_path / "folder")


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    model = random_model("llama", tie_word_embeddings=True)
    model.model.norm.weight.data[3] = torch.nan
    write_gguf(tmp_path / "m.gguf", model, F32, "smollm")
    with pytest.raises(ConfigError, match="model.norm.weight has values that are not finite"):
        convert(tmp_path / "m.gguf", tmp_path / "folder")


@pytest.mark.parametrize("size", [0, 3, 100, 5_000, -1000])
def test_a_damaged_file_is_refused(tmp_path, size):
    written(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:size])
    with pytest.raises(ConfigError, match="m.gguf is not a complete GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path / "folder")


def test_a_file_and_a_folder_with_one_name_the_same_model(tmp_path, cache):
    (tmp_path / "m").mkdir()
    written(tmp_path / "m" / "small.gguf")
    folder = converted_folder(str(tmp_path / "m"), "--pretrain")
    assert Path(folder).name == "small" and Path(folder).parents[1] == cache
    before = (Path(folder) / "config.json").stat()
    assert converted_folder(str(tmp_path / "m" / "small.gguf"), "--pretrain") == folder
    assert (Path(folder) / "config.json").stat() == before, "it is converted once"

    written(tmp_path / "m" / "small.gguf", "qwen2")
    assert converted_folder(str(tmp_path / "m"), "--pretrain") != folder, (
        "another file is another model"
    )
    shutil.copy(tmp_path / "m" / "small.gguf", tmp_path / "m" / "other.gguf")
    with pytest.raises(
        ConfigError, match="has 2 GGUF files, so name one of them: other.gguf, small.gguf"
    ):
        converted_folder(str(tmp_path / "m"), "--pretrain")
    with pytest.raises(ConfigError, match="--critic_pretrain: .*absent.gguf: no such file"):
        converted_folder(str(tmp_path / "absent.gguf"), "--critic_pretrain")


@pytest.mark.parametrize("name", ["", "owner/name", "owner/name-gguf", ".", "x" * 5000])
def test_other_names_stay_as_they_are(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert converted_folder(name, "--pretrain") == name


def test_every_flag_that_names_a_model(tmp_path):
    written(tmp_path / "small.gguf")
    name = str(tmp_path / "small.gguf")
    rewards = [f"x={name}:0.5", f"{name}:2", name]
    config = Config.of(
        pretrain=name,
        critic_pretrain=name,
        teacher_pretrain=name,
        draft_pretrain=name,
        reward_pretrain=rewards,
        process_reward_pretrain=[name],
    )
    name_folders(config)
    folder = converted_folder(name, "--pretrain")
    model = config.model
    assert {
        model.pretrain,
        model.critic_pretrain,
        model.teacher_pretrain,
        config.engine.draft_pretrain,
    } == {folder}
    assert model.reward_pretrain == [f"x={folder}:0.5", f"{folder}:2", folder]
    assert model.process_reward_pretrain == [folder]


def test_packages_that_are_missing_or_too_old_are_named(tmp_path, monkeypatch):
    written(tmp_path / "m.gguf")
    monkeypatch.setattr(versions, "installed_version", {"transformers": "5.12"}.get)
    said = (
        r"transformers 5.12 is installed, .* >=5.19; gguf is not installed.*pip install"
        r" 'transformers>=5.19' 'gguf>="
    )
    with pytest.raises(ConfigError, match=said):
        converted_folder(str(tmp_path / "m.gguf"), "--pretrain")


def test_of_several_processes_one_converts(tmp_path, monkeypatch):
    written(tmp_path / "m.gguf")
    monkeypatch.setattr(
        model_folders, "convert_gguf", noting(model_folders.convert_gguf, tmp_path / "converted")
    )
    folders = run_ranks(3, converted_folder, str(tmp_path / "m.gguf"), "--pretrain")
    assert len(set(folders)) == 1 and (Path(folders[0]) / "model.safetensors").is_file()
    assert len((tmp_path / "converted").read_text().splitlines()) == 1


def noting(function, file: Path):
    """Return a function that also writes a line to a file."""

    def called(*arguments):
        with open(file, "a") as calls:
            calls.write(f"{os.getpid()}\n")
        return function(*arguments)

    return called


def test_export_writes_a_file_as_a_folder(tmp_path):
    written(tmp_path / "m.gguf")
    export.main([str(tmp_path / "m.gguf"), str(tmp_path / "folder")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "folder").config.model_type == "llama"


@pytest.mark.slow
def test_doctor_examines_a_file(tmp_path, capsys):
    doctor = pytest.importorskip("lightrft.extras.commands.doctor")
    written(tmp_path / "m.gguf")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--model", str(tmp_path / "m.gguf"), "--engine_type", "hf", "--fsdp"])
    assert ended.value.code == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_run_with_a_file(tmp_path):
    flags = [
        flag
        for flag in prepare(tmp_path, rows=4)
        if not flag.startswith(("--pretrain", "--prompt_data", "--report_to"))
    ]
    written(tmp_path / "m.gguf")
    flags += [
        f"--pretrain={tmp_path}/m.gguf",
        f"--eval_data={tmp_path}/train.jsonl",
        "--engine_type=hf",
        "--generate_max_len=4",
        f"--save_path={tmp_path}/run",
    ]
    with pytest.raises(SystemExit) as ended:
        MAINS["evaluate"](flags)
    assert ended.value.code == 0
    assert len((tmp_path / "run" / "responses.jsonl").read_text().splitlines()) == 4


def test_a_damaged_file_ends_a_run_with_one_line(tmp_path, capfd):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        MAINS["evaluate"](
            ["--fsdp", f"--pretrain={tmp_path}/m.gguf", f"--eval_data={tmp_path}/x.jsonl"]
        )
    assert ended.value.code == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "INFO" not in line]
    assert len(said) == 1 and "--pretrain: " in said[0] and "is not a complete GGUF file" in said[0]
