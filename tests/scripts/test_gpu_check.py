"""Why: the one command of a first day on a GPU has to work there at once, so all of it but the device is tried here."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import gpu_check, gpu_measure
from scripts.gpu_check import CHECKS, Aim, Check, figures_of_line, figures_of_pytest, rows_of, run_check, table, why_skipped

ROOT = Path(__file__).resolve().parents[2]
SPEED, EXACT = Aim("tokens/s", least=100), Aim("failed", most=0, anywhere=True)
CHECK = Check("speed", "training", ("scripts/gpu_measure.py", "training"), (SPEED, Aim("peak GB"), EXACT))


@pytest.mark.parametrize(("aim", "measured", "device", "expected"), [
    (Aim("x", most=5), 5.0, "cuda", True), (Aim("x", most=5), 5.1, "cuda", False), (Aim("x", least=5), 4.9, "cuda", False),
    (Aim("x", least=5, most=6), 5.5, "cuda", True), (Aim("x", least=5, most=6), 7.0, "cuda", False),
    (Aim("x", most=5), float("nan"), "cuda", False), (Aim("x"), 1.0, "cuda", None), (Aim("x", most=5), 9.0, "cpu", None),
    (Aim("x", most=5, anywhere=True), 9.0, "cpu", False), (Aim("x", most=0, anywhere=True), 0, "cpu", True),
])  # fmt: skip
def test_verdicts(aim, measured, device, expected):
    assert aim.verdict(measured, device) is expected


def test_rows_of_what_was_measured_and_what_was_not():
    rows = rows_of(CHECK, {"tokens/s": 99.0, "peak GB": 3.0, "failed": 0}, "cuda", "")
    assert [(row.figure, row.measured, row.ok) for row in rows] == [
        ("tokens/s", 99.0, False), ("peak GB", 3.0, None), ("failed", 0, True)
    ]  # fmt: skip
    assert [row.ok for row in rows_of(CHECK, {}, "cuda", "ended with 1: out of memory")] == [False] * 3
    (unknown,) = [row for row in rows_of(CHECK, {"failed": 0}, "cuda", "") if row.figure == "tokens/s"]
    assert unknown.ok is None and "not known" in unknown.note


def test_the_table_has_a_line_for_each_row():
    rows = rows_of(CHECK, {"tokens/s": 99.0, "failed": 0}, "cuda", "") + [gpu_check.skipped(CHECK, "vllm not installed")]
    head, *lines = table(rows).splitlines()
    assert head.split() == ["part", "check", "figure", "expected", "measured", "ok"]
    assert lines[0].split() == ["training", "speed", "tokens/s", ">=", "100", "99", "NO"]
    assert lines[-1].endswith("skipped: vllm not installed")


def test_figures_of_what_processes_print():
    assert figures_of_line('warning\n{"a": 1}\n{"a": 2}\nbye') == {"a": 2} and figures_of_line("nothing") == {}
    assert figures_of_pytest("FAILED x\n2 failed, 3 passed, 1 skipped in 1.2s\n") == {"failed": 2, "passed": 3, "skipped": 1}
    assert figures_of_pytest("no tests ran\n1 error in 0.1s")["failed"] == 1 and figures_of_pytest("Killed") == {}


def test_needs_that_are_not_met():
    needs_module = Check("x", "p", (), (), modules=("no_such_module", "json"))
    assert why_skipped(needs_module, "cuda", 8) == "no_such_module not installed"
    assert why_skipped(Check("x", "p", (), (), devices=2), "cuda", 1) == "needs 2 GPUs, this machine has 1"
    assert why_skipped(Check("x", "p", (), (), devices=2), "cpu", 0) == why_skipped(CHECK, "cuda", 1) == ""
    assert why_skipped(Check("x", "p", (), (), only_gpu=True), "cpu", 0) == "needs a GPU"


def test_every_part_is_shorter_than_eight_minutes_and_every_check_exists():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for part in gpu_check.PARTS:
        assert sum(check.seconds for check in CHECKS if check.part == part) <= 480, "with every check at its limit"
    for check in CHECKS:
        if check.command[0].endswith("gpu_measure.py"):
            assert check.command[1] in gpu_measure.MEASUREMENTS
        else:
            assert (ROOT / check.command[5]).is_file() and check.command[1] == "pytest"
    assert all(find_spec(module) for module in gpu_check.PACKAGES)


@pytest.mark.parametrize(("program", "note"), [
    ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
    ("import time; print('{\"failed\": 0}', flush=True); time.sleep(60)", "not done after 1 s"),
    ("raise MemoryError('no room')", "MemoryError: no room"),
])  # fmt: skip
def test_a_check_that_crashes_or_hangs_fails_and_says_why(program, note, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_measure.py").write_text(program)
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (row,) = run_check(Check("x y", "p", CHECK.command, (EXACT,), seconds=1), "cpu", 1, tmp_path)
    assert row.ok is False and row.measured is None and note in row.note


def test_missing_packages_are_named_with_the_way_to_bring_them(monkeypatch, capsys):
    monkeypatch.setitem(gpu_check.PACKAGES, "no_such_module", "no-such-package")
    assert gpu_check.main(["--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "missing: no-such-package." in said and "WHEELS=wheels" in said


def test_unknown_parts_are_refused():
    with pytest.raises(SystemExit):
        gpu_check.main(["kernel"])


@pytest.mark.slow
def test_the_script_on_a_cpu(tmp_path):
    names = ["buckets ahead: bits", "1.5B, none", "1.5B, fused kernels"]
    command = ["bash", ROOT / "scripts" / "gpu_check.sh", "--device", "cpu", "--out", tmp_path, "--only", *names]
    ran = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "gpu_check.json").read_text()) and result["ok"] and result["versions"]["torch"]
    assert {row["check"] for row in result["rows"]} == {*names}
    measured = {(row["check"], row["figure"]): row for row in result["rows"]}
    assert measured["buckets ahead: bits", "failed"]["ok"] is True and measured["1.5B, none", "tokens/s"]["measured"] > 0
    assert measured["1.5B, none", "tokens/s"]["ok"] is measured["1.5B, none", "share of peak"]["ok"] is None, "aims of a GPU"
    assert "skipped: needs a GPU" in ran.stdout or "skipped: liger_kernel" in ran.stdout
