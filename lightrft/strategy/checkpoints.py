"""Write and read checkpoints: models, optimizers, schedules, and whatever else has a state."""

import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.core.metrics import GB
from lightrft.models.parallel.device import free_host_memory, idle_pinned_memory
from lightrft.models.weight_sync.stream import unwrap
from lightrft.strategy.backends.base import Backend
from lightrft.strategy.backends.staging import num_bytes, to_host
from lightrft.strategy.checkpoint import manager
from lightrft.strategy.checkpoint.atomic import TEMPORARY, run_on_all_ranks
from lightrft.strategy.checkpoint.background import Background
from lightrft.strategy.checkpoint.hf_export import export, export_adapter, rehearse
from lightrft.strategy.checkpoint.manifest import NOTHING, Kinds

Models = nn.Module | Mapping[str, Any]
"""One model, or several by name: {"actor": (actor, optimizer, scheduler), "ema": ema}, each as
prepare() takes it."""
Trained = tuple[nn.Module | None, Optimizer | None, LRScheduler | None]
"""Model with the optimizer and schedule that train it; any of them may be None."""
MEMORY_FACTOR = 2
"""Free host memory that a checkpoint in the background needs, as a multiple of the copy."""


class Checkpoints:
    """Checkpoints and Hugging Face folders of the models of a run.

    strategy.save_ckpt(models, "runs/mine/checkpoints", tag="step2")
    path, client_state = strategy.load_ckpt(models, "runs/mine/checkpoints")
    strategy.save_model(actor, tokenizer, "runs/mine/model")

    One checkpoint at a time may be written in the background.

    All ranks call every method together.
    """

    def __init__(self, strategy: Backend):
        self.strategy = strategy
        self.prepared: dict[nn.Module, Trained] = {}
        """Model -> (model, optimizer, scheduler), as prepare() received them."""
        self._background: Background | None = None

    def save(
        self,
        model: Models,
        save_dir: str | Path,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: Mapping[str, Any] = NOTHING,
        save_latest: bool = True,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        items: Mapping[str, Stateful] = NOTHING,
        hf_model: nn.Module | None = None,
        tokenizer: Tokenizer | None = None,
        async_save: bool = False,
    ) -> Path:
        """Write all that a run needs to continue to `save_dir/tag`, and return that path.

        Without a tag it is the next free `save_dir/saveN`. `client_state` belongs to the caller
        and has JSON types only. A model is saved with the optimizer and the schedule that prepare()
        received with it, unless others are passed.

        `items` are objects with state_dict() and load_state_dict(); all ranks call both, rank 0's
        state is written, and all ranks load it. `hf_model` is also written as a Hugging Face
        folder, `save_dir/tag/hf`. With `async_save` this returns when everything is copied to host
        memory, if that has twice the room; finish() raises the error if writing fails.

        At most `max_num` checkpoints and `max_mem` GB of them are kept. A checkpoint without
        `save_latest` is loaded only by a tag. Raises CheckpointError on all ranks if one rank
        cannot write (disk full); existing checkpoints are then untouched.
        """
        self.finish()
        models = self._by_name(model, optimizer, scheduler)
        world = self.strategy.mesh.world
        folder = Path(save_dir) / (tag or world.broadcast(next_tag(Path(save_dir))))

        hf = None
        # It waits beside the checkpoint, and becomes part of it when everything is written.
        if hf_model is not None:
            hf = self.strategy.save_model(hf_model, tokenizer, hf_folder(folder))

        state = {"client": dict(client_state), **self.strategy.state_dict()}
        copied, snapshot = self._snapshot(models, items, state, folder, copy=async_save)
        limits = {"max_num": max_num, "max_mem": max_mem, "latest": save_latest}
        job = partial(manager.write, snapshot, folder, hf=hf, **limits)

        if copied:
            if self._background is None:
                self._background = Background(world, self.strategy.mesh.gloo_axis("background"))
            self._background.start(job)
        else:
            job(world)

        return folder

    def load(
        self,
        model: Models,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        items: Mapping[str, Stateful] = NOTHING,
        check: Callable[[Path, dict[str, Any]], None] | None = None,
        needs: Kinds = NOTHING,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Restore `load_dir/tag`, or the newest undamaged checkpoint.

        Returns the path and the client_state, or (None, {}). The number of ranks may have changed.
        `check` receives path and client_state before anything is loaded, and may raise. A
        checkpoint whose client_state has not the entries of `needs`, name -> type, is damaged. Models and
        items must be the same as in the checkpoint. With load_module_only fewer models are
        enough, and only parameters are changed. Without load_module_strict, parameters that the
        checkpoint does not have stay as they are.
        """
        self.finish()
        models = self._by_name(model, optimizer, scheduler)
        checkpoint = manager.find(Path(load_dir), tag, self.strategy.mesh.world, needs=needs)
        if checkpoint is None:
            return None, {}

        manifest, path, state = checkpoint
        if check is not None:
            check(path, state["client"])

        requested = {}
        # Offloaded models and optimizers cannot be loaded into.
        for name, (module, its_optimizer, its_scheduler) in models.items():
            self.strategy.memory.reload(module)
            self.strategy.memory.reload(its_optimizer)
            requested[name] = (
                module,
                its_optimizer if load_optimizer_states else None,
                its_scheduler if load_lr_scheduler_states else None,
            )

        manager.load(
            self._contents(requested, items),
            path,
            manifest.world_size,
            strict=load_module_strict,
            module_only=load_module_only,
        )
        client_state = state.pop("client")
        self.strategy.load_state_dict({} if load_module_only else state)

        return path, client_state

    def finish(self, *, wait: bool = True) -> bool:
        """Return True if no checkpoint is being written; with `wait`, wait for that.

        A failed write raises here, on all ranks.
        """
        return self._background is None or self._background.finish(wait=wait)

    def close(self) -> None:
        """Wait until the last checkpoint is complete or has failed, and end the writer."""
        background = self._background
        self._background = None
        if background is not None:
            background.close()

    # -- Hugging Face folders

    def rehearse_save(self, model: nn.Module, tokenizer: Tokenizer | None) -> None:
        """Write a model's folder without the weights into a temporary folder, and read it back.

        Raises ConfigError on all ranks if save_model() could not write it.
        """
        rehearse(
            unwrap(model),
            tokenizer,
            self.strategy.dtype,
            self.strategy.world,
            trust_remote_code=self.strategy.config.model.trust_remote_code,
        )

    def save_model(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None,
        folder: str | Path,
        dtype: torch.dtype | None = None,
    ) -> Path:
        """Write a folder that from_pretrained() can load, in files of at most 5 GB.

        Ranks take turns in writing the files. dtype None: bfloat16 with --bf16, else float32. A
        model that `folder` already has is replaced.
        """
        stream = self.strategy.full_params(model, dtype)
        dtype = dtype or self.strategy.dtype
        return export(unwrap(model), stream, tokenizer, Path(folder), dtype, self.strategy.world)

    def save_adapter(
        self, model: nn.Module, tokenizer: Tokenizer | None, folder: str | Path
    ) -> Path:
        """Write only the adapters, in float32, for peft's PeftModel.from_pretrained().

        Raises ValueError if other parameters of the model are trained too. An adapter that `folder`
        already has is replaced.
        """
        self.strategy.reload_model(model)
        stream = self.strategy.stream(model, torch.float32)
        return export_adapter(unwrap(model), stream, tokenizer, Path(folder), self.strategy.world)

    # -- internals

    def _by_name(
        self, model: Models, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> dict[str, Trained]:
        if isinstance(model, nn.Module):
            _, its_optimizer, its_scheduler = self._trained(model)
            return {"model": (model, optimizer or its_optimizer, scheduler or its_scheduler)}
        return {name: self._trained(item) for name, item in model.items()}

    def _trained(self, item: Any) -> Trained:
        if isinstance(item, nn.Module):
            return self.prepared.get(item, (item, None, None))
        module, optimizer, scheduler = (*item, None, None)[:3]
        return module, optimizer, scheduler

    def _snapshot(
        self,
        models: Mapping[str, Any],
        items: Mapping[str, Stateful],
        state: dict[str, Any],
        folder: Path,
        *,
        copy: bool,
    ) -> tuple[bool, manager.Snapshot]:
        """Return what to write, and True if all of it is copied to host memory.

        It is copied if `copy` is set and the hosts have room.
        """
        world = self.strategy.mesh.world
        problem = f"{folder} could not be written"

        def find() -> dict[str, tuple[dict[str, Any], bool]]:
            return {name: self._tensors(*trained) for name, trained in models.items()}

        def take() -> manager.Snapshot:
            tensors = {
                name: to_host(tensors) if copy and not is_copy else tensors
                for name, (tensors, is_copy) in states.items()
            }
            return manager.snapshot(self._contents(models, items), state, tensors=tensors)

        # An error on one rank ends all of them; none waits for it in a collective.
        states = run_on_all_ranks(world, problem, find)
        copy = copy and self._has_room(
            sum(num_bytes(tensors) for tensors, is_copy in states.values() if not is_copy)
        )
        return copy, run_on_all_ranks(world, problem, take)

    def _has_room(self, num_bytes: int) -> bool:
        """Return True if every host has MEMORY_FACTOR times the room that copies take there.

        The copy of this rank takes `num_bytes`. It may use the pinned memory of the last one.
        """
        new = max(0, num_bytes - idle_pinned_memory(self.strategy.device))
        hosts: dict[str, tuple[int, int]] = {}
        # All ranks of a host share the memory, so their copies are added up.
        for host, needed, free in self.strategy.mesh.world.gather(
            (socket.gethostname(), new, free_host_memory())
        ):
            others, least = hosts.get(host, (0, free))
            hosts[host] = others + needed, min(least, free)

        full = {host: sizes for host, sizes in hosts.items() if sizes[1] < MEMORY_FACTOR * sizes[0]}
        for host, (needed, free) in full.items():
            logger.info(
                f"training waits for the checkpoint: a copy takes {needed / GB:.1f} GB, and {host}"
                f" has {free / GB:.1f} GB of free memory"
            )

        return not full

    def _contents(
        self, models: Mapping[str, Any], items: Mapping[str, Stateful]
    ) -> manager.CheckpointState:
        states = {name: self.strategy.training(*trained) for name, trained in models.items()}
        return manager.CheckpointState(
            states, items, self.strategy.mesh.world, self.strategy.device
        )

    def _tensors(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> tuple[dict[str, Any], bool]:
        """Return the tensors to save, and True if they are copies.

        They are copied if the model or the optimizer was offloaded and goes back to the host.
        """
        with self.strategy.memory.loaded(model, optimizer) as reloaded:
            tensors = self.strategy.training(model, optimizer, scheduler).tensors()
            return (to_host(tensors) if reloaded else tensors), reloaded


def hf_folder(folder: Path) -> Path:
    """Return where the Hugging Face folder of a checkpoint waits until the checkpoint is there."""
    return folder.with_name(f"{folder.name}.{manager.HF}{TEMPORARY}")


def next_tag(folder: Path) -> str:
    """Return the first free name save1, save2, ... after those in `folder`."""
    numbers = [int(path.name[4:]) for path in folder.glob("save*") if path.name[4:].isdecimal()]
    return f"save{max(numbers, default=0) + 1}"
