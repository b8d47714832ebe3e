"""Every engine passes the contract, alone, as replicas, and (vLLM) cut over two ranks."""

from pathlib import Path

import pytest

from engine.contract import CASES, STREAM_ONLY_CASES, run_contract
from ranks import run_ranks
from tiny import tiny_model

LAYOUTS = {
    "hf": ("hf", 1, 1),
    "hf-2-replicas": ("hf", 2, 1),
    "vllm": ("vllm", 1, 1),
    "vllm-2-replicas": ("vllm", 2, 1),
    "vllm-tp2": ("vllm", 2, 2),
}
"""Name -> engine, ranks, ranks per engine."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("models")
    return tiny_model(folder / "plain", seed=1), tiny_model(folder / "tied", seed=2, tie=True)


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.slow) if name.startswith("vllm") else name
                                         for name in LAYOUTS])
def outcomes(request: pytest.FixtureRequest, folders: tuple[str, str]) -> list[dict[str, str]]:
    """Of every rank: case -> traceback. One engine start for all cases."""
    engine, world_size, tp = LAYOUTS[request.param]
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
    return run_ranks(world_size, run_contract, engine, tp, *folders, timeout=600)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES + STREAM_ONLY_CASES])
def test_contract(case: str, outcomes: list[dict[str, str]]) -> None:
    failures = [f"rank {rank}:\n{outcome[case]}" for rank, outcome in enumerate(outcomes) if outcome[case]]
    assert not failures, "\n".join(failures)
