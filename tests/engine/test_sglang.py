"""What is SGLang's own, beyond the contract: a course with the real engine, and what its versions have."""

import json
from functools import partial
from pathlib import Path

import pytest

from engine.sglang_course import course
from ranks import run_ranks
from runs import PPO, prepare, rows_of, train
from scripts.sglang_interface import interface, missing, used
from sglang_environment import PREFIX, in_sglang_environment
from tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "lightrft" / "engine" / "sglang.py"
NEWEST = Path(__file__).parent / "sglang_newest.json"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tiny_model(tmp_path_factory.mktemp("tied"), seed=2, tie=True)
    return in_sglang_environment(partial(run_ranks, 2, course, folder, timeout=400), timeout=850)


@pytest.mark.slow
def test_course(outcomes: list[dict[str, str]]) -> None:
    assert len(outcomes[0]) == 10
    failures = [f"rank {rank}, {case}:\n{trace}"
                for rank, outcome in enumerate(outcomes) for case, trace in outcome.items() if trace]
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_a_run_with_another_flag(tmp_path: Path) -> None:
    """GRPO on two ranks, as with vLLM: SGLang samples what the trainer computes, and the reward rises."""
    engine = ["--engine_type=sglang", "--engine_kv_cache_gb=0.05", "--enable_engine_sleep"]
    flags = [*prepare(tmp_path), *PPO, *engine, "--max_steps=6"]
    in_sglang_environment(partial(train, "train_ppo", 2, flags, tmp_path / "run", timeout=400), timeout=850)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 6 and max(row["engine/logprob_mismatch_max"] for row in rows) < 1e-4
    assert rows[-1]["rollout/reward"] > rows[0]["rollout/reward"]


def test_the_pinned_version_has_what_is_used() -> None:
    packages = next(PREFIX.glob("lib/python*/site-packages"), None)
    assert packages is not None, f"no environment with SGLang at {PREFIX}: make it with `bash scripts/environment.sh test`"
    assert missing(used(ADAPTER.read_text()), interface(packages)) == []


def test_the_newest_version_has_what_is_used() -> None:
    """Recorded by scripts/sglang_interface.py."""
    assert missing(used(ADAPTER.read_text()), json.loads(NEWEST.read_text())) == []


@pytest.mark.parametrize(("name", "other", "problem"), [
    ("load_format=", "load_as=", "Engine.update_weights_from_tensor: load_as"),
    ('"max_total_tokens"', '"max_tokens"', "arguments: max_tokens"),
    ('"sampling_seed"', '"seed"', "sampling: seed"),
    ('"cuda_graph"', '"graphs"', "tags: graphs"),
    ("import run_scheduler_process", "import run_scheduler", "from sglang.srt.managers.scheduler import run_scheduler"),
    ("multinomial_with_seed", "multinomial", "from sglang.srt.layers.sampler import multinomial"),
    ("self.engine.begin_weight_update", "self.engine.start_update", "Engine.start_update: start_update"),
])
def test_what_a_version_lacks_is_named(name: str, other: str, problem: str) -> None:
    adapter = ADAPTER.read_text().replace("import Scheduler, run_scheduler_process", "import run_scheduler_process")
    assert missing(used(adapter.replace(name, other)), json.loads(NEWEST.read_text())) == [problem]
