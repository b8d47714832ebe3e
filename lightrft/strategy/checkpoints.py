"""Checkpoints of a strategy: its models, their optimizers and schedules, and any other part of a run that has a state."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.backends.base import Backend
from lightrft.checkpoint import manager
from lightrft.checkpoint.atomic import PART, run_on_all_ranks
from lightrft.checkpoint.background import Background

NOTHING: Mapping[str, Any] = MappingProxyType({})
Trained = tuple[nn.Module | None, Optimizer | None, LRScheduler | None]
"""Model with the optimizer and schedule that train it, which may be None."""


class Checkpoints:
    """Write and read checkpoints; one at a time may be written in the background. All ranks call every method together."""

    def __init__(
        self, backend: Backend, reload: Callable[[nn.Module | Optimizer | None], None],
        loaded: Callable[..., AbstractContextManager[bool]],
    ):  # fmt: skip
        """Set up checkpoints. `reload` moves an offloaded item back to the device.

        `loaded` is a context with the given items on the device; it returns True if any was offloaded.
        """
        self.backend, self.reload, self.loaded = backend, reload, loaded
        self._background: Background | None = None

    def save(
        self, models: Mapping[str, Trained], folder: Path, *, state: dict[str, Any], parts: Mapping[str, Stateful],
        retention: manager.RetentionPolicy, hf: Path | None, in_background: bool,
    ) -> None:  # fmt: skip
        """Write `folder`. `hf` is a complete Hugging Face folder that becomes part of it; `state` contains JSON types only."""
        world = self.backend.mesh.world
        taken: list[manager.Snapshot] = []

        def take() -> None:
            tensors = {name: self._tensors(*trained, copy=in_background) for name, trained in models.items()}
            taken.append(manager.snapshot(self._contents(models, parts), state, tensors=tensors))

        run_on_all_ranks(world, f"{folder} could not be written", take)
        job = partial(manager.write, taken[0], folder, retention=retention, hf=hf)
        if in_background:
            self._background = self._background or Background(world, self.backend.mesh.background_axis())
            self._background.start(job)
        else:
            job(world)

    def finish(self, *, wait: bool = True) -> bool:
        """Return True if no checkpoint is being written; with `wait`, wait for that. A failed write raises here, on all ranks."""
        return self._background is None or self._background.finish(wait=wait)

    def load(
        self, models: Mapping[str, Trained], folder: Path, tag: str | None, *, parts: Mapping[str, Stateful],
        check: Callable[[Path, dict[str, Any]], None] | None, strict: bool, module_only: bool, optimizers: bool, schedulers: bool,
    ) -> tuple[Path, dict[str, Any]] | None:  # fmt: skip
        """Restore `folder/tag`, or the newest undamaged checkpoint in `folder`; return its path and state, or None.

        Without `optimizers` or `schedulers` those that belong to the models keep their state.
        """
        found = manager.find(folder, tag, self.backend.mesh.world)
        if found is None:
            return None
        manifest, path, state = found
        if check is not None:
            check(path, state["client"])
        wanted = {}
        for name, (module, optimizer, scheduler) in models.items():
            self.reload(module)
            self.reload(optimizer)
            wanted[name] = module, optimizer if optimizers else None, scheduler if schedulers else None
        manager.load(self._contents(wanted, parts), path, manifest.world_size, strict=strict, module_only=module_only)
        return path, state

    def close(self) -> None:
        """Wait until the checkpoint being written is complete or has failed, then end the background writer."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def _contents(self, models: Mapping[str, Trained], parts: Mapping[str, Stateful]) -> manager.CheckpointState:
        states = {name: self.backend.training(*trained) for name, trained in models.items()}
        return manager.CheckpointState(states, parts, self.backend.mesh.world, self.backend.device)

    def _tensors(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None, *, copy: bool
    ) -> dict[str, Any]:
        """Return the tensors to save; an offloaded model or optimizer is reloaded for as long as copying takes."""
        with self.loaded(model, optimizer) as reloaded:
            tensors = self.backend.training(model, optimizer, scheduler).tensors()
            return manager.copied(tensors) if copy or reloaded else tensors


def hf_folder(folder: Path) -> Path:
    """Return the folder into which the Hugging Face folder of a checkpoint is written before the checkpoint."""
    return folder.with_name(f"{folder.name}.{manager.HF}{PART}")


def next_tag(folder: Path) -> str:
    """Return the first free name save1, save2, ... after those in `folder`."""
    taken = [int(path.name[4:]) for path in folder.glob("save*") if path.name[4:].isdecimal()]
    return f"save{max(taken, default=0) + 1}"
