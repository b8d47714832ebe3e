"""The folder of a run: the lock, and which run the files belong to.

Earlier results are moved to another folder.
"""

import datetime
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

import yaml
from loguru import logger

from lightrft.config.errors import ConfigError
from lightrft.config.references import TRACKERS
from lightrft.config.sections import Config
from lightrft.config.values import read_object
from lightrft.models.launch.connection import LOST_AFTER
from lightrft.models.launch.rendezvous import launcher
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.checkpoint.atomic import write_file
from lightrft.strategy.checkpoint.manifest import LATEST, checkpoints, read_state

LOCK = ".lock"
DESCRIPTION = "run.json"
MODELS = {"model", "model_ema", "critic", "draft"}
RESULT_FILES = ("metrics.jsonl", "samples.jsonl", *sorted(MODELS))
"""Files and folders that only a run that has trained leaves."""
OTHER_FILES = (
    DESCRIPTION,
    *"config.yaml digests.jsonl report.html trace.json summary.json evaluation.json".split(),
    *"responses.jsonl ledger.sqlite ledger.json before_alarm tensorboard wandb swanlog comet".split(),
    *(f"{name}_run_id" for name in TRACKERS),
)
"""Other files and folders of a run; they are moved together with the results."""
PROCESS_KEY = uuid.uuid4().hex
"""Random name of this process: processes of two containers may have one number on one host."""
PROBE_BYTES = 4096
TAKEOVER = LOST_AFTER + 15
"""Seconds before a restarted run takes the lock over.

A file server may keep the lock of a rank whose machine is lost. By then that rank has ended: it had
noticed that the connection to the others was lost.
"""


def today() -> str:
    return datetime.date.today().isoformat()


