"""Why: Ctrl-C after a complete checkpoint is no failure, and a traceback of torchrun hides the line
that says how to go on.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import prepare

ROOT = Path(__file__).resolve().parents[3]


def plug_in(folder: Path) -> str:
    """Write what pip writes when it installs the package.

    Return the path that torchrun needs to find it.
    """
    about = folder / "lightrft_plug_in-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lightrft-plug-in\nVersion: 0\n")
    setup = (ROOT / "setup.py").read_text()
    entry = next(line.split('"')[3] for line in setup.splitlines() if "torchrun.handlers" in line)
    (about / "entry_points.txt").write_text(f"[torchrun.handlers]\n{entry}\n")
    return f"{folder}:{ROOT}"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_a_checkpoint_one_line_and_its_code(tmp_path):
    flags = [flag for flag in prepare(tmp_path) if not flag.startswith("--reward")]
    flags += ["--train_batch_size=8", "--num_episodes=100000", f"--save_path={tmp_path}/run"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]

    command += ["-m", "lightrft", "train_sft"]
    log = tmp_path / "log"
    with log.open("w") as out:
        run = subprocess.Popen(
            [*command, *flags],
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONPATH": plug_in(tmp_path)},
        )

    try:
        deadline = time.monotonic() + 120
        while " 3/" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, log.read_text()[-3000:]
    finally:
        run.kill()

    said = log.read_text()
    assert "Traceback" not in said and "resume with the same command and --load_checkpoint" in said
    assert said.rstrip().splitlines()[-1] == "torchrun: stopped by SIGINT"
    assert list((tmp_path / "run/checkpoints").glob("step*/manifest.json"))


APART = """
import json, os, sys
import torch.distributed

assert "torch.distributed.run" not in sys.modules
for arguments, variables in json.loads(sys.argv[1]):
    if not (case := os.fork()):
        sys.argv[:] = ["torchrun", *arguments]
        os.environ.update(variables)
        break
    ended = os.waitstatus_to_exitcode(os.waitpid(case, 0)[1])
    print(f"ended with {ended}", file=sys.stderr, flush=True)
else:
    sys.exit()
"""
"""Program that goes on once for each case, in a fork with the arguments and variables of the case.

A fresh interpreter would take two seconds for each.
"""
OTHER = """
from lightrft.models.launch.torchrun import install
install()
import signal
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

def failed(code, message):
    with open("/dev/null") as nowhere:
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file=nowhere.name)
    failure.message = message
    return ChildFailedError("program", {3: failure})

raise {
    "fails": RuntimeError("broken"),
    "user": failed(2, {"message": "unknown flag --sed"}),
    "crashes": failed(1, {"message": "Traceback\\n  lines\\nValueError: a shape"}),
    "killed": failed(-9, "Signal 9 (SIGKILL) received by PID 1"),
}.get(sys.argv[-1], SignalException("stopped", signal.SIGINT))
"""


def run_apart(
    program: str, cases: list[tuple[list[str], dict[str, str]]], path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program with the arguments and variables of each case."""
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    command = [sys.executable, "-c", APART + program, json.dumps(cases)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_ends_of_our_own_programs_are_one_line():
    cases = [
        (["-m", "lightrft", "train_ppo"], 130, "torchrun: stopped by SIGINT"),
        (["-m", "lightrft", "train_ppo", "fails"], 1, "RuntimeError: broken"),
        (["-m", "lightrft", "x", "user"], 2, "torchrun: rank 3 ended first, with exit code 2"),
        (
            ["-m", "lightrft", "x", "crashes"],
            1,
            "torchrun: rank 3 ended first, with exit code 1: ValueError: a shape",
        ),
        (
            ["-m", "lightrft", "x", "killed"],
            137,
            "torchrun: rank 3 ended first, with signal SIGKILL: Signal 9 (SIGKILL) received by PID 1",
        ),
        (
            ["-m", "another.program"],
            1,
            "torch.distributed.elastic.multiprocessing.api.SignalException: stopped",
        ),
    ]
    done = run_apart(OTHER, [(arguments, {}) for arguments, *_ in cases])
    said = done.stderr.splitlines()
    ends = [index for index, line in enumerate(said) if line.startswith("ended with ")]
    assert [(said[index], said[index - 1]) for index in ends] == [
        (f"ended with {code}", last) for _, code, last in cases
    ]


WAITS = """
from torch.distributed.run import config_from_args, get_args_parser
arguments = ["--nproc-per-node", "2", *sys.argv[1:]]
config, *_ = config_from_args(get_args_parser().parse_args(arguments))
print(config.shutdown_timeout)
"""


def test_torchrun_waits_for_the_checkpoint_of_our_own_programs(tmp_path):
    program = ["-m", "lightrft", "train_ppo"]
    cases = {
        600: (program, {}),
        7: (program, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}),
        5: (["--shutdown-timeout", "5", *program], {}),
        30: (["-m", "another.program"], {}),
    }
    done = run_apart(WAITS, [*cases.values()], plug_in(tmp_path))
    assert done.stdout.split() == [str(seconds) for seconds in cases], done.stderr
