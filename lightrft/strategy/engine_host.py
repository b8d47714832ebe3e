"""The engine that lives beside the trainer on the same devices: when it is awake, whose weights it has, who asks what."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Self

import torch
from easydict import EasyDict
from loguru import logger
from torch import Tensor

from lightrft.backends.config import StrategyConfig
from lightrft.data.loader import share_of
from lightrft.engine.base import Engine, Request, Sampling
from lightrft.engine.build import build_engine
from lightrft.engine.requests import derived_seed
from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import occupied_memory, release_cached_memory
from lightrft.parallel.mesh import Mesh
from lightrft.types import Completion

GB = 1e9
Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Starts one weight stream."""


class EngineStatus(Enum):
    SLEEPED = "sleeped"
    WAKEUP = "wakeup"


class EngineHost:
    """One engine, or this rank's part of one, and its place among the replicas."""

    def __init__(self, engine: Engine, *, axis: Axis, mesh: Mesh, device: torch.device, sleeps: bool):
        self.engine, self.axis, self.device, self.sleeps = engine, axis, device, sleeps
        self.model_parallel = mesh.model_parallel
        self.replica = mesh.world.rank // axis.size
        self.memory: dict[str, float] = {}
        """`memory/engine_awake_gb` and `memory/engine_asleep_gb`: what was occupied before the last sleep, and after it."""

    @classmethod
    def build(
        cls, config: StrategyConfig, *, mesh: Mesh, dtype: torch.dtype, device: torch.device, seed: int, from_stream: bool
    ) -> Self:
        """The engine that `config` names, on the ranks that share it. `from_stream`: its first weights come from there."""
        axis = mesh.engine(config.engine_tp_size)
        engine = build_engine(
            config, model_path=config.pretrain, dtype=dtype, device=device, axis=axis,
            max_model_len=config.prompt_max_len + config.generate_max_len,
            seed=derived_seed(seed, mesh.world.rank // axis.size) % 2**31,  # vLLM takes 32 bits here
            trust_remote_code=config.trust_remote_code, from_stream=from_stream,
        )
        return cls(engine, axis=axis, mesh=mesh, device=device, sleeps=config.enable_engine_sleep)

    @property
    def name(self) -> str:
        """hf, vllm, ...: the file of its adapter, or its room."""
        return type(self.engine).__module__.removeprefix("lightrft.engine.").partition(".")[0]

    @property
    def status(self) -> EngineStatus:
        """WAKEUP when it can generate."""
        return EngineStatus.WAKEUP if self.engine.awake == {"weights", "kv_cache"} else EngineStatus.SLEEPED

    def update_weights(self, weights: Weights) -> None:
        """Stream the newest weights in, under the next version. The engine's weights are awake; the cache stays as it is."""
        self.engine.load_weights(weights(), self.engine.version + 1)

    def wake_weights(self) -> None:
        """Wake the weights as they are. The cache is woken later: it never competes with them for memory."""
        release_cached_memory(self.device)
        self.engine.wake("weights")

    def sleep(self, *, keep_weights: bool) -> None:
        """If it may. An engine that nobody refills keeps its weights, on the host."""
        if self.sleeps and self.engine.awake:
            awake = occupied_memory(self.device) / GB
            self.engine.sleep(level=1 if keep_weights else None)
            asleep = occupied_memory(self.device) / GB
            self.memory = {"memory/engine_awake_gb": awake, "memory/engine_asleep_gb": asleep}
            logger.debug("the engine sleeps: {:.2f} GB were occupied, {:.2f} are", awake, asleep)

    def generate(self, sampling: Sampling, requests: list[Request]) -> list[list[Completion]]:
        """On the engine as it is: ranks that share one pass the same requests."""
        return self.engine.generate(requests, self._own(sampling))

    def stream(self, sampling: Sampling, requests: list[Request]) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index, completions) of each of this rank's requests: any number, all ranks together.

        The engine gets the requests of all its ranks. Ranks that share a replica of data pass the same requests: each has its
        part of them answered, and yields the parts of the others at the end. Which ranks share an engine is another matter.
        """
        part = share_of(self.model_parallel.rank, self.model_parallel.size, len(requests))
        local = requests[part.start : part.stop]
        by_rank = self.axis.gather(local)
        first = sum(len(others) for others in by_rank[: self.axis.rank])
        answers: dict[int, list[Completion]] = {}
        for index, completions in self.engine.stream([each for others in by_rank for each in others], self._own(sampling)):
            if first <= index < first + len(local):
                answers[part.start + index - first] = completions
                yield part.start + index - first, completions
        for others in self.model_parallel.gather(answers):
            yield from ((index, completions) for index, completions in others.items() if index not in answers)

    def _own(self, sampling: Sampling) -> Sampling:
        """Return it with a seed that is equal on the ranks of one engine, and different on every replica."""
        return replace(sampling, seed=derived_seed(sampling.seed, self.replica))


def as_dicts(requests: list[Request], completions: list[list[Completion]]) -> list[EasyDict]:
    """Return a dictionary for each sample, a prompt's samples side by side."""
    return [
        EasyDict(prompt_token_ids=list(request.token_ids), output_token_ids=sample.token_ids, output_logprobs=sample.logprobs,
                 finish_reason=sample.finish_reason, weight_version=sample.weight_version)
        for request, samples in zip(requests, completions, strict=True)
        for sample in samples
    ]  # fmt: skip
