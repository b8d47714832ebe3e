"""Why: a tracker may fail, hang or be away, and the run must not.

What a tracker records must be complete and must contain no secret. The tests use the real packages
offline, each in a separate process, because they keep threads. Packages that are not installed are
left out.
"""

import json
import os
import sqlite3
import sys
import threading
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from loguru import logger

from lightrft.app.cli import MAINS
from lightrft.app.observe import trackers
from lightrft.app.observe.trackers import PACKAGES, Tracker, check_login, flat, hide_secrets
from lightrft.config import ConfigError, ObserveSection
from ranks import exit_codes, run_apart
from runs import prepare, rows_of

SECRET = "k3y-of-the-judge"
CONFIG = {
    "train": {"seed": 1, "stop": ["a", "b"], "none": None},
    "reward": {"reward": f"http://host/score?key={SECRET}"},
}
ROWS = [
    {"prompt": "1+1=", "response": "two and more", "reward": 1.0},
    {"prompt": "1+1=", "response": "3", "reward": 0.0},
]
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "COMET_START_ONLINE": "0"}


def forget(package: str) -> None:
    """Let the package be imported anew.

    Another test may have imported it, for example through TRL, and Trackio reads its folder from
    the environment only then.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def run_twice(name: str, folder: str) -> list[str]:
    """A run of two steps, and one that resumes after the first; returns the ids."""
    forget("trackio")
    os.environ.update(
        OFFLINE,
        TRACKIO_DIR=f"{folder}/trackio",
        MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db",
        REWARD_API_KEY=SECRET,
    )
    if name != "comet_ml":
        # Once it was imported, by whichever test, it records what MLflow does, and source code.
        os.environ["COMET_AUTO_LOG_DISABLE"] = "1"
    os.chdir(folder)
    sys.argv = ["train", "--reward_key", SECRET]

    ids = []
    section = ObserveSection(tracker_project="project", tracker_run_name="name")
    for resume_step, steps in ((None, (1, 2)), (1, (2, 3))):
        sink = Tracker(name, folder, section)
        sink.start(
            CONFIG if resume_step is None else CONFIG | {"train": {"seed": 2}}, 3, resume_step
        )
        for step in steps:
            sink.log(step, {"train/loss": 0.5 * step, "train/kl": float("nan")})
            sink.samples(step, ROWS)
        sink.close("failed" if resume_step is None else "finished")
        assert not sink._failed and sys.argv[2] == SECRET
        ids.append((Path(folder) / f"{name}_run_id").read_text())

    return ids


def recorded(folder: Path) -> bytes:
    """All bytes of all files, also of files in archives, and the rows of databases of SQLite, whose
    pages may divide a text.
    """
    content = b""
    for path in folder.rglob("*"):
        if path.suffix == ".zip":
            archive = zipfile.ZipFile(path)
            content += b"".join(archive.read(name) for name in archive.namelist())
        elif path.is_file():
            content += path.read_bytes()
        if path.suffix == ".db":
            content += "\n".join(sqlite3.connect(path).iterdump()).encode()
    return content


def losses(name: str, folder: Path) -> list[tuple[int, float]]:
    """Steps and losses in the tracker's own database."""
    if name == "mlflow":
        query = "select step, value from metrics where key = 'train/loss'"
        return sorted(sqlite3.connect(folder / "mlflow.db").execute(query).fetchall())

    rows = (
        sqlite3.connect(next(folder.glob("trackio/*.db")))
        .execute("select step, metrics from metrics")
        .fetchall()
    )
    return sorted(
        (step, found["train/loss"])
        for step, metrics in rows
        if "train/loss" in (found := json.loads(metrics))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_run_is_recorded_without_secrets_and_continued(name, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    ((first, second),) = run_apart(run_twice, [(name, str(tmp_path))])
    assert first and first == second
    content = recorded(tmp_path)
    for text in (b"train/loss", b"train.seed", b"two and more"):
        assert text in content, text
    assert SECRET.encode() not in content and b"http://host/score?***" in content
    if name in ("mlflow", "trackio"):
        assert losses(name, tmp_path) == [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]


def test_sections_are_one_level_without_secrets(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    found = flat(
        {"a": {"b": {"c": 1}, "list": [1, 2]}, "text": f"x{SECRET}", "none": None, "switch": True}
    )
    assert found == {"a.b.c": 1, "a.list": "1, 2", "text": "x***", "none": None, "switch": True}
    assert hide_secrets("http://a/b?key=1,c:0.5 https://d/e") == "http://a/b?***,c:0.5 https://d/e"


# -- a package that fails, as seen from accelerate's interface


class Failing:
    """A tracker of accelerate whose calls raise when told to."""

    broken: set[str] = set()
    calls: list[str] = []

    def __init__(self, project, **options):
        self.tracker = SimpleNamespace(id="id", finish=lambda code: self._called("finish"))

    def _called(self, name, *_, **__):
        Failing.calls.append(f"{name} {threading.current_thread().name}")
        if name in self.broken:
            raise ConnectionError(f"{name}:\n no route to host with {os.environ['SOME_TOKEN']}")

    def __getattr__(self, name):
        return lambda *arguments, **options: self._called(name)


@pytest.fixture
def failing(monkeypatch):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    monkeypatch.setenv("SOME_TOKEN", SECRET)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Failing)
    monkeypatch.setattr(Failing, "broken", set())
    monkeypatch.setattr(Failing, "calls", [])
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    yield lines
    for thread in threading.enumerate():
        if thread.name == "tracker wandb":  # it calls Failing, which the next test reads
            thread.join(timeout=30)
            assert not thread.is_alive()
    logger.remove(sink)


def test_a_tracker_that_cannot_start_ends_the_run_with_one_line(failing, tmp_path, monkeypatch):
    monkeypatch.setattr(Failing, "broken", {"start"})
    with pytest.raises(ConfigError) as error:
        Tracker("wandb", tmp_path, ObserveSection()).start({}, 3)
    assert (
        str(error.value)
        == "--report_to wandb cannot start: ConnectionError: start: no route to host with ***"
    )
    assert not (tmp_path / "wandb_run_id").exists()


def test_a_tracker_that_does_not_answer_ends_the_run(failing, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "TRACKER_START_SECONDS", 0.05)
    monkeypatch.setattr(Failing, "start", lambda self: threading.Event().wait(1), raising=False)
    with pytest.raises(ConfigError, match="--report_to wandb: no answer within 0.05 seconds"):
        Tracker("wandb", tmp_path, ObserveSection()).start({}, 3)


def test_a_later_failure_is_reported_once_and_the_run_goes_on(failing, tmp_path, monkeypatch):
    sink = Tracker("wandb", tmp_path, ObserveSection())
    sink.start({}, 3)
    monkeypatch.setattr(Failing, "broken", {"log", "log_table", "finish"})

    for step in (1, 2):
        sink.log(step, {"train/loss": 1.0})
        sink.samples(step, ROWS)

    sink.close("finished")
    assert (
        len(failing) == 1
        and "ConnectionError: log: no route to host with ***; the run continues" in failing[0]
    )
    thread = " tracker wandb"
    names = ["start", "store_init_configuration", *["log", "log_table"] * 2, "finish"]
    assert Failing.calls == [name + thread for name in names], (
        "later calls are attempted, all in one thread"
    )


def test_the_end_waits_only_for_a_while(failing, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(
        Failing, "log", lambda self, *_, **__: threading.Event().wait(0.5), raising=False
    )
    sink = Tracker("wandb", tmp_path, ObserveSection())
    sink.start({}, 3)
    sink.log(1, {})
    sink.close("finished")
    assert len(failing) == 1 and "not everything was sent within 0.05 seconds" in failing[0]


# -- in a run


def train_to_trackio(flags: list[str], folder: str, broken: set[str]) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    forget("trackio")
    os.environ.update(TRACKIO_DIR=folder, SOME_TOKEN=SECRET)
    if broken:
        LOGGER_TYPE_TO_CLASS["trackio"], Failing.broken = Failing, broken
    try:
        MAINS["train_sft"](flags)
    except SystemExit as ended:
        os._exit(ended.code)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_two_ranks_report_once_and_end_together_if_the_tracker_cannot_start(tmp_path):
    flags = [
        *prepare(tmp_path),
        "--train_batch_size=8",
        "--max_steps=2",
        "--report_to=trackio",
        f"--save_path={tmp_path}/run",
        "--max_tokens_per_microbatch=128",
    ]
    assert exit_codes(2, train_to_trackio, flags, str(tmp_path / "trackio"), set()) == [0, 0]
    assert losses("trackio", tmp_path) == [
        (row["step"], row["train/loss"]) for row in rows_of(tmp_path / "run")
    ]
    assert exit_codes(
        2, train_to_trackio, [*flags, "--overwrite"], str(tmp_path / "trackio"), {"start"}
    ) == [2, 2]


@pytest.mark.parametrize(
    ("variables", "netrc", "problem"),
    [
        ({}, "", True),
        ({"WANDB_API_KEY": "key"}, "", False),
        ({"WANDB_MODE": "offline"}, "", False),
        ({}, "machine api.wandb.ai login user password key", False),
        ({}, "machine other.host login user password key", True),
    ],
)
def test_a_missing_login_is_found_before_anything_is_loaded(
    tmp_path, monkeypatch, variables, netrc, problem
):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".netrc").write_text(netrc)
    (tmp_path / ".netrc").chmod(0o600)

    if problem:
        with pytest.raises(ConfigError, match="--report_to wandb cannot start: there is no login"):
            check_login(["tensorboard", "wandb"])
    else:
        check_login(["tensorboard", "wandb", "mlflow"])


def test_a_run_without_a_name_has_the_name_of_the_folder():
    for folder, section, name in (
        ("runs/mine", ObserveSection(), "mine"),
        ("runs/mine", ObserveSection(tracker_run_name="other"), "other"),
    ):
        assert Tracker("wandb", folder, section)._section.tracker_run_name == name
