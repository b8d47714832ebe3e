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

from lightrft.data.loader import share_of
from lightrft.engine.base import Engine, RequestLoop
from lightrft.engine.requests import Request, Sampling, derived_seed
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import GB, occupied_memory, release_cached_memory
from lightrft.parallel.mesh import Mesh
from lightrft.types import Completion

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Function that starts one weight stream of (name, full tensor)."""


Finished = Iterator[tuple[int, list[Completion]]]
"""Iterator over (index of a request, its completions)."""


class Generation:
    """Loop of an engine for requests of this rank, to which requests can be added while others
    decode.

    Ranks that share an engine call add(), step() and abort() together, with requests of their own.
    Ranks of one data replica pass the same requests; each submits its part of them, and
    of_other_ranks() returns the others'.
    """

    def __init__(self, loop: RequestLoop, engine: Axis, model_parallel: Axis):
        self.loop = loop
        self.engine = engine
        self.model_parallel = model_parallel
        self.num_requests = 0
        self._places: dict[int, int] = {}
        """Index in the loop -> index of this rank's request."""
        self._answers: dict[int, list[Completion]] = {}
        """Completions of this rank's part, if others need them."""

    @property
    def running(self) -> bool:
        """Return True if the engine has requests, of this or another rank; the same on all ranks of
        the engine.
        """
        return bool(self.loop.running)

    @property
    def unfinished(self) -> set[int]:
        """Return the indices of requests that this rank has submitted and that run."""
        return {self._places[index] for index in self.loop.running if index in self._places}

    def on_any_rank(self, flag: bool) -> bool:
        """Return True if the flag is True on a rank of the engine; the same on all of them, which
        call it together.
        """
        return any(self.engine.gather(flag))

    def add(self, requests: list[Request], *, own: bool = False) -> range:
        """Begin requests, any number on each rank; return their indices.

        `own`: they are of this rank alone.
        """
        part = (
            range(len(requests))
            if own
            else share_of(self.model_parallel.rank, self.model_parallel.size, len(requests))
        )
        local = requests[part.start : part.stop]
        by_rank = self.engine.gather(local)
        first = sum(len(others) for others in by_rank[: self.engine.rank])
        add = self.loop.add_alone if own else self.loop.add
        indices = add([each for others in by_rank for each in others])
        for place in range(len(local)):
            self._places[indices[first + place]] = self.num_requests + part.start + place
        begin = self.num_requests
        self.num_requests = self.num_requests + len(requests)

        return range(begin, self.num_requests)

    def step(self) -> Finished:
        """Let the engine do a step; yield this rank's requests that have ended."""
        yield from self._own(self.loop.step())

    def abort(self) -> Finished:
        """End all requests in the engine; yield this rank's with their completions so far."""
        yield from self._own(list(self.loop.abort().items()))

    def to_the_end(self) -> Finished:
        """Yield all requests of this rank, each as it ends."""
        while self.running:
            yield from self.step()
        yield from self.of_other_ranks()

    def prompts_at_once(self, n: int) -> int:
        """Return the number of prompts with n samples each that the engines of a data replica
        decode at the same time.
        """
        return max(
            1, self.loop.engine.prompts_at_once(n) * self.model_parallel.size // self.engine.size
        )

    def of_other_ranks(self) -> Finished:
        """Yield the requests that other ranks of the data replica have submitted, when all have
        ended.
        """
        for others in self.model_parallel.gather(self._answers):
            yield from (
                (index, completions)
                for index, completions in others.items()
                if index not in self._answers
            )

    def _own(self, ended: list[tuple[int, list[Completion]]]) -> Finished:
        for index, completions in ended:
            if index in self._places:
                place = self._places[index]
                if self.model_parallel.size > 1:
                    self._answers[place] = completions
                yield place, completions


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

    def open(self, sampling: Sampling) -> Generation:
        """Return a loop for requests of this rank.

        All ranks that share the engine, or a data replica, call it together.
        """
        return Generation(
            self.engine.open(self._with_replica_seed(sampling)), self.axis, self.model_parallel
        )

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
