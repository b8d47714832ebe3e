"""What a run lacks is found before it starts: by `check`, by a plan, and by the run itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft.app.cli import read_command_line
from lightrft.config.errors import ConfigError
from lightrft.config.paths import check_paths, missing
from lightrft.extras.check import main
from runs import PPO, prepare

ROOT = Path(__file__).resolve().parents[3]
NO_TORCH = """
import contextlib, io, sys
from lightrft.__main__ import SUMMARIES, main
for command in SUMMARIES:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([command, "--help"])
    print(command, sorted({"torch", "transformers"} & set(sys.modules)))
"""
PACKAGES = {
    "vllm": ["--engine_type=vllm"],
    "sglang": ["--engine_type=sglang"],
    "bitsandbytes": ["--load_in_4bit"],
    "torchao": ["--fp8_training"],
    "peft": ["--lora_rank=4"],
    "deepspeed": ["--strategy=deepspeed"],
    "openai": ["--agent=mine:agent"],
    "wandb": ["--report_to=jsonl,wandb"],
    "comet_ml": ["--report_to=comet_ml"],
    "math_verify": ["--reward=exact_match:0.5,math:0.5"],
    "jsonschema": ["--reward=json_schema"],
    "httpx": ["--reward=http://localhost:1"],
    "websockets": ["--environment=openenv:http://localhost:1"],
    "mcp": ["--tools=mcp:server"],
    "reasoning_gym": ["--prompt_data=reasoning_gym:chain_sum"],
}


def test_help_of_every_command_needs_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 20 and not [line for line in lines if not line.endswith(" []")], lines


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_a_flag_needs(package, monkeypatch):
    flags = ["--prompt_data=owner/name", "--engine_type=hf", *PACKAGES[package]]
    config = read_command_line(flags, "train_ppo")
    monkeypatch.setattr(
        "lightrft.config.paths.find_spec", lambda name: None if name == package else object()
    )
    (problem,) = missing(config, "train_ppo")
    assert problem.startswith(PACKAGES[package][0].split("=")[0])
    assert f"needs {package}, which is not installed: pip install '.[" in problem
    with pytest.raises(ConfigError, match=f"needs {package}"):
        check_paths(config, "train_ppo")

    monkeypatch.setattr("lightrft.config.paths.find_spec", lambda name: object())
    assert not list(missing(config, "train_ppo"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return [*prepare(folder), *PPO]


def checked(capsys, *flags) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([*flags])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_can_start(inputs, capsys):
    code, said = checked(capsys, *inputs)
    assert (code, said.count("it fits")) == (0, 1), said
    assert "share_of_ascii gives" in said and "all is well" in said


@pytest.mark.slow
def test_what_is_learned_is_marked(inputs, capsys):
    flags = [
        flag for flag in inputs if flag.startswith(("--pretrain=", "--prompt_data=", "--fsdp"))
    ]
    code, said = checked(capsys, "train_sft", *flags)
    assert code == 0 and "⟦" in said, said


@pytest.mark.slow
def test_all_that_is_missing_is_named_at_once(inputs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("mine.py").write_text("def good(samples, **columns): return [1.0 for _ in samples]\n")
    Path("odd.py").write_text("def odd(samples, **columns): return [1.0]\n")
    lacking = {
        "--eval_data=gone.jsonl": "--eval_data gone.jsonl: neither",
        "--reward=mine.py:goood,gone.py:f:1": "--reward gone.py:f: no file",
        "--environment=gone.py:Game": "--environment gone.py:Game: no file",
        "--report_to=wandb": "--report_to wandb needs wandb",
    }
    code, said = checked(capsys, *inputs, *lacking)
    assert code == 2 and "it fits" not in said
    assert not [problem for problem in (*lacking.values(), "goood") if problem not in said], said

    code, said = checked(capsys, *inputs, "--reward=odd.py:odd")
    assert code == 2 and "odd.py:odd" in said.rpartition("cannot start")[2], said
