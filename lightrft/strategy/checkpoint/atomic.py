"""Write a folder atomically from several ranks: all raise an error if one of them fails."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from torch.distributed.checkpoint import CheckpointException

from lightrft.models.parallel.collectives import Axis

T = TypeVar("T")
TEMPORARY = ".part"
OLD = ".old"
"""Suffixes of a folder that is being written, and of one that is being replaced."""


class CheckpointError(RuntimeError):
    """Failure to write or read a checkpoint or model folder; all ranks raise it."""


def write_folder(folder: Path, world: Axis, *steps: Callable[[Path], None]) -> None:
    """Run the steps in order on every rank, on a temporary folder, and rename it to `folder`.

    The temporary folder is in the same parent. If a step fails on any rank, all ranks raise the
    same CheckpointError; the temporary folder is removed, and the previous contents of `folder` are
    untouched. A step that fails on one rank must not leave other ranks waiting in a collective.
    """
    temporary = folder.with_name(folder.name + TEMPORARY)
    summary = f"{folder} could not be written"
    try:
        run_on_first(world, summary, partial(_start, temporary))
        for step in steps:
            run_on_all_ranks(world, summary, partial(step, temporary))
        run_on_first(world, summary, partial(_publish, temporary, folder))
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        world.barrier()
        raise


def run_on_all_ranks(world: Axis, summary: str, action: Callable[[], T]) -> T:
    """Run `action` and return its result; if it fails on any rank, all raise one CheckpointError.

    The error has the reasons of all ranks.
    """
    cause = None
    reasons = {}
    try:
        result = action()
    except CheckpointException as error:
        # torch's, not a subclass of Exception; it already contains the reasons of all ranks
        cause = error
        reasons = {rank: _reason(failure) for rank, (failure, _) in error.failures.items()}
    except Exception as error:
        cause = error
        reasons = {world.rank: _reason(error)}

    errors: dict[int, str] = {}
    for of_rank in world.gather(reasons):
        errors |= of_rank
    if errors:
        raise CheckpointError(
            f"{summary}: " + "; ".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors))
        ) from cause
    return result


def run_on_first(world: Axis, summary: str, action: Callable[[], None]) -> None:
    """Run `action` on rank 0; if it fails, every rank raises its CheckpointError."""
    run_on_all_ranks(world, summary, action if world.rank == 0 else lambda: None)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk. An OSError names the file."""
    with naming(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError raised inside.

    A failed write does not report it, unlike a failed open.
    """
    try:
        yield
    except OSError as error:
        raise (
            error if error.filename else OSError(error.errno, error.strerror, str(path))
        ) from error


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raise an OSError for anything else, such as a pipe, whose end may never come.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


def remove(path: Path) -> None:
    """Remove a file, a link but not what it points to, or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under another name, sync it to disk, then rename it."""
    temporary = path.with_name(path.name + TEMPORARY)
    remove(temporary)
    write_file(temporary, content)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file to disk that another library has written, or make names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Rename a folder and remove it.

    So a partly removed folder is never taken for a complete one.
    """
    temporary = folder.with_name(folder.name + TEMPORARY)
    remove(temporary)
    os.rename(folder, temporary)
    remove(temporary)


def _start(temporary: Path) -> None:
    remove(temporary)
    temporary.mkdir(parents=True)


def _publish(temporary: Path, folder: Path) -> None:
    _follow_umask(temporary)
    sync(temporary)

    # A rename cannot replace a folder that has contents. If the process dies between the two
    # renames, the old folder is still there under another name.
    old = folder.with_name(folder.name + OLD)
    if os.path.lexists(folder):
        remove(old)
        os.rename(folder, old)

    os.rename(temporary, folder)
    sync(folder.parent)
    remove(old)


def _follow_umask(temporary: Path) -> None:
    """Give all files the mode of a new file.

    safetensors makes them readable by the owner only.
    """
    probe = temporary / "mode.tmp"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in temporary.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
