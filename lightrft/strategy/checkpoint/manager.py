"""Save and load all that a run needs to continue, on the same or another number of ranks."""

import io
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LRScheduler

from lightrft.models.parallel.collectives import Axis
from lightrft.models.weight_files import refuse_tensors
from lightrft.strategy.checkpoint.atomic import naming, run_on_all_ranks, write_file, write_folder
from lightrft.strategy.checkpoint.manifest import (
    NOTHING,
    STATE,
    Kinds,
    Manifest,
    manifest_steps,
    newest_intact,
    next_number,
    read_intact,
    read_state,
    rotate,
    update_latest,
)
from lightrft.strategy.checkpoint.model_state import ModelState
from lightrft.strategy.checkpoint.reader import CheckpointReader
from lightrft.strategy.checkpoint.zero_fragment import LoadPlanner, SavePlanner

SCHEDULERS = "schedulers.pt"
ITEMS_FILE = "parts.pt"
HF = "hf"


@dataclass(slots=True)
class CheckpointState:
    """Models and other items of a run that are saved in a checkpoint or loaded from one."""

    models: dict[str, ModelState]
    items: Mapping[str, Stateful]
    """Other objects with a state of tensors and plain types.

    The state is equal on all ranks, and rank 0 writes it.
    """
    world: Axis
    device: torch.device

    @property
    def schedulers(self) -> dict[str, LRScheduler]:
        """Return the schedules of the models that have one."""
        return {name: each.scheduler for name, each in self.models.items() if each.scheduler}


