"""Why: a resumed run must not repeat rows, files must be readable by others' tools, and a terminal
must survive model text.
"""

import errno
import io
import json
import threading
import time

import pytest
from loguru import logger
from rich.console import Console as RichConsole

from lightrft.app.observe.console import HEADLINES, console, sparkline
from lightrft.app.observe.sinks import (
    JsonLines,
    Observer,
    Sink,
    TensorBoard,
    encode_row,
    read_ends,
    read_rows,
)


def write_steps(folder, steps, resume_step=None):
    sink = JsonLines(folder)
    sink.start({}, 10, resume_step)
    for step in steps:
        sink.log(step, {"train/loss": float(step), "run": float(resume_step or 0)})
        sink.samples(
            step, [{"prompt": "1+1=", "response": "2"}, {"prompt": "2+2=", "response": "5"}]
        )
    sink.close("finished")


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    write_steps(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "train/lo')  # killed while writing
    write_steps(tmp_path, range(4, 7), resume_step=3)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["run"] for row in rows] == [0, 0, 0, 3, 3, 3]
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        6,
        6,
    ]


def test_a_fresh_run_keeps_the_earlier_files_aside(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [1])
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    assert len(read_rows(tmp_path / "metrics.previous.jsonl")) == 2


def test_rows_are_strict_json_whatever_is_in_them():
    row = {"step": 1, "nan": float("nan"), "inf": float("-inf"), "text": "é\u2028\x00\ud800\n"}

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = encode_row(row)
    assert line.count(b"\n") == 1
    assert json.loads(line, parse_constant=refuse) == row | {"nan": None, "inf": None}


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_broken_rows_are_left_out_with_a_warning_and_a_run_continues(tmp_path, name):
    """A power cut leaves zeros or halves of rows, at the end and, after a resume, anywhere."""
    write_steps(tmp_path, [1, 2])
    content = (tmp_path / name).read_bytes()
    broken = b'{"step": 2, "tra\x00\x00\xff\n17\n{"no": "step"}\n'
    (tmp_path / name).write_bytes(
        content + broken + b"[" * 9000 + b'\n{"step": 3, "train/loss": 3.0}\n{"step": 4, "train'
    )
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    write_steps(tmp_path, [4], resume_step=3)
    logger.remove(sink)
    first = content.count(b"\n") + 1
    assert lines == [f"{tmp_path / name}: 5 invalid lines are skipped, the first is line {first}\n"]
    assert sorted({row["step"] for row in read_rows(tmp_path / name)}) == [1, 2, 3, 4]


@pytest.mark.parametrize("tail", [2**24, 200])
def test_the_ends_of_a_long_file(tmp_path, monkeypatch, tail):
    monkeypatch.setattr("lightrft.app.observe.sinks.TAIL_BYTES", tail)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(
        b"".join(encode_row({"step": step}) for step in range(1, 101)) + b'{"step": 101'
    )
    assert [row["step"] for row in read_ends(path, 4)] == [1, 2, 3, 4, 98, 99, 100]
    path.write_bytes(b"".join(encode_row({"step": step}) for step in range(1, 7)))
    assert [row["step"] for row in read_ends(path, 4)] == [1, 2, 3, 4, 5, 6]
    assert read_ends(tmp_path / "none", 4) == []


