"""Why: the benchmark of episodes must still run, and turns begin together only if they should."""

import json

import pytest
import torch.distributed as dist

from ranks import run_ranks
from scripts.bench.episodes import main
from with_vllm import load_vllm


def without_a_launcher(flags: list[str]) -> None:
    """Run the benchmark, which begins a process group of its own."""
    dist.destroy_process_group()
    main(flags)


@pytest.mark.slow
def test_turns_begin_when_their_own_program_asks_for_them(capfd):
    """Turns that wait for one another begin three times, all together.

    How long the engine is idle depends on the machine.
    """
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()
    run_ranks(1, without_a_launcher, ["--episodes=12", "--turns=3", "--tool_ms=100", "--repeat=1"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["together"]["begins"] == 3 and found["free"]["begins"] > 6
    assert found["free"]["tokens"] == found["together"]["tokens"]
