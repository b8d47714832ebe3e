"""An engine that does not start, a request that does not fit, an engine that breaks in the middle
of a step: every rank ends.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import exit_codes
from runs import PPO, prepare
from with_vllm import load_vllm

pytestmark = pytest.mark.slow
VLLM = ["--engine_type=vllm", "--engine_kv_cache_gb=0.125"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def no_launcher_to_wait_for(monkeypatch):
    monkeypatch.setattr("lightrft.models.launch.heartbeat.GRACE", 0.4)


def entrypoint(flags: list[str], folder: Path, spoil: Callable[[], None] | None) -> None:
    log = open(folder / f"log{os.environ['RANK']}", "w", buffering=1)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    if spoil is not None and os.environ["RANK"] == "1":
        spoil()
    from lightrft.app.cli import MAINS

    MAINS["train_ppo"](flags)


def run(
    flags: list[str], folder: Path, spoil: Callable[[], None] | None = None
) -> tuple[list[int | None], list[str]]:
    """Exit codes, within a minute and a half, and what each rank wrote."""
    if "--engine_type=vllm" in flags:
        load_vllm()
    codes = exit_codes(
        2, entrypoint, [*flags, "--max_steps=2", f"--save_path={folder}"], folder, spoil, timeout=90
    )
    return codes, [(folder / f"log{rank}").read_text() for rank in range(2)]


def test_no_memory_for_the_cache(inputs, tmp_path):
    pytest.importorskip("vllm", reason="vllm is not installed")
    codes, said = run([*inputs, *PPO, *VLLM, "--engine_kv_cache_gb=100000"], tmp_path)
    assert codes == [2, 2], said
    once = "".join(said)  # whichever rank was first says it
    assert (
        "--engine_type vllm does not start with" in once and "is less than requested memory" in once
    )
    assert "--engine_kv_cache_gb its cache on a CPU" in once and "Traceback" not in once


def short_of_room() -> None:
    from lightrft.engine.hf import HFEngine

    start = HFEngine.__init__

    def started(engine, setup) -> None:
        start(engine, setup)
        engine.max_model_len = 9

    HFEngine.__init__ = started


def test_a_request_that_can_never_fit(inputs, tmp_path):
    """One of two replicas gets the request; the other would wait for the samples."""
    codes, said = run([*inputs, *PPO], tmp_path, short_of_room)
    assert codes == [1, 1], said
    assert "does not fit: " in said[1] and "exceed max_model_len 9" in said[1]
    assert (
        "rank 1 " in said[0]
        and "failed in phase generate: " in said[0]
        and "does not fit" in said[0]
    )


def breaking() -> None:
    """Make the engine's model raise in its tenth forward pass.

    Some samples of the first step are under way by then.
    """
    from lightrft.engine.vllm import VLLMEngine

    start = VLLMEngine.__init__

    def started(engine, setup) -> None:
        start(engine, setup)
        passes = []

        def hook(module, arguments) -> None:
            passes.append(module)
            if len(passes) == 10:
                raise ArithmeticError("the tenth pass broke")

        engine._shim.model.register_forward_pre_hook(hook)

    VLLMEngine.__init__ = started


@pytest.mark.parametrize("tp", [1, 2], ids=["replicas", "tensor-parallel"])
def test_an_engine_that_breaks_in_the_middle_of_a_step(inputs, tmp_path, tp):
    """If the engine spans two ranks, the other rank waits inside the engine's own process group."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    codes, said = run(
        [*inputs, *PPO, *VLLM, f"--engine_tp_size={tp}", "--generate_max_len=24"],
        tmp_path,
        breaking,
    )
    assert codes == [1, 1], said
    assert "EngineError: VLLMEngine.generate failed: the tenth pass broke" in said[1]

    assert (
        "rank 1 " in said[0]
        and "failed in phase generate: " in said[0]
        and "the tenth pass broke" in said[0]
    )
    assert not [
        json.loads(line)
        for file in tmp_path.glob("metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
