"""Checkpoints in one folder: which there are, whether they are intact, and which are removed.

checkpoints/latest                  name of the newest checkpoint, for people and other tools
checkpoints/step20/manifest.json    size and checksum of every other file there; it is written last
checkpoints/step20/hf/              the model for from_pretrained, if requested
"""

import json
import os
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loguru import logger

from lightrft.core.metrics import GB
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.checkpoint import atomic

NOTHING: Mapping[str, Any] = MappingProxyType({})
MANIFEST = "manifest.json"
LATEST = "latest"
STATE = "state.json"
Kinds = Mapping[str, type]
"""Name in the caller's state -> type of the value."""


@dataclass
class Manifest:
    """Facts about a checkpoint, with size and checksum of the files."""

    number: int
    """Number of the checkpoint in the folder; the highest is the newest."""
    world_size: int
    resume: bool
    """True if a run may resume from it without naming the tag."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path relative to the checkpoint -> bytes and CRC-32."""

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read the manifest of a folder.

        Raise OSError or ValueError if it is missing or invalid.
        """
        try:
            with atomic.open_file(folder / MANIFEST) as file:
                manifest = Manifest(**json.load(file))
            numbers = [manifest.number, manifest.world_size]
            for size, checksum in manifest.files.values():
                numbers += [size, checksum]
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if set(map(type, numbers)) != {int} or type(manifest.resume) is not bool:
            raise ValueError("it is no manifest")
        return manifest


def manifest_steps(manifest: Manifest, world: Axis) -> list[Callable[[Path], None]]:
    """Return steps for write_folder() that add a manifest.

    Every rank reads a share of the files back, and rank 0 writes the manifest. No step can fail
    between two collectives.
    """
    names: list[str] = []
    measured: dict[str, tuple[int, int]] = {}

    def list_names(folder: Path) -> None:
        files = (path for path in folder.rglob("*") if path.is_file())
        names.extend(
            sorted(path.relative_to(folder).as_posix() for path in files) if world.rank == 0 else ()
        )

    # The files are read back from disk, so the checksum covers what was really written.
    def measure(folder: Path) -> None:
        local_names = world.broadcast(names)[world.rank :: world.size]
        measured.update({name: _measure(folder / name) for name in local_names})

    def write(folder: Path) -> None:
        for share in world.gather(measured):
            manifest.files |= share
        if world.rank == 0:
            atomic.write_file(folder / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())

    return [list_names, measure, write]


def checkpoints(root: Path, *, warn: bool = False) -> list[tuple[Manifest, Path]]:
    """Return all checkpoints with a readable manifest, newest first.

    With `warn`, log the folders without one.
    """
    manifests = []
    for path in root.iterdir() if root.is_dir() else ():
        if not path.is_dir() or path.name.endswith(atomic.TEMPORARY):
            continue

        try:
            manifests.append((Manifest.read(path), path))
        except (OSError, ValueError) as error:
            if warn:
                logger.warning(
                    f"{path} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
                )

    return sorted(manifests, key=lambda pair: pair[0].number, reverse=True)


def read_state(folder: Path, needs: Kinds = NOTHING) -> dict[str, Any]:
    """Return the state in a checkpoint; its `client`, the caller's, has at least what `needs` says.

    Raise OSError or ValueError for anything else.
    """
    try:
        with atomic.open_file(folder / STATE) as file:
            state = json.load(file)
        wrong = [
            name for name, kind in needs.items() if not isinstance(state["client"][name], kind)
        ]
        wrong = wrong if isinstance(state["client"], dict) else ["client"]
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{STATE} lacks an entry ({type(error).__name__}: {error})") from error
    if wrong:
        raise ValueError(f"{STATE} has no valid {wrong[0]}")
    return state


def damage(folder: Path, manifest: Manifest, needs: Kinds, world: Axis) -> list[str]:
    """Return what is wrong with the files of a checkpoint; empty if undamaged.

    Each rank reads a share, and all get the same list.
    """
    problems = []
    for name in sorted(manifest.files)[world.rank :: world.size]:
        size, checksum = manifest.files[name]
        try:
            actual_size, actual_checksum = _measure(folder / name)
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if actual_size != size:
            problems.append(f"{name} has {actual_size} bytes instead of {size}")
        elif actual_checksum != checksum:
            problems.append(f"{name} has changed")

    if problems := [problem for of_rank in world.gather(problems) for problem in of_rank]:
        return problems
    try:
        read_state(folder, needs)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    return world.broadcast(problems)


def newest_intact(root: Path, needs: Kinds, world: Axis) -> tuple[Manifest, Path] | None:
    """Return the newest checkpoint with only undamaged files.

    Damaged ones are logged as warnings.
    """
    # Ranks may see a shared folder at different times, so rank 0 says which checkpoints there are.
    candidates = world.broadcast(
        [pair for pair in checkpoints(root, warn=True) if pair[0].resume]
        if world.rank == 0
        else None
    )
    for manifest, path in candidates:
        problems = damage(path, manifest, needs, world)
        if not problems:
            return manifest, path
        if world.rank == 0:
            logger.warning(
                "checkpoint {} is damaged and is not used: {}", path, "; ".join(problems)
            )

    return None


def read_intact(path: Path, needs: Kinds, world: Axis) -> tuple[Manifest, Path]:
    """Return the checkpoint at `path`; raise CheckpointError if it is missing or damaged."""
    summary = f"{path} is not a complete checkpoint"
    try:
        manifest = atomic.run_on_all_ranks(world, summary, lambda: Manifest.read(path))
    except atomic.CheckpointError as error:
        names = ", ".join(found.name for _, found in reversed(checkpoints(path.parent))) or "none"
        raise atomic.CheckpointError(f"{error}; {path.parent} has {names}") from error
    if problems := damage(path, manifest, needs, world):
        raise atomic.CheckpointError(f"checkpoint {path} is damaged: {'; '.join(problems)}")
    return manifest, path


def next_number(root: Path, *, being_written: Collection[str]) -> int:
    """Return the next checkpoint number.

    Remove what interrupted runs have left behind: incomplete folders and files.
    """
    for path in root.glob(f"*{atomic.TEMPORARY}"):
        if path.name not in being_written:
            logger.warning("removing {}, which an interrupted run left behind", path)
            atomic.remove(path)
    return max((manifest.number for manifest, _ in checkpoints(root)), default=0) + 1


def update_latest(root: Path, tag: str, world: Axis) -> None:
    latest = root / LATEST
    atomic.run_on_first(
        world, f"{latest} could not be written", partial(atomic.replace_file, latest, tag.encode())
    )


def rotate(root: Path, max_num: int, max_gb: float) -> None:
    """Remove the oldest checkpoints until number and total size are within the limits.

    The newest is always kept.
    """
    total = 0.0
    for position, (manifest, path) in enumerate(checkpoints(root)):
        total += manifest.num_bytes / GB
        if position and (position >= max_num or total > max_gb):
            try:
                atomic.remove_folder(path)
            except OSError as error:
                logger.warning("old checkpoint {} could not be removed: {}", path, error)


def _measure(path: Path) -> tuple[int, int]:
    checksum = 0
    with atomic.open_file(path) as file:
        while chunk := file.read(2**24):
            checksum = zlib.crc32(chunk, checksum)
        return os.fstat(file.fileno()).st_size, checksum
