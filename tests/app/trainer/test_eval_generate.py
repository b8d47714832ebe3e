"""Supervised runs whose model answers prompts on the way (--eval_generate)."""

import json
from pathlib import Path

import pytest

from app.trainer.in_turn import train_and_resume, train_in_turn
from lightrft.app.trainer.build_supervised import generated_evaluation
from lightrft.app.trainer.run import run
from lightrft.config import Config, ConfigError, parse
from lightrft.extras.commands.plan import dry_run
from ranks import run_ranks
from runs import prepare, repeatable

pytestmark = pytest.mark.slow

SHORT = ["--train_batch_size=8", "--max_tokens_per_microbatch=128", "--learning_rate=3e-3"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[list[str], list[str]]:
    """Return the flags of runs, and those of their evaluations."""
    folder = tmp_path_factory.mktemp("inputs")
    flags = prepare(folder)
    reward = next(flag for flag in flags if flag.startswith("--reward"))
    asked = [f"--eval_data={folder}/train.jsonl", reward, "--generate_max_len=6"]
    return [flag for flag in flags if flag != reward] + SHORT, asked


def eval_rows(rows: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in row.items() if name.startswith("eval/")} for row in rows
    ]


def test_numbers_are_those_of_evaluate_in_every_layout(inputs, tmp_path):
    flags, asked = inputs
    sampled = [*asked, "--eval_n_samples=2"]
    layouts = {
        "plain": ([], sampled),
        "vllm": (["--tp_size=2"], [*asked, "--engine_type=vllm", "--engine_tp_size=2"]),
        "zero": (["--fsdp=false", "--zero_stage=3", "--bf16=false"], asked),
        "adapters": (["--lora_rank=4"], [*asked, "--engine_type=vllm"]),
    }
    kv = "--engine_kv_cache_gb=0.05"
    runs = [
        (
            [*flags, *layout, "--max_steps=2", f"--eval_generate={' '.join([*own, kv])}"],
            tmp_path / name,
        )
        for name, (layout, own) in layouts.items()
    ]
    found = dict(zip(layouts, train_in_turn("train_sft", 2, runs), strict=True))
    assert found["plain"][-1].keys() >= {"eval/avg_at_2", "eval/num_samples"}

    folders = [str(tmp_path / name) for name in layouts]
    (evaluated,) = run_ranks(1, evaluate_each, [flags[0], *asked, "--engine_type=hf"], folders)
    for (name, rows), reward in zip(found.items(), evaluated, strict=True):
        assert "eval/reward" not in rows[0], name
        assert rows[-1]["eval/reward"] == pytest.approx(reward, abs=0.01), name


def evaluate_each(flags: list[str], folders: list[str]) -> list[float]:
    """Return the mean reward of the greedy responses of each run's model."""
    rewards = []
    for folder in folders:
        own = [*flags, f"--pretrain={folder}/model", f"--save_path={folder}/evaluation"]
        rewards.append(run("evaluate", parse(own, "evaluate"))["reward"])
    return rewards


def test_a_resumed_run_repeats_its_evaluations(inputs, tmp_path):
    flags, asked = inputs
    generate = f"--eval_generate={' '.join([*asked, '--eval_n_samples=2'])}"
    whole, resumed = train_and_resume(
        "train_sft",
        1,
        [*flags, generate, "--eval_steps=1"],
        tmp_path,
        stop=1,
        end=2,
        saving=["--save_steps=1"],
    )
    assert eval_rows(repeatable(resumed)) == eval_rows(repeatable(whole))
    assert all("eval/avg_at_2" in row for row in whole)


def test_pairs_have_their_loss_and_the_answers(inputs, tmp_path):
    flags, asked = inputs
    rows = [{"prompt": "ab=", "chosen": "c", "rejected": "d" * (1 + i % 2)} for i in range(8)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [flag for flag in flags if not flag.startswith("--prompt_data")]
    held_out = [f"--prompt_data={pairs}", f"--eval_data={pairs}"]
    given = [*kept, *held_out, f"--eval_generate={' '.join(asked)}", "--max_steps=1"]
    ((row,),) = train_in_turn("train_dpo", 1, [(given, tmp_path / "dpo")])
    assert row["eval/loss"] > 0 and 0 < row["eval/reward"] <= 1


def test_a_file_of_an_evaluation_and_what_cannot_be_read(tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text(f"eval_data: gsm8k={tmp_path}/gsm8k.jsonl\ngenerate_max_len: 7\n")
    Path(tmp_path / "gsm8k.jsonl").write_text("")
    config = Config.of(pretrain="some/model", eval_generate=str(file), apply_chat_template=True)
    found = generated_evaluation(config)
    assert found.rollout.generate_max_len == 7 and found.data.apply_chat_template
    assert found.engine.engine_type == "hf" and found.model.pretrain == "some/model"

    assert generated_evaluation(Config.of(pretrain="some/model")) is None
    for flags, problem in {
        "--eval_dat x": "unknown flag --eval_dat",
        "--eval_data 'x": "No closing quotation",
        "--eval_data nowhere.jsonl --reward math": "nowhere.jsonl: neither an existing file",
    }.items():
        config = Config.of(pretrain="some/model", eval_generate=flags)
        with pytest.raises(ConfigError, match=f"(?s)--eval_generate {flags}: .*{problem}"):
            generated_evaluation(config)


def test_a_dry_run_checks_the_flags_of_the_evaluation(inputs, tmp_path):
    flags = [*inputs[0], "--eval_generate=--eval_data nowhere.jsonl", "--dry_run"]
    config = parse([*flags, f"--save_path={tmp_path}"], "train_sft")
    with pytest.raises(
        ConfigError, match="(?s)--eval_generate .*neither an existing file or folder"
    ):
        dry_run(config, "train_sft")
