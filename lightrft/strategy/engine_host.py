"""Host of the engine that shares its devices with the trainer: sleep and wake, weight updates,
routing of requests.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum

import torch
from easydict import EasyDict
from loguru import logger
from torch import Tensor, nn

from lightrft.engine.base import Engine, RequestLoop
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import GB, occupied_memory, release_cached_memory
from lightrft.parallel.mesh import Mesh
from lightrft.strategy.shared_session import SharedSession
from lightrft.types import Completion

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Function that starts one weight stream of (name, full tensor)."""


class EngineStatus(Enum):
    SLEEPED = "sleeped"
    WAKEUP = "wakeup"


class EngineHost:
    """One engine, or this rank's part of one, with its index among the replicas."""

    def __init__(
        self, engine: Engine, *, axis: Axis, mesh: Mesh, device: torch.device, sleeps: bool
    ):
        self.engine = engine
        self.axis = axis
        self.device = device
        self.sleeps = sleeps
        self.model_parallel = mesh.model_parallel
        self.replica = mesh.world.rank // axis.size
        self.actor: nn.Module | None = None
        """Model whose weights the engine received last; None: the engine keeps those of its folder,
        also while it sleeps."""
        self.draft: nn.Module | None = None
        """Model that drafts for the engine and is trained; None: its weights are not streamed."""
        self.memory: dict[str, float] = {}
        """Memory occupied before and after the last sleep: `memory/engine_awake_gb` and
        `memory/engine_asleep_gb`."""

    @property
    def name(self) -> str:
        """Return hf, vllm, ...: the name of the module or package of its adapter."""
        return type(self.engine).__module__.removeprefix("lightrft.engine.").partition(".")[0]

    @property
    def status(self) -> EngineStatus:
        """Return WAKEUP if the engine can generate, else SLEEPED."""
        return (
            EngineStatus.WAKEUP
            if self.engine.awake == {"weights", "kv_cache"}
            else EngineStatus.SLEEPED
        )

    def update_weights(self, weights: Weights) -> None:
        """Stream the newest weights in, under the next version.

        Its weights must be awake; the cache keeps its state.
        """
        self.engine.load_weights(weights(), self.engine.version + 1)

    def wake_weights(self) -> None:
        """Wake the weights only.

        The cache is woken later, so that the two never compete for memory.
        """
        release_cached_memory(self.device)
        self.engine.wake("weights")

    def invalidate_weights(self, version: int | None) -> None:
        """Mark the weights as outdated, under `version` if it is not None.

        Weights that came from a folder stay valid.
        """
        if self.actor is not None:
            self.engine.weights_valid = False
            self.engine.version = self.engine.version if version is None else version

    def sleep(self) -> None:
        """Put the engine to sleep if it is allowed to.

        Weights that no actor can bring again are kept in host memory.
        """
        if self.sleeps and self.engine.awake:
            awake = occupied_memory(self.device) / GB
            self.engine.sleep(level=1 if self.actor is None else None)
            asleep = occupied_memory(self.device) / GB
            self.memory = {"memory/engine_awake_gb": awake, "memory/engine_asleep_gb": asleep}
            logger.debug("the engine sleeps: {:.2f} GB were occupied, {:.2f} are", awake, asleep)

    def generate(self, sampling: Sampling, requests: list[Request]) -> list[list[Completion]]:
        """Generate without waking the engine; ranks that share an engine pass the same requests."""
        return self.engine.generate(requests, self._with_replica_seed(sampling))

    def open(self, sampling: Sampling, *, shared: bool = False) -> RequestLoop | SharedSession:
        """Return a loop for requests of this rank.

        All ranks that share the engine, or a data replica, call it together. With `shared` each
        rank can also add requests of its own.
        """
        loop = self.engine.open(self._with_replica_seed(sampling))
        if shared or self.axis.size > 1 or self.model_parallel.size > 1:
            return SharedSession(loop, self.axis, self.model_parallel)
        return loop

    def _with_replica_seed(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with a seed that is equal on the ranks of one engine and different on
        every replica.
        """
        return replace(sampling, seed=derived_seed(sampling.seed, self.replica))


def as_dicts(requests: list[Request], completions: list[list[Completion]]) -> list[EasyDict]:
    """Return one dictionary for each sample; the samples of a prompt are adjacent."""
    return [
        EasyDict(
            prompt_token_ids=list(request.token_ids),
            output_token_ids=sample.token_ids,
            output_logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            weight_version=sample.weight_version,
        )
        for request, samples in zip(requests, completions, strict=True)
        for sample in samples
    ]
