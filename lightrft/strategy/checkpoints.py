"""Checkpoints of a strategy: its models, their optimizers and schedules, and any other part of a
run that has a state.
"""

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loguru import logger
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.backends.base import Backend
from lightrft.checkpoint import manager
from lightrft.checkpoint.atomic import PART, run_on_all_ranks
from lightrft.checkpoint.background import Background
from lightrft.parallel.device import GB, free_host_memory

NOTHING: Mapping[str, Any] = MappingProxyType({})
Trained = tuple[nn.Module | None, Optimizer | None, LRScheduler | None]
"""Model with the optimizer and schedule that train it, which may be None."""
MEMORY_FACTOR = 2
"""Free host memory with which a checkpoint is written in the background, relative to what its copy
takes."""


class Checkpoints:
    """Write and read checkpoints; one at a time may be written in the background.

    All ranks call every method together.
    """

    def __init__(
        self,
        backend: Backend,
        reload: Callable[[nn.Module | Optimizer | None], None],
        loaded: Callable[..., AbstractContextManager[bool]],
    ):
        """Set up checkpoints. `reload` moves an offloaded item back to the device.

        `loaded` is a context with the given items on the device; it returns True if any was
        offloaded.
        """
        self.backend = backend
        self.reload = reload
        self.loaded = loaded
        self._background: Background | None = None

    def save(
        self,
        models: Mapping[str, Trained],
        folder: Path,
        *,
        state: dict[str, Any],
        parts: Mapping[str, Stateful],
        retention: manager.RetentionPolicy,
        hf: Path | None,
        in_background: bool,
    ) -> None:
        """Write `folder`, `in_background` if host memory has room for a copy.

        `hf` is a complete Hugging Face folder that becomes part of it; `state` contains JSON types
        only.
        """
        world = self.backend.mesh.world
        problem = f"{folder} could not be written"
        states: dict[str, tuple[dict[str, Any], bool]] = {}
        snapshots: list[manager.Snapshot] = []

        def find() -> None:
            states.update((name, self._tensors(*trained)) for name, trained in models.items())

        def take() -> None:
            tensors = {
                name: manager.to_host(each) if in_background and not own else each
                for name, (each, own) in states.items()
            }
            snapshots.append(
                manager.snapshot(self._contents(models, parts), state, tensors=tensors)
            )

        run_on_all_ranks(world, problem, find)
        in_background = in_background and self._has_room(
            sum(manager.num_bytes(each) for each, own in states.values() if not own)
        )
        run_on_all_ranks(world, problem, take)

        job = partial(manager.write, snapshots[0], folder, retention=retention, hf=hf)
        if in_background:
            self._background = self._background or Background(
                world, self.backend.mesh.background_axis()
            )
            self._background.start(job)
        else:
            job(world)

    def _has_room(self, num_bytes: int) -> bool:
        """Return True if every host has MEMORY_FACTOR times the memory that copies take on its
        ranks: `num_bytes` on this one.
        """
        hosts: dict[str, tuple[int, int]] = {}
        for host, needed, free in self.backend.mesh.world.gather(
            (socket.gethostname(), num_bytes, free_host_memory())
        ):
            others, least = hosts.get(host, (0, free))
            hosts[host] = others + needed, min(least, free)

        full = {host: sizes for host, sizes in hosts.items() if sizes[1] < MEMORY_FACTOR * sizes[0]}
        for host, (needed, free) in full.items():
            logger.info(
                "training waits for the checkpoint: a copy takes {:.1f} GB, and {} has {:.1f} GB of"
                " free memory",
                needed / GB,
                host,
                free / GB,
            )

        return not full

    def finish(self, *, wait: bool = True) -> bool:
        """Return True if no checkpoint is being written; with `wait`, wait for that.

        A failed write raises here, on all ranks.
        """
        return self._background is None or self._background.finish(wait=wait)

    def load(
        self,
        models: Mapping[str, Trained],
        folder: Path,
        tag: str | None,
        *,
        parts: Mapping[str, Stateful],
        check: Callable[[Path, dict[str, Any]], None] | None,
        strict: bool,
        module_only: bool,
        optimizers: bool,
        schedulers: bool,
    ) -> tuple[Path, dict[str, Any]] | None:
        """Restore `folder/tag`, or the newest undamaged checkpoint in `folder`; return its path and
        state, or None.

        Without `optimizers` or `schedulers` those that belong to the models keep their state.
        """
        checkpoint = manager.find(folder, tag, self.backend.mesh.world)
        if checkpoint is None:
            return None

        manifest, path, state = checkpoint
        if check is not None:
            check(path, state["client"])

        requested = {}
        for name, (module, optimizer, scheduler) in models.items():
            self.reload(module)
            self.reload(optimizer)
            requested[name] = (
                module,
                optimizer if optimizers else None,
                scheduler if schedulers else None,
            )

        manager.load(
            self._contents(requested, parts),
            path,
            manifest.world_size,
            strict=strict,
            module_only=module_only,
        )
        return path, state

    def close(self) -> None:
        """Wait until the checkpoint being written is complete or has failed, then end the
        background writer.
        """
        background = self._background
        self._background = None
        if background is not None:
            background.close()

    def _contents(
        self, models: Mapping[str, Trained], parts: Mapping[str, Stateful]
    ) -> manager.CheckpointState:
        states = {name: self.backend.training(*trained) for name, trained in models.items()}
        return manager.CheckpointState(states, parts, self.backend.mesh.world, self.backend.device)

    def _tensors(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> tuple[dict[str, Any], bool]:
        """Return the tensors to save, and True if they are copies: those of a model or optimizer
        that is offloaded again.
        """
        with self.loaded(model, optimizer) as reloaded:
            tensors = self.backend.training(model, optimizer, scheduler).tensors()
            return (manager.to_host(tensors) if reloaded else tensors), reloaded


def hf_folder(folder: Path) -> Path:
    """Return the folder into which the Hugging Face folder of a checkpoint is written before the
    checkpoint.
    """
    return folder.with_name(f"{folder.name}.{manager.HF}{PART}")


def next_tag(folder: Path) -> str:
    """Return the first free name save1, save2, ... after those in `folder`."""
    numbers = [int(path.name[4:]) for path in folder.glob("save*") if path.name[4:].isdecimal()]
    return f"save{max(numbers, default=0) + 1}"
