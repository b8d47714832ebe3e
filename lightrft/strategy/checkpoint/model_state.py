"""State of one model in a checkpoint: parameters, optimizer and learning-rate schedule."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.models.parallel.collectives import Axis


@dataclass(slots=True)
class ModelState:
    """A model that is saved in a checkpoint, with optimizer and schedule."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    world: Axis
    device: torch.device

    def tensors(self, *, module_only: bool = False) -> dict[str, Any]:
        """Return the parameters under `model`, and under `optimizer` its state by parameter.

        They are in the current shards. Frozen parameters of a trained model are left out, since
        they can be loaded from --pretrain.
        """
        frozen = frozen_names(self.model)
        values = sharded.get_model_state_dict(self.model)
        state = {"model": {name: value for name, value in values.items() if name not in frozen}}
        if self.optimizer is not None and not module_only:
            state["optimizer"] = sharded.get_optimizer_state_dict(self.model, self.optimizer)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Apply a state that was read into tensors().

        Parameters without optimizer state in it never had a gradient.
        """
        lenient = sharded.StateDictOptions(strict=False)
        sharded.set_model_state_dict(self.model, state["model"], options=lenient)
        if "optimizer" in state:
            sharded.set_optimizer_state_dict(
                self.model, self.optimizer, state["optimizer"], options=lenient
            )


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names in a model's state_dict() that checkpoints leave out.

    These are the frozen parameters, unless all are frozen.
    """
    items = model.state_dict(keep_vars=True).items()
    values = {name: value for name, value in items if isinstance(value, nn.Parameter)}
    frozen = {name for name, value in values.items() if not value.requires_grad}
    return set() if len(frozen) == len(values) else frozen
