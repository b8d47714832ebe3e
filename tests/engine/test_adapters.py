"""Adapters alone in an engine: what it generates, what a sync brings, and what is noticed."""

import pytest

from engine.adapter_course import adapters_hold_the_policy, bfloat16_gaps, problems_of_auto
from ranks import run_ranks
from tiny import tiny_experts, tiny_model
from with_vllm import load_vllm

LAYOUTS = {"hf": ("hf", 1), "vllm": ("vllm", 1), "vllm-tp2": ("vllm", 2)}
PARAMS = [name if name == "hf" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model") / "model", seed=1, tie=True)


@pytest.mark.parametrize("layout", PARAMS)
def test_an_engine_holds_adapters_beside_the_weights(folder: str, layout: str) -> None:
    """Each check of the course has a name in its result; see there."""
    engine, ranks = LAYOUTS[layout]
    if engine == "vllm":
        load_vllm()
    for found in run_ranks(ranks, adapters_hold_the_policy, engine, folder, timeout=400):
        assert found.pop("gap") < 1e-5
        assert found.pop("effect") > 1e-2
        assert found == dict.fromkeys(found, True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_mismatch_in_bfloat16_is_that_of_the_model(folder: str, engine: str) -> None:
    """No more than a tenth above that of the same engine without adapters."""
    if engine == "vllm":
        load_vllm()
    ((without, beside),) = run_ranks(1, bfloat16_gaps, engine, folder, timeout=400)
    print(f"{engine}: mean gap without adapters {without:.5f}, with them {beside:.5f}")
    assert 0 < beside < 1.1 * without


def test_models_of_experts_get_merged_weights(tmp_path) -> None:
    message = "stored in parts, such as the experts"
    assert message in run_ranks(1, problems_of_auto, tiny_experts(tmp_path / "experts"))[0]
