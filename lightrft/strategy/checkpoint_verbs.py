"""Checkpoint verbs: save and load models, their optimizers and schedules, and any other part of a run that has a state."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from lightrft.checkpoint import manager
from lightrft.checkpoint.atomic import PART, agree
from lightrft.checkpoint.background import Background
from lightrft.strategy.engine_verbs import EngineVerbs
from lightrft.strategy.model_verbs import Trained

Models = nn.Module | Mapping[str, Any]
"""One model, or several by name: {"actor": (actor, optimizer, scheduler), "ema": ema}, each as prepare() takes it."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class CheckpointVerbs(EngineVerbs):
    """Part of StrategyBase with the checkpoint verbs. All ranks call every verb together."""

    def __init__(self) -> None:
        super().__init__()
        self._background: Background | None = None

    def save_ckpt(
        self, model: Models, save_dir: str | Path, tag: str | None = None, max_num: int = 3, max_mem: float = 1000,
        client_state: Mapping[str, Any] = NOTHING, save_latest: bool = True,
        optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None, *,
        parts: Mapping[str, Stateful] = NOTHING, hf_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None, async_save: bool = False,
    ) -> Path:  # fmt: skip
        """Write everything needed to continue to `save_dir/tag`, or to the next free `save_dir/saveN` if there is no tag.

        `client_state` is the caller's own and contains JSON types only.
        A model is saved with the optimizer and schedule that prepare() received with it, unless others are passed. `parts` are
        objects with state_dict(), which all ranks call together, and load_state_dict(): rank 0's state is written and all ranks
        load it. `hf_model` is also written as a Hugging Face folder, `save_dir/tag/hf`. With `async_save` this returns as soon
        as everything is copied to host memory; finish_ckpt() raises the error if writing fails. At most `max_num` checkpoints
        and `max_mem` GB of them are kept. A checkpoint without `save_latest` is loaded only by its tag. Raises CheckpointError
        on all ranks if one rank cannot write (disk full); existing checkpoints are then untouched.
        """
        self.finish_ckpt()
        world, hf = self.mesh.world, None
        tag = tag or world.broadcast(_next_tag(Path(save_dir)))
        folder = Path(save_dir) / tag
        if hf_model is not None:
            hf = self.save_model(hf_model, tokenizer, folder.with_name(f"{tag}.{manager.HF}{PART}"))
        taken: list[manager.Snapshot] = []

        def take() -> None:
            models = self._named(model, optimizer, scheduler)
            tensors = {name: self._tensors(*trained, copy=async_save) for name, trained in models.items()}
            state = {"client": dict(client_state), "skipped_steps": self.skipped_steps, "weight_version": self.weight_version}
            taken.append(manager.snapshot(self._checkpoint_state(models, parts), state, tensors=tensors))

        agree(world, f"{folder} could not be written", take)
        retention = manager.RetentionPolicy(max_num, max_mem, save_latest)
        job = partial(manager.write, taken[0], folder, retention=retention, hf=hf)
        if async_save:
            self._background = self._background or Background(world, self.mesh.aside())
            self._background.start(job)
        else:
            job(world)
        return folder

    def finish_ckpt(self, *, wait: bool = True) -> bool:
        """Return True if no checkpoint is being written; with `wait`, wait for that. A failed write raises here, on all ranks."""
        return self._background is None or self._background.finish(wait=wait)

    def load_ckpt(
        self, model: Models, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False, *,
        optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None, parts: Mapping[str, Stateful] = NOTHING,
        check: Callable[[Path, dict[str, Any]], None] | None = None,
    ) -> tuple[Path | None, dict[str, Any]]:  # fmt: skip
        """Restore `load_dir/tag`, or the newest undamaged checkpoint; return its path and client_state, or (None, {}).

        A checkpoint can be loaded on a different number of ranks than saved it. `check` receives path and client_state before
        anything is loaded, and may raise. Models and parts must be those that were saved; with load_module_only a subset of the
        models is enough, and only their parameters are changed. Without load_module_strict, parameters that are not in the
        checkpoint keep their values.
        """
        self.finish_ckpt()
        found = manager.find(Path(load_dir), tag, self.mesh.world)
        if found is None:
            return None, {}
        manifest, path, state = found
        if check is not None:
            check(path, state["client"])
        models = self._named(model, optimizer, scheduler)
        for name, (module, its_optimizer, its_scheduler) in models.items():
            self._bring_back(module)
            self._bring_back(its_optimizer)
            models[name] = (
                module, its_optimizer if load_optimizer_states else None, its_scheduler if load_lr_scheduler_states else None
            )  # fmt: skip
        contents = self._checkpoint_state(models, parts)
        manager.load(contents, path, manifest.world_size, strict=load_module_strict, module_only=load_module_only)
        if not load_module_only:
            self.skipped_steps = state["skipped_steps"]
        self.engine_lags(None if load_module_only else state["weight_version"])
        return path, state["client"]

    def close_checkpoints(self) -> None:
        """Wait until the checkpoint being written is complete or has failed, then end the background writer."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def _named(self, model: Models, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> dict[str, Trained]:
        if isinstance(model, nn.Module):
            _, its_optimizer, its_scheduler = self._prepared.get(model, (model, None, None))
            return {"model": (model, optimizer or its_optimizer, scheduler or its_scheduler)}
        return {name: self._complete(item) for name, item in model.items()}

    def _complete(self, item: Any) -> Trained:
        if isinstance(item, nn.Module):
            return self._prepared.get(item, (item, None, None))
        module, optimizer, scheduler = (*item, None, None)[:3]
        return module, optimizer, scheduler

    def _checkpoint_state(self, models: Mapping[str, Trained], parts: Mapping[str, Stateful]) -> manager.CheckpointState:
        states = {name: self.training(*trained) for name, trained in models.items()}
        return manager.CheckpointState(states, parts, self.mesh.world, self.device)

    def _tensors(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: LRScheduler | None, *, copy: bool
    ) -> dict[str, Any]:
        """Return the tensors to save; an offloaded model or optimizer is reloaded for as long as copying takes."""
        offloaded = [item for item in (model, optimizer) if item in self._offloaded]
        for item in offloaded:
            self._bring_back(item)
        tensors = self.training(model, optimizer, scheduler).tensors()
        if copy or offloaded:
            tensors = manager.copied(tensors)
        if model in offloaded:
            self.offload_model(model)
        if optimizer in offloaded:
            self.maybe_offload_optimizer(optimizer)
        return tensors


def _next_tag(folder: Path) -> str:
    taken = [int(path.name[4:]) for path in folder.glob("save*") if path.name[4:].isdecimal()]
    return f"save{max(taken, default=0) + 1}"
