"""Registers the advantage estimators of --advantage_estimator, and what spreads them over tokens.

core/advantages.py has the estimators of plain runs, and says what an estimator is. Some of these
here read more columns: `greedy_rewards` [M], the reward of the greedy response to the same prompt,
0 for all steps of a response but the last; `components` [M, R], the named components of each reward
before shaping, with their weights, and `component_weights` [R].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.core.advantages import (
    discounted_sums,
    dr_grpo,
    from_rows,
    group_mean_std,
    group_sum,
    grpo,
    reinforce,
    rloo,
    to_rows,
)
from lightrft.core.batch import Batch
from lightrft.core.losses import Sum
from lightrft.core.samples import RIGHT
from lightrft.registry import Registry

estimators = Registry("advantage estimator", flag="--advantage_estimator")
# With a critic (gae, and the recipe ppo) the baseline is the value that the critic predicts at each
# token: gae(). The recipe of REINFORCE++ (arXiv 2501.03262) adds the k1 divergence to the reward of
# each token and normalises over all tokens of the step.
estimators.register("reinforce", "reinforce++", "gae", "ppo", "stable_reinforce")(reinforce)
# The other names are recipes with other losses.
estimators.register("grpo", "group_norm", "dapo", "gspo", "gmpo", "cispo", "sapo", "cpgd", "dppo")(
    grpo
)
# The recipe of REINFORCE++ with baseline normalises over all tokens of the step.
estimators.register("dr_grpo", "reinforce++_baseline", "reinforce_baseline", "dro")(dr_grpo)
# The divergence in the reward is compared in the same way: rloo_penalty().
estimators.register("rloo")(rloo)


@estimators.register("gdpo")
def gdpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    components: Tensor,
    component_weights: Tensor,
    eps: float = 1e-4,
) -> Tensor:
    """A_i = S_i / (std S + eps), S_i = sum_k w_k (R_ik - mean_g R_k) / (std_g R_k + eps).

    Each component of the reward is normalised in the group before the sum, so that combinations
    with the same total stay apart, and S over all samples of the step. The mean of S is 0. GDPO,
    arXiv 2601.05242. A component has its weight already, and normalising takes
    away all of it but the sign.
    """
    total = torch.zeros(len(rewards), dtype=torch.float64)
    for values, weight in zip(components.unbind(1), component_weights.tolist(), strict=True):
        mean, std = group_mean_std(values, groups)
        size = abs(weight)
        total += size * (values - mean) / (std + size * eps) if size else 0.0
    return total / (batch_std(total) + eps)


@estimators.register("lite_ppo")
def lite_ppo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A_i = (R_i - mean_g R) / (std R + eps), with the std of all samples of the step.

    A group whose rewards are nearly equal is not blown up. Lite PPO, arXiv 2508.08221.
    """
    return (rewards - group_mean_std(rewards, groups)[0]) / (batch_std(rewards) + eps)


@estimators.register("prpo")
def prpo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-4) -> Tensor:
    """A_i = (R_i - mean R) / (std R + eps), over all samples of the step, whatever their prompt.

    Rewards of different prompts have to be comparable. The estimator prpo of rLLM.
    """
    return (rewards.double() - rewards.mean(dtype=torch.float64)) / (batch_std(rewards) + eps)


