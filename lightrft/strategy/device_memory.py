"""Models and optimizers of a run, each of them on the device or in host memory."""

from torch import nn
from torch.optim import Optimizer

from lightrft.backends.base import Backend, Offloaded
from lightrft.backends.offload import has_gradients, is_offloaded
from lightrft.parallel.device import current_device, release_cached_memory, synchronize
from lightrft.parallel.mesh import world_axis


class DeviceMemory:
    """Record of the models and optimizers of a run, which moves them between device and host memory
    by the backend's hooks.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.unsummed: set[nn.Module] = set()
        """Models with gradients that have not been summed over the ranks."""
        self.offloaded: dict[nn.Module | Optimizer, Offloaded] = {}

    def register(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        if model is not None and all(model is not other for other in self.models):
            self.models.append(model)
        if optimizer is not None and all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)

    def forget(self) -> None:
        """Drop the references to all models and optimizers that are on the device."""
        self.models = []
        self.optimizers = []

    def holds_gradients(self, model: nn.Module) -> bool:
        return model in self.unsummed or self.backend.holds_gradients(model)

    def offload_model(self, model: nn.Module) -> None:
        """Move a model to host memory, unless it is there.

        Raises RuntimeError if it holds gradients, which would be lost.
        """
        if self.holds_gradients(model):
            raise RuntimeError(has_gradients(model))
        if model not in self.offloaded and not self.backend.lives_on_host(model):
            self.offloaded[model] = self.backend.offload_model_state(model)

    def offload_optimizer(self, optimizer: Optimizer) -> None:
        """Move an optimizer's state to host memory, unless it is there."""
        if optimizer not in self.offloaded and not self.backend.lives_on_host(optimizer):
            self.offloaded[optimizer] = self.backend.offload_optimizer_state(optimizer)

    def reload(self, item: nn.Module | Optimizer | None) -> None:
        """Move an offloaded item back to the device, bit-identical; do nothing for one that is
        there.
        """
        if item in self.offloaded:
            self.offloaded.pop(item).reload(self.backend.device)

    def check_loaded(self, *items: nn.Module | Optimizer) -> None:
        """Raise RuntimeError with the remedy if an item is offloaded."""
        for item in items:
            if item in self.offloaded:
                raise RuntimeError(is_offloaded(item))


def sync_and_clear_cache() -> None:
    """Wait until this device has finished and all ranks have called this, then release cached
    memory.
    """
    device = current_device()
    synchronize(device)
    world_axis().barrier()
    release_cached_memory(device)
