"""What is vLLM's own, beyond the contract."""

from pathlib import Path

import pytest
from loguru import logger
from transformers import AutoModelForCausalLM

from engine.contract import Bench, reference_greedy, start
from lightrft.parallel.mesh import Mesh
from ranks import run_ranks
from tiny import tiny_model

pytest.importorskip("vllm", reason="vllm is not installed")
pytestmark = pytest.mark.slow


def _two_engines_on_one_machine(folder: str) -> tuple[list[list[int]], list[str]]:
    """Ranks 0 and 1 share one engine, 2 and 3 another. Returns the tokens, and the shared memory as this process maps it."""
    mesh = Mesh("cpu")
    engine = start("vllm", folder, mesh.engine(2))
    bench = Bench(engine, AutoModelForCausalLM.from_pretrained(folder), mesh.engine(2), mesh.world.rank)
    tokens = bench.greedy([[1 + mesh.world.rank // 2]])
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/lightrft-" in line]
    engine.close()
    return tokens, mapped


def test_two_tensor_parallel_engines_beside_each_other(tmp_path: Path) -> None:
    """Each with memory of its own, whose name is gone: what is killed now leaves nothing behind."""
    folder = tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    results = run_ranks(4, _two_engines_on_one_machine, folder, timeout=300)
    first, second = reference_greedy(model, [[1], [2]])
    assert [tokens for tokens, _ in results] == [[first], [first], [second], [second]]
    names = [{line.split("/lightrft-")[1].split("-")[0] for line in mapped} for _, mapped in results]
    assert names[0] == names[1] != names[2] == names[3]
    assert len(names[0]) == len(names[2]) == 1
    assert all(line.endswith("(deleted)") for _, mapped in results for line in mapped)


def test_a_version_outside_the_tested_range_is_named() -> None:
    run_ranks(1, _versions)


def _versions() -> None:
    from lightrft.engine.vllm import _check_version

    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING")
    for version in ("0.32.0", "0.32.1+cpu", "0.31.0", "0.33.0rc1", "1.0"):
        _check_version(version)
    logger.remove(sink)
    assert [line.split("vllm ")[-1].split(" is")[0] for line in lines] == ["0.31.0", "0.33.0rc1", "1.0"]