@dataclass(slots=True)
class OptionalItems:
    """Items that may come or go when a run is resumed; one that a checkpoint lacks begins anew."""

    items: Mapping[str, Stateful]

    def state_dict(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.items.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.items.keys() & state.keys():
            self.items[name].load_state_dict(state[name])


@dataclass(slots=True)
class Snapshot:
    """Tensors and files that one rank writes."""

    tensors: dict[str, Any]
    """Model name -> tensors."""
    files: dict[str, bytes]


def snapshot(
    contents: CheckpointState, state: dict[str, Any], *, tensors: dict[str, Any]
) -> Snapshot:
    """Build the snapshot of this rank; `state` has JSON types only.

    All ranks call it, since items may use collectives.
    """
    files = {_random_file(contents.world.rank): _bytes(_random_states(contents.device))}
    items = {name: item.state_dict() for name, item in contents.items.items()}
    if contents.world.rank == 0:
        schedulers = {name: each.state_dict() for name, each in contents.schedulers.items()}
        files |= {
            STATE: json.dumps(state).encode(),
            SCHEDULERS: _bytes(schedulers),
            ITEMS_FILE: _checked_bytes(items),
        }

    return Snapshot(tensors, files)


def write(
    snapshot: Snapshot,
    folder: Path,
    world: Axis,
    *,
    max_num: int,
    max_mem: float,
    latest: bool,
    hf: Path | None = None,
) -> None:
    """Write `folder` atomically, and remove old checkpoints beyond the number and the total in GB.

    Only a `latest` checkpoint is resumed without a tag. `hf` is a model folder that is moved into
    it. Raise CheckpointError on all ranks if any of them cannot write; earlier checkpoints are then
    untouched.
    """
    root = folder.parent
    manifest = Manifest(0, world.size, latest)

    def begin(path: Path) -> None:
        if world.rank == 0:
            manifest.number = next_number(
                root, being_written={path.name} | ({hf.name} if hf else set())
            )
            if hf is not None:
                hf.rename(path / HF)

    write_folder(
        folder,
        world,
        begin,
        partial(_write_tensors, snapshot.tensors, world),
        lambda path: [write_file(path / name, content) for name, content in snapshot.files.items()],
        *manifest_steps(manifest, world),
    )
    # Only now: `latest` must never name a checkpoint that is not complete.
    if latest:
        update_latest(root, folder.name, world)
    if world.rank == 0:
        rotate(root, max_num, max_mem)
    world.barrier()


def find(
    root: Path, tag: str | None, world: Axis, *, needs: Kinds = NOTHING
) -> tuple[Manifest, Path, dict[str, Any]] | None:
    """Return `root/tag`, or the newest undamaged checkpoint, as (manifest, path, state).

    None if there is none. Raise CheckpointError if the requested tag is missing or damaged. A
    checkpoint is damaged too if its caller's state lacks what `needs` says.
    """
    intact = (
        newest_intact(root, needs, world) if tag is None else read_intact(root / tag, needs, world)
    )
    return intact and (*intact, read_state(intact[1]))


def load(
    contents: CheckpointState, path: Path, world_size: int, *, strict: bool, module_only: bool
) -> None:
    """Load a checkpoint into `contents`; raise CheckpointError if they do not match.

    Random states are restored only if the number of ranks is the same.
    """
    world = contents.world
    steps = [partial(_read_tensors, contents, path, strict=strict, module_only=module_only)]
    if not module_only:
        steps.append(partial(_read_small_files, contents, path))
        if world_size == world.size:
            steps.append(partial(_restore_random, contents, path))
        elif world.rank == 0:
            logger.warning(
                f"{path} was written by {world_size} ranks, this run has {world.size}: random"
                " states start anew"
            )

    for step in steps:
        run_on_all_ranks(world, f"checkpoint {path} could not be loaded", step)


def _write_tensors(tensors: dict[str, Any], world: Axis, temporary: Path) -> None:
    writer = _Writer(temporary, sync_files=True)
    planner = SavePlanner(world.size)
    try:
        ranks = {"process_group": world.group, "no_dist": world.size == 1}
        dcp.save(tensors, storage_writer=writer, planner=planner, **ranks)
    except BaseException:  # torch raises it on all ranks
        planner.forget_plans()
        raise


class _Writer(dcp.FileSystemWriter):
    def write_data(self, *args: Any) -> Any:
        """Write, and raise the OSError of a full disk.

        torch's own writer hides it behind "unexpected pos 704 vs 598".
        """
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                with naming(Path(self.path)):
                    raise error.__context__ from None
            raise


def _read_tensors(
    contents: CheckpointState, path: Path, *, strict: bool, module_only: bool
) -> None:
    reader = CheckpointReader(path)
    entries = reader.read_metadata().state_dict_metadata.items()
    saved = {name: getattr(entry, "size", None) for name, entry in entries}
    _check_same(
        set(contents.models), {name.split(".")[0] for name in saved}, "model", subset=module_only
    )
    states = {
        name: model.tensors(module_only=module_only) for name, model in contents.models.items()
    }

    for name, state in states.items():
        _check_tensors(state["model"], f"{name}.model.", saved, strict)
        if "optimizer" in state:
            _forget_untouched(state["optimizer"]["state"], f"{name}.optimizer.state.", saved)

    # not every rank of the process group may be here: rank 0 alone exports a checkpoint
    world = contents.world
    ranks = {"process_group": world.group, "no_dist": world.size == 1}
    dcp.load(states, storage_reader=reader, planner=LoadPlanner(), **ranks)
    for name, model in contents.models.items():
        model.restore(states[name])


def _check_same(requested: set[str], saved: set[str], kind: str, *, subset: bool = False) -> None:
    if requested - saved or (saved - requested and not subset):
        names = [", ".join(sorted(names)) or "none" for names in (saved, requested)]
        raise ValueError(f"it contains a {kind} for each of: {names[0]}; requested are: {names[1]}")


def _check_tensors(
    state: dict[str, Any], prefix: str, saved: dict[str, torch.Size | None], strict: bool
) -> None:
    """Check names and shapes.

    Without `strict`, tensors that are not saved keep their values and are removed from `state`.
    """
    expected = set(state)
    stored = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
    if strict:
        refuse_tensors(expected - stored, "of the model are not in it")
        refuse_tensors(stored - expected, "in it are not in the model")

    for name in expected - stored:
        del state[name]
    other = [
        name for name in sorted(expected & stored) if saved[prefix + name] != state[name].size()
    ]

    if other:
        shapes = [list(shape) for shape in (saved[prefix + other[0]], state[other[0]].size())]
        raise ValueError(
            f"{len(other)} tensors have another shape; {other[0]} is {shapes[0]} in the checkpoint"
            f" and {shapes[1]} in the model"
        )


def _forget_untouched(
    state: dict[str, dict[str, Any]], prefix: str, saved: Mapping[str, Any]
) -> None:
    """Remove parameters without optimizer state in the checkpoint from `state`.

    They never had a gradient and need none.
    """
    for name in list(state):
        if not any(f"{prefix}{name}.{key}" in saved for key in state[name]):
            del state[name]


def _read_small_files(contents: CheckpointState, path: Path) -> None:
    schedulers, items = (
        torch.load(path / name, weights_only=True) for name in (SCHEDULERS, ITEMS_FILE)
    )
    scheduled = contents.schedulers
    _check_same(set(scheduled), set(schedulers), "schedule", subset=True)
    _check_same(set(contents.items), set(items), "state")
    for name, scheduler in scheduled.items():
        scheduler.load_state_dict(schedulers[name])
    for name, item in contents.items.items():
        item.load_state_dict(items[name])


def _random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states as tensors and plain types.

    So they can be loaded without unrestricted pickle.
    """
    _, keys, *rest = np.random.get_state()
    numpy = (torch.from_numpy(keys.astype(np.int64)), *rest)
    states = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _restore_random(contents: CheckpointState, path: Path) -> None:
    states = torch.load(path / _random_file(contents.world.rank), weights_only=True)
    device = contents.device
    keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


def _bytes(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _checked_bytes(items: dict[str, Any]) -> bytes:
    """Serialise the states; raise TypeError for one that could not be loaded again."""
    for name, state in items.items():
        try:
            torch.load(io.BytesIO(_bytes(state)), weights_only=True)
        except Exception as error:
            raise TypeError(
                f"the state of {name} contains objects other than tensors and plain types: {error}"
            ) from error
    return _bytes(items)
