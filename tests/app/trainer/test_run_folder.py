"""Who may write to a run's folder, and where an earlier run's files go. No result is deleted."""

import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from loguru import logger

from lightrft.app.run.run_folder import RunFolder
from lightrft.config import Config, ConfigError
from lightrft.models.launch.rendezvous import launcher
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.checkpoint.manifest import Manifest
from ranks import run_ranks
from strategy.training import fill_the_disk

ALONE = Axis("world", 1, 0, None)


def config(folder: Path, **train) -> Config:
    made = Config()
    for name, value in {"save_path": str(folder), **train}.items():
        setattr(made.train, name, value)
    return made


def claim(folder: Path, **train) -> RunFolder:
    return RunFolder.claim(config(folder, **train), ALONE)


def use(
    folder: Path, run: str, *, checkpoints: Path | None = None, steps: tuple[int, ...] = ()
) -> None:
    """Leave there what a run leaves, and something that is not a run's."""
    (folder / "model").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "of": "{run}"}}\n')
    (folder / "run.json").write_text(json.dumps({"run": run, "status": "finished"}))
    for step in steps:
        path = (checkpoints or folder / "checkpoints") / f"step{step}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps(vars(Manifest(step, 1, True))))
        (path / "state.json").write_text(json.dumps({"client": {"step": step, "run": run}}))


def refusal(folder: Path, **train) -> str:
    with pytest.raises(ConfigError) as error:
        claim(folder, **train)
    return str(error.value)


def test_a_fresh_run_in_a_used_folder_is_refused_with_the_ways_out(tmp_path):
    use(tmp_path / "run", "a", steps=(2,))
    said = refusal(tmp_path / "run")
    for way in (
        "results of an earlier run (metrics.jsonl, model, ",
        "--load_checkpoint resumes",
        "another --save_path",
        f"--overwrite moves it to {tmp_path / 'run.previous'}",
    ):
        assert way in said

    assert (tmp_path / "run" / "metrics.jsonl").read_text() and not (
        tmp_path / "run.previous"
    ).exists()


def test_overwrite_moves_and_deletes_nothing(tmp_path):
    for run, previous in (("a", "run.previous"), ("b", "run.previous-2")):
        use(tmp_path / "run", run, steps=(2, 4))
        folder = claim(tmp_path / "run", overwrite=True)
        assert not (tmp_path / previous).exists(), "nothing is moved by a run that has not begun"
        folder.set_aside()
        moved = tmp_path / previous
        assert sorted(path.name for path in moved.iterdir()) == [
            "checkpoints",
            "metrics.jsonl",
            "model",
            "run.json",
        ]
        assert json.loads((moved / "metrics.jsonl").read_text())["of"] == run
        assert sorted(path.name for path in (moved / "checkpoints").iterdir()) == ["step2", "step4"]
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "data"]
        (tmp_path / "run" / "data").rmdir()


def test_checkpoints_elsewhere_count_and_are_moved_too(tmp_path):
    use(tmp_path / "old", "a", checkpoints=tmp_path / "ckpt", steps=(2,))
    (tmp_path / "ckpt" / "notes").write_text("mine")
    elsewhere = {"ckpt_path": str(tmp_path / "ckpt")}
    assert "an earlier run (" in refusal(tmp_path / "new", **elsewhere)
    claim(tmp_path / "new", overwrite=True, **elsewhere).set_aside()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [".lock", "notes"]
    assert [path.name for path in (tmp_path / "ckpt.previous").iterdir()] == ["step2"]


def test_what_died_before_its_first_step_is_in_nobody_s_way(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "run.json").write_text('{"status": "fail')
    claim(tmp_path)


def test_a_continued_run_keeps_its_identity_and_takes_no_other_s_checkpoints(tmp_path):
    use(tmp_path / "run", "a", steps=(2,))
    continued = claim(tmp_path / "run", load_checkpoint=True)
    assert continued.id == "a"
    continued.release()
    use(tmp_path / "other", "b")
    elsewhere = {"load_checkpoint": True, "ckpt_path": str(tmp_path / "run" / "checkpoints")}
    assert "has checkpoints of a run other than" in refusal(tmp_path / "other", **elsewhere)
    assert claim(tmp_path / "new", **elsewhere).id == "a", (
        "a folder without a run of its own continues that of the checkpoints"
    )


