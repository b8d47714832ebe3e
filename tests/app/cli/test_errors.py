"""What a user can get wrong is said in one message that names the location and the way out.

The exit code is 2.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft.__main__ import main as lightrft
from lightrft.app.cli import MAINS, SWITCH_INTERVAL
from lightrft.config.extras import extra, installed
from runs import PPO, prepare

ROOT = Path(__file__).resolve().parents[3]
with_extras = pytest.mark.skipif(not installed(), reason="plans and reports are extras")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return [*prepare(folder), f"--save_path={folder}/run"]


def fails(capfd, main, flags) -> str:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    return capfd.readouterr().err


def test_missing_files_are_found_before_torch_is_imported(tmp_path):
    flags_of_functions = ("advantage_estimator", "policy_loss", "rollout_correction")
    flags = [
        "--pretrain=./nowhere",
        "--prompt_data=rows.jsonl,chat/rows",
        "--eval_data=own=~/no.parquet",
        "--reward=exact_match,mine.py:short:0.5",
        "--tools=tools.py",
        f"--fork_from={'x' * 5000}",
        *(f"--{flag}=own.py:f" for flag in flags_of_functions),
    ]
    program = (
        "import sys; from lightrft.app.cli import MAINS\ntry: MAINS['train_ppo'](sys.argv[1:])\n"
    )
    program += "finally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr

    problems = [
        line.removeprefix("  - ") for line in done.stderr.splitlines() if line.startswith("  - ")
    ]
    no_data = "neither an existing file or folder nor a hub name (owner/name)"
    assert problems == [
        "--pretrain ./nowhere: no such folder",
        f"--prompt_data rows.jsonl: {no_data}",
        f"--eval_data ~/no.parquet: {no_data}",
        f"--reward mine.py:short: no file {tmp_path}/mine.py",
        f"--tools tools.py: no file {tmp_path}/tools.py",
        *(f"--{flag} own.py:f: no file {tmp_path}/own.py" for flag in flags_of_functions),
        f"--fork_from {'x' * 200}: it is not the folder of a run: it has no config.yaml",
    ]


def test_folder_without_a_model(inputs, tmp_path, capfd):
    sys.setswitchinterval(0.005)  # Python's default
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, f"--pretrain={tmp_path}"])
    assert "no config.json" in said
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL), (
        "a run sets it before anything else"
    )


def test_malformed_line(inputs, tmp_path, capfd):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"input": "a", "label": "b"}) + "\n{oops\n")
    said = fails(
        capfd, MAINS["train_sft"], [*inputs, f"--prompt_data={file}", "--train_batch_size=1"]
    )
    assert f"{file}:2" in said and "--bad_rows skip" in said


def test_empty_data(inputs, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("")
    said = fails(
        capfd, MAINS["train_ppo"], [*inputs, *PPO, f"--prompt_data={tmp_path}/empty.jsonl"]
    )
    assert "no usable row" in said


def test_prompt_over_the_limit(inputs, capfd):
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, "--prompt_max_len=4"])
    assert "train.jsonl:3" in said and "5 tokens" in said and "--prompt_max_len 4" in said


def test_too_few_rows_for_a_batch(inputs, capfd):
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, "--rollout_batch_size=64"])
    assert "24 rows" in said and "64" in said


def test_batches_that_do_not_divide(inputs, capfd):
    said = fails(
        capfd,
        MAINS["train_ppo"],
        [*inputs, *PPO, "--train_batch_size=24", "--generate_max_len=500"],
    )
    assert (
        "8 x n_samples_per_prompt 4 = 32" in said
        and "train_batch_size 24" in said
        and "max_tokens_per_microbatch 128" in said
    )


def test_micro_batches_that_do_not_divide(inputs, capfd):
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, "--micro_train_batch_size=5"])
    assert "32" in said and "5" in said


def test_unknown_names(inputs, capfd):
    assert "did you mean --seed" in fails(capfd, MAINS["train_ppo"], [*inputs, "--sed=1"])
    assert "did you mean 'exact_match'" in fails(
        capfd, MAINS["train_ppo"], [*inputs, *PPO, "--reward=exact_mach"]
    )
    assert "did you mean 'grpo'" in fails(
        capfd, MAINS["train_ppo"], [*inputs, *PPO, "--advantage_estimator=grop"]
    )


def test_evaluate_needs_held_out_data(inputs, capfd):
    assert "--eval_data is empty" in fails(capfd, MAINS["evaluate"], inputs[:2])


@pytest.mark.parametrize(
    "dry", [[], pytest.param(["--dry_run"], marks=with_extras)], ids=["run", "dry"]
)
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "here"},
            "WORLD_SIZE, MASTER_ADDR is set, but RANK, MASTER_PORT is not",
        ),
        (
            {"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"},
            "RANK='a' is not a number",
        ),
        ({"PET_NNODES": "2"}, "this process is one of several, but it has no rank"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            "OMPI_COMM_WORLD_SIZE=4: this process is one of several",
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE=4: this process is one of several"),
    ],
    ids=["part", "letters", "pod", "mpirun", "mpich"],
)
def test_a_process_that_no_launcher_made_a_rank(inputs, capfd, monkeypatch, environment, says, dry):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, *dry])
    assert says in said.splitlines()[-1] and "Traceback" not in said


BROKEN_MODELS = {
    "a list": ("config.json", b"[]"),
    "brackets": ("config.json", b"[" * 20_000),
    "no JSON": ("config.json", b"{"),
    "a number": ("config.json", b"5"),
    "no family": ("config.json", b"{}"),
    "a tokenizer of nothing": ("tokenizer.json", b"{}"),
    "a tokenizer of a list": ("tokenizer.json", b"[]"),
    "no tokenizer": ("tokenizer.json", b"\xff"),
    "half of the weights": ("model.safetensors", b"\x08\0\0\0\0\0\0\0{"),
}
SIZES = {
    "hidden_size": -64,
    "num_hidden_layers": 0,
    "vocab_size": -1,
    "num_attention_heads": 10**12,
    "intermediate_size": "a",
}


@pytest.mark.parametrize("case", [*BROKEN_MODELS, *SIZES])
def test_a_broken_model(inputs, tmp_path, capfd, case):
    source = Path(next(flag for flag in inputs if flag.startswith("--pretrain=")).partition("=")[2])
    shutil.copytree(source, tmp_path / "model")
    if case in SIZES:
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {case: SIZES[case]}))
    else:
        (tmp_path / "model" / BROKEN_MODELS[case][0]).write_bytes(BROKEN_MODELS[case][1])

    said = fails(
        capfd, MAINS["train_sft"], [*inputs, f"--pretrain={tmp_path}/model", "--train_batch_size=8"]
    )
    assert f"--pretrain {tmp_path}/model" in said and "Traceback" not in said


BROKEN_FILES = {
    "brackets.yaml": (b"[" * 20_000, "--config={}", "nested too deep"),
    "cut.parquet": (b"PAR1" + b"\0" * 100, "--prompt_data={}", "not a valid parquet file"),
    "empty.parquet": (b"", "--prompt_data={}", "not a valid parquet file"),
    "reward.py": (b"import sys\nsys.exit(0)", "--reward={}:f", "it calls sys.exit(0)"),
    "end.py": (b"import os\nos._exit(0)", "--reward={}:f", "it calls os._exit(0)"),
    "rows.py": (
        b"import os\ndef rows(): os._exit(0)",
        "--prompt_data={}:rows",
        "it calls os._exit(0)",
    ),
    "later.py": (
        b"import sys\ndef rows():\n  yield {'input': '1', 'label': '1'}\n  sys.exit()",
        "--prompt_data={}:rows",
        "sys.exit",
    ),
    "e" * 3000: (None, "--pretrain={}", "has 3"),
}


@pytest.mark.parametrize("name", BROKEN_FILES, ids=lambda name: name[:20])
def test_a_broken_file(inputs, tmp_path, capfd, name):
    content, flag, says = BROKEN_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, flag.format(tmp_path / name)])
    assert says in said and "Traceback" not in said


def test_a_function_that_ends_the_process_fails(inputs, tmp_path, capfd):
    (tmp_path / "mine.py").write_text("import os\ndef f(samples, **columns): os._exit(0)")
    flags = [*inputs, *PPO, f"--reward={tmp_path}/mine.py:f", f"--save_path={tmp_path}/run"]
    assert "it calls os._exit(0)" in fails(
        capfd, MAINS["train_ppo"], [*flags, "--reward_workers=0"]
    )


def test_a_start_that_takes_long_says_where_it_is(inputs, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("lightrft.app.trainer.run.NOTICE_SECONDS", 0.3)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\nraise ValueError('at last')")
    said = fails(capfd, MAINS["train_ppo"], [*inputs, *PPO, f"--reward={tmp_path}/slow.py:f"])
    assert "still starting, after" in said and "slow.py:2" in said and "at last" in said


@with_extras
def test_report_of_a_folder_without_a_run(tmp_path, capfd):
    assert f"{tmp_path} is not the folder of a run" in fails(
        capfd, extra("lightrft report").main, [str(tmp_path)]
    )


def test_deepspeed_that_is_not_installed(inputs, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    said = fails(capfd, MAINS["train_ppo"], [*inputs[1:], *PPO, "--strategy=deepspeed"])
    assert "needs deepspeed" in said and "or shard with FSDP2: --fsdp" in said


def test_what_zero_cannot_do(inputs, capfd):
    said = fails(
        capfd,
        MAINS["train_ppo"],
        [*inputs[1:], *PPO, "--tp_size=1", "--zero_stage=0", "--bf16", "--param_offload"],
    )
    assert (
        "--zero_stage 0 does not support --bf16" in said
        and "--param_offload needs --zero_stage 3" in said
    )


def test_a_run_that_cannot_begin_leaves_the_results_of_before_in_place(inputs, tmp_path, capfd):
    """With --overwrite nothing is moved before data, rewards and models are loaded."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    flags = [*inputs, *PPO, "--prompt_data=no.jsonl", f"--save_path={run}", "--overwrite"]
    assert "no.jsonl" in fails(capfd, MAINS["train_ppo"], flags)
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n' and not run.with_name(
        "run.previous"
    ).exists()


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("train_sft", "app.cli.read_command_line"),
        ("train_sft", "app.cli._run"),
        pytest.param(
            "report folder", "extras.commands.debug.report.write_report", marks=with_extras
        ),
    ],
)
def test_ctrl_c_before_a_run_listens_for_signals(monkeypatch, capfd, command, path):
    """While modules are imported, models loaded, or a command works that is no run."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"lightrft.{path}", interrupt)
    with pytest.raises(SystemExit) as ended:
        lightrft(command.split())
    said = capfd.readouterr().err
    assert (
        ended.value.code == 130
        and said.strip().endswith("interrupted by SIGINT")
        and "Traceback" not in said
    )
