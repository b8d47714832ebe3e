"""Choose the tokens that reduce the policy's entropy most, once per optimizer step.

They are found by the covariance of log-prob and advantage. The paper uses the current log-probs.
Here they are taken before the step, so that the choice depends neither on micro-batches nor on
ranks. In the first update of a step both are the same.
"""

import torch
from torch import Tensor

from lightrft.algorithms.selection import largest, share_of_tokens, top_share
from lightrft.core.batch import Experience
from lightrft.core.losses import Sum
from lightrft.registry import Registry

marks = Registry("choice of tokens", flag="--policy_loss")
"""Functions (batch of one optimizer step, sum over ranks) -> [T] bool, tokens to treat differently,
by policy loss."""


def covariances(batch: Experience, total: Sum) -> Tensor:
    """(log p - mean) (A - mean) of each token, with means over the learned tokens of all ranks.

    Cui et al., arXiv 2505.22617.
    """
    mask = batch.loss_mask
    columns = torch.stack([batch.old_logprobs, batch.advantages, mask.float()]).double()
    logprob, advantage, count = total(columns[:, mask].sum(1))
    count = count.clamp(min=1)
    return (columns[0] - logprob / count) * (columns[1] - advantage / count)


@marks.register("kl_cov")
def highest(batch: Experience, total: Sum, *, cov_ratio: float) -> Tensor:
    """Return [T] bool: the share `cov_ratio` of all tokens with the highest covariance."""
    return top_share(covariances(batch, total), cov_ratio, batch, total)


@marks.register("clip_cov")
def drawn(
    batch: Experience, total: Sum, *, cov_ratio: float, clip_cov_range: list[float]
) -> Tensor:
    """Return [T] bool: as many tokens, drawn at random where the covariance is within the range."""
    least, most = clip_cov_range
    covariance = covariances(batch, total)
    eligible = batch.loss_mask & (covariance >= least) & (covariance <= most)
    count = share_of_tokens(cov_ratio, batch, total)
    return largest(random_keys(batch), eligible, count, batch, total)


def random_keys(batch: Experience) -> Tensor:
    """Return [T] uniform random numbers that do not depend on the rank of a sequence.

    Each sequence seeds the generator with its own tokens.
    """
    generator = torch.Generator()
    sequences = batch.input_ids.split(batch.lengths.tolist())
    seeds = [int((ids * torch.arange(1, len(ids) + 1)).sum()) for ids in sequences]
    seeded = zip(sequences, seeds, strict=True)
    drawn = [torch.rand(len(ids), generator=generator.manual_seed(seed)) for ids, seed in seeded]
    return torch.cat([torch.zeros(0), *drawn])
