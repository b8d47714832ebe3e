"""Sampling in SGLang's processes: by each sample's seed, and from a part of the vocabulary."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
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
    points = [
        random.Random(f"{of_row} {at}").random()
        for of_row, at in zip(seed.tolist(), position.tolist(), strict=True)
    ]
    return drawn_tokens(logprobs, torch.tensor(points, dtype=torch.float64))


class Truncate(CustomLogitProcessor):
    """Sets the logits of excluded tokens to -inf, before the division by the temperature.

    Log-probs are thereby normalised over the tokens that can be sampled. SGLang's own log-probs and
    top p cover all tokens.
    """

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        rows_of = defaultdict(list)
        # All requests are for one model, so they have the same size.
        logits[:, min(parameters["size"] for parameters in custom_param_list) :] = -torch.inf
        for row, parameters in enumerate(custom_param_list):
            rows_of[
                parameters["top_k"],
                parameters["top_p"],
                parameters["min_p"],
                tuple(parameters["banned"]),
                parameters["temperature"],
            ].append(row)

        for (top_k, top_p, min_p, banned, temperature), rows in rows_of.items():
            truncation = Truncation(top_k, top_p, banned, min_p=min_p)
            if not truncation.active:
                continue
            scaled = logits[rows].float() / (temperature or 1.0)
            logits[rows] = logits[rows].masked_fill(
                truncation.outside(scaled, truncation.threshold(scaled)), -torch.inf
            )

        return logits
