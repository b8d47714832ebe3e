"""Rollouts in eight bits: what vLLM generates with int8 on a CPU, and what is refused."""

import pytest
import torch

from engine.quantized_course import (
    adapters_beside_int8,
    an_engine_of_int8,
    as_on_amx,
    stale_scales,
    with_a_cache_of_fp8,
    with_kernel,
)
from lightrft.config import EngineSection
from lightrft.config.errors import ConfigError
from lightrft.engine import build
from lightrft.engine.build import build_engine, check_quantization
from lightrft.models.parallel.collectives import Axis
from ranks import run_ranks
from tiny import tiny_experts, tiny_hybrid, tiny_model
from with_vllm import load_vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model") / "model", seed=1, tie=True)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "bf16"), [(1, False), (1, True), (2, False)])
def test_vllm_computes_with_int8_after_every_load(folder: str, ranks: int, bf16: bool) -> None:
    """Each check of the course has a name in its result; see there."""
    load_vllm()
    # Two ranks choose kernels as on a processor with AMX, whichever one this is.
    course = (an_engine_of_int8,) if ranks == 1 else (as_on_amx, an_engine_of_int8)
    for found in run_ranks(ranks, *course, folder, bf16, timeout=400):
        # Only the inputs of layers are rounded beside the weights.
        assert max(found.pop("gaps")) < 0.02
        assert found.pop("size") < found.pop("whole_size") * (0.85 if bf16 else 0.6)
        assert found.pop("unknown") == 0
        assert found == dict.fromkeys(found, True)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "ranks"), [("turned", 2), ("packed", 1), ("repacked", 1)])
def test_no_kernel_ends_a_run_by_its_form_of_the_weights(
    folder: str, form: str, ranks: int
) -> None:
    """A form that has changed codes and scales is not verified, and the other weights are."""
    load_vllm()
    for found in run_ranks(ranks, with_kernel, form, an_engine_of_int8, folder, True, timeout=400):
        assert max(found.pop("gaps")) < 0.02
        noticed = {name: found[name] for name in ("scale", "code", "norm")}
        assert noticed == dict.fromkeys(noticed, True) | {"scale": form != "repacked"} | {
            "code": form != "repacked"
        }
        assert found["unknown"] == (28 if form == "repacked" else 0)
        assert found["all_matrices"] and found["same_after_sleep"]


@pytest.mark.slow
def test_adapters_are_held_beside_int8(folder: str) -> None:
    load_vllm()
    (found,) = run_ranks(1, adapters_beside_int8, folder, timeout=400)
    assert found["held"]
    assert max(found["gaps"]) < 0.03
    assert found["sizes"][1] == found["sizes"][2] < found["sizes"][0] / 4


@pytest.mark.slow
def test_keys_and_values_may_have_eight_bits_too(folder: str) -> None:
    load_vllm()
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        with pytest.raises(RuntimeError, match="FP8 KV cache on CPU requires x86 with AVX-512"):
            run_ranks(1, with_a_cache_of_fp8, folder, timeout=400)
        return

    (gap,) = run_ranks(1, with_a_cache_of_fp8, folder, timeout=400)
    assert 0.015 < gap < 0.06


@pytest.mark.slow
def test_codes_without_scales_are_an_error(folder: str) -> None:
    load_vllm()
    message = "weights are missing, the first is model.layers.0."
    assert message in run_ranks(1, stale_scales, folder, timeout=400)[0]


def test_what_cannot_be_quantised_is_said_before_anything_is_loaded(folder: str, tmp_path) -> None:
    cpu = torch.device("cpu")
    int8 = EngineSection(engine_type="vllm", rollout_quantization="int8")
    check_quantization(int8, folder, cpu)
    with pytest.raises(ConfigError, match="and there is model.layers.0.mlp.experts"):
        check_quantization(int8, tiny_experts(tmp_path / "experts"), cpu)
    with pytest.raises(ConfigError, match="and there is model.layers.0.linear_attn"):
        check_quantization(int8, tiny_hybrid(tmp_path / "hybrid"), cpu)


def test_other_engines_refuse_it_where_no_rule_has_looked(folder: str) -> None:
    section = EngineSection(engine_type="hf", rollout_quantization="int8")
    with pytest.raises(ConfigError, match="needs --engine_type vllm, and not hf"):
        build_engine(section, model_path=folder, axis=Axis("engine", 1, 0, None))


def test_fp8_needs_a_device_that_multiplies_it(folder: str, monkeypatch) -> None:
    fp8 = EngineSection(engine_type="vllm", rollout_quantization="fp8")
    with pytest.raises(ConfigError, match="no products of FP8 on a CPU"):
        check_quantization(fp8, folder, torch.device("cpu"))

    monkeypatch.setattr(build, "compute_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match="compute capability 8.9"):
        check_quantization(fp8, folder, torch.device("cuda", 0))
    monkeypatch.setattr(build, "compute_capability", lambda: (9, 0))
    check_quantization(fp8, folder, torch.device("cuda", 0))


def test_int8_needs_a_gpu_before_blackwell(folder: str, monkeypatch) -> None:
    """Its kernel would fail where vLLM measures the memory of a step, after minutes of start."""
    int8 = EngineSection(engine_type="vllm", rollout_quantization="int8")
    monkeypatch.setattr(build, "compute_capability", lambda: (9, 0))
    check_quantization(int8, folder, torch.device("cuda", 0))
    monkeypatch.setattr(build, "compute_capability", lambda: (10, 0))
    with pytest.raises(ConfigError, match="no products of int8 from compute capability 10.0"):
        check_quantization(int8, folder, torch.device("cuda", 0))
