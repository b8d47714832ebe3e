"""Hybrids in vLLM on a CPU: Qwen3.5, in bfloat16 only, and families with Mamba 2."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.contract import Bench, flipped_elements_are_named, reference_greedy
from flat_models import make_model
from lightrft.engine.base import EngineError, Request, Sampling
from lightrft.engine.testing import perturbed, start_engine
from lightrft.models.attention.recurrent import lift_time_step_limits
from lightrft.models.parallel.mesh import Mesh
from ranks import run_ranks
from sglang_environment import beside_torchvision
from tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer, tiny_hybrid
from with_vllm import load_vllm

pytestmark = pytest.mark.slow
PROMPTS = [[50, 55, 43, 53], list(range(70)), [200], [(7 * index) % 250 for index in range(200)]]


def gaps(
    bench: Bench, model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16
) -> tuple[float, float]:
    """Mean differences of log-probs: engine to model in `dtype`, and that to float32 model."""
    rounded = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=dtype)
    rounded.load_state_dict(model.state_dict())
    lift_time_step_limits(rounded)
    sampling = Sampling(n=3, max_tokens=24, seed=1)
    groups = bench.engine.generate([Request(prompt) for prompt in PROMPTS], sampling)
    found = []
    for prompt, samples in zip(PROMPTS, groups, strict=True):
        for sample in samples:
            scores = []
            for reference in (rounded, model):
                with torch.no_grad():
                    logits = reference(torch.tensor([prompt + sample.token_ids])).logits[0].float()
                logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
                scores.append(logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0])
            sampled = torch.tensor(sample.logprobs)
            found.append(torch.stack([(sampled - scores[0]).abs(), (scores[0] - scores[1]).abs()]))

    engine, rounding = torch.cat(found, 1).mean(1).tolist()
    return engine, rounding


def course(folder: str, tp: int) -> list[tuple[float, float]]:
    axis = Mesh("cpu").engine(tp)
    engine = start_engine("vllm", folder, axis, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bench = Bench(engine, model)
    assert engine._shim.weights.unknown == []
    found = [gaps(bench, model)]

    other = perturbed(model, 5)
    bench.load(other.bfloat16().float(), 1)
    found.append(gaps(bench, other))

    engine.sleep(2)
    engine.wake("weights")
    bench.load(model, 2)
    engine.wake("kv_cache")
    found.append(gaps(bench, model))

    bench.model = model.bfloat16()
    flipped_elements_are_named(bench, of_one_layer_each(engine.expected))
    engine.close()
    return found


def of_one_layer_each(names: Iterable[str]) -> list[str]:
    """Leave out the second and the third layer, which are like the first one."""
    return [name for name in names if ".layers.1." not in name and ".layers.2." not in name]


def courses(folder: str) -> list[list[tuple[float, float]]]:
    return [found for tp in (1, 2) for found in run_ranks(tp, course, folder, tp, timeout=400)]


def test_weights_are_verified_and_used_in_one_rank_and_in_two(tmp_path: Path) -> None:
    """Every weight of a layer of each kind is proven, also its shard on each of two ranks."""
    for found in beside_torchvision(courses, tiny_hybrid(tmp_path), timeout=600):
        assert found[0] == found[2]
        for engine, rounding in found:
            assert engine < 1.5 * rounding < 0.15


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
MAMBA = {
    "falcon_h1": {"mamba_d_head": 32, "mamba_d_ssm": 256},
    "granitemoehybrid": {
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "intermediate_size": 32,
    },
    "nemotron_h": {"mamba_head_dim": 32},
    "zamba2": {
        "mamba_headdim": 32,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}
"""Sizes of families with Mamba 2, as vLLM supports them. Granite's ranks share one group."""


def mamba_course(folder: str, tp: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Compare log-probs with the folder's weights and with two syncs, and flip elements."""
    axis = Mesh("cpu").engine(tp)
    engine = start_engine("vllm", folder, axis, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bench = Bench(engine, model)
    assert engine._shim.weights.unknown == []
    lift_time_step_limits(model)

    found = []
    for version, weights in enumerate((model, perturbed(model, 5), model)):
        if dtype == torch.bfloat16:
            weights = weights.bfloat16().float()
        if version:
            bench.load(weights, version)
        found.append(gaps(bench, weights, dtype))
        if dtype == torch.float32:
            assert bench.greedy() == reference_greedy(weights)

    # There vLLM packs the convolution, and its layers would compute with the one of before.
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightrft.engine.vllm.shim._renew_copies", lambda model: None)
            with pytest.raises(EngineError, match="conv1d.weight in the engine differs"):
                bench.load(perturbed(model, 6).bfloat16().float())

    bench.model = model.to(dtype)
    flipped_elements_are_named(bench, engine.expected)
    engine.close()
    return found


def mamba_courses(
    folders: dict[str, str], tp: int, dtype: torch.dtype
) -> dict[str, list[tuple[float, float]]]:
    return {name: mamba_course(folder, tp, dtype) for name, folder in folders.items()}


def test_mamba_2_is_verified_and_equals_transformers(tmp_path: Path) -> None:
    """vLLM stores -exp(A_log), and ranks split heads and groups, or share a group."""
    load_vllm()
    for name, sizes in MAMBA.items():
        make_model(name, "eager", **SIZES | sizes).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    for tp, dtype, names in (
        (1, torch.float32, ("falcon_h1", "zamba2")),
        (2, torch.float32, ("granitemoehybrid", "nemotron_h")),
        (1, torch.bfloat16, ("nemotron_h",)),
    ):
        folders = {name: str(tmp_path / name) for name in names}
        for by_name in run_ranks(tp, mamba_courses, folders, tp, dtype, timeout=400):
            for name, found in by_name.items():
                limits = [max(1e-5, 1.5 * rounding) for _, rounding in found]
                assert all(gap < limit for (gap, _), limit in zip(found, limits, strict=True)), (
                    name,
                    found,
                )


def refusals(float32: str, mamba: str) -> list[str]:
    return run_ranks(1, messages, float32, mamba, timeout=200)[0]


def messages(float32: str, mamba: str) -> list[str]:
    found = []
    for folder in (float32, mamba):
        with pytest.raises(ValueError) as error:
            start_engine("vllm", folder, Mesh("cpu").engine(1))
        found.append(str(error.value))
    return found


def test_what_vllm_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_model("bamba", "eager").save_pretrained(tmp_path / "mamba")
    byte_tokenizer().save_pretrained(tmp_path / "mamba")
    folders = tiny_hybrid(tmp_path / "delta"), str(tmp_path / "mamba")
    first, second = beside_torchvision(refusals, *folders)
    assert "qwen3_5_text only in bfloat16: use --bf16" in first
    assert "bamba can be trained, but not with vLLM, which has removed this family" in second


def test_settings_of_mamba_2_that_vllm_reads_otherwise_are_refused() -> None:
    from lightrft.engine.vllm.arguments import mamba2_problem  # imports vLLM, which takes seconds

    refused = {
        "granitemoehybrid": ({"mamba_n_groups": 2}, "each of its 2 groups"),
        "falcon_h1": ({"mamba_rms_norm": True}, "after the gate"),
        "zamba2": ({"num_key_value_heads": 2}, "as many key-value heads"),
    }
    for name, (setting, problem) in refused.items():
        sizes = SIZES | MAMBA[name]
        assert mamba2_problem(make_model(name, "eager", **sizes).config) == ""
        assert problem in mamba2_problem(make_model(name, "eager", **sizes | setting).config)
