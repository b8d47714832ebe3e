"""Why: the step benchmark reaches into the trainer to read the clock.

A renamed method must not go unnoticed.
"""

import json
import subprocess
import sys
import time

import pytest

from ranks import run_ranks
from scripts.bench import step
from scripts.bench.step import PHASES, Clock, arguments, digits, main, summary


@pytest.mark.slow
def test_two_ranks_report_every_phase(tmp_path, monkeypatch, capsys):
    forked = lambda number, _, argv: run_ranks(number, main, argv)  # noqa: E731  which is faster than torchrun
    monkeypatch.setattr(step, "on_ranks", forked)
    tiny = [
        "--engine=hf",
        "--ranks=2",
        "--steps=3",
        "--prompts=2",
        "--samples=4",
        "--micro=4",
        "--max-new=4",
    ]
    main([*tiny, f"--out={tmp_path / 'lines'}"])

    # packages speak too
    printed = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert printed == [
        json.loads(line) for line in (tmp_path / "lines.rank0").read_text().splitlines()
    ]
    *rows, summary = printed
    assert (
        [row["step"] for row in rows] == [1, 2, 3] and summary["summary"] and summary["world"] == 2
    )

    for row in rows:
        assert all(
            row[phase] > 0 and row[f"{phase}_cpu"] >= 0 for phase in PHASES if phase != "old_logp"
        )
        assert row["total"] == pytest.approx(sum(row[phase] for phase in PHASES[1:]))
        assert (
            4 <= row["gen_tokens"] <= 16
            and row["prompt_tokens"] > 4
            and row["rss_mb"] > 0
            and 0 <= row["reward"] <= 1
        )

    assert (tmp_path / "lines.rank1").exists()


def test_time_is_charged_once():
    began = time.perf_counter()
    clock = Clock()
    with clock.phase("gen"):
        time.sleep(0.02)
        with clock.phase("sync"):
            time.sleep(0.05)
    clock.end_of_step({})
    (row,) = clock.rows
    assert row["sync"] >= 0.05 and row["gen"] >= 0.02
    assert row["total"] == pytest.approx(row["gen"] + row["sync"])
    assert row["total"] <= time.perf_counter() - began


def test_time_of_an_iterator_is_that_of_its_items():
    class Engine:
        def stream(self):
            for item in range(3):
                time.sleep(0.02)
                yield item

    clock = Clock()
    engine = Engine()
    clock.charge(engine, "stream", "gen")
    with clock.phase("prep"):
        for _ in engine.stream():
            time.sleep(0.05)
    clock.end_of_step({})
    (row,) = clock.rows
    assert (
        row["gen"] >= 0.06
        and row["prep"] >= 0.15
        and row["total"] == pytest.approx(row["gen"] + row["prep"])
    )


def test_worker_processes_belong_to_the_step():
    """One still runs at the end of the step, the other has ended."""
    spin = "import time\nwhile time.process_time() < .2: pass\nprint(flush=True)\n"
    clock = Clock()
    subprocess.run([sys.executable, "-c", spin], capture_output=True, check=True)
    command = [sys.executable, "-c", f"{spin}input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        clock.end_of_step({})
        clock.end_of_step({})
        worker.communicate(b"\n")

    first, second = clock.rows
    assert first["prep_cpu"] == first["total_cpu"]
    assert round(first["total_cpu"], 6) >= 0.38  # the kernel counts in 0.01 s
    assert second["prep_cpu"] < 0.1  # processor time, which a busy machine does not lengthen


def test_summary_names_the_model(tmp_path):
    clock = Clock()
    clock.end_of_step({"gen_tokens": 1, "prompt_tokens": 1, "reward": 0.0})
    own = [f"--model={tmp_path / 'own'}/"]
    assert summary(clock.rows, arguments(own))["model"] == "own"
    assert summary(clock.rows, arguments(["--preset=vocab32k"]))["model"] == "vocab32k"


def test_reward():
    class Sample:
        def __init__(self, text):
            self.text = text

    assert digits([Sample("42"), Sample("4x"), Sample("")], ["42", "9", "9"]) == [1.0, 0.05, 0.0]
