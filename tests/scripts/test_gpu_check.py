"""Why: the command for a first day on a GPU has to work there at once.

So everything but the device is tried here.
"""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import requires
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lightrft.versions import CORE
from ranks import run_ranks
from runs import run_here
from scripts import gpu_check, gpu_measure
from scripts.gpu_check import (
    CHECKS,
    Aim,
    Check,
    figures_of_line,
    figures_of_pytest,
    rows_of,
    run_check,
    table,
    why_skipped,
)
from warm import STARTS_WARM, warm_python
from with_vllm import load_vllm

ROOT = Path(__file__).resolve().parents[2]
SPEED = Aim("tokens/s", least=100)
EXACT = Aim("failed", most=0, anywhere=True)
CHECK = Check(
    "speed", "training", ("scripts/gpu_measure.py", "training"), (SPEED, Aim("peak GB"), EXACT)
)


@pytest.mark.parametrize(
    ("aim", "measured", "device", "expected"),
    [
        (Aim("x", most=5), 5.0, "cuda", True),
        (Aim("x", most=5), 5.1, "cuda", False),
        (Aim("x", least=5), 4.9, "cuda", False),
        (Aim("x", least=5, most=6), 5.5, "cuda", True),
        (Aim("x", least=5, most=6), 7.0, "cuda", False),
        (Aim("x", most=5), float("nan"), "cuda", False),
        (Aim("x"), 1.0, "cuda", None),
        (Aim("x", most=5), 9.0, "cpu", None),
        (Aim("x", most=5, anywhere=True), 9.0, "cpu", False),
        (Aim("x", most=0, anywhere=True), 0, "cpu", True),
    ],
)
def test_verdicts(aim, measured, device, expected):
    assert aim.verdict(measured, device) is expected


def test_rows_of_what_was_measured_and_what_was_not():
    rows = rows_of(CHECK, {"tokens/s": 99.0, "peak GB": 3.0, "failed": 0}, "cuda", "")
    assert [(row.figure, row.measured, row.ok) for row in rows] == [
        ("tokens/s", 99.0, False),
        ("peak GB", 3.0, None),
        ("failed", 0, True),
    ]
    assert [row.ok for row in rows_of(CHECK, {}, "cuda", "ended with 1: out of memory")] == [
        False
    ] * 3
    (unknown,) = [
        row for row in rows_of(CHECK, {"failed": 0}, "cuda", "") if row.figure == "tokens/s"
    ]
    assert unknown.ok is None and "not known" in unknown.note


def test_the_table_has_a_line_for_each_row():
    rows = rows_of(CHECK, {"tokens/s": 99.0, "failed": 0}, "cuda", "") + [
        gpu_check.skipped(CHECK, "vllm not installed")
    ]
    head, *lines = table(rows).splitlines()
    assert head.split() == ["part", "check", "figure", "expected", "measured", "ok"]
    assert lines[0].split() == ["training", "speed", "tokens/s", ">=", "100", "99", "NO"]
    assert lines[-1].endswith("skipped: vllm not installed")


def test_figures_of_what_processes_print():
    assert (
        figures_of_line('warning\n{"a": 1}\n{"a": 2}\nbye') == {"a": 2}
        and figures_of_line("nothing") == {}
    )
    assert figures_of_pytest("FAILED x\n2 failed, 3 passed, 1 skipped in 1.2s\n") == {
        "failed": 2,
        "passed": 3,
        "skipped": 1,
    }
    assert (
        figures_of_pytest("no tests ran\n1 error in 0.1s")["failed"] == 1
        and figures_of_pytest("Killed") == {}
    )


def test_needs_that_are_not_met():
    needs_module = Check("x", "p", (), (), modules=("no_such_module", "json"))
    assert why_skipped(needs_module, "cuda", 8) == "no_such_module not installed"
    assert (
        why_skipped(Check("x", "p", (), (), devices=2), "cuda", 1)
        == "needs 2 GPUs, this machine has 1"
    )
    assert (
        why_skipped(Check("x", "p", (), (), devices=2), "cpu", 0)
        == why_skipped(CHECK, "cuda", 1)
        == ""
    )
    assert why_skipped(Check("x", "p", (), (), only_gpu=True), "cpu", 0) == "needs a GPU"


