"""The engine that lives beside the trainer on the same devices: when it is awake, whose weights it has, who asks what."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from lightrft.engine.base import Engine, Request, Sampling
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import release_cached_memory
from lightrft.types import Completion

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Starts one weight stream."""


class EngineStatus(Enum):
    SLEEPED = "sleeped"
    WAKEUP = "wakeup"


class EngineHost:
    """One engine, or this rank's part of one, and its place among the replicas."""

    def __init__(self, engine: Engine, *, axis: Axis, world: Axis, device: torch.device, sleeps: bool):
        self.engine, self.axis, self.device, self.sleeps = engine, axis, device, sleeps
        self.replica = world.rank // axis.size

    @property
    def status(self) -> EngineStatus:
        """WAKEUP when it can generate."""
        return EngineStatus.WAKEUP if self.engine.awake == {"weights", "kv_cache"} else EngineStatus.SLEEPED

    def update_weights(self, weights: Weights) -> None:
        """Wake the weights and stream the newest in, under the next version. The cache stays as it is."""
        release_cached_memory(self.device)
        self.engine.wake("weights")
        self.engine.load_weights(weights(), self.engine.version + 1)
        release_cached_memory(self.device)

    def wake(self, weights: Weights | None) -> None:
        """Weights, then the stream if there is one, then the cache: cache and stream never compete for memory."""
        if weights is not None:
            self.update_weights(weights)
        else:
            release_cached_memory(self.device)
            self.engine.wake("weights")
        self.engine.wake("kv_cache")

    def sleep(self, *, keep_weights: bool) -> None:
        """If it may. An engine that nobody refills keeps its weights, on the host."""
        if self.sleeps:
            self.engine.sleep(level=1 if keep_weights else None)

    def generate(self, sampling: Sampling, prompt_token_ids: list[list[int]]) -> list[list[Completion]]:
        """On the engine as it is: ranks that share one pass the same prompts."""
        own = replace(sampling, seed=replica_seed(sampling.seed, self.replica))
        return self.engine.generate([Request(token_ids=list(ids)) for ids in prompt_token_ids], own)

    def gather_and_generate(self, sampling: Sampling, prompt_token_ids: list[list[int]]) -> list[list[Completion]]:
        """The engine gets the prompts of all its ranks; each rank takes back its own, in order. Any numbers of prompts."""
        everyone = self.axis.gather(prompt_token_ids)
        first = sum(len(prompts) for prompts in everyone[: self.axis.rank])
        completions = self.generate(sampling, [ids for prompts in everyone for ids in prompts])
        return completions[first : first + len(prompt_token_ids)]


def replica_seed(seed: int, replica: int) -> int:
    """Equal on the ranks of one engine; different, and not merely shifted, on every replica."""
    return random.Random(f"{seed}/{replica}").getrandbits(48)