@estimators.register("maxrl")
def maxrl(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = (R_i - mean_g R) / mean_g R; 0 where the mean is not above 0.

    For rewards of 0 and 1 this is the gradient of the likelihood of right responses, to the order
    of the group's size: the fewer responses are right, the more each counts. MaxRL, arXiv
    2602.02710.
    """
    mean, _ = group_mean_std(rewards, groups)
    return torch.where(mean > 0, (rewards - mean) / mean, 0.0)


@estimators.register("gpg")
def gpg(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = alpha (R_i - mean_g R), alpha = all samples / those in groups with a spread.

    Groups of equal rewards have no gradient but count in the mean of the loss; alpha makes up for
    them. GPG, arXiv 2504.02546, without the division by std_g.
    """
    mean, std = group_mean_std(rewards, groups)
    return (rewards - mean) * len(rewards) / (std > 0).sum().clamp(min=1)


@estimators.register("turn_grpo")
def turn_grpo(rewards: Tensor, groups: Tensor, *, responses: Tensor, eps: float = 1e-4) -> Tensor:
    """A_ik = (G_ik - mean_g G_k) / (std_g G_k + eps), G_ik = sum_{j >= k} R_ij, for each turn k.

    What follows a turn is compared with what follows the same turn of the other responses, and is
    the advantage of its tokens alone. The k-th reward of a response stands for its k-th turn. GTPO,
    arXiv 2511.14846, without a discount. A_ik - A_i(k+1) is returned: reward_to_go()
    sums these to A_ik.
    """
    _, index = torch.unique_consecutive(responses, return_inverse=True)
    indices = torch.arange(len(responses))
    starts = torch.full_like(indices, len(responses)).scatter_reduce(0, index, indices, "amin")
    turns = indices - starts[index]
    before = rewards.double().cumsum(0) - rewards
    totals = group_sum(rewards.double(), responses)
    returns = totals - (before - before[starts[index]])

    mean, std = group_mean_std(returns, groups * (len(responses) + 1) + turns)
    advantages = (returns - mean) / (std + eps)
    following = torch.zeros_like(advantages)
    following[:-1] = torch.where(responses[1:] == responses[:-1], advantages[1:], 0.0)
    return advantages - following


def rloo_penalty(penalty: Tensor, groups: Tensor, learned: Tensor) -> Tensor:
    """P_i - mean of the other P_j of the group that are learned from; 0 where there are none.

    P_i is beta KL_i, of all tokens. With R_i - P_i in place of R_i the result is the advantage of
    the paper: the reward is penalised before it is compared. Ahmadian et al., arXiv 2402.14740,
    section 3.
    """
    counted = torch.where(learned, penalty, 0.0).double()
    total = group_sum(counted, groups)
    others = group_sum(learned.double(), groups) - 1
    compared = counted - (total - counted) / others.clamp(min=1)
    return torch.where(learned & (others > 0), compared, 0.0)


@estimators.register("opo")
def opo(rewards: Tensor, groups: Tensor, *, lengths: Tensor) -> Tensor:
    """A_i = R_i - sum_g(l R) / sum_g(l), l the lengths of responses. Hao et al., arXiv 2505.23585.

    This baseline has the least variance if the gradients of tokens are alike and independent.
    """
    lengths = lengths.double()
    return rewards - group_sum(lengths * rewards, groups) / group_sum(lengths, groups).clamp(min=1)


@estimators.register("distill", "gkd")
def distill(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = 0: the teacher's term alone is the advantage of a token, and rewards are only reported.

    See teacher_advantages().
    """
    return torch.zeros_like(rewards)


@estimators.register("remax")
def remax(rewards: Tensor, groups: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    """A_i = R_i - the reward of the greedy response to the same prompt.

    Li et al., arXiv 2310.10505.
    """
    return rewards - greedy_rewards


@estimators.register("pass_at_k")
def pass_at_k(rewards: Tensor, groups: Tensor, *, pass_k: int) -> Tensor:
    """Return the advantage of a response in the average draw of k from the group.

    A draw is right when any sample in it is; a reward above RIGHT is right. Of n samples m are
    wrong. F = C(m, k) / C(n, k) of all draws fail, and C(m-1, k-1) / C(n-1, k-1) of the draws with
    a given wrong sample. With sigma = sqrt(F (1 - F)) a right sample has A = F / sigma, a wrong one
    A = (F - the second share) / sigma; 0 where no draw or every draw fails. Chen et al., arXiv
    2508.10751, equations 14 and 15.
    """
    wrong = (rewards <= RIGHT).double()
    size = group_sum(torch.ones_like(wrong), groups)
    num_wrong = group_sum(wrong, groups)
    failing = share_of_draws(num_wrong, size, pass_k)
    sigma = (failing * (1 - failing)).sqrt()
    deviation = failing - wrong * share_of_draws(num_wrong - 1, size - 1, pass_k - 1)
    return torch.where(sigma > 0, deviation / sigma.clamp(min=1e-12), 0.0)


def weighted_by_difficulty(
    advantages: Tensor, solved: Tensor, *, least: float, most: float
) -> Tensor:
    """Return A w(p) where A is positive, else A w(1 - p): [M], [M] -> [M].

    p is the share of right samples in the group. w(p) = least + (most - least) / (1 + exp(10 (p -
    0.75))): rare outcomes count more. The form is taken from GRPO-LEAD, arXiv 2504.09696, section
    3.3.
    """
    rarity = torch.where(advantages > 0, solved, 1 - solved)
    return advantages * (least + (most - least) * torch.sigmoid(10 * (0.75 - rarity)))


def solved_share(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the share of right samples in each sample's group: [N], [N] -> [N] float64."""
    right = (rewards > RIGHT).double()
    return group_sum(right, groups) / group_sum(torch.ones_like(right), groups)


def share_of_draws(chosen: Tensor, total: Tensor, k: int) -> Tensor:
    """Return C(chosen, k) / C(total, k): the share of draws of k from the chosen alone.

    [N], [N] -> [N] float64.
    """
    drawn = torch.arange(k, dtype=torch.float64)
    return ((chosen[:, None] - drawn).clamp(min=0) / (total[:, None] - drawn).clamp(min=1)).prod(1)


def batch_std(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation of all values, 0 for a single one: [N] -> []."""
    values = values.double()
    squares = (values - values.mean()).square().sum() if len(values) else values.sum()
    return (squares / max(len(values) - 1, 1)).sqrt()


# -- over tokens


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


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
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