class RunFolder:
    """Folder --save_path with its checkpoints, locked by this run.

    The process's end or release() frees the lock.
    """

    def __init__(self, config: Config, world: Axis):
        self.train = train = config.train
        self.path = Path(train.save_path)
        self.world = world
        inside = self.path / "checkpoints"
        self.checkpoints = Path(train.ckpt_path) if train.ckpt_path else inside
        self.outside = self.checkpoints.resolve() != inside.resolve()
        """True if the checkpoints are outside the run's own folder."""

        self.process = world.broadcast(f"process {os.getpid()} on {socket.gethostname()}")
        """Process of rank 0."""
        self.launchers = sorted({name for name in world.gather(launcher()) if name})
        """Names of the torchruns that have started the ranks."""
        self.restarted = world.broadcast(world.rank == 0 and self._is_restarted())
        """True if the folder belongs to an earlier attempt of this run: the same torchrun has
        started these ranks too."""
        self.id = ""
        """Unique id of the run; its checkpoints contain it."""
        self.date = ""
        """First day of the run, as YYYY-MM-DD. Prompts may contain it, so it stays the same when
        the run is resumed."""
        self._locks: list[IO[str]] = []

    @classmethod
    def claim(cls, config: Config, world: Axis) -> Self:
        """Lock the folder and check that all ranks can write to it.

        All ranks call this, before anything expensive. A run that torchrun has started again
        resumes: --load_checkpoint is set, and --overwrite has had its effect. Chat templates then
        write the date of the run.

        Raises ConfigError, on all ranks, if another run is using the folder, if it holds an earlier
        run's results and the configuration does not say what to do with them, or if it cannot be
        written.
        """
        folder = cls(config, world)
        if folder.restarted:
            config.train.load_checkpoint = True
            config.train.overwrite = False
            if world.rank == 0:
                logger.warning(
                    "torchrun has started this run again: it resumes from its newest checkpoint"
                )

        try:
            folder._together(lambda: folder._take() if world.rank == 0 else None)
            # Every rank tries to write, because it may be on another machine.
            folder._together(folder._probe)
        except ConfigError:
            folder.release()
            raise

        folder.id = world.broadcast(folder.id)
        began = folder.description().get("date") if config.train.load_checkpoint else None
        folder.date = world.broadcast(config.data.chat_template_date or began or today())
        if config.data.apply_chat_template:
            config.data.chat_template_date = folder.date

        return folder

    def set_aside(self) -> None:
        """Move an earlier run's results, if there are any, to FOLDER.previous for a new start.

        All ranks call this.
        """
        self._together(lambda: self._move_results() if self.world.rank == 0 else None)
        self.id = self.world.broadcast(self.id)

    def description(self) -> dict[str, Any]:
        """Read `run.json`; return an empty mapping if it is missing or invalid."""
        return read_object(self.path / DESCRIPTION)

    def describe(self, description: dict[str, Any]) -> None:
        """Write `run.json` in place, over the earlier one.

        This needs no free space on a full disk.
        """
        with open(os.open(self.path / DESCRIPTION, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            owner = {"process": self.process, "launchers": self.launchers}
            about = {"run": self.id, "date": self.date, **owner, **description}
            file.write((json.dumps(about, indent=2) + "\n").encode())
            file.truncate()

    def release(self) -> None:
        """Release the locks for other runs.

        Forked children hold the same lock, so closing the file is not enough.
        """
        for file in self._locks:
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()
        self._locks.clear()

    def _is_restarted(self) -> bool:
        before = self.description()
        launched = not set(self.launchers).isdisjoint(before.get("launchers", ()))
        return launched and before.get("process") != self.process

    def _together(self, action: Callable[[], None]) -> None:
        problem = ""
        try:
            action()
        except (ConfigError, OSError) as error:
            problem = str(error)
        if problems := list(dict.fromkeys(each for each in self.world.gather(problem) if each)):
            raise ConfigError("\n".join(problems))

    def _take(self) -> None:
        for folder, flag in self._folders():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock(folder, flag)
            except OSError as error:
                raise ConfigError(f"--{flag} {folder} cannot be written: {error}") from error

        run_id = self.description().get("run")
        saved = self._saved_runs()
        if self.train.load_checkpoint:
            if len(saved | ({run_id} if run_id else set())) > 1:
                raise ConfigError(
                    f"{self.checkpoints} has checkpoints of a run other than the one in"
                    f" {self.path}: set another --ckpt_path, or the --save_path of the run to"
                    " resume"
                )
            self.id = run_id or next(iter(saved), "") or uuid.uuid4().hex
            return

        self.id = uuid.uuid4().hex
        results = self._results()
        # With --overwrite they stay until the run begins, because it may fail before.
        if results and not self.train.overwrite:
            raise ConfigError(
                f"--save_path {self.path} has the results of an earlier run ({', '.join(results)}):"
                " --load_checkpoint resumes that run, another --save_path starts a separate one,"
                f" --overwrite moves it to {_previous(self.path)}"
            )

    def _folders(self) -> list[tuple[Path, str]]:
        """Return the folders to lock and to test, each with the flag that names it."""
        separate = self.outside and self.checkpoints.resolve() != self.path.resolve()
        return [(self.path, "save_path"), *([(self.checkpoints, "ckpt_path")] if separate else [])]

    def _saved_runs(self) -> set[str]:
        """Return the ids of the runs whose checkpoints can be resumed without a tag."""
        saved = [path for manifest, path in checkpoints(self.checkpoints) if manifest.resume]
        return {run for run in map(_run_of, saved) if run}

    def _results(self) -> list[str]:
        results = [
            name
            for name in RESULT_FILES
            if (path := self.path / name).is_dir() or path.is_file() and path.stat().st_size
        ]
        return results + [str(path) for _, path in checkpoints(self.checkpoints)[:1]]

    def _move_results(self) -> None:
        if not self._results():
            return
        self.id = uuid.uuid4().hex
        inside = [] if self.outside else ["checkpoints"]
        moved = _move(self.path, [*RESULT_FILES, *OTHER_FILES, *inside])
        if self.outside:
            names = [path.name for _, path in checkpoints(self.checkpoints)]
            aside = _move(self.checkpoints, [LATEST, *names])
            with suppress(OSError):
                # It says that this attempt had checkpoints, and where they are.
                (moved / "checkpoints").symlink_to(aside.resolve(strict=True))
        if self.train.load_checkpoint:
            _forget_attempts(self.path.resolve(), newest=moved)

    def _lock(self, folder: Path, flag: str) -> None:
        file = open(folder / LOCK, "a+")
        try:
            _flock(file, TAKEOVER if self.restarted else 0.0)
        except BlockingIOError:
            file.seek(0)
            holder, _, key = file.read().partition("\n")
            file.close()

            if self.restarted:
                logger.warning(
                    "{} is taken over from {}, whose machine is lost", folder / LOCK, holder
                )
                (folder / LOCK).unlink()
                return self._lock(folder, flag)

            if (holder, key) == (self.process, PROCESS_KEY):
                # an earlier attempt of this process, such as a cell of a notebook that failed
                return

            raise ConfigError(
                f"--{flag} {folder} is in use by another run ({holder or 'unknown process'}): wait"
                " until it ends, or set another folder"
            ) from None
        except OSError as error:
            file.close()
            logger.warning(
                f"{folder} cannot be locked ({error.strerror}): a second run in it would not be"
                " detected"
            )
            return

        self._locks.append(file)
        file.truncate(0)
        file.write(f"{self.process}\n{PROCESS_KEY}")
        file.flush()

    def _probe(self) -> None:
        """Write a small file as this rank, through to the disk."""
        for folder, flag in self._folders():
            file = folder / f".probe{self.world.rank}"
            try:
                write_file(file, bytes(PROBE_BYTES))
            except OSError as error:
                raise ConfigError(f"--{flag} {folder} cannot be written: {error}") from error
            finally:
                file.unlink(missing_ok=True)


def copy_records(origin: Path, folder: Path) -> None:
    """Copy what a run has written of its steps, for a run that goes on from it."""
    for name in ("metrics.jsonl", "samples.jsonl", "digests.jsonl", "ledger.sqlite"):
        if (origin / name).exists():
            shutil.copyfile(origin / name, folder / name)


def checkpoints_of(folder: Path) -> Path:
    """Return where the run in a folder has its checkpoints: inside, or in its --ckpt_path."""
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text()) if file.is_file() else {}
    return Path((config.get("train") or {}).get("ckpt_path") or folder / "checkpoints")


def _flock(file: IO[str], patience: float) -> None:
    """Lock an open file.

    Raise BlockingIOError if another process holds the lock for more than `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.2)


def _run_of(checkpoint: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if it cannot be read."""
    try:
        return read_state(checkpoint, {"run": str})["client"]["run"]
    except (OSError, ValueError):
        return None


def _previous(folder: Path) -> Path:
    """Return the first free name of FOLDER.previous, FOLDER.previous-2, ..."""
    folder = folder.resolve()
    names = (f"{folder.name}.previous{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def _forget_attempts(folder: Path, newest: Path) -> None:
    """Remove what earlier attempts left that died before their first complete checkpoint.

    A job that is requeued again and again would fill the disk. The newest stays, and so does
    everything else: folders with a model, a complete checkpoint, or files of somebody else.
    """
    known = {*RESULT_FILES, *OTHER_FILES, "checkpoints"}
    name = re.compile(re.escape(folder.name) + r"\.previous(-\d+)?")
    others = [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]
    for path in (each for each in others if each != newest and each.is_dir()):
        left = {each.name for each in path.iterdir()}
        if DESCRIPTION in left <= known - MODELS and not checkpoints(path / "checkpoints"):
            logger.warning("removing {}, of an attempt without a complete checkpoint", path)
            shutil.rmtree(path, ignore_errors=True)


def _move(folder: Path, names: list[str]) -> Path:
    target = _previous(folder)
    present = [name for name in names if (folder / name).exists()]
    if present:
        target.mkdir()
        for name in present:
            shutil.move(folder / name, target / name)
        logger.warning(
            "an earlier run's files in {} are now in {}: {}", folder, target, ", ".join(present)
        )
    return target