def test_nothing_to_continue_moves_the_earlier_results(tmp_path):
    """A job that is requeued before its first save begins afresh in its folder.

    It loses no row.
    """
    use(tmp_path / "run", "a")
    folder = claim(tmp_path / "run", load_checkpoint=True)
    folder.set_aside()
    assert folder.id not in ("", "a")
    assert json.loads((tmp_path / "run.previous" / "metrics.jsonl").read_text())["of"] == "a"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_of_attempts_without_a_checkpoint_the_newest_is_kept(tmp_path):
    """Also if they left incomplete checkpoints; nothing else of a user is removed."""

    def leave(name: str, run: str, steps: tuple[int, ...] = ()) -> Path:
        folder = tmp_path / name
        use(folder, run, steps=steps)
        for made in ("model", "data"):
            (folder / made).rmdir()
        return folder

    (leave("run.previous-2", "kept") / "model").mkdir()
    (leave("run.previous-3", "kept") / "notes").mkdir()
    (leave("run.previous-4", "kept") / "run.json").unlink()
    leave("run.previous-5", "kept", steps=(2,))
    leave("run.previous.mine", "kept")
    leave("other.previous", "kept")
    before = {path.name for path in tmp_path.iterdir()}

    for attempt in ("a", "b", "c", "d"):
        (leave("run", attempt) / "checkpoints" / "step2.part").mkdir(parents=True)
        folder = claim(tmp_path / "run", load_checkpoint=True)
        folder.set_aside()
        folder.release()
        (new,) = {path.name for path in tmp_path.iterdir()} - before - {"run"}
        assert json.loads((tmp_path / new / "metrics.jsonl").read_text())["of"] == attempt
    assert before <= {path.name for path in tmp_path.iterdir()}


def test_an_attempt_whose_checkpoints_are_elsewhere_is_kept(tmp_path):
    """Why: its checkpoints are not in its folder, and it was removed as if it had none."""
    for attempt, steps in (("a", (2,)), ("b", ()), ("c", ()), ("d", ())):
        use(tmp_path / "run", attempt, checkpoints=tmp_path / "ckpt", steps=steps)
        for made in ("model", "data"):
            (tmp_path / "run" / made).rmdir()
        folder = claim(tmp_path / "run", load_checkpoint=True, ckpt_path=str(tmp_path / "ckpt"))
        folder.set_aside()
        folder.release()

    left = {
        json.loads((path / "run.json").read_text())["run"]: path
        for path in tmp_path.glob("run.previous*")
    }
    assert set(left) == {"a", "d"}
    assert [path.name for path in (left["a"] / "checkpoints").iterdir()] == ["step2"]


# -- the lock


def hold(folder: Path, last: str) -> None:
    """Claim the folder, start a process that lives on, and end so."""
    claimed = claim(folder)
    (folder / "pid").write_text(str(os.getpid()))
    if not os.fork():
        time.sleep(600)
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)

    if last == "release":
        claimed.release()
        time.sleep(600)

    os._exit(3)


