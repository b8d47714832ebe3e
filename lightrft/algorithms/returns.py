"""Returns over tokens: from the rewards of tokens to one advantage for each.

Time steps are learned tokens only: text of a tool or an environment between them is skipped. Values
are [T], computed in float64, and 0 for tokens that are not learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.algorithms.reduce import Sum, sequence_sums
from lightrft.types import Batch, padded, unpadded


def reward_to_go(rewards: Tensor, batch: Batch, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}. [T] -> [T]."""
    return from_rows(discounted_sums(to_rows(rewards, batch), gamma), batch)


def gae(
    rewards: Tensor, values: Tensor, batch: Batch, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}.

    V after the end is 0. Returns advantages and the returns A + V, the target of the critic. [T],
    [T] -> [T], [T]. Schulman et al., arXiv 1506.02438, equations 11 and 16.
    """
    value_rows = to_rows(values, batch)
    following = F.pad(value_rows[:, 1:], (0, 1))
    deltas = to_rows(rewards, batch) + gamma * following - value_rows
    advantages = discounted_sums(deltas, gamma * lambd)
    return from_rows(advantages, batch), from_rows(advantages + value_rows, batch)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, total: Sum) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the masked elements of all ranks.

    It is 1 if the values predict the returns, 0 if they are no better than the mean, and not finite
    where all returns are equal. [T], [T], [T] -> [].
    """
    pairs = torch.stack([returns[mask], returns[mask] - values[mask]]).double()
    count, *sums = total(torch.cat([mask.sum(dtype=torch.float64)[None], pairs.sum(1)]))
    means = torch.stack(sums) / count
    total_variance, unexplained = total((pairs - means[:, None]).square().sum(1))
    return 1 - unexplained / total_variance


def distill(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """A_t = log p_teacher - log p_actor at the tokens that the actor sampled. [T] -> [T].

    This is the reverse divergence as a reward of each token. It is used alone, or added to the
    advantage of the task. On-policy distillation: Agarwal et al., arXiv 2306.13649.
    """
    return teacher_logprobs - logprobs


def whiten(values: Tensor, mask: Tensor, total: Sum, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over the masked elements of all ranks; 0 elsewhere. [T], [T] -> [T].

    std is the standard deviation of a population.
    """
    count, value = total(
        torch.stack([mask.sum(dtype=torch.float64), values[mask].sum(dtype=torch.float64)])
    )
    mean = value / count.clamp(min=1)
    variance = total((values[mask].double() - mean).square().sum()) / count.clamp(min=1)
    return torch.where(mask, (values - mean) / (variance.sqrt() + eps), 0.0)


def discounted_sums(rows: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor y_{t+1} along each row: [N, L] -> [N, L].

    After k rounds each entry is the sum of the 2^k entries that start with it.
    """
    sums = rows.clone()
    reach = 1
    while reach < rows.shape[1]:
        sums[:, :-reach] = sums[:, :-reach] + factor**reach * sums[:, reach:]
        reach *= 2
    return sums


def to_rows(values: Tensor, batch: Batch) -> Tensor:
    """Return the learned tokens of each sequence as a row, padded with 0: [T] -> [N, L] float64."""
    lengths = learned_lengths(batch)
    return padded(values.double()[batch.learned_tokens], lengths, max(lengths.tolist(), default=0))


def from_rows(rows: Tensor, batch: Batch) -> Tensor:
    """Invert to_rows(): [N, L] -> [T]."""
    values = rows.new_zeros(batch.num_tokens)
    values[batch.learned_tokens] = unpadded(rows, learned_lengths(batch))
    return values


def learned_lengths(batch: Batch) -> Tensor:
    """Return the number of learned tokens of each sequence, [N] int64."""
    return sequence_sums(batch.loss_mask.long(), batch)
