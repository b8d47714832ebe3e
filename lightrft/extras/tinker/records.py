"""Records of requests and answers between the server's thread and the ranks."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightrft.core.batch import Batch
from lightrft.core.engine import Request
from lightrft.core.samples import Completion

TARGET_TOKENS = "target_tokens"
"""Column of examples with the tokens to take the log-probs of in place of the inputs."""


class RequestRefused(Exception):
    """Raised on all ranks alike for a request that cannot be done; the server goes on."""


class Outputs(NamedTuple):
    """Result of a forward pass."""

    loss: float
    """Sum over all targets of the request."""
    logprobs: list[Tensor]
    """Log-probs of the targets of each datum, [L] float32."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The data of a request, end to end: a row has the inputs of a datum and the last target."""

    lengths: list[int]
    input_ids: Tensor
    """[T] int64."""
    columns: dict[str, Tensor]
    """[T] each: TARGET_TOKENS and what the loss reads, 0 at the first token of a row."""

    def select(self, rows: list[int]) -> Batch:
        """Return rows as a batch that learns every target."""
        lengths = torch.tensor(self.lengths)
        mask = torch.ones(len(self.input_ids), dtype=torch.bool)
        mask[lengths.cumsum(0) - lengths] = False
        every = Batch(
            lengths,
            self.input_ids,
            mask,
            torch.arange(len(lengths)),
            extra_columns=self.columns,
            extra_per_token=frozenset(self.columns),
        )
        return every.select(rows)


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt to sample from."""

    number: int
    """Number of the request. The answer has it too."""
    request: Request
    weights: Hashable
    """Key of the weights; None: the weights of --pretrain."""
    scored: bool
    """True if the log-probs of the prompt are asked for."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The answer to a prompt."""

    completions: list[Completion]
    prompt_logprobs: Tensor | None
    """[L] float32, NaN for the first token."""
