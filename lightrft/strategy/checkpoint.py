"""Everything a run needs to continue as if nothing had happened, on this or another number of ranks."""

import io
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from loguru import logger
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.parallel.collectives import Axis
from lightrft.strategy import checkpoint_folder as folders
from lightrft.strategy.atomic import agree, write_file, write_folder

SCHEDULER, CLIENT = "scheduler.pt", "client_state.json"


@dataclass(slots=True)
class Training:
    """What is being trained, and where."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    world: Axis
    device: torch.device

    def tensors(self, *, module_only: bool = False) -> dict[str, Any]:
        """The parameters under `model` and, by parameter, the state of its optimizer under `optimizer`, sharded as they lie."""
        state = {"model": sharded.get_model_state_dict(self.model)}
        if self.optimizer is not None and not module_only:
            state["optimizer"] = sharded.get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what was read into tensors(). Parameters without optimizer state there never had a gradient."""
        sharded.set_model_state_dict(self.model, state["model"])
        if "optimizer" in state:
            lenient = sharded.StateDictOptions(strict=False)
            sharded.set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=lenient)


def save(
    training: Training, root: Path, tag: str, *, client_state: dict[str, Any], max_num: int, max_mem: float, save_latest: bool
) -> Path:
    """Write `root/tag`, whole or not at all, then point `latest` to it, then remove what is too old.

    CheckpointError on all ranks when any of them cannot write; earlier checkpoints are then untouched.
    """
    world = training.world
    manifest = folders.Manifest(0, world.size, save_latest)

    def count(_: Path) -> None:
        manifest.number = folders.next_number(root, being_written=tag) if world.rank == 0 else 0

    write_folder(
        root / tag,
        world,
        count,
        partial(_write_tensors, training),
        partial(_write_small_files, training, client_state),
        *folders.manifest_steps(manifest, world),
    )
    if save_latest:
        folders.point_to(root, tag, world)
    if world.rank == 0:
        folders.rotate(root, max_num, max_mem)
    world.barrier()
    return root / tag


def load(training: Training, root: Path, tag: str | None, *, module_only: bool) -> tuple[Path | None, dict[str, Any]]:
    """Continue from `root/tag`, or from the newest whole checkpoint; (None, {}) when there is none.

    Random states are restored where the number of ranks is the same. CheckpointError when the one asked for is missing
    or damaged, or belongs to another model.
    """
    world = training.world
    found = folders.newest_whole(root, world) if tag is None else folders.whole(root / tag, world)
    if found is None:
        return None, {}
    manifest, path = found
    agree(world, f"checkpoint {path} could not be loaded", partial(_read_tensors, training, path, module_only))
    if not module_only:
        agree(world, f"checkpoint {path} could not be loaded", partial(_read_small_files, training, path))
        _restore_random(training, path, manifest.world_size)
    return path, json.loads((path / CLIENT).read_text())


def _write_tensors(training: Training, path: Path) -> None:
    dcp.save(training.tensors(), storage_writer=_Writer(path, sync_files=True))


class _Writer(dcp.FileSystemWriter):
    def write_data(self, *args: Any) -> Any:
        """When the disk is full, torch's own writer hides the OSError behind "unexpected pos 704 vs 598"."""
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _read_tensors(training: Training, path: Path, module_only: bool) -> None:
    reader = dcp.FileSystemReader(path)
    saved = set(reader.read_metadata().state_dict_metadata)
    state = training.tensors(module_only=module_only)
    _check_names({f"model.{name}" for name in state["model"]}, {name for name in saved if name.startswith("model.")})
    if "optimizer" in state:
        _forget_untouched(state["optimizer"]["state"], saved)
    dcp.load(state, storage_reader=reader)
    training.restore(state)


def _check_names(wanted: set[str], saved: set[str]) -> None:
    for names, what in ((wanted - saved, "of the model are not in it"), (saved - wanted, "in it are not of the model")):
        if names:
            raise ValueError(f"{len(names)} tensors {what}, the first is {min(names).removeprefix('model.')}")


def _forget_untouched(state: dict[str, dict[str, Any]], saved: set[str]) -> None:
    """A parameter that never had a gradient has no optimizer state in the checkpoint, and needs none."""
    for name in list(state):
        if not any(f"optimizer.state.{name}.{key}" in saved for key in state[name]):
            del state[name]


def _write_small_files(training: Training, client_state: dict[str, Any], path: Path) -> None:
    _write_object(path / _random_file(training.world.rank), random_states(training.device))
    if training.world.rank == 0:
        write_file(path / CLIENT, json.dumps(client_state).encode())
        if training.scheduler is not None:
            _write_object(path / SCHEDULER, training.scheduler.state_dict())


def _read_small_files(training: Training, path: Path) -> None:
    if training.scheduler is not None:
        training.scheduler.load_state_dict(torch.load(path / SCHEDULER, weights_only=True))


def _restore_random(training: Training, path: Path, world_size: int) -> None:
    world = training.world
    if world_size != world.size:
        if world.rank == 0:
            logger.warning("{} was written by {} ranks, these are {}: random states start afresh", path, world_size, world.size)
        return

    def restore() -> None:
        set_random_states(torch.load(path / _random_file(world.rank), weights_only=True), training.device)

    agree(world, f"checkpoint {path} could not be loaded", restore)


def random_states(device: torch.device) -> dict[str, Any]:
    """Python, numpy, torch, and the accelerator's."""
    _, keys, *rest = np.random.get_state()
    numpy = (torch.from_numpy(keys.astype(np.int64)), *rest)  # plain types: the file is read without pickle
    states = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


def _write_object(path: Path, value: Any) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    write_file(path, content.getvalue())
