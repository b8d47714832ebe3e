"""A rank that is killed, fails or is late, at any phase of a real run: all ranks end, and the first
cause is what people read.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.trainer import sabotage
from ranks import exit_codes
from runs import PPO, prepare, rows_of, train
from warm import warm_python

pytestmark = pytest.mark.slow
FLAGS = [*PPO, "--max_steps=1", "--save_steps=1", "--eval_steps=1"]
PHASES = [
    "load_models",
    "start_engine",
    "generate",
    "reward",
    "experience",
    "train",
    "evaluate",
    "checkpoint",
    "save_model",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return [*prepare(folder), f"--eval_data={folder / 'train.jsonl'}", "--max_eval_samples=4"]


# -- every phase, on ranks forked from this process


@pytest.fixture
def no_launcher_to_wait_for(monkeypatch):
    monkeypatch.setattr("lightrft.models.launch.heartbeat.GRACE", 0.4)


def entrypoint(flags: list[str], folder: Path) -> None:
    log = open(folder / f"log{os.environ['RANK']}", "w", buffering=1)
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    sabotage.main(flags)


def run(
    inputs: list[str], folder: Path, what: str, monkeypatch
) -> tuple[list[int | None], list[str]]:
    """(exit codes, what each rank wrote to stderr)."""
    monkeypatch.setenv("SABOTAGE", what)
    codes = exit_codes(2, entrypoint, [*inputs, *FLAGS, f"--save_path={folder}"], folder)
    return codes, [(folder / f"log{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_any_phase(inputs, tmp_path, monkeypatch, no_launcher_to_wait_for, phase):
    rank = PHASES.index(phase) % 2
    codes, said = run(inputs, tmp_path, f"{phase}:{rank}:kill", monkeypatch)
    assert codes[rank] == -9 and codes[1 - rank] == 1
    assert re.search(
        rf"this run ends: rank {rank} \(pid \d+ on .*\) ended without an error message in phase"
        rf" {phase}:",
        said[1 - rank],
    )
    assert "Traceback" not in said[1 - rank] and "Connection" not in said[1 - rank]


@pytest.mark.parametrize("phase", ["start_engine", "train", "save_model"])
def test_an_exception_in_any_phase(inputs, tmp_path, monkeypatch, no_launcher_to_wait_for, phase):
    codes, said = run(inputs, tmp_path, f"{phase}:1:raise", monkeypatch)
    assert codes == [1, 1]
    assert (
        said[1].rstrip().endswith("OSError: the disk is on fire")
        and said[1].count("Traceback") == 1
    )
    assert (
        f"failed in phase {phase}: OSError: the disk is on fire" in said[0]
        and "Traceback" not in said[0]
    )


def test_a_mistake_of_the_user_is_one_message(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for
):
    (tmp_path / "broken.jsonl").write_text("{oops\n")
    codes, said = run(
        [*inputs, f"--prompt_data={tmp_path}/broken.jsonl"], tmp_path, "none:0:none", monkeypatch
    )
    assert (
        codes == [2, 2]
        and "".join(said).count("broken.jsonl") == 1
        and "Traceback" not in "".join(said)
    )


# -- rewards that do not return

HANGING = """
import os
import time
from pathlib import Path
def hangs(samples, **columns):
    rows = Path(__file__).with_name("metrics.jsonl")
    done = len(rows.read_text().splitlines()) if rows.exists() else 0
    if done < int(os.environ.get("HANGS_AFTER", 0)):
        return [0.0] * len(samples)
    print("hangs now", flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def hanging(inputs, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    return [*inputs, f"--reward={tmp_path / 'hanging.py'}:hangs"]


@pytest.mark.parametrize("where", ["--reward_workers=1", "--reward_workers=0"])
def test_a_reward_that_hangs_on_all_ranks(
    hanging, tmp_path, monkeypatch, no_launcher_to_wait_for, where
):
    flags = [*hanging, where, "--reward_minutes=0.02"]
    codes, said = run(flags, tmp_path, "none:0:none", monkeypatch)
    assert codes == [2, 2]
    one = next(text for text in said if "--reward " in text)
    assert (
        "hanging.py:hangs: a call has taken more than 1.2 s (--reward_minutes), for the response"
        in one
    )
    assert "to the prompt 'ab" in one
    assert re.search(r"It is at \S*hanging.py:12 \(hangs\)", one) and "Traceback" not in one


@pytest.mark.parametrize(
    ("signals", "says"),
    [
        ([signal.SIGINT], "interrupted by SIGINT"),
        ([signal.SIGTERM], "interrupted by SIGTERM"),
        ([signal.SIGINT, signal.SIGINT], "stopping at the next safe point"),
    ],
)
def test_a_signal_ends_a_reward_that_hangs(hanging, tmp_path, signals, says):
    """The first one, while there is nothing to save; later the second."""
    program = f"{warm_python()} -m lightrft train_ppo".split()
    flags = [*hanging, *FLAGS, "--max_steps=2", f"--save_path={tmp_path}"]
    started = subprocess.Popen(
        [*program, *flags],
        env=os.environ | {"PYTHONPATH": os.getcwd(), "HANGS_AFTER": str(len(signals) - 1)},
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = iter(started.stdout.readline, "")
    next(line for line in said if "hangs now" in line)
    started.send_signal(signals[0])
    next(line for line in said if says in line)
    for each in signals[1:]:
        started.send_signal(each)
    rest = started.communicate(timeout=30)[0]
    assert started.returncode == 128 + signals[0] and "Traceback" not in rest
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("rank", ["0", "1", "*"])
def test_a_signal_to_any_rank_ends_all_before_the_first_step(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for, rank
):
    codes, said = run(inputs, tmp_path, f"train:{rank}:terminate", monkeypatch)
    text = "".join(said)
    assert codes == [143, 143] and "interrupted by SIGTERM" in text and "Traceback" not in text


def test_a_signal_while_the_model_is_written_lets_the_run_end(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for
):
    """Why: it ended the process in the middle of a file, without a word, and as if it still ran."""
    _, said = run(inputs, tmp_path, "save_model:*:terminate", monkeypatch)
    assert "finished after step 1" in said[0] and "Traceback" not in "".join(said)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"


def test_a_reward_that_does_not_fit_is_found_before_models_are_loaded(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for
):
    (tmp_path / "unfit.py").write_text(
        "def unfit(samples, answer, **columns):\n    return [0.0] * len(samples)\n"
    )
    codes, said = run(
        [*inputs, f"--reward={tmp_path / 'unfit.py'}:unfit"],
        tmp_path,
        "load_models:0:kill",
        monkeypatch,
    )
    assert (
        codes == [2, 2]
        and "unfit: the function needs answer" in "".join(said)
        and "columns label" in "".join(said)
    )


@pytest.mark.parametrize("flag", ["prompt_data", "eval_data"])
def test_a_row_without_the_right_answer_is_found_before_models_are_loaded(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for, flag
):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "a", "label": "1"}\n' * 9 + '{"input": "b", "label": null}\n')
    codes, said = run(
        [*inputs, f"--{flag}={file}", "--max_eval_samples=10"],
        tmp_path,
        "load_models:0:kill",
        monkeypatch,
    )
    assert codes == [2, 2] and f"--{flag}: {file}:10: --reward " in "".join(said)
    assert "label (--label_key) is None" in "".join(said)


@pytest.mark.parametrize("damage", ["truncated", "not finite"])
def test_a_damaged_model_is_named_without_a_traceback(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for, damage
):
    """The second is found when the sharded model is filled."""
    folder = next(flag for flag in inputs if flag.startswith("--pretrain=")).partition("=")[2]
    file = shutil.copytree(folder, tmp_path / "damaged") / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        tensors = load_file(file)
        tensors["model.norm.weight"][5] = torch.nan
        save_file(tensors, file, metadata={"format": "pt"})

    codes, said = run(
        [*inputs, f"--pretrain={tmp_path / 'damaged'}"],
        tmp_path,
        "start_engine:0:kill",
        monkeypatch,
    )
    says = (
        "is damaged or incomplete"
        if damage == "truncated"
        else "model.norm.weight has values that are not finite"
    )
    assert codes == [2, 2]
    assert str(file) in "".join(said) and says in "".join(said) and "Traceback" not in "".join(said)


@pytest.mark.parametrize("what", ["train:1:fill", "none:0:none"])
def test_files_that_cannot_be_written_end_a_run_with_one_line(
    inputs, tmp_path, monkeypatch, no_launcher_to_wait_for, what
):
    """One rank finds the disk full, or no rank can point to the newest checkpoint."""
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    codes, said = run(inputs, tmp_path, what, monkeypatch)
    text = "".join(said)
    says = "No space left on device" if "fill" in what else f"{tmp_path}/checkpoints/latest could"
    assert codes == [2, 2] and says in text and "Traceback" not in text
    assert len([line for line in text.splitlines() if "ERROR" in line]) == 1


# -- under torchrun


def torchrun(what: str, flags: list[str], *options: str, python: str) -> subprocess.Popen:
    command = [python, "-m", "torch.distributed.run", *options, sabotage.__file__, *flags]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "SABOTAGE": what}
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    )


