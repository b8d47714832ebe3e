"""The shell scripts: syntax, and the environment they make.

A stand-in for Python notes what it is asked for.
"""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL = sorted([*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("deploy/*.sbatch"), ROOT / ".ci" / "run"])
LOCKS = sorted(ROOT.glob("requirements/*.txt"))
STAND_IN = """#!/usr/bin/env bash
echo "$*" >> {log}
case $1 in
    --version) echo "Python {version}" ;;
    -c) if [[ {refuses} == 1 ]]; then exit 1; fi; echo "{version}" {microseconds} ;;
    -m) if [[ $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
        if [[ $* == *torch* && -e {fail} ]]; then exit 1; fi ;;
esac
"""


class Machine:
    """A machine with a stand-in as its only Python."""

    def __init__(self, folder: Path, version: str = "3.12.1", refuses: bool = False):
        self.venv = folder / "venv"
        self.log = folder / "log"
        self.fail = folder / "fail"
        self.python = self.add_python(folder / "python", version, 1000, refuses)

    def add_python(
        self, file: Path, version: str, microseconds: int, refuses: bool = False
    ) -> Path:
        """Write a stand-in that takes this long to compile a program."""
        file.parent.mkdir(exist_ok=True)
        values = {
            "log": self.log,
            "version": version,
            "refuses": int(refuses),
            "fail": self.fail,
            "microseconds": microseconds,
        }
        file.write_text(STAND_IN.format(**values))
        file.chmod(0o755)

        return file

    def make(self, *arguments: str) -> subprocess.CompletedProcess:
        self.log.write_text("")
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(self.python),
            "LIGHTRFT_VENV": str(self.venv),
        }
        command = ["bash", str(ROOT / "scripts" / "environment.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    def installed(self) -> list[str]:
        """Return what pip was asked to install, in order.

        It went into another environment where it begins with --python.
        """
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("-m pip")]
        return [
            re.sub("-m pip |install --quiet --disable-pip-version-check ", "", line)
            for line in lines
        ]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_syntax_and_strictness(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    assert "set -euo pipefail" in path.read_text()


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_python_files_and_configurations_named_in_scripts_exist(path):
    named = re.findall(
        r"\b(?:scripts|configs|requirements)/[\w./-]+\.(?:py|sh|sbatch|yaml|txt)\b",
        path.read_text(),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_people_start_is_executable():
    started = [
        ROOT / ".ci" / "run",
        *(path for path in ROOT.glob("scripts/*.sh") if path.name != "environment.sh"),
    ]
    assert [path.name for path in started if not path.stat().st_mode & stat.S_IXUSR] == []


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_once(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = [line.split("==")[0].lower() for line in lines]
    assert sorted(set(names)) == sorted(names)


def test_makes_the_environment_in_order(machine):
    result = machine.make("test")
    assert result.returncode == 0, result.stderr
    torch, lock, itself, tests, *overlays = machine.installed()
    assert torch == "--no-compile torch==2.13.0"
    assert lock == f"--no-compile --no-deps -r {ROOT}/requirements/cpu.txt"
    assert itself == f"--no-compile --no-deps --no-build-isolation -e {ROOT}"
    assert tests.endswith(f"-r {ROOT}/requirements/test.txt")
    assert overlays == [
        f"--python {machine.venv}-{name}/bin/python --no-compile --no-deps -r"
        f" {ROOT}/requirements/{name}.txt"
        for name in ("sglang", "extras", "fp8", "tinker")
    ]


def test_makes_it_once_and_adds_the_tests_later(machine):
    machine.make()
    assert len(machine.installed()) == 3
    assert machine.make().stdout == "" and machine.installed() == []
    machine.make("test")
    assert len(machine.installed()) == 5
    assert machine.make("test").stdout == "" and machine.installed() == []


def test_a_shell_that_enters_it_reaches_the_hub(machine):
    """Tests work offline; a user's shell keeps its own settings."""
    machine.make()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(machine.python),
        "LIGHTRFT_VENV": str(machine.venv),
    }
    enter = f"source {ROOT}/scripts/environment.sh && env"
    entered = subprocess.run(
        ["bash", "-c", enter], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert f"VIRTUAL_ENV={machine.venv}" in entered and "OFFLINE" not in entered


def test_an_interrupted_installation_is_made_again(machine):
    machine.fail.touch()
    assert machine.make().returncode == 1
    (machine.venv / "half_a_package").touch()
    machine.fail.unlink()
    assert machine.make().returncode == 0 and len(machine.installed()) == 3
    assert not (machine.venv / "half_a_package").exists()


def test_leaves_the_folder_of_somebody_else_alone(machine):
    machine.venv.mkdir()
    (machine.venv / "precious").touch()
    result = machine.make()
    assert (
        result.returncode == 1
        and "was not made by this script" in result.stderr
        and "LIGHTRFT_VENV=" in result.stderr
    )
    assert (machine.venv / "precious").exists()


def test_leaves_the_environment_of_another_clone_alone(machine, tmp_path):
    assert machine.make().returncode == 0
    stamp = machine.venv / "lightrft-requirements"
    other = tmp_path / "other"
    stamp.write_text(stamp.read_text().replace(str(ROOT), str(other)))
    (other / "scripts").mkdir(parents=True)
    (other / "scripts" / "environment.sh").touch()
    (machine.venv / "precious").touch()
    result = machine.make()
    assert (
        result.returncode == 1
        and f"is the environment of {other}" in result.stderr
        and machine.installed() == []
    )
    assert (machine.venv / "precious").exists()
    (other / "scripts" / "environment.sh").unlink()  # a clone that was moved
    assert machine.make().returncode == 0 and len(machine.installed()) == 3


def test_an_old_python_is_refused_with_the_way_out(tmp_path):
    result = Machine(tmp_path, version="3.9.18", refuses=True).make()
    assert result.returncode == 1 and not (tmp_path / "venv").exists()
    assert "needs Python 3.11 or newer, with venv" in result.stderr
    assert "is Python 3.9.18" in result.stderr and "PYTHON=" in result.stderr


def test_a_clearly_faster_python_of_the_same_version_is_preferred(machine, tmp_path):
    speeds = {
        "first": ("3.12", 1000),
        "similar": ("3.12", 900),
        "faster": ("3.12", 700),
        "newer": ("3.13", 100),
    }
    folders = [
        machine.add_python(tmp_path / name / "python3", *speeds[name]).parent for name in speeds
    ]
    environment = {
        "PATH": ":".join([*map(str, folders), os.environ["PATH"]]),
        "LIGHTRFT_VENV": str(machine.venv),
    }
    command = ["bash", str(ROOT / "scripts" / "environment.sh")]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
    assert f"-m venv {machine.venv}" in machine.log.read_text()
    assert " 700 " in (machine.venv / "bin" / "python").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--sed", "1"], "unknown: --sed"), (["--seed"], "--seed needs a number")],
)
def test_quick_start_refuses_wrong_arguments_before_any_work(arguments, message):
    result = subprocess.run(
        ["bash", ROOT / "scripts" / "quickstart.sh", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode != 0 and message in result.stderr and result.stdout == ""


def test_gsm8k_run_says_what_to_do_without_a_gpu(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "test.jsonl").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(tmp_path)}
    result = subprocess.run(
        ["bash", ROOT / "scripts" / "run_grpo_gsm8k.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1 and "NPROC=4" in result.stderr
