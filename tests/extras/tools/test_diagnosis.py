"""The doctor finds where an engine's model differs from the trainer's.

Where it does not, the doctor says that all is well.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightrft.config import (
    Config,
    DataSection,
    EngineSection,
    ModelSection,
    RolloutSection,
    StrategySection,
)
from lightrft.engine import hf
from lightrft.engine.probe import Probe
from lightrft.extras.tools.diagnosis import Diagnosis, compare, diagnose
from lightrft.models.load import load_tokenizer
from lightrft.strategy import get_strategy
from ranks import run_ranks
from sglang_environment import in_sglang_environment
from tiny import byte_tokenizer, tiny_model
from warm import warm_python
from with_vllm import load_vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and beside it the same weights under other settings."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "plain", seed=1)

    config = json.loads((folder / "plain" / "config.json").read_text())
    rope = config["rope_parameters"] | {"rope_theta": 3 * config["rope_parameters"]["rope_theta"]}
    for name, change in {
        "theta": {"rope_parameters": rope},
        "eps": {"rms_norm_eps": 1e-5},
        "act": {"hidden_act": "gelu"},
        "scaled": {"rope_parameters": rope | {"rope_type": "linear", "factor": 2.0}},
    }.items():
        shutil.copytree(folder / "plain", folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | change))

    return folder


def examine(folder: Path, engine_type: str, engine_model: str, *, bf16: bool = False) -> Diagnosis:
    config = Config(
        model=ModelSection(pretrain=str(folder / "plain"), bf16=bf16),
        data=DataSection(prompt_max_len=128),
        strategy=StrategySection(fsdp=True),
        engine=EngineSection(engine_type=engine_type, engine_kv_cache_gb=0.125),
        rollout=RolloutSection(generate_max_len=64),
    )
    strategy = get_strategy(config)
    strategy.setup_distributed()

    try:
        return diagnose(
            config,
            strategy,
            load_tokenizer(config.model),
            str(folder / engine_model) if engine_model else "",
        )
    finally:
        strategy.close_engine()


def _several(folder: Path, cases: dict[str, dict]) -> dict[str, Diagnosis]:
    return {name: examine(folder, "hf", **options) for name, options in cases.items()}


@pytest.mark.slow
def test_the_first_output_that_differs_is_named(folder: Path) -> None:
    cases = {name: {"engine_model": name} for name in ("", "theta", "scaled", "eps", "act")} | {
        "bf16": {"engine_model": "", "bf16": True}
    }
    (found,) = run_ranks(1, _several, folder, cases)
    for name, first, advice in (
        ("theta", "model.layers.0.self_attn.heads", "rope_theta"),
        ("scaled", "model.layers.0.self_attn.heads", "'factor': 2.0"),
        ("eps", "model.layers.0.input_layernorm", "rms_norm_eps: trainer 1e-06, engine 1e-05"),
        ("act", "model.layers.0.mlp", "hidden_act: trainer 'silu', engine 'gelu'"),
    ):
        assert found[name].first.name == first and advice in found[name].advice
        assert not found[name].healthy

    assert found["theta"].gaps["sampled"].mean > 1e-2
    for name in ("", "bf16"):
        assert found[name].healthy and not found[name].advice
        assert len(found[name].outputs) == 19, "2 x 8 of layers, embeddings, last norm, head"

    assert found[""].gaps["greedy"].tokens == 4 * 32 and found[""].gaps["sampled"].largest < 1e-5
    assert 1e-5 < found["bf16"].gaps["sampled"].mean < 0.05


def _with_a_head_of_bfloat16(folder: Path) -> Diagnosis:
    load: Callable = hf._load

    def rounded(*arguments):
        model = load(*arguments)
        model.lm_head.register_forward_hook(lambda module, given, output: output.bfloat16().float())
        return model

    hf._load = rounded
    return examine(folder, "hf", "")


def test_a_rounded_head_is_named(folder: Path) -> None:
    (found,) = run_ranks(1, _with_a_head_of_bfloat16, folder)
    assert found.first.name == "lm_head" and "bfloat16 or float32" in found.advice
    assert not found.healthy


def test_nan_differs() -> None:
    good = {"norm": torch.ones(3, 2)}
    bad = {"norm": torch.full((3, 2), torch.nan)}
    assert (
        compare(good, bad, torch.float32)[0].differs
        and not compare(good, good, torch.float32)[0].differs
    )
    assert compare(good, {"norm": torch.ones(3, 4)}, torch.float32) == [], (
        "of another shape: not the same module"
    )


def test_outputs_by_head_are_compared_by_token() -> None:
    probe = Probe(3)
    value = torch.randn(1, 2, 3, 4)
    probe.add("q_norm", value)
    probe.add("k_norm", value.transpose(1, 2))
    assert all(
        torch.equal(output, value[0].transpose(0, 1).flatten(1))
        for output in probe.outputs.values()
    )


def test_embeddings_are_what_the_first_layer_gets() -> None:
    """vLLM's Gemma scales them after the module that embeds."""
    embed = nn.Embedding(5, 4)
    norm = nn.Identity()
    probe = Probe(2)
    model = nn.ModuleDict(
        {"embed_tokens": embed, "layers": nn.ModuleList([nn.ModuleDict({"input_layernorm": norm})])}
    )
    with probe.attached(nn.ModuleDict({"model": model})), torch.no_grad():
        norm(embed(torch.tensor([[3, 1]])) * 8)
    torch.testing.assert_close(probe.outputs["model.embed_tokens"], 8 * embed.weight[[3, 1]])