def one_node(what: str, *flags: str, vllm: bool = False) -> str:
    started = torchrun(
        what, list(flags), "--standalone", "--nproc-per-node=2", python=warm_python(vllm=vllm)
    )
    said = started.communicate(timeout=180)[0]
    assert started.returncode == 1
    return said


def root_cause(said: str) -> str:
    """The last thing that torchrun shows."""
    return said.split("Root Cause (first observed failure):")[1]


def test_torchrun_killed_before_the_ranks_have_met(inputs):
    assert "Signal 9 (SIGKILL)" in root_cause(one_node("import:1:kill", *inputs, *FLAGS))


def test_what_a_killed_torchrun_started_ends(inputs, tmp_path):
    """When the launcher dies, one rank hangs with Python's lock and has a child process.

    The launcher and the ranks import everything themselves, as they do for a user.
    """
    flags = [*inputs, *FLAGS, f"--save_path={tmp_path}"]
    started = torchrun(
        "load_models:1:hang", flags, "--standalone", "--nproc-per-node=2", python=sys.executable
    )
    said = iter(started.stdout.readline, "")
    child = psutil.Process(
        int(next(line for line in said if line.startswith("hangs beside ")).split()[-1])
    )
    launcher = child.parent().parent()
    family = {child, *launcher.children(recursive=True)}
    launcher.kill()
    alive = psutil.wait_procs(family, timeout=30)[1]
    for process in alive:
        process.kill()
    assert len(family) >= 3 and alive == []
    assert f"torchrun (pid {launcher.pid}) ended without an error message: rank 1 (pid " in "".join(
        said
    )


