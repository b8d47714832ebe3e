"""Sampling in SGLang's processes: by each sample's seed, and from a part of the vocabulary."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.sampler import murmur_hash32
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from lightrft.engine.requests import drawn_tokens
from lightrft.models.logits.truncation import Truncation


def with_seeds(make: Callable) -> Callable:
    """Make SGLang always draw each request from the request's seed.

    Otherwise it does so only if every kernel is deterministic too.
    """

    def from_schedule_batch(cls: type, batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info = make(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    return from_schedule_batch


def draw(logprobs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw a token for each row of logprobs [R, V]: [R, 1] int64.

    The point of a row depends only on the row's seed and position. SGLang has such a function, but
    it needs SGLang's kernels.
    """
    draws = zip(seed.tolist(), position.tolist(), strict=True)
    points = [random.Random(f"{of_row} {at}").random() for of_row, at in draws]
    return drawn_tokens(logprobs, torch.tensor(points, dtype=torch.float64))


@torch.compile(dynamic=True)
def draw_by_noise(logprobs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw a token for each row of logprobs [R, V] on an accelerator: [R, 1] int64.

    It is the one with the largest sum of log-prob and Gumbel noise, from SGLang's hash of seed,
    position and token. SGLang computes the noise in float64, which many devices compute at a 64th
    of the speed. Here the largest values come from numbers near 0, of which float32 has enough.
    The largest hashes round to 2^32; without a bound their noise would be -inf, and a token of
    log-prob -inf could be drawn.
    """
    tokens = torch.arange(logprobs.shape[1], device=logprobs.device)
    uniform = (murmur_hash32(seed.to(torch.uint64), position, tokens).float() + 0.5) * 2.0**-32
    noise = -(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24))).log()
    return (logprobs.float() + noise).argmax(1, keepdim=True)


class Truncate(CustomLogitProcessor):
    """Sets the logits of excluded tokens to -inf, before the division by the temperature.

    Log-probs are thereby normalised over the tokens that can be sampled. SGLang's own log-probs and
    top p cover all tokens.
    """

    def __init__(self):
        self.of_batch: list[dict[str, Any]] = []
        """Parameters of the rows of the last batch. It has many steps, and a new list of rows in
        each would make the host wait for the device."""
        self.groups: list[tuple[Truncation, float, Tensor | slice]] = []
        """Truncation and temperature, and the rows that have them."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        if custom_param_list != self.of_batch:
            rows_of = defaultdict(list)
            for row, own in enumerate(custom_param_list):
                banned = tuple(own["banned"])
                part = Truncation(own["top_k"], own["top_p"], banned, min_p=own["min_p"])
                rows_of[part, own["temperature"]].append(row)
            self.of_batch = custom_param_list
            self.groups = [
                (
                    *same,
                    torch.tensor(rows, device=logits.device) if len(rows_of) > 1 else slice(None),
                )
                for same, rows in rows_of.items()
                if same[0].active
            ]

        # All requests are for one model, so they have the same size.
        logits[:, self.of_batch[0]["size"] :] = -torch.inf
        for truncation, temperature, rows in self.groups:
            scaled = logits[rows].float() / (temperature or 1.0)
            logits[rows] = logits[rows].masked_fill(
                truncation.outside(scaled, truncation.threshold(scaled)), -torch.inf
            )
        return logits
