"""The command of the quick start: its programs, and the summary from the files of its run."""

import json

import pytest
import torch

from lightrft.app.cli import quickstart
from lightrft.app.quickstart.summary import conclude, summarize
from lightrft.config import parse

COLUMNS = (
    "step",
    "rollout/reward",
    "engine/logprob_mismatch_max",
    "memory/peak_gb",
    "time/generate",
    "time/generate/weight_sync",
    "time/train",
    "time/step",
)
STEPS = [(1, 0.25, 1e-6, 1.5, 2.0, 0.5, 1.0, 3.5), (2, 0.75, 3e-6, 1.75, 1.0, 0.5, 2.0, 3.5)]
RUN = {
    "engine": "vllm",
    "strategy": "FSDPStrategy",
    "world_size": 2,
    "seconds": 9.5,
    "versions": {"torch": "2.13.0"},
}
WANTED = {
    "eval_before_sft",
    "eval_after_sft",
    "eval_after_rl",
    "reward_first",
    "reward_last",
    "logprob_mismatch_max",
    "engine",
    "strategy",
    "world_size",
    "wall_s",
    "versions",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(dict(zip(COLUMNS, step, strict=True))) + "\n" for step in STEPS)
    )
    for name, accuracy in (
        ("eval_before_sft", 0.0),
        ("eval_after_sft", 0.5),
        ("eval_after_rl", 0.98),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(
            json.dumps({"accuracy": accuracy, "num_samples": 500})
        )

    return tmp_path


def test_each_program_reads_what_an_earlier_one_writes(tmp_path):
    configs = {}
    for program in quickstart._phases(tmp_path, seed=3).values():
        if "--config" in " ".join(program) or "evaluate" in program:
            command, *flags = program[program.index("lightrft") + 1 :]
            config = parse(flags, command)
            configs[config.train.save_path] = config

    read = [
        (config.model.pretrain, config.data.prompt_data, config.data.eval_data)
        for config in configs.values()
    ]
    assert {config.train.seed for config in configs.values()} == {3}
    assert [
        [str(name).removeprefix(f"{tmp_path}/") for name in names if name] for names in read
    ] == [
        ["data/model", "data/test.jsonl"],
        ["data/model", "data/train.jsonl"],
        ["sft/model", "data/test.jsonl"],
        ["sft/model", "data/train.jsonl", "data/test.jsonl"],
        ["model", "data/test.jsonl"],
    ]


@pytest.mark.parametrize(("devices", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_no_rank_is_without_a_device(tmp_path, monkeypatch, devices, ranks):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    words = sum(quickstart._phases(tmp_path, seed=0).values(), [])
    counts = [word for word in words if word.startswith("--nproc-per-node")]
    assert counts == [f"--nproc-per-node={ranks}"] * 2


def test_the_report_has_the_numbers_of_the_evaluations(folder):
    conclude(folder, 300, seed=0)
    assert "after RL" in (folder / "report.html").read_text()


def test_summary_and_table(folder, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    conclude(folder, 300, seed=0)
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= WANTED

    assert (summary["eval_before_sft"], summary["eval_after_sft"], summary["eval_after_rl"]) == (
        0.0,
        0.5,
        0.98,
    )
    assert (summary["reward_first"], summary["reward_last"], summary["logprob_mismatch_max"]) == (
        0.25,
        0.75,
        3e-6,
    )
    assert (summary["wall_s"], summary["peak_memory_gb"]) == (300, 1.75)
    assert summary["seconds_per_phase"] == {
        "step": 7.0,
        "generate": 3.0,
        "train": 3.0,
        "generate/weight_sync": 1.0,
    }
    shown = capsys.readouterr().out
    assert (
        "98.0%" in shown
        and "3.0e-06" in shown
        and "generate 3, train 3" in shown
        and "weight_sync" not in shown
    )


def test_a_missing_evaluation_is_not_passed_over(folder):
    (folder / "eval_after_rl" / "evaluation.json").unlink()
    with pytest.raises(FileNotFoundError, match="eval_after_rl"):
        summarize(folder)