def test_torchrun_shows_the_killed_rank_with_vllm(inputs, tmp_path):
    vllm = ("--engine_type=vllm", "--engine_kv_cache_gb=0.1")
    said = one_node("generate:0:kill", *inputs, *FLAGS, *vllm, f"--save_path={tmp_path}", vllm=True)
    assert re.search(
        r"rank 1 ERROR +this run ends: rank 0 .* ended without an error message in phase generate",
        said,
    )
    assert "rank      : 0 " in root_cause(said) and "Signal 9 (SIGKILL)" in root_cause(said)


# -- two nodes of different size: two launchers on this machine, one rank and two


def two_nodes(what: str, *flags: str) -> list[tuple[int, str]]:
    """(exit code, output) of each."""
    from strategy.test_setup import free_port

    meeting = ("--nnodes=2", "--master-addr=localhost", f"--master-port={free_port()}")

    def node(rank: int) -> tuple[str, ...]:
        return *meeting, f"--node-rank={rank}", f"--nproc-per-node={rank + 1}"

    nodes = [torchrun(what, list(flags), *node(rank), python=warm_python()) for rank in range(2)]
    said = [node.communicate(timeout=180)[0] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]


SHARED = [*(flag for flag in FLAGS if "save_steps" not in flag), "--max_steps=2"]


def test_nodes_of_different_size_train_as_three_ranks_of_one(inputs, tmp_path):
    ended = two_nodes("none:0:none", *inputs, *SHARED, f"--save_path={tmp_path / 'two'}")
    assert [code for code, _ in ended] == [0, 0], ended
    rows = train("train_ppo", 3, [*inputs, *SHARED], tmp_path / "one")
    assert len(rows) == 2
    for ours, theirs in zip(rows, rows_of(tmp_path / "two"), strict=True):
        for name in ("rollout/reward", "train/loss", "train/grad_norm", "eval/reward"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name


def test_every_node_says_which_rank_of_another_is_late(inputs, tmp_path):
    for code, said in two_nodes(
        "reward:2:sleep", *inputs, *SHARED, "--timeout_minutes=0.2", f"--save_path={tmp_path}"
    ):
        assert code == 1 and re.search(
            r"rank 2 \(pid \d+ on .*\): late: .*; in phase reward, at .*\(spoil\)", said
        )
        assert (
            "a collective has waited for more than 12 s (--timeout_minutes). Late: rank 2."
            in root_cause(said)
        )


def test_every_node_says_why_a_rank_of_another_failed(inputs, tmp_path):
    """The node of the failed rank has another rank too, and shows the one that failed first."""
    ended = two_nodes("reward:1:raise", *inputs, *SHARED, f"--save_path={tmp_path}")
    assert all(
        code == 1 and "OSError: the disk is on fire" in root_cause(said) for code, said in ended
    )
    assert "rank      : 1 " in root_cause(ended[1][1])
