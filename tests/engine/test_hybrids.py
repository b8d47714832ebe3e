"""A Qwen3.5 in vLLM: linear attention in three of four layers, on a CPU in bfloat16 only."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.contract import (
    Bench,
    flipped_elements_are_named,
    perturbed,
    start,
)
from flat_models import make_model
from lightrft.engine.base import Request, Sampling
from lightrft.parallel.mesh import Mesh
from ranks import run_ranks
from sglang_environment import beside_torchvision
from tiny import byte_tokenizer, tiny_hybrid

pytestmark = pytest.mark.slow
PROMPTS = [[50, 55, 43, 53], list(range(70)), [200], [(7 * place) % 250 for place in range(200)]]


def gaps(bench: Bench, model: PreTrainedModel) -> tuple[float, float]:
    """Mean differences of log-probs: engine to bfloat16 model, and that to float32 model."""
    rounded = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    sampling = Sampling(n=3, max_tokens=24, seed=1)
    groups = bench.engine.generate([Request(prompt) for prompt in PROMPTS], sampling)
    found = []
    for prompt, samples in zip(PROMPTS, groups, strict=True):
        for sample in samples:
            scores = []
            for each in (rounded, model):
                with torch.no_grad():
                    logits = each(torch.tensor([prompt + sample.token_ids])).logits[0].float()
                logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
                scores.append(logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0])
            sampled = torch.tensor(sample.logprobs)
            found.append(torch.stack([(sampled - scores[0]).abs(), (scores[0] - scores[1]).abs()]))

    engine, rounding = torch.cat(found, 1).mean(1).tolist()
    return engine, rounding


def course(folder: str, tp: int) -> list[tuple[float, float]]:
    axis = Mesh("cpu").engine(tp)
    engine = start("vllm", folder, axis, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bench = Bench(engine, model, axis, axis.rank)
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
    flipped_elements_are_named(bench, engine.expected)
    engine.close()
    return found


def courses(folder: str) -> list[list[tuple[float, float]]]:
    return [found for tp in (1, 2) for found in run_ranks(tp, course, folder, tp, timeout=400)]


def test_weights_are_verified_and_used_in_one_rank_and_in_two(tmp_path: Path) -> None:
    """Every weight of an engine is proven, also its part on each of two ranks."""
    for found in beside_torchvision(courses, tiny_hybrid(tmp_path), timeout=600):
        assert found[0] == found[2]
        for engine, rounding in found:
            assert engine < 1.5 * rounding < 0.15


def refusals(float32: str, mamba: str) -> list[str]:
    return run_ranks(1, messages, float32, mamba, timeout=200)[0]


def messages(float32: str, mamba: str) -> list[str]:
    found = []
    for folder in (float32, mamba):
        with pytest.raises(ValueError) as error:
            start("vllm", folder, Mesh("cpu").engine(1))
        found.append(str(error.value))
    return found


def test_what_vllm_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_model("falcon_h1", "eager").save_pretrained(tmp_path / "mamba")
    byte_tokenizer().save_pretrained(tmp_path / "mamba")
    folders = tiny_hybrid(tmp_path / "delta"), str(tmp_path / "mamba")
    first, second = beside_torchvision(refusals, *folders)
    assert "qwen3_5_text only in bfloat16: use --bf16" in first
    assert "falcon_h1 can be trained, but not with vLLM" in second
