"""What a user can get wrong is said in one message that names the place and the way out, with exit code 2."""

import json
import sys

import pytest

from lightrft.__main__ import main as lightrft
from lightrft.cli import SWITCH_INTERVAL, evaluate, report, train_ppo, train_sft
from runs import PPO, prepare


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return [*prepare(folder), f"--save_path={folder}/run"]


def fails(capfd, main, flags) -> str:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    return capfd.readouterr().err


def test_missing_model_folder(inputs, tmp_path, capfd):
    sys.setswitchinterval(0.005)  # Python's default
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, f"--pretrain={tmp_path}/nowhere"])
    assert f"--pretrain {tmp_path}/nowhere: no such folder" in said
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL), "a run sets it before anything else"


def test_folder_without_a_model(inputs, tmp_path, capfd):
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, f"--pretrain={tmp_path}"])
    assert "no config.json" in said


def test_malformed_line(inputs, tmp_path, capfd):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"input": "a", "label": "b"}) + "\n{oops\n")
    said = fails(capfd, train_sft.main, [*inputs, f"--prompt_data={file}", "--train_batch_size=1"])
    assert f"{file}:2" in said and "--bad_rows skip" in said


def test_empty_data(inputs, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("")
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, f"--prompt_data={tmp_path}/empty.jsonl"])
    assert "no usable row" in said


def test_prompt_over_the_limit(inputs, capfd):
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, "--prompt_max_len=4"])
    assert "train.jsonl:3" in said and "5 tokens" in said and "--prompt_max_len 4" in said


def test_too_few_rows_for_a_batch(inputs, capfd):
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, "--rollout_batch_size=64"])
    assert "24 rows" in said and "64" in said


def test_batches_that_do_not_divide(inputs, capfd):
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, "--train_batch_size=24", "--generate_max_len=500"])
    assert "8 x n_samples_per_prompt 4 = 32" in said and "train_batch_size 24" in said and "max_tokens_per_microbatch 128" in said


def test_micro_batches_that_do_not_divide(inputs, capfd):
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, "--micro_train_batch_size=5"])
    assert "32" in said and "5" in said


def test_unknown_names(inputs, capfd):
    assert "did you mean --seed" in fails(capfd, train_ppo.main, [*inputs, "--sed=1"])
    assert "did you mean 'exact_match'" in fails(capfd, train_ppo.main, [*inputs, *PPO, "--reward=exact_mach"])
    assert "did you mean 'grpo'" in fails(capfd, train_ppo.main, [*inputs, *PPO, "--advantage_estimator=grop"])


def test_evaluate_needs_held_out_data(inputs, capfd):
    assert "--eval_data is empty" in fails(capfd, evaluate.main, inputs[:2])


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry"])
@pytest.mark.parametrize(("environment", "says"), [
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "WORLD_SIZE, MASTER_ADDR is set, but RANK, MASTER_PORT is not"),
    ({"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "RANK='a' is not a number"),
    ({"PET_NNODES": "2"}, "this process is one of several, but it has no rank"),
], ids=["part", "letters", "pod"])  # fmt: skip
def test_a_process_that_no_launcher_made_a_rank(inputs, capfd, monkeypatch, environment, says, dry):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = fails(capfd, train_ppo.main, [*inputs, *PPO, *dry])
    assert says in said.splitlines()[-1] and "Traceback" not in said


def test_report_of_a_folder_without_a_run(tmp_path, capfd):
    assert f"{tmp_path} is not the folder of a run" in fails(capfd, report.main, [str(tmp_path)])


def test_deepspeed_that_is_not_installed(inputs, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "lightrft.strategy.deepspeed", raising=False)
    said = fails(capfd, train_ppo.main, [*inputs[1:], *PPO, "--strategy=deepspeed"])
    assert "`pip install deepspeed`, or shard with FSDP2: --fsdp" in said


def test_what_zero_cannot_do(inputs, capfd):
    said = fails(capfd, train_ppo.main, [*inputs[1:], *PPO, "--tp_size=1", "--zero_stage=0", "--bf16", "--param_offload"])
    assert "--zero_stage 0 does not support --bf16" in said and "--param_offload needs --zero_stage 3" in said


def test_a_run_that_cannot_begin_leaves_the_results_of_before_in_place(inputs, tmp_path, capfd):
    """With --overwrite nothing is moved before data, rewards and models are loaded."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    flags = [*inputs, *PPO, "--prompt_data=no.jsonl", f"--save_path={run}", "--overwrite"]
    assert "no.jsonl" in fails(capfd, train_ppo.main, flags)
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n' and not run.with_name("run.previous").exists()


@pytest.mark.parametrize(
    ("command", "place"),
    [("train_sft", "cli.parse"), ("train_sft", "cli._run"), ("report folder", "cli.report.write_report")],
)
def test_ctrl_c_before_a_run_listens_for_signals(monkeypatch, capfd, command, place):
    """While modules are imported, models loaded, or a command works that is no run."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"lightrft.{place}", interrupt)
    with pytest.raises(SystemExit) as ended:
        lightrft(command.split())
    said = capfd.readouterr().err
    assert ended.value.code == 130 and said.strip().endswith("interrupted by SIGINT") and "Traceback" not in said
