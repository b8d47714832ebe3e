"""vLLM on each rank of a torchrun, and a collector of responses with given lengths.

rollout_schedule.py uses them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrft.algorithms.rollout.rollout import FixedBatch
from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.algorithms.schedulers.rounds import Rounds, needs_rounds
from lightrft.config import EngineSection, RewardSection, RolloutSection
from lightrft.core.engine import Ended, derived_seed
from lightrft.core.groups import Group
from lightrft.core.rollout import Rollout
from lightrft.core.sampler import PendingRequest
from lightrft.core.samples import Prompt
from lightrft.engine.base import Request, Sampling
from lightrft.engine.build import build_engine
from lightrft.models.parallel.mesh import Mesh
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.shared_session import SharedSession

VOCABULARY = 512
END = 511


class Ranks:
    """What generating needs of a strategy, with a random model of a million parameters."""

    def __init__(self, most: int):
        with tempfile.TemporaryDirectory() as folder:
            config = Qwen3Config(
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                intermediate_size=256,
                vocab_size=VOCABULARY,
                eos_token_id=END,
                pad_token_id=END,
                max_position_embeddings=2048,
                dtype=torch.float32,
            )
            # by each rank, as it is not in a group yet
            Qwen3ForCausalLM(config).save_pretrained(folder)
            dist.init_process_group("gloo")
            self.mesh = Mesh("cpu")
            section = EngineSection(engine_type="vllm", engine_kv_cache_gb=0.5)
            self.axis = self.mesh.engine(1)
            self.engine = build_engine(
                section,
                model_path=folder,
                axis=self.axis,
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_model_len=most + 16,
            )

        self.host = self
        """The host of the engine is this object too."""
        self.stamps: list[float] = []

    def open(self, sampling: Sampling) -> SharedSession:
        return TimedSession(self, self.engine.open(sampling), self.axis, self.mesh.model_parallel)

    def timed(self, work: Callable[[], Any]) -> np.ndarray:
        """Begin work on all ranks; return the CPU milliseconds until it is done.

        They are taken at the end of each step of the engine, and of the work.
        """
        dist.barrier()
        self.stamps = [time.process_time()]
        work()
        return 1000 * np.diff([*self.stamps, time.process_time()])

    def observe(self, most: int, short: int = 16) -> list[tuple[list[float], float]]:
        """Return work and its CPU milliseconds, for batches of several sizes.

        Work is (steps, tokens, earlier tokens, requests).
        """
        observed = []
        for size, tokens in product((1, 2, 4, 8, 16, 32), (short, most)):
            times = self.timed(lambda: self._decode(size, tokens))[:tokens]  # noqa: B023
            if tokens == short:
                observed.append(([tokens, size * tokens, size * tokens**2 / 2, size], times.sum()))
            else:
                observed += [
                    ([1, size, size * place, 0], spent)
                    for place, spent in enumerate(times[1:-1], 1)
                ]

        return observed

    def _decode(self, size: int, tokens: int) -> None:
        """Generate responses of one length that begin and end together."""
        generation = self.open(Sampling())
        sampling = Sampling(max_tokens=tokens, banned_token_ids=(END,))
        generation.add([Request([2, index, 7, 8], sampling=sampling) for index in range(size)])
        for _ in generation.to_the_end():
            pass


class TimedSession(SharedSession):
    """Session that notes the CPU time after each step."""

    def __init__(self, ranks: Ranks, *args: Any):
        super().__init__(*args)
        self.ranks = ranks

    def step(self) -> Ended:
        finished = super().step()
        self.ranks.stamps.append(time.process_time())
        return finished


class ForcedSampler(RunSampler):
    """Sampler whose responses have the given lengths [prompts, n]."""

    def __init__(self, ranks: Ranks, section: RolloutSection, lengths: np.ndarray):
        super().__init__(ranks, self, section)
        self.lengths = lengths

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return ""

    def requests(self, group: Group, slots: Sequence[int], seed: int) -> Iterator[PendingRequest]:
        for slot in slots:
            sample = group.samples[slot]
            if sample.finish_reason is None:
                sampling = Sampling(
                    max_tokens=int(self.lengths[group.row, slot]), banned_token_ids=(END,)
                )
                seeds = (derived_seed(seed, group.number, slot),)
                request = Request([*sample.prompt.token_ids], sampling=sampling, seeds=seeds)
                yield PendingRequest(request, group, [slot])


def forced_rollout(
    ranks: Ranks, section: RolloutSection, lengths: np.ndarray, expected: np.ndarray
) -> Rollout:
    """Return a rollout that knows the expected lengths [prompts]."""
    prompts = [
        Prompt(row, "", [1 + row % 500, row // 500, 7, 8], {}) for row in range(len(lengths))
    ]
    rewards = RewardRunner("none", section=RewardSection(reward_workers=0))
    make = Rounds if needs_rounds(section) else FixedBatch
    scheduler = make(
        ForcedSampler(ranks, section, lengths),
        rewards,
        prompts,
        section=section,
        data=ranks.mesh.data,
        seed=1,
    )
    scheduler.history.lengths.copy_(torch.from_numpy(expected))
    scheduler.history.epochs.zero_()
    return Rollout(scheduler, rewards)
