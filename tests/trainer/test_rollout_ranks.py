"""Ranks that only generate: what is learned from their samples is what ranks that do both would learn, to the last bit."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lightrft.config import parse
from lightrft.trainer.run import run
from ranks import exit_codes, run_ranks
from runs import PPO, prepare, repeatable, rows_of, train
from trainer import sabotage
from with_vllm import load_vllm

CASES = {
    "plain": [],
    "critic": ["--advantage_estimator=gae", "--eval_steps=1", "--eval_data={folder}/train.jsonl", "--max_eval_samples=5"],
    "dynamic": ["--dynamic_sampling", "--first_token_temperature=2"],
}


def launch() -> dist.TCPStore | None:
    """Leave the process group and do what a launcher does: set the environment in which runs make groups of their own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]), TORCHELASTIC_USE_AGENT_STORE="True")
    return store


def as_launched(cases: dict[str, list[str]], save_path: str) -> None:
    """The runs of all cases, one after another, each with process groups of its own."""
    _store = launch()
    for case, flags in cases.items():
        run("train_ppo", parse([*flags, f"--save_path={save_path}/{case}"], "train_ppo"))


def both(folder: Path, cases: dict[str, list[str]], *, trains: int, generates: int) -> dict[str, tuple[list, list]]:
    """Case -> the rows of metrics with and without ranks that only generate."""
    apart = {case: [*flags, f"--rollout_ranks={generates}"] for case, flags in cases.items()}
    run_ranks(trains + generates, as_launched, apart, str(folder / "apart"))
    found = {}
    for case, flags in cases.items():
        together = train("train_ppo", trains, flags, folder / "together" / case)
        found[case] = repeatable(rows_of(folder / "apart" / case)), repeatable(together)
    return found


def test_it_learns_what_ranks_that_do_both_learn(tmp_path):
    inputs = [*prepare(tmp_path), *PPO, "--max_steps=3"]
    cases = {case: [*inputs, *(flag.format(folder=tmp_path) for flag in flags)] for case, flags in CASES.items()}
    for apart, together in both(tmp_path, cases, trains=2, generates=1).values():
        for found, expected in zip(apart, together, strict=True):
            for name in expected:  # the hf engine rounds log-probs by its batches
                assert found[name] == (pytest.approx(expected[name], abs=1e-6) if name.startswith("engine/") else expected[name])


@pytest.mark.slow
def test_one_step_off_learns_from_the_weights_before_the_last_update(tmp_path):
    """The reward rises; each sample but those of the first step is one update old; a resumed run goes on learning."""
    flags = [*prepare(tmp_path), *PPO, "--rollout_ranks=1", "--max_staleness=1", "--rollout_correction=tis", "--save_steps=4"]
    cases = {
        "whole": [*flags, "--max_steps=30"],
        "parts": [*flags, "--max_steps=4"],
        "dynamic": [*flags, "--max_steps=4", "--dynamic_sampling", "--eval_steps=2", f"--eval_data={tmp_path}/train.jsonl"],
    }
    run_ranks(3, as_launched, cases, str(tmp_path))
    run_ranks(3, as_launched, {"parts": [*flags, "--max_steps=6", "--load_checkpoint"]}, str(tmp_path))
    rows = {case: rows_of(tmp_path / case) for case in cases}
    assert [row["rollout/staleness"] for row in rows["whole"]] == [0.0] + [1.0] * 29
    rewards = [row["rollout/reward"] for row in rows["whole"]]
    assert sum(rewards[-5:]) / 5 > 0.8 > 0.55 > rewards[0]
    assert repeatable(rows["parts"][:4]) == repeatable(rows["whole"][:4])
    assert [row["rollout/staleness"] for row in rows["parts"]] == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert len(rows["dynamic"]) == 4 and "eval/reward" in rows["dynamic"][1]


@pytest.mark.slow
def test_ranks_that_share_an_engine_serve_zero_3(tmp_path):
    load_vllm()
    flags = [*prepare(tmp_path), *PPO, "--max_steps=3", "--engine_type=vllm", "--engine_kv_cache_gb=0.125", "--engine_tp_size=2",
             "--fsdp=false", "--zero_stage=3"]  # fmt: skip
    ((apart, together),) = both(tmp_path, {"vllm": flags}, trains=2, generates=2).values()
    assert len(apart) == 3 and apart == together


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers(tmp_path):
    flags = [*prepare(tmp_path), *PPO, "--max_steps=4", "--save_steps=2", "--rollout_ranks=1"]
    cases = {"whole": flags, "parts": [*flags, "--max_steps=2"]}
    run_ranks(2, as_launched, cases, str(tmp_path))
    run_ranks(2, as_launched, {"parts": [*flags, "--load_checkpoint"]}, str(tmp_path))
    assert repeatable(rows_of(tmp_path / "parts")) == repeatable(rows_of(tmp_path / "whole"))
    model = Path("model") / "model.safetensors"
    assert (tmp_path / "parts" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def sabotaged(flags: list[str], folder: Path) -> None:
    _store = launch()
    log = open(folder / f"log{os.environ['RANK']}", "w", buffering=1)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    sabotage.main(flags)


@pytest.mark.slow
def test_a_rank_that_generates_and_dies_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lightrft.launch.heartbeat.GRACE", 0.4)
    monkeypatch.setenv("SABOTAGE", "generate:2:kill")
    flags = [*prepare(tmp_path), *PPO, "--max_steps=3", "--rollout_ranks=1", f"--save_path={tmp_path}/run"]
    assert exit_codes(3, sabotaged, flags, tmp_path) == [1, 1, -9]
    for rank in (0, 1):
        said = (tmp_path / f"log{rank}").read_text()
        assert re.search(r"this run ends: rank 2 \(pid \d+ on .*\) ended without an error message in phase generate:", said)
        assert "Traceback" not in said
