"""Why: the benchmark of episodes stays runnable, and shows that turns which do not wait for one another keep the engine busy."""

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
def test_turns_that_wait_for_one_another_leave_the_engine_idle(capfd):
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()
    run_ranks(1, without_a_launcher, ["--episodes=12", "--turns=3", "--tool_ms=100", "--repeat=1"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["free"]["busy"] > found["barrier"]["busy"] + 0.05 and found["free"]["tokens"] == found["barrier"]["tokens"]