def test_every_part_is_shorter_than_eight_minutes_and_every_check_exists():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for part in gpu_check.PARTS:
        # That one ends after --minutes.
        assert (
            part == "first" or sum(check.seconds for check in CHECKS if check.part == part) <= 480
        ), "with every check at its limit"
    for check in CHECKS:
        if check.command[0].endswith("gpu_measure.py"):
            assert check.command[1] in gpu_measure.MEASUREMENTS
        else:
            assert (ROOT / check.command[5]).is_file() and check.command[1] == "pytest"


def needed_by(names: list[str]) -> set[str]:
    """Return these distributions and everything that their metadata says they need."""
    found = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            needed = map(Requirement, requires(name) or [])
            left += [
                each.name
                for each in needed
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]

    return found


def test_the_packages_of_a_machine_without_a_network():
    """Wheels are unpacked without their requirements, so all are named.

    Only what torch and transformers bring is not.
    """
    of_the_machine = needed_by(["torch", "transformers"])
    named = set(gpu_check.PACKAGES.values())
    assert named >= needed_by([*CORE, *gpu_check.TEST_DISTRIBUTIONS]) - of_the_machine
    assert gpu_check.missing_packages() == []
    downloaded = (
        (ROOT / "docs" / "gpu_check.md")
        .read_text()
        .split("pip download")[1]
        .split("```")[0]
        .split()
    )
    assert named - of_the_machine <= set(downloaded)


OF_OTHER_TESTS = ("head", "contract", "engine_contract")
"""Measurements that other tests run.

They are tests/bench/test_logprobs.py, tests/strategy/test_contract.py and
tests/engine/test_contract.py.
"""
ONE_OF_EACH = (
    "HSDP",
    "tensor parallel",
    "FSDP, bfloat16",
    "sequence parallel, bfloat16",
    "gradients of 14B on rank 0 of 8",
    "1.5B, fused kernels",
    "four layers of 7B",
    "training in FP8",
    "a run learns with vLLM, bfloat16",
)
"""Checks like one that is run here, with another flag of the trainer or another size.

Others only need a package for accelerators.
"""
MEASURED = [
    check
    for check in CHECKS
    if check.command[0].endswith("gpu_measure.py")
    and check.command[1] not in OF_OTHER_TESTS
    and check.name not in ONE_OF_EACH
]


def measure(check: Check, ranks: int) -> dict[str, float]:
    """Measure in this process, as in one that no launcher has started."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    return gpu_measure.MEASUREMENTS[check.command[1]](
        gpu_measure.Setting(torch.device("cpu"), ranks), *check.command[2:]
    )


def train_here(
    ranks: int,
    entrypoint: str,
    flags: list[str],
    *,
    environment: dict[str, str] | None = None,
    check: bool = True,
) -> tuple[int, str]:
    """Train as gpu_measure.train() does, on forked ranks that start in a second."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        try:
            run_ranks(ranks, run_here, entrypoint, flags)
        except RuntimeError as error:
            if check:
                raise
            return 1, str(error)
    return 0, ""


