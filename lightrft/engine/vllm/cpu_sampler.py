"""Sampling of vLLM's model runner V1 on CPUs: the same tokens and log-probs in less time."""

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

SEEDS = 2**31
"""Number of seeds of noise."""
AHEAD = 32
"""Number of seeds that are drawn from a generator together."""

_drawn: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
"""Seeds that have been drawn from the generator of a request and are not used yet, the next one last."""


def use_fast_sampling(sampler: Sampler) -> None:
    """Replace the parts of a sampler that vLLM 0.32 computes slowly on a CPU.

    vLLM draws the seed of the noise from a request's generator for each token, and compares the log-probs of the whole vocabulary
    with that of the sampled token to find its rank, which no one reads, by a function that needs a C++ compiler.
    """
    if sampler.topk_topp_sampler.forward == sampler.topk_topp_sampler.forward_cpu:
        sampler.topk_topp_sampler.forward = _FastSampling()
        sampler.gather_logprobs = _gather_logprobs


def copy_of(generator: torch.Generator) -> torch.Generator:
    """Return a generator whose next seeds are those of `generator`."""
    copy = generator.clone_state()
    if drawn := _drawn.get(generator):
        _drawn[copy] = drawn.copy()
    return copy


class _FastSampling:
    """Replacement for TopKTopPSampler.forward_cpu()."""

    def __init__(self) -> None:
        self._items: list[tuple[int, torch.Generator]] = []
        """(row, generator) of the last step."""
        self._rows: list[int] = []
        self._seeds: list[list[int]] = []

    def __call__(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sampled tokens [R] of logits [R, V] at the temperature, and their distributions' log-probs [R, V].

        Rows without a generator are greedy: vLLM does not use their tokens.
        """
        logits = apply_top_k_top_p(logits, k, p).float()
        return torch.ops._C.fused_gumbel_argmax(logits, self._next_seeds(len(logits), generators)), logits.log_softmax(-1)

    def _next_seeds(self, num_rows: int, generators: dict[int, torch.Generator]) -> Tensor:
        items = list(generators.items())
        if items != self._items:
            self._items, self._rows = items, list(generators)
            self._seeds = [_drawn.setdefault(generator, []) for generator in generators.values()]
        if not all(self._seeds):
            for seeds, generator in zip(self._seeds, generators.values(), strict=True):
                if not seeds:
                    seeds += torch.randint(0, SEEDS, (AHEAD,), generator=generator).tolist()[::-1]
        result = np.zeros(num_rows, dtype=np.int64)
        result[self._rows] = [seeds.pop() for seeds in self._seeds]
        return torch.from_numpy(result)


def _gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Return the log-probs of sampled tokens [R], from those of the vocabulary [R, V], with rank 0 for each."""
    if num_logprobs:
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
    token_ids = token_ids.unsqueeze(-1)
    return LogprobsTensors(token_ids.int(), logprobs.gather(-1, token_ids), torch.zeros(len(token_ids), dtype=torch.int64))