def test_a_failed_write_names_its_file(tmp_path):
    class Full(io.BytesIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    sink = JsonLines(tmp_path)
    sink.start({}, 10)
    sink._files[0] = Full()
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/metrics.jsonl'"):
        sink.log(1, {"train/loss": 1.0})


def test_tensorboard_reads_its_files_and_a_resume_hides_the_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value, resume_step in ((range(1, 6), 1.0, None), (range(4, 6), 2.0, 3)):
        sink = TensorBoard(tmp_path)
        sink.start({"train": {"seed": 1}}, 5, resume_step)
        for step in steps:
            sink.log(step, {"train/loss": value})
            sink.samples(step, [{"prompt": "a", "response": "b"}])
        sink.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert scalars == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def test_the_observer_tells_all_and_closes_all_even_when_one_fails():
    class Recorder(Sink):
        def __init__(self, fails=False):
            self.heard = []
            self.fails = fails

        def log(self, step, metrics):
            self.heard.append((step, metrics))

        def close(self, status):
            self.heard.append(status)
            if self.fails:
                raise OSError("disk full")

    sinks = [Recorder(), Recorder(fails=True), Recorder()]
    observer = Observer(sinks)
    observer.start({}, 3)
    observer.phase("train")
    observer.log(1, {"train/loss": 2.0})
    with pytest.raises(OSError, match="disk full"):
        observer.close("failed")
    assert [sink.heard for sink in sinks] == [[(1, {"train/loss": 2.0}), "failed"]] * 3
    Observer().log(1, {})  # other ranks


class Slow(Sink):
    """A file on a disk that writes when `disk` is set, and fails in step 3."""

    in_background = True

    def __init__(self):
        self.rows = []
        self.disk = threading.Event()

    def log(self, step, metrics):
        assert self.disk.wait(60)
        if step == 3:
            raise OSError("disk full")
        self.rows.append(step)


def test_files_are_written_while_the_caller_goes_on():
    """In order; all rows are there after a flush.

    After a failure nothing is written, and whoever calls next gets it.
    """
    observer = Observer([slow := Slow()])
    observer.log(1, {}), observer.log(2, {})
    assert slow.rows == []
    slow.disk.set()
    observer.writer.flush()
    assert slow.rows == [1, 2]
    observer.log(3, {})
    while observer.writer.error is None:
        time.sleep(0.01)
    with pytest.raises(OSError, match="disk full"):
        observer.log(4, {})
    with pytest.raises(OSError, match="disk full"):
        observer.writer.flush()
    assert slow.rows == [1, 2]


def test_the_end_of_a_run_writes_what_waits():
    """A failure is raised unless the run has failed by itself."""
    observer = Observer([slow := Slow()])
    observer.log(1, {})
    threading.Timer(0.1, slow.disk.set).start()
    observer.close("failed")
    assert slow.rows == [1]
    observer.log(3, {})
    observer.close("failed")
    with pytest.raises(OSError, match="disk full"):
        observer.close("interrupted")


def test_a_slow_disk_is_waited_for(monkeypatch):
    monkeypatch.setattr("lightrft.app.observe.sinks.WRITER_BACKLOG", 2)
    observer = Observer([slow := Slow()])
    observer.log(1, {}), observer.log(2, {})
    caller = threading.Thread(target=observer.log, args=(4, {}))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    slow.disk.set()
    caller.join(60)
    observer.close("finished")
    assert slow.rows == [1, 2, 4]


JUDGED = [
    f"train/{name}"
    for name in (
        "accuracy",
        "margin",
        "reward_chosen",
        "reward_rejected",
        "reward_desirable",
        "reward_undesirable",
        "probability_right",
        "probability_wrong",
    )
]


def run_console(terminal, rows):
    out = io.StringIO()
    sink = console(RichConsole(file=out, force_terminal=terminal, width=120, height=40))
    sink.start({}, 12)

    for step, row in enumerate(rows, start=1):
        sink.phase("generate")
        sink.samples(
            step, [{"prompt": "1+1=", "response": "\x1b]0;owned\x07[red]2\nx", "reward": 1.0}]
        )
        sink.log(step, row)

    sink.close("finished")
    return out.getvalue()


def test_console_without_a_terminal_prints_a_table():
    rows = [
        {"rollout/reward": 0.25, "engine/logprob_mismatch": 3.1e-6},
        {"rollout/reward": 0.5, "engine/logprob_mismatch": 0.0},
    ]
    header, first, second, last = run_console(False, rows).splitlines()
    assert header == " step  reward  mismatch  left" and first == " 1/12    0.25    3.1e-6"
    assert second.startswith(" 2/12     0.5         0  ") and last.startswith("finished after")


def test_console_repeats_the_header_and_gives_an_evaluation_a_line_of_its_own():
    """The columns do not move, and the same number is not shown twice."""
    evaluation = {
        "eval/accuracy": 0.61,
        "eval/reward": 0.61,
        "eval/own/reward": 0.2,
        "eval/own/truncated": 1.0,
    }
    plain = {"rollout/reward": 0.5}
    lines = run_console(False, [plain, plain | evaluation, *[plain] * 20]).splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith(" step")] == [0, 22]
    assert lines[3] == "       held-out: accuracy 0.61  own reward 0.2"
    assert lines[2][:13] == " 2/12     0.5"


def test_console_shows_what_a_supervised_run_has():
    header, line, held_out, _ = run_console(
        False, [{"train/loss": 2.5, "some/other": 1.0, "eval/loss": 2.0}]
    ).splitlines()
    assert (header, line, held_out) == (
        " step    loss  left",
        " 1/12     2.5",
        "       held-out: loss 2",
    )


def test_console_shows_the_rewards_of_roles_beside_the_reward():
    """The sum over the roles says little: in a game it is always 0."""
    row = {"train/entropy": 2.0, "reward/first": -0.5, "reward/second": 0.5, "rollout/reward": 0}
    header, line, _ = run_console(False, [row]).splitlines()
    assert header.split() == ["step", "reward", "first", "second", "entropy", "left"]
    assert line.split() == ["1/12", "0", "-0.5", "0.5", "2"]


@pytest.mark.parametrize(
    "names",
    [
        ["accuracy", "margin", "reward_chosen", "reward_rejected"],
        ["accuracy", "reward_desirable", "reward_undesirable"],
        ["accuracy", "probability_right", "probability_wrong"],
    ],
)
def test_console_shows_what_a_run_on_judged_answers_has(names):
    row = {f"train/{name}": (number + 1) / 8 for number, name in enumerate(names)}
    header, line, _ = run_console(False, [row]).splitlines()
    assert len(header.replace("p right", "x").replace("p wrong", "x").split()) == len(names) + 2
    assert all(f"{(number + 1) / 8:g}" in line for number in range(len(names)))


def test_a_line_of_a_whole_run_fits_into_a_window():
    row = dict.fromkeys(HEADLINES, -1.25e-5) | {"rollout/reward": 0.5}
    of_ppo = {
        name: value
        for name, value in row.items()
        if name not in JUDGED and not name.startswith("critic/")
    }
    header, line, _ = run_console(False, [of_ppo]).splitlines()
    assert max(len(header), len(line)) <= 120


def test_console_on_a_terminal_shows_progress_metrics_and_a_harmless_sample():
    out = run_console(
        True, [{"rollout/reward": 0.25}, {"rollout/reward": 0.75, "perf/tokens_per_second": 2100.0}]
    )
    final = out[out.rindex("finished") :]
    assert (
        "2/12" in final
        and "0.75" in final
        and "2,100" in final
        and "▁█" in final
        and "from 0.25" in final
    )
    assert "\\x1b]0;owned\\x07[red]2⏎x" in final
    assert "\x1b]0;" not in out and "\x07" not in out, (
        "model text must not reach the terminal as a command"
    )


def test_sparkline_has_gaps_where_values_are_not_finite():
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert len(sparkline([float(value) for value in range(1000)])) <= 32