def test_two_runs_cannot_share_a_folder_and_the_holder_is_named(tmp_path):
    holder = os.fork()
    if not holder:
        os.setpgid(0, 0)
        hold(tmp_path / "run", "release")

    try:
        wait_for(tmp_path / "run" / "ready")
        where = f"is in use by another run (process {holder} on {socket.gethostname()})"
        assert where in refusal(tmp_path / "run")
        assert where in refusal(tmp_path / "new", ckpt_path=str(tmp_path / "run")), (
            "a folder of checkpoints is locked as well"
        )
        (tmp_path / "run" / "go").touch()

        deadline = time.monotonic() + 20
        while True:
            try:
                claim(tmp_path / "run")
                break
            except ConfigError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        os.killpg(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def test_a_killed_run_leaves_no_lock(tmp_path):
    holder = os.fork()
    if not holder:
        claim(tmp_path)
        (tmp_path / "ready").touch()
        time.sleep(600)
    wait_for(tmp_path / "ready")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    claim(tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cell_of_a_notebook_may_be_run_again(tmp_path):
    failed = claim(tmp_path)
    assert claim(tmp_path, ckpt_path=str(tmp_path)).id != failed.id, (
        "one folder for both, and a lock that this process holds"
    )


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    monkeypatch.setattr(fcntl, "flock", refuse)
    claim(tmp_path)
    logger.remove(sink)
    assert lines == [
        f"{tmp_path} cannot be locked (No locks available): a second run in it would not be"
        " detected\n"
    ]


# -- where nothing can be written


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path):
    (tmp_path / "file").touch()
    assert f"--save_path {tmp_path / 'file' / 'run'} cannot be written: [Errno 20]" in refusal(
        tmp_path / "file" / "run"
    )
    said = refusal(tmp_path / "run", ckpt_path=str(tmp_path / "file" / "ckpt"))
    assert f"--ckpt_path {tmp_path / 'file' / 'ckpt'} cannot be written: [Errno 20]" in said


def full(folder: Path, rank: int) -> str:
    if dist.get_rank() == rank:
        fill_the_disk(1000)
    try:
        RunFolder.claim(config(folder), Axis("world", 2, dist.get_rank(), dist.group.WORLD))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_any_rank_is_found_at_the_start_by_all(tmp_path, rank):
    said = run_ranks(2, full, tmp_path, rank)
    assert said[0] == said[1]
    assert (
        said[0] == f"--save_path {tmp_path} cannot be written: [Errno 27] File too large:"
        f" '{tmp_path}/.probe{rank}'"
    )


# -- started again by the same torchrun


@pytest.fixture
def under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launcher()
    return monkeypatch


def earlier_attempt(folder: Path, **owner) -> None:
    """Write what an earlier attempt with a checkpoint leaves.

    By default another process of this torchrun made it.
    """
    use(folder, "a", steps=(2,))
    description = {
        "run": "a",
        "status": "running",
        "process": "process 1 on lost",
        "launchers": ["torchrun 1", launcher()],
    }
    (folder / "run.json").write_text(json.dumps(description | owner))


def test_a_run_that_torchrun_starts_again_resumes(tmp_path, under_torchrun):
    """--overwrite has had its effect by then: nothing is moved any more."""
    earlier_attempt(tmp_path / "run")
    again = config(tmp_path / "run", overwrite=True)
    folder = RunFolder.claim(again, ALONE)
    assert folder.id == "a" and (again.train.load_checkpoint, again.train.overwrite) == (
        True,
        False,
    )
    assert not (tmp_path / "run.previous").exists()
    folder.describe({"status": "running"})
    assert json.loads((tmp_path / "run" / "run.json").read_text())["launchers"] == [launcher()]
    folder.release()


@pytest.mark.parametrize(
    "owner",
    [
        {"launchers": ["torchrun 1"]},
        {"process": f"process {os.getpid()} on {socket.gethostname()}"},
    ],
)
def test_another_torchrun_s_run_and_another_run_of_this_process_are_still_refused(
    tmp_path, under_torchrun, owner
):
    earlier_attempt(tmp_path / "run", **owner)
    assert "has the results of an earlier run" in refusal(tmp_path / "run")


def test_a_process_of_another_container_with_the_same_number_is_another_run(tmp_path, monkeypatch):
    held = claim(tmp_path / "run")
    claim(tmp_path / "run")  # by this process
    monkeypatch.setattr("lightrft.app.run.run_folder.PROCESS_KEY", "that of another one")
    assert f"(process {os.getpid()} on {socket.gethostname()})" in refusal(tmp_path / "run")
    held.release()


def test_without_torchrun_nothing_resumes_by_itself(tmp_path, under_torchrun):
    earlier_attempt(tmp_path / "run")
    under_torchrun.delenv("TORCHELASTIC_RUN_ID")
    assert launcher() == "" and "has the results of an earlier run" in refusal(tmp_path / "run")


@pytest.mark.parametrize("freed", [True, False])
def test_the_lock_of_an_earlier_attempt_is_waited_for_and_then_taken_over(
    tmp_path, under_torchrun, freed
):
    """A file server may keep the lock of a machine that is lost."""
    earlier_attempt(tmp_path / "run")
    under_torchrun.setattr("lightrft.app.run.run_folder.TAKEOVER", 0.5)
    held = open(tmp_path / "run" / ".lock", "a+")
    fcntl.flock(held, fcntl.LOCK_EX)
    if freed:
        threading.Timer(0.2, held.close).start()
    before = os.stat(held.fileno()).st_ino
    folder = claim(tmp_path / "run")
    assert ((tmp_path / "run" / ".lock").stat().st_ino == before) == freed
    with open(tmp_path / "run" / ".lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.release()