@pytest.mark.slow
def test_vllm_is_looked_into(folder: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()
    (found,) = run_ranks(1, examine, folder, "vllm", "theta")
    assert found.first.name == "model.layers.0.self_attn.heads" and len(found.outputs) == 19
    assert [output.differs for output in found.outputs[:5]] == [False] * 5


def _in_sglang(folder: Path, names: list[str]) -> dict[str, Diagnosis]:
    return {name: examine(folder, "sglang", name) for name in names}


@pytest.mark.slow
def test_sglang_is_looked_into(folder: Path) -> None:
    """Its model is in another process. Its families are tested where all is well."""
    (found,) = in_sglang_environment(
        partial(run_ranks, 1, _in_sglang, folder, ["theta", "eps"], timeout=300)
    )
    assert (
        found["theta"].first.name == "model.layers.0.self_attn.heads"
        and len(found["theta"].outputs) == 19
    )
    assert (
        found["eps"].first.name == "model.layers.0.input_layernorm"
        and len(found["eps"].outputs) == 19
    )
    assert [output.differs for output in found["theta"].outputs[:5]] == [False] * 5


@pytest.mark.slow
def test_the_command(folder: Path) -> None:
    """A process without a launcher; if something is broken, it says why and ends with 1."""
    pytest.importorskip("vllm", reason="vllm is not installed")

    def doctor(*flags: str) -> subprocess.CompletedProcess:
        command = [
            warm_python(vllm=True),
            "-m",
            "lightrft",
            "doctor",
            "--engine_kv_cache_gb",
            "0.125",
            *flags,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    shutil.copytree(folder / "plain", folder / "padded")
    # as published models have rows without tokens
    byte_tokenizer(300).save_pretrained(folder / "padded")
    well = doctor("--model", str(folder / "padded"), "--engine_type", "vllm")
    assert (well.returncode, well.stdout.strip().splitlines()[-1]) == (0, "all checks passed"), (
        well.stdout + well.stderr
    )
    assert "and trainer (FSDPStrategy)" in well.stdout, "the strategy that a run without --fsdp has"

    ill = doctor(
        "--model",
        str(folder / "plain"),
        "--engine_type",
        "hf",
        "--engine_model",
        str(folder / "eps"),
        "--fsdp",
    )
    assert "and trainer (FSDPStrategy)" in ill.stdout
    assert (
        ill.returncode == 1
        and "first difference" in ill.stdout
        and "rms_norm_eps: trainer" in ill.stdout
    )
