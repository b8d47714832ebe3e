"""Why: a newcomer copies these commands.

Each is run, or read by the program that it starts.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightrft.app.run.prepare import prepare_config
from lightrft.config import flags_without_effect, parse
from warm import warm_environment, warm_python

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
LAPTOP, REAL_MODEL, NODE = re.split(
    "\n## (?:A real model on the laptop|On a node of 8 GPUs)\n", PAGE
)
SMALL = "--rollout_batch_size 8 --train_batch_size 64 --max_eval_samples 16"
SHORTER = {
    "source scripts/environment.sh": "",
    "2 -m lightrft train_sft": "1 -m lightrft train_sft",
    "configs/quickstart_sft.yaml": "configs/quickstart_sft.yaml --max_steps 4 --logging_steps 1",
    "--max_steps 100 --save_steps 50": f"--max_steps 2 --save_steps 2 {SMALL}",
    "/grpo\n\ntorchrun --standalone --nproc-per-node 2": (
        "/grpo\n\ntorchrun --standalone --nproc-per-node 1"
    ),
    "--max_steps 120 --save_steps 50": f"--max_steps 3 --save_steps 2 {SMALL}",
    "lightrft evaluate --fsdp --engine_type hf --pretrain runs/tutorial/sft/model": "true",
    "/after": "/after --max_eval_samples 16",
}
"""Text of the page -> what the test runs instead.

It runs in an environment that exists already, for a few steps. Two ranks are used only once,
because the run goes on with one. One of the two evaluations is enough, because they are alike.
"""


def blocks(part: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", part, flags=re.DOTALL | re.MULTILINE)


def run(script: str) -> str:
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=warm_environment(PYTHONPATH=str(ROOT)),
    )
    assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.slow
def test_the_commands_for_a_laptop_run(tmp_path):
    script = "\n".join(blocks(LAPTOP))
    for text, instead in SHORTER.items():
        assert script.count(text) == 1, f"the page does not contain {text!r} once"
        script = script.replace(text, instead)

    run(script.replace("runs/tutorial", str(tmp_path)))
    rows = [
        json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3] and (
        tmp_path / "grpo" / "report.html"
    ).exists()
    assert (tmp_path / "after" / "evaluation.json").exists()


def test_what_a_real_model_leaves_is_what_the_page_reads():
    """The recipe itself takes an hour; the page reads files of its folder."""
    recipe = (ROOT / "scripts/laptop/run.sh").read_text()
    read = re.findall(r"runs/laptop/words/(\w+)/responses.jsonl", REAL_MODEL)
    assert read == ["before", "after"] and all(f'"$out/{folder}"' in recipe for folder in read)


@pytest.mark.slow
def test_the_commands_for_a_node_are_possible(tmp_path, monkeypatch):
    """The plan is made, the reward is called, and the flags of each run are read as by its 8
    processes.
    """
    commands = "\n".join(blocks(NODE))
    reward = tmp_path / "my_reward.py"
    heredoc = re.search(r"cat > my_reward.py <<'PYTHON'\n(.*?)PYTHON\n", commands, flags=re.DOTALL)
    reward.write_text(heredoc[1])
    commands = (
        commands.replace(heredoc[0], "").replace("\\\n", " ").replace("my_reward.py", str(reward))
    )
    assert "it fits" in run(
        next(line for line in commands.splitlines() if line.startswith("lightrft plan"))
    )

    runs = [
        shlex.split(line)
        for line in commands.splitlines()
        if "run_grpo_gsm8k.sh" in line or "-m lightrft " in line
    ]
    assert len(runs) == 4
    (tmp_path / "data").mkdir()

    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(
            json.dumps({"input": "1+1?", "label": "2"}) + "\n"
        )

    monkeypatch.setenv("WORLD_SIZE", "8")
    for words in runs:
        config = next(
            (word.partition("=")[2] for word in words if word.startswith("CONFIG=")), None
        )
        command = "train_ppo"

        flags = words[3:] if config else words[words.index("-m") + 3 :]
        if "bench" in words:
            config = flags[0]
            flags = flags[1:]
        elif config is None:
            command = words[words.index("-m") + 2]

        flags = [flag.replace("data/gsm8k", f"{tmp_path}/data") for flag in flags]
        if command == "train_ppo":
            flags = [
                f"--config={ROOT / config}",
                f"--prompt_data={tmp_path}/data/train.jsonl",
                f"--eval_data={tmp_path}/data/test.jsonl",
                *flags,
            ]
        else:
            flags = [
                flag.replace("runs/grpo_gsm8k_1.5b", "Qwen/Qwen2.5-1.5B-Instruct") for flag in flags
            ]

        found = parse(flags, command)
        prepare_config(command, found)
        assert not flags_without_effect(found, command)


def test_the_reward_for_a_node_has_its_parts(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        re.search(r"<<'PYTHON'\n(.*?)PYTHON\n", NODE, flags=re.DOTALL)[1]
    )
    script = (
        "import my_reward; from types import SimpleNamespace as Of; "
        "print(my_reward.right_and_short([Of(text='so 7', token_ids=[1] * 300)], label=['7']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert ran.stdout == "[{'right': 1.0, 'length': -0.1}]\n"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """It runs cell by cell in one module that is __main__, as in a kernel, with few steps."""
    cells = json.loads((ROOT / "notebooks" / "tutorial.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = code.replace("runs/notebook", str(tmp_path)).replace("max_steps=300", "max_steps=4")
    code = code.replace("max_steps=20", "max_steps=2, rollout_batch_size=8, train_batch_size=64")
    script = tmp_path / "cells.py"
    script.write_text(code)
    ran = subprocess.run(
        [warm_python(), script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    *_, rewards, answer = ran.stdout.splitlines()
    assert len(json.loads(rewards)) == 2 and answer.startswith("27+58=")