@pytest.mark.slow
@pytest.mark.parametrize("check", MEASURED, ids=lambda check: check.name)
def test_every_measurement_runs_on_a_cpu(check, monkeypatch):
    """At tiny sizes.

    For the death of a rank, torchrun starts processes, and its log has to name the rank.
    """
    if "vllm" in check.modules:
        pytest.importorskip("vllm", reason="vllm is not installed")
        load_vllm()

    if check.part in ("runs", "layouts", "layouts_bf16", "divided_experts", "ranks"):
        if check.name == "death of a rank":
            monkeypatch.setattr(sys, "executable", warm_python())
        else:
            monkeypatch.setattr(gpu_measure, "train", train_here)
        arguments = gpu_measure.Setting(torch.device("cpu"), 2), *check.command[2:]
        figures = gpu_measure.MEASUREMENTS[check.command[1]](*arguments)
    else:
        (figures,) = run_ranks(1, measure, check, 2)

    assert all(math.isfinite(value) for value in figures.values())
    # vLLM names experts only where Triton is installed, and a CPU has no peak and reserves nothing.
    assert figures.keys() >= {aim.figure for aim in check.aims} - {
        "share of peak",
        "experts that differ",
        gpu_measure.RESERVED,
        "reserved GB less than full",
    }
    assert [row for row in rows_of(check, figures, "cpu", "") if row.ok is False] == []


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
        ("import time; print('{\"failed\": 0}', flush=True); time.sleep(60)", "not done after 1 s"),
        ("raise MemoryError('no room')", "MemoryError: no room"),
    ],
)
def test_a_check_that_crashes_or_hangs_fails_and_says_why(program, note, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_measure.py").write_text(program)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (row,) = run_check(Check("x y", "p", CHECK.command, (EXACT,), seconds=1), "cpu", 1, tmp_path)
    assert row.ok is False and row.measured is None and note in row.note


def check_that_waits(folder: Path) -> None:
    gpu_check.ROOT = folder
    gpu_check.CHECKS[:] = [CHECK]
    gpu_check.main(["--device", "cpu", "--out", str(folder)])


def test_a_terminated_script_ends_the_processes_of_its_check(tmp_path):
    """Otherwise they disturb the next measurement."""
    (tmp_path / "scripts").mkdir()
    program = (
        "import os, time; open('pid.new', 'w').write(str(os.getpid())); os.rename('pid.new',"
        " 'pid'); time.sleep(120)"
    )
    (tmp_path / "scripts" / "gpu_measure.py").write_text(program)
    script = multiprocessing.get_context("fork").Process(target=check_that_waits, args=(tmp_path,))
    script.start()

    while not (tmp_path / "pid").exists():
        assert script.is_alive()
        time.sleep(0.05)

    os.kill(script.pid, signal.SIGTERM)
    script.join(60)
    assert script.exitcode == 1 and not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_missing_packages_are_named_with_the_way_to_bring_them(monkeypatch, capsys):
    monkeypatch.setitem(gpu_check.PACKAGES, "no_such_module", "no-such-package")
    assert gpu_check.main(["kernels", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "missing: no-such-package." in said and "WHEELS=wheels" in said
    assert "pip install --no-deps -r requirements/gpu.txt" in said


def test_a_check_of_lightrft_alone_needs_no_package_of_the_tests(monkeypatch):
    monkeypatch.setitem(gpu_check.PACKAGES, "no_such_module", "no-such-package")
    assert why_skipped(Check("x", "p", (), (), bare=True), "cuda", 1) == ""
    assert why_skipped(CHECK, "cuda", 1) == "no_such_module not installed"


def test_checks_go_on_where_the_time_has_ended(tmp_path, monkeypatch):
    """Those without enough time are skipped with the reason, and run the next time."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_measure.py").write_text("print('{\"failed\": 0}')")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    checks = [
        Check(name, "p", CHECK.command, (EXACT,), seconds)
        for name, seconds in (("a", 50), ("b", 500))
    ]

    def rows(seconds: float, done: list[gpu_check.Row]) -> list[tuple[str, bool | None, str]]:
        gpu_check.run_checks(checks, "cpu", 0, tmp_path, seconds, done)
        found = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
        return [(row["check"], row["ok"], row["note"]) for row in found]

    first, second = rows(100, [])
    assert first == ("a", True, "")
    assert second[:2] == ("b", None) and second[2].startswith("skipped: may take 500 s, and ")

    (tmp_path / "scripts" / "gpu_measure.py").write_text("raise MemoryError")
    a, b = rows(1000, gpu_check.rows_before(tmp_path))
    assert a == ("a", True, "") and b[1] is False and "MemoryError" in b[2]

    (tmp_path / "scripts" / "gpu_measure.py").write_text("print('{\"failed\": 1}')")
    assert rows(1000, gpu_check.rows_before(tmp_path)) == [("a", True, ""), ("b", False, "")]


def test_unknown_parts_are_refused():
    with pytest.raises(SystemExit):
        gpu_check.main(["kernel"])


@pytest.mark.slow
def test_the_script_on_a_cpu(tmp_path):
    names = ["buckets ahead: bits", "1.5B, none", "1.5B, fused kernels"]
    command = [
        "bash",
        ROOT / "scripts" / "gpu_check.sh",
        "--device",
        "cpu",
        "--out",
        tmp_path,
        "--only",
        *names,
    ]
    environment = os.environ | {"PYTHON": warm_python(), STARTS_WARM: warm_python()}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (
        result == json.loads((tmp_path / "gpu_check.json").read_text())
        and result["ok"]
        and result["versions"]["torch"]
    )
    assert {row["check"] for row in result["rows"]} == {*names}
    measured = {(row["check"], row["figure"]): row for row in result["rows"]}
    assert (
        measured["buckets ahead: bits", "failed"]["ok"] is True
        and measured["1.5B, none", "tokens/s"]["measured"] > 0
    )

    assert (
        measured["1.5B, none", "tokens/s"]["ok"]
        is measured["1.5B, none", "share of peak"]["ok"]
        is None
    ), "aims of a GPU"
    assert "skipped: needs a GPU" in ran.stdout or "skipped: liger_kernel" in ran.stdout
