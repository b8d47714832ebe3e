"""Why: between a reward and a gradient lie the flat layout, the advantages and the move to another
rank; all by hand here.

The reference for log-probs is transformers' eager attention on each sample alone; for advantages,
plain numbers.
"""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightrft.algorithms.kl import KLCoefficient, kl_estimators
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.rollout.experience import flatten_for_run, with_branches
from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.stages.build import experience_maker
from lightrft.algorithms.stages.compare import compare_rewards
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection, ModelSection, RewardSection, TrainSection
from lightrft.config.errors import ConfigError
from lightrft.core.advantages import reward_to_go
from lightrft.core.experience import flatten, place_at_tokens
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm, micro_batches
from lightrft.core.samples import Episode, Prompt, Sample
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.strategy import get_strategy
from lightrft.strategy.batching.micro_batches import prompts
from ranks import run_ranks
from tiny import tiny_model

TEMPERATURE = 0.7


def make_sample(prompt: list[int], response: list[int], group: int, reward: float) -> Sample:
    return Sample(
        prompt=Prompt(index=group, text="", token_ids=prompt),
        group=group,
        token_ids=response,
        logprobs=[-(token % 7) / 8 for token in response],
        text="",
        finish_reason="stop",
        reward=reward,
    )


def test_flatten_by_hand():
    samples = [
        make_sample([1, 2], [3, 4, 5], 9, 1.0),
        make_sample([6], [7], 9, 0.5),
        make_sample([8, 9], [], 4, 0.25),
    ]
    experience = flatten(samples, first_row=10)
    assert experience.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert experience.loss_mask.tolist() == [
        False,
        False,
        True,
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    assert experience.engine_logprobs.tolist() == [0, 0, -0.375, -0.5, -0.625, 0, 0, 0, 0]
    assert experience.lengths.tolist() == [5, 2, 2] and experience.rows.tolist() == [10, 11, 12]

    assert experience.groups.tolist() == [9, 9, 4] and experience.rewards.tolist() == [
        1.0,
        0.5,
        0.25,
    ]
    assert experience.advantages is experience.old_logprobs is experience.reference_logprobs is None


def test_no_samples_keep_every_column_and_its_type():
    nothing = flatten([], first_row=3)
    something = flatten([make_sample([1], [2], 0, 0.0)], first_row=0)
    for per in ("token", "sequence"):
        types = {name: value.dtype for name, value in something.columns(per).items()}
        assert {name: value.dtype for name, value in nothing.columns(per).items()} == types
    assert len(nothing) == nothing.num_tokens == 0


# group, reward, response length; group 1 lies on both ranks, group 2 has no signal
SAMPLES = [
    (0, 1.0, 3),
    (0, 0.0, 9),
    (1, 2.0, 4),
    (1, 6.0, 1),
    (1, 1.0, 7),
    (2, 0.1, 2),
    (2, 0.1, 5),
    (2, 0.1, 6),
]
# group 0: mean 0.5, std 0.707107; group 1: 2, 6, 1 has mean 3, std 2.645751
ADVANTAGES = [0.707007, -0.707007, -0.377950, 1.133850, -0.755900, 0.0, 0.0, 0.0]
TOKEN_MEAN = (
    sum(abs(a) * length for a, (_, _, length) in zip(ADVANTAGES, SAMPLES, strict=True)) / 37
)
METRICS = {
    "rollout/advantage_abs": TOKEN_MEAN,
    "rollout/groups_without_signal": 1 / 3,
    "rollout/groups_solved_100": 1 / 3,
}


def all_samples() -> list[Sample]:
    prompts = {0: [60, 61], 1: [70], 2: [80, 81, 82]}
    return [
        make_sample(
            prompts[group],
            [(13 * number + 29 * index) % 250 for index in range(length)],
            group,
            reward,
        )
        for number, (group, reward, length) in enumerate(SAMPLES)
    ]


def make(
    folder: str, held: list[int], minibatch: int, epochs: int, reference: bool
) -> dict[str, Any]:
    """Make the experience of this rank.

    `held` says how many of the samples each rank holds.
    """
    policy = make_policy(folder, minibatch, reference)
    train = TrainSection(
        train_batch_size=minibatch, max_epochs=epochs, max_tokens_per_microbatch=16
    )
    return experience_of(policy, all_samples(), held, train=train)


def make_policy(folder: str, minibatch: int, reference: bool) -> Policy:
    torch.manual_seed(0)
    strategy = get_strategy({"fsdp": True, "train_batch_size": minibatch})
    strategy.setup_distributed()
    model = ModelSection(pretrain=folder)
    actor = Actor(load_model(model))
    optimizer = strategy.create_optimizer(actor, lr=1e-3)
    actor, optimizer = strategy.prepare((actor, optimizer))
    frozen = None

    if reference:
        frozen = strategy.prepare(
            Actor(load_model(ModelSection(pretrain=folder + "/reference"))).requires_grad_(False)
        )

    return Policy(
        strategy, actor, optimizer, None, reference=frozen, temperature=TEMPERATURE, max_tokens=16
    )


ONE_STEP = TrainSection(train_batch_size=8, max_tokens_per_microbatch=16)


def experience_of(
    policy: Policy,
    samples: list[Sample],
    held: list[int],
    *,
    algorithm: AlgorithmSection | None = None,
    reward: RewardSection | None = None,
    kl_coefficient: KLCoefficient | None = None,
    train: TrainSection = ONE_STEP,
    branches: bool = False,
) -> dict[str, Any]:
    data = policy.strategy.mesh.data
    mine = samples[sum(held[: data.rank]) : sum(held[: data.rank + 1])]
    metrics = Metrics()
    shape = RewardShaper(reward or RewardSection(), longest=10)
    algorithm = algorithm or AlgorithmSection(use_kl_loss=True)
    given = {
        "compare": compare_rewards(algorithm, shape, {}),
        "kl_coefficient": kl_coefficient or KLCoefficient(algorithm.init_kl_coef),
    }
    planned = experience_maker(policy, algorithm, train, branches=branches, **given)(mine, metrics)

    return {
        "columns": planned.experience.columns("token") | planned.experience.columns("sequence"),
        "minibatches": planned.minibatches,
        "metrics": metrics.reduce(data),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(path / "reference", seed=1)
    return tiny_model(path)


def reference_logprobs(folder: str, sample: Sample) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.tensor(sample.prompt.token_ids + sample.token_ids)
    with torch.no_grad():
        logp = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    values = torch.cat([torch.zeros(1), logp[:-1].gather(-1, ids[1:, None])[:, 0]])
    values[: len(sample.prompt.token_ids)] = 0.0
    return values


def sequences(result: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    """Row -> columns of that row, in the rank's order."""
    columns, lengths = result["columns"], result["columns"]["lengths"].tolist()
    total = sum(lengths)
    per_token = {
        name: value.split(lengths)
        for name, value in columns.items()
        if len(value) == total and name != "lengths"
    }

    return {
        row: {name: pieces[index] for name, pieces in per_token.items()}
        for index, row in enumerate(columns["rows"].tolist())
    }


@pytest.mark.parametrize(
    "held, minibatch, epochs, reference",
    [
        ([8], 8, 1, False),
        ([8], 4, 1, True),
        ([3, 5], 8, 1, False),
        ([3, 5], 4, 1, True),
        ([4, 4], 8, 2, False),
        ([8, 0], 4, 1, True),
    ],
)
def test_experience(folder, held, minibatch, epochs, reference):
    results = run_ranks(len(held), make, folder, held, minibatch, epochs, reference)
    samples = all_samples()
    found = {row: columns for result in results for row, columns in sequences(result).items()}
    assert (
        sorted(found) == list(range(8))
        and sum(len(result["columns"]["rows"]) for result in results) == 8
    )

    several_updates = 8 // minibatch * epochs > 1
    for row, columns in found.items():
        sample = samples[row]
        prompt = len(sample.prompt.token_ids)
        response = len(sample.token_ids)
        assert columns["input_ids"].tolist() == sample.prompt.token_ids + sample.token_ids
        assert columns["loss_mask"].tolist() == [False] * prompt + [True] * response
        assert columns["engine_logprobs"].tolist() == [0.0] * prompt + sample.logprobs
        assert columns["advantages"].tolist() == pytest.approx(
            [0.0] * prompt + [ADVANTAGES[row]] * response, abs=1e-6
        )

        assert ("old_logprobs" in columns) == several_updates and (
            "reference_logprobs" in columns
        ) == reference
        if several_updates:
            torch.testing.assert_close(
                columns["old_logprobs"], reference_logprobs(folder, sample), rtol=1e-5, atol=1e-5
            )

        if reference:
            expected = reference_logprobs(folder + "/reference", sample)
            torch.testing.assert_close(
                columns["reference_logprobs"], expected, rtol=1e-5, atol=1e-5
            )

    assert_planned(results, minibatch, [sample.length for sample in samples])
    for result in results:
        assert {name: result["metrics"][name] for name in METRICS} == pytest.approx(
            METRICS, abs=1e-6
        )


def assert_planned(results: list[dict[str, Any]], minibatch: int, lengths: list[int]) -> None:
    """Assert that every optimizer step takes the rows that belong to it.

    It takes them in as many micro-batches on every rank, none over 16 tokens.
    """
    for step in range(8 // minibatch):
        of_ranks = [result["minibatches"][step] for result in results]
        assert len({len(micro_batches) for micro_batches in of_ranks}) == 1
        packed = [
            [result["columns"]["rows"][index].item() for index in indices]
            for result, micro_batches in zip(results, of_ranks, strict=True)
            for indices in micro_batches
        ]
        assert sorted(row for rows in packed for row in rows) == list(
            range(step * minibatch, (step + 1) * minibatch)
        )
        assert all(sum(lengths[row] for row in rows) <= 16 for rows in packed)


# -- what the options make of the same samples, each at one point of the pipeline


def stepwise() -> list[Sample]:
    """Return two groups with rewards of steps.

    In group 0 one response is rewarded at the second and the last token (1 and 3), the other at the
    end (2). One response of group 1 has no tokens.
    """
    samples = [make_sample([60], [1, 2, 3], 0, 4.0), make_sample([60], [4, 5], 0, 2.0)]
    samples[0].token_rewards = [None, 1.0, 3.0]
    return [*samples, make_sample([70, 71], [], 1, 5.0), make_sample([70, 71], [6], 1, 1.0)]


def beside_greedy(samples: list[Sample]) -> list[Sample]:
    """The greedy response to the prompt of group g got g + 0.5."""
    for sample in samples:
        sample.greedy_reward = sample.group + 0.5
    return samples


def with_components(samples: list[Sample]) -> list[Sample]:
    """A reward is a component for the answer and, in group 1, 1 for a short response."""
    for sample in samples:
        short = float(sample.group == 1 and len(sample.token_ids) < 5)
        sample.reward_components = {"answer": sample.reward - short} | (
            {"short": short} if short else {}
        )
    return samples


def without(samples: list[Sample], *indices: int) -> list[Sample]:
    for index in indices:
        samples[index].masked = True
    return samples


def cut(samples: list[Sample], *indices: int) -> list[Sample]:
    for index in indices:
        samples[index].finish_reason = "length"
    return samples


CASES: dict[str, tuple[list[Sample], dict[str, Any], dict[str, Any]]] = {
    "discounted": (stepwise(), {"advantage_estimator": "reinforce", "gamma": 0.5}, {}),
    "steps": (stepwise(), {"advantage_estimator": "dr_grpo"}, {}),
    "others' steps": (stepwise(), {"advantage_estimator": "rloo"}, {}),
    "lengths": (stepwise(), {"advantage_estimator": "opo"}, {}),
    "whitened": (all_samples(), {"advantage_estimator": "dr_grpo", "advantages_norm": True}, {}),
    "clipped": (all_samples(), {"advantage_estimator": "dr_grpo", "advantage_clip": 0.75}, {}),
    "rewards": (all_samples(), {"advantage_estimator": "reinforce"}, {"reward_clip": 1.5}),
    "too long": (
        all_samples(),
        {"advantage_estimator": "reinforce"},
        {"overlong_buffer": True, "overlong_buffer_len": 4, "overlong_buffer_penalty_factor": 2.0},
    ),
    "cut off": (cut(all_samples(), 3, 6), {"mask_truncated": True}, {}),
    "greedy": (beside_greedy(all_samples()), {"advantage_estimator": "remax"}, {}),
    "greedy, stepwise": (beside_greedy(stepwise()), {"advantage_estimator": "remax"}, {}),
    "left out": (without(all_samples(), 0, 4), {}, {}),
    "short and long": (all_samples(), {"length_filter": [2, 6]}, {}),
    "hard enough": (all_samples(), {"difficulty_filter": [0.0, 0.9]}, {}),
    "pass at 2": (all_samples(), {"advantage_estimator": "pass_at_k", "pass_k": 2}, {}),
    "rare": (all_samples(), {"difficulty_weights": [0.4, 1.5]}, {}),
    "components": (with_components(all_samples()), {"advantage_estimator": "gdpo"}, {}),
    "one component": (all_samples(), {"advantage_estimator": "gdpo"}, {}),
    "turns": (stepwise(), {"advantage_estimator": "turn_grpo"}, {}),
    "certain": (all_samples(), {"entropy_filter": [0.0, 0.01]}, {}),
    "open": (all_samples(), {"entropy_filter": [0.01, 20.0]}, {}),
}
WHOLE = [[value] * length for value, (_, _, length) in zip(ADVANTAGES, SAMPLES, strict=True)]
# w(1/2) = 0.4 + 1.1 / (1 + exp(-2.5)) = 1.416556, w(1) = 0.4 + 1.1 / (1 + exp(2.5)) = 0.483444,
# w(0) = 1.499392
RARE = [1.416556, 1.416556, 1.499392, 0.483444, 1.499392, 1.0, 1.0, 1.0]
LENGTHS = [length for _, _, length in SAMPLES]
# deviations from the group mean: 0.5, -0.5, -1, 3, -2, 0, 0, 0, each as often as its response has
# tokens (37): sum 1.5 - 4.5 - 4 + 3 - 14 = -18; squares 0.75 + 2.25 + 4 + 9 + 28 = 44; variance
# 44/37 - (18/37)^2 = 0.952520, std 0.975971
DEVIATIONS = [0.5, -0.5, -1.0, 3.0, -2.0, 0.0, 0.0, 0.0]
EXPECTED: dict[str, list[list[float] | None]] = {
    "discounted": [[0.5 + 0.75, 1 + 1.5, 3.0], [1.0, 2.0], [], [1.0]],
    # group 0 has three rewards, 1, 3, 2, mean 2: -1 and 1 make the first response; group 1 has 5
    # and 1
    "steps": [[0.0, 0.0, 1.0], [0.0, 0.0], [], [-2.0]],
    # group 0: 1 and 3 less 2, and 2 less their mean; group 1: 1 less 5
    "others' steps": [[0.0, 0.0, 1.0], [0.0, 0.0], [], [-4.0]],
    # weights 2, 1, 2: mean (2 * 1 + 3 + 2 * 2) / 5 = 1.8; the response without tokens weighs
    # nothing
    "lengths": [[0.4, 0.4, 1.2], [0.2, 0.2], [], [0.0]],
    "whitened": [
        [(value + 18 / 37) / 0.9759713] * length
        for value, length in zip(DEVIATIONS, LENGTHS, strict=True)
    ],
    "clipped": [
        [max(-0.75, min(0.75, value))] * length
        for value, length in zip(DEVIATIONS, LENGTHS, strict=True)
    ],
    "rewards": [[min(reward, 1.5)] * length for _, reward, length in SAMPLES],
    # longest 10, buffer 4: -0.5 per token from 7 on
    "too long": [[reward - max(0, length - 6) / 2] * length for _, reward, length in SAMPLES],
    "cut off": [None if index in (3, 6) else whole for index, whole in enumerate(WHOLE)],
    "greedy": [[reward - group - 0.5] * length for group, reward, length in SAMPLES],
    # the greedy response is subtracted once from a response, however many steps were rewarded
    "greedy, stepwise": [[1 + 3 - 0.5, 1 + 3 - 0.5, 3 - 0.5], [2 - 0.5, 2 - 0.5], [], [1 - 1.5]],
    "left out": [None if index in (0, 4) else whole for index, whole in enumerate(WHOLE)],
    "short and long": [whole if 2 <= len(whole) <= 6 else None for whole in WHOLE],
    # right are half of group 0, all of group 1, none of group 2
    "hard enough": [None if SAMPLES[index][0] == 1 else whole for index, whole in enumerate(WHOLE)],
    # group 0: one wrong of two, no draw fails; groups 1: none wrong; group 2: all wrong
    "pass at 2": [[0.0] * length for length in LENGTHS],
    # shares of right responses 1/2, 1 and 0: w(p) = 0.4 + 1.1 / (1 + exp(10 (p - 0.75))), of 1 - p
    # where A < 0
    "rare": [
        [value * weight for value in whole] for whole, weight in zip(WHOLE, RARE, strict=True)
    ],
    # group 0: 0.707007 and -0.707007. Group 1: answers 1, 5, 1 have mean 2.333333, std 2.309401:
    # -0.577325, 1.154650, -0.577325; short 1, 1, 0, std 0.577350: 0.577250, 0.577250, -1.154501.
    # Sums -0.000075, 1.731900, -1.731826, and 0 three times; squares 0.999718 + 5.998699, / 7, std
    # 0.999887
    "components": [
        [value / (0.9998871 + 1e-4)] * length
        for value, length in zip(
            [0.707007, -0.707007, -0.000075, 1.731900, -1.731826, 0.0, 0.0, 0.0],
            LENGTHS,
            strict=True,
        )
    ],
    # squares of ADVANTAGES 0.999717 + 1.999848, / 7, std 0.654600
    "one component": [[value / (0.6546061 + 1e-4) for value in whole] for whole in WHOLE],
    # group 0: returns 4, 3 and 2: first turns 4, 2, std 1.414214; the second is alone. Group 1: 5,
    # 1, std 2.828427
    "turns": [[0.707057, 0.707057, 0.0], [-0.707057, -0.707057], [], [-0.707082]],
    "certain": [None] * 8,
    "open": list(WHOLE),
}


def make_cases(folder: str, shares: dict[int, list[int]]) -> dict[str, dict[str, Any]]:
    policy = make_policy(folder, 8, reference=False)
    results = {}
    for name, (samples, algorithm, reward) in CASES.items():
        options = {"algorithm": AlgorithmSection(**algorithm), "reward": RewardSection(**reward)}
        results[name] = experience_of(policy, samples, shares[len(samples)], **options)
    return results


@pytest.fixture(
    scope="module",
    params=[{8: [8], 4: [4]}, {8: [3, 5], 4: [1, 3]}, {8: [8, 0], 4: [0, 4]}],
    ids=str,
)
def made(request, folder) -> dict[str, dict[int, dict[str, torch.Tensor]]]:
    """Case -> row -> columns, for samples that lie on ranks in different ways."""
    results = run_ranks(len(request.param[8]), make_cases, folder, request.param)
    return {
        name: {row: c for result in results for row, c in sequences(result[name]).items()}
        for name in CASES
    }


@pytest.mark.parametrize("name", CASES)
def test_options(made, name):
    for row, expected in enumerate(EXPECTED[name]):
        columns = made[name][row]
        prompt = len(CASES[name][0][row].prompt.token_ids)
        learned = columns["loss_mask"][prompt:]
        assert not columns["loss_mask"][:prompt].any() and bool(learned.all()) == (
            expected is not None
        )

        if expected is None:
            assert not learned.any()
        else:
            assert columns["advantages"].tolist() == pytest.approx(
                [0.0] * prompt + expected, abs=1e-6
            )


# -- rewards at tokens that are not learned


TURNS = [
    # sampled, rewards of tokens or of the response, learned with a first token of its own
    # temperature
    ([1, 1, 1, 0, 1], 2.0, [0, 1, 1, 0, 1]),
    ([1, 1, 1, 0, 1], [None, None, 3.0, None, 2.0], [0, 1, 1, 0, 1]),
    ([1, 1, 0, 0, 1], [None, None, 3.0, 4.0, 2.0], [0, 1, 0, 0, 1]),
    ([1, 0, 1, 1, 0], [5.0, 1.0, None, 2.0, 3.0], [0, 0, 1, 1, 0]),
    ([1, 1, 0, 1, 0], 7.0, [0, 1, 0, 1, 0]),
    ([1], 2.0, [0]),
    ([0, 0, 1, 1], [1.0, 2.0, 4.0, 8.0], [0, 0, 1, 1]),
    (None, [1.0, 2.0, None], [0, 1, 1]),
    (None, 3.0, [0, 1]),
]


@pytest.mark.parametrize("first_token_apart", [True, False])
def test_rewards_at_tokens_that_are_not_learned_stay_in_the_returns(first_token_apart):
    """Only the first token of a conversation has a separate temperature and is not learned.

    A return is the sum of all rewards from the token on.
    """
    samples = []
    values = []
    for sampled, reward, learned in TURNS:
        sample = make_sample([1, 2], list(range(3, 3 + len(learned))), len(samples), 0.0)
        sample.episode = sampled and Episode(sampled=[bool(one) for one in sampled])
        if isinstance(reward, list):
            sample.token_rewards = reward
        else:
            sample.reward = reward
        samples.append(sample)
        values += [value for _, value in sample.steps]

    experience = flatten_for_run(samples, first_token_apart=first_token_apart)
    returns = reward_to_go(
        place_at_tokens(torch.tensor(values), samples, experience), experience, gamma=1.0
    )
    for sample, (sampled, _, learned), start in zip(
        samples, TURNS, experience.offsets.tolist(), strict=False
    ):
        learned = learned if first_token_apart else sampled or [1] * len(learned)
        learned_tokens = slice(start + 2, start + 2 + len(learned))
        steps = dict(sample.steps)
        expected = [
            sum(steps.get(later, 0.0) for later in range(token, len(learned))) if one else 0.0
            for token, one in enumerate(learned)
        ]
        assert experience.loss_mask[learned_tokens].tolist() == [bool(one) for one in learned]
        assert returns[learned_tokens].tolist() == expected


def test_only_the_first_turn_of_a_branch_without_a_history_has_a_first_token_of_its_own():
    episode = with_a_branch(make_sample([1], [2, 3], 0, 1.0), 1, [4, 5])
    episode.episode.branches.append(make_sample([6], [7, 8], 0, 0.0))
    episode.episode.branches[1].episode = Episode(sampled=[True, True])
    experience = flatten_for_run(with_branches([episode]), first_token_apart=True)
    assert experience.input_ids[experience.loss_mask].tolist() == [3, 4, 5, 8]


# -- episodes whose history was rewritten


def with_a_branch(sample: Sample, shared: int, *others: list[int]) -> Sample:
    """Add branches that repeat the first `shared` tokens of the sample."""
    sample.episode = Episode(sampled=[True] * len(sample.token_ids))
    for tokens in others:
        branch = make_sample(
            list(sample.prompt.token_ids), [*sample.token_ids[:shared], *tokens], sample.group, 0.0
        )
        branch.episode = Episode(sampled=[False] * shared + [True] * len(tokens))
        sample.episode.branches.append(branch)
    return sample


def branched() -> list[Sample]:
    first, second, *others = stepwise()
    second.reward = 5.0
    return [
        with_a_branch(first, 2, [9], [8, 7]),
        second,
        others[0],
        with_a_branch(others[1], 1, [5]),
    ]


def make_branched(folder: str, held: list[int]) -> dict[str, Any]:
    policy = make_policy(folder, 2, reference=False)
    train = TrainSection(train_batch_size=2, max_tokens_per_microbatch=16)
    algorithm = AlgorithmSection(advantage_estimator="dr_grpo")
    return experience_of(policy, branched(), held, algorithm=algorithm, train=train, branches=True)


def test_branches_share_a_micro_batch_with_their_episode():
    """To the planner they begin with the same prompt, so the common tokens are computed once."""
    rows = with_branches(branched())
    tags = prompts(flatten(rows, first_row=0), torch.tensor([0, 0, 0, 1, 2, 3, 3]))
    assert tags[:, 1].tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert [len(set(tags[rows, 0].tolist())) for rows in ([0, 1, 2, 3], [4, 5, 6], [0, 4])] == [
        1,
        1,
        2,
    ]


@pytest.mark.parametrize("held", [[4], [1, 3], [0, 4]], ids=str)
def test_branches_have_the_advantage_of_their_episode(folder, held):
    """Branches count neither for the baseline nor for --train_batch_size.

    They are learned in the step of their sample.
    """
    results = run_ranks(len(held), make_branched, folder, held)
    found = {row: columns for result in results for row, columns in sequences(result).items()}

    # group 0 has the rewards 1, 3 and 5 with mean 3, so the first episode has -2 and 0, and its
    # branches -2; group 1 has 5 and 1
    expected = [[-2.0, -2.0, 0.0], [-2.0], [-2.0, -2.0], [2.0, 2.0], [], [-2.0], [-2.0]]
    learned = [[1, 2, 3], [9], [8, 7], [4, 5], [], [6], [5]]
    for row, (advantages, tokens) in enumerate(zip(expected, learned, strict=True)):
        mask = found[row]["loss_mask"]
        assert found[row]["input_ids"][mask].tolist() == tokens
        assert found[row]["advantages"][mask].tolist() == pytest.approx(advantages, abs=1e-6)

    for step, rows in enumerate([[0, 1, 2, 3], [4, 5, 6]]):
        planned = [
            result["columns"]["rows"][index].item()
            for result in results
            for members in result["minibatches"][step]
            for index in members
        ]
        assert sorted(planned) == rows


# -- episodes with several roles


def roled() -> list[Sample]:
    """Return two groups of episodes in which a solver, the judge, or both have conversations.

    Every role has a separate reward. The second episode has two conversations of the judge, and the
    third none. Another reward, of 0.5, counts for both in the last episode.
    """
    rewards = [(1.0, -1.0), (3.0, 2.0), (8.0, 9.0), (1.0, 0.0), (2.0, 4.0)]
    episodes = [
        with_a_branch(make_sample([60], [1, 2, 3], 0, 0.0), 3, [9]),
        with_a_branch(make_sample([60], [4, 5], 0, 0.0), 1, [8, 7], [6]),
        with_a_branch(make_sample([60], [10], 0, 0.0), 0),
        with_a_branch(make_sample([70, 71], [11], 1, 0.0), 0, [12]),
        with_a_branch(make_sample([70, 71], [14], 1, 0.0), 1, [15]),
    ]
    for episode, (solver, judge) in zip(episodes, rewards, strict=True):
        episode.reward_components = {"policy:solver": solver, "policy:judge": judge}
        episode.episode.role = "solver"
        for branch in episode.episode.branches:
            branch.episode.role = "judge"
    episodes[4].reward_components["other"] = 0.5
    for episode in episodes:
        episode.reward = sum(episode.reward_components.values())
    return episodes


OF_ROLES = [("solver", [[1, 3, 8], [1, 2.5]]), ("judge", [[-1, 2], [0, 4.5]])]
"""Rewards that are compared with each other, by role and group."""
CONVERSATIONS = {
    "solver": [[[1, 2, 3]], [[4, 5]], [[10]], [[11]], [[14]]],
    "judge": [[[9]], [[8, 7], [6]], [[12]], [[15]]],
}
"""Learned tokens of each conversation of each role, by episode."""


def minus_mean(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def by_deviation(rewards):
    centered = minus_mean(rewards)
    std = (sum(each**2 for each in centered) / (len(rewards) - 1)) ** 0.5
    return [each / (std + 1e-4) for each in centered]


def minus_others(rewards):
    return [each - (sum(rewards) - each) / (len(rewards) - 1) for each in rewards]


BY_HAND = {
    "dr_grpo": minus_mean,
    "grpo": by_deviation,
    "rloo": minus_others,
    "reinforce++": lambda rewards: rewards,
}


def make_roled(folder: str, held: list[int], options: dict[str, Any]) -> dict[str, Any]:
    policy = make_policy(folder, 5, reference=False)
    train = TrainSection(train_batch_size=5, max_tokens_per_microbatch=16)
    algorithm = AlgorithmSection(**options)
    return experience_of(policy, roled(), held, algorithm=algorithm, train=train, branches=True)


def learned_advantages(results: list[dict[str, Any]]) -> dict[tuple[int, ...], set[float]]:
    """Return learned tokens of a conversation -> the advantages of its tokens."""
    return {
        tuple(found["input_ids"][found["loss_mask"]].tolist()): {
            round(value, 4) for value in found["advantages"][found["loss_mask"]].tolist()
        }
        for result in results
        for found in sequences(result).values()
    }


@pytest.mark.parametrize("held", [[5], [1, 4], [0, 5]], ids=str)
@pytest.mark.parametrize("across", [False, True], ids=["role", "group"])
@pytest.mark.parametrize("name", BY_HAND)
def test_rewards_of_roles_are_compared_with_those_of_the_role_or_of_the_group(
    folder, name, across, held
):
    options = {"advantage_estimator": name, "role_advantage": "group" if across else "role"}
    found = learned_advantages(run_ranks(len(held), make_roled, folder, held, options))

    expected = {}
    rewards = dict(OF_ROLES)
    pools = [[rewards[role][group]] for group in (0, 1) for role in rewards]
    if across:
        pools = [[rewards["solver"][group], rewards["judge"][group]] for group in (0, 1)]
    for pool in pools:
        values = iter(BY_HAND[name]([reward for part in pool for reward in part]))
        for part in pool:
            role = next(role for role, groups in OF_ROLES if part in groups)
            first = 0 if part is rewards[role][0] else len(rewards[role][0])
            for conversations in CONVERSATIONS[role][first : first + len(part)]:
                value = next(values)
                expected |= {tuple(tokens): {round(value, 4)} for tokens in conversations}
    assert found == expected


def test_roles_are_kept_out_of_the_loss(folder):
    options = {"advantage_estimator": "dr_grpo", "train_roles": ["judge"]}
    found = learned_advantages(run_ranks(2, make_roled, folder, [2, 3], options))
    judged = [tuple(tokens) for episode in CONVERSATIONS["judge"] for tokens in episode]
    assert sorted(found) == sorted([(), *judged])


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"train_roles": ["solvr", "x"]},
            "have only the roles judge, solver: the model policy:ROLE",
        ),
        ({"advantage_estimator": "remax"}, "remax does not support rewards of roles"),
    ],
)
def test_roles_that_a_run_cannot_learn_from_are_named(folder, options, message):
    assert message in run_ranks(1, roles_refused, folder, options)[0]


def roles_refused(folder: str, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        make_roled(folder, [5], options)
    return str(error.value)


# -- the weight of an episode with branches


def eight_branches() -> list[Sample]:
    """Return an episode with eight branches, and one without; their rewards are 3 and 1."""
    first = make_sample([60, 61], [1, 2, 3, 4], 0, 3.0)
    branches = [[20 + index] * (1 + index % 3) for index in range(8)]
    with_a_branch(first, 2, *branches)
    for index, branch in enumerate(first.episode.branches[4:]):  # as after other first turns
        branch.token_ids = branch.token_ids[2:]
        branch.prompt = Prompt(0, "", [60, 61, 90 + index])
        branch.logprobs = branch.logprobs[2:]
        branch.episode = Episode(sampled=[True] * len(branch.token_ids))
    return [first, with_a_branch(make_sample([60, 61], [7, 8], 0, 1.0), 0)]


def gradients(folder: str, held: list[int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of the run's objective, of all ranks."""
    policy = make_policy(folder, 2, reference=False)
    algorithm = AlgorithmSection(advantage_estimator="dr_grpo", **options)
    train = TrainSection(train_batch_size=2, max_tokens_per_microbatch=40)
    data = policy.strategy.mesh.data
    mine = eight_branches()[sum(held[: data.rank]) : sum(held[: data.rank + 1])]
    shape = RewardShaper(RewardSection(), longest=10)
    make = experience_maker(
        policy,
        algorithm,
        train,
        compare=compare_rewards(algorithm, shape, {}),
        kl_coefficient=KLCoefficient(0.0),
        branches=True,
    )
    plan = make(mine, Metrics())
    (rows,) = plan.minibatches
    batch = plan.experience
    term = LossTerm(batch, rows, policy_objective(algorithm), policy.denominator(batch, rows))
    policy.begin(len(rows))
    for micro_batch in micro_batches(batch, rows, policy.strategy.to_device):
        policy.add_gradients(micro_batch, term)
    found = {
        name: parameter.grad for name, parameter in policy.actor.language_model.named_parameters()
    }
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in found.items()
    }


def gradients_of_separate_rows(
    folder: str, weights: list[float], sizes: str
) -> dict[str, torch.Tensor]:
    """Return the gradients of transformers' model, each row alone with its weight."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    losses, counts = [], []
    for sample, advantage in zip(eight_branches(), [1.0, -1.0], strict=True):
        for row in sample.rows:
            ids = torch.tensor([*row.prompt.token_ids, *row.token_ids])
            logp = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            logp = logp[:-1].gather(-1, ids[1:, None])[:, 0][-len(row.token_ids) :]
            own = torch.tensor(row.episode.sampled)
            losses.append(-advantage * logp[own].sum())  # a ratio of 1 has the log-prob's gradient
            counts.append(int(own.sum()))
    if sizes == "seq-mean-token-mean":
        shares = [weight / count for weight, count in zip(weights, counts, strict=True)]
        total = sum(weights)
    elif sizes == "token-mean":
        shares = weights
        total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    else:
        shares, total = weights, sum(weights)
    sum(loss * share / total for loss, share in zip(losses, shares, strict=True)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("held", [[2], [1, 1]], ids=str)
@pytest.mark.parametrize("mean", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("weight", ["branch", "episode"])
def test_branches_have_the_gradients_of_separate_samples_with_their_weights(
    folder, weight, mean, held
):
    options = {"branch_weight": weight, "loss_agg_mode": mean}
    weights = [1 / 9 if weight == "episode" else 1.0] * 9 + [1.0]
    expected = gradients_of_separate_rows(folder, weights, mean)
    for found in run_ranks(len(held), gradients, folder, held, options):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            largest = max(1.0, gradient.abs().max().item())
            assert (found[name] - gradient).abs().max() < 1e-6 * largest, name


def of_the_moon(rewards, groups, *, phase):
    return rewards * phase


def of_groups(rewards, groups):
    return rewards[groups == 0]


def of_nothing(rewards, groups, *, greedy_rewards):
    assert greedy_rewards.dtype == rewards.dtype  # else equal ones would differ
    return rewards / (rewards - rewards)


def test_estimators_that_cannot_be_are_named(folder):
    needs, of_another_shape, not_finite = run_ranks(
        1, estimate_with, folder, ["of_the_moon", "of_groups", "of_nothing"]
    )[0]
    assert "asks for a number in the column 'phase', and it is None" in needs
    for message in (of_another_shape, not_finite):
        assert "must return a finite advantage for each of the 8 rewards" in message


def estimate_with(folder: str, names: list[str]) -> list[str]:
    policy = make_policy(folder, 8, reference=False)
    messages = []
    for name in names:
        with pytest.raises(ValueError) as error:
            experience_of(
                policy,
                all_samples(),
                [8],
                algorithm=AlgorithmSection(advantage_estimator=f"{__name__}:{name}"),
            )
        messages.append(str(error.value))

    return messages


# -- tokens that are chosen among those of an optimizer step


def make_chosen(folder: str, held: list[int]) -> dict[str, dict[str, Any]]:
    policy = make_policy(folder, 4, reference=False)
    train = TrainSection(train_batch_size=4, max_tokens_per_microbatch=16)
    sections = {
        "forks": AlgorithmSection(high_entropy_token_ratio=0.3),
        "covariant": AlgorithmSection(policy_loss="kl_cov", cov_ratio=0.3),
        "engine": AlgorithmSection(use_engine_logprobs=True),
    }

    return {
        name: experience_of(policy, all_samples(), held, algorithm=s, train=train)
        for name, s in sections.items()
    }


@pytest.mark.parametrize("held", [[8], [3, 5]], ids=str)
def test_tokens_are_chosen_among_those_of_all_ranks(folder, held):
    results = run_ranks(len(held), make_chosen, folder, held)
    found = {
        name: {r: c for result in results for r, c in sequences(result[name]).items()}
        for name in results[0]
    }
    samples = all_samples()
    for row, columns in found["engine"].items():
        assert torch.equal(columns["old_logprobs"], columns["engine_logprobs"]), row

    for step in ([0, 1, 2, 3], [4, 5, 6, 7]):
        entropy = {}
        logprobs = {}
        advantages = {}
        for row in step:
            prompt = len(samples[row].prompt.token_ids)
            values = reference_logprobs(folder, samples[row])
            entropies = reference_entropy(folder, samples[row])
            for position in range(prompt, samples[row].length):
                entropy[row, position], logprobs[row, position] = (
                    entropies[position].item(),
                    values[position].item(),
                )
                advantages[row, position] = ADVANTAGES[row]

        means = [sum(column.values()) / len(column) for column in (logprobs, advantages)]
        covariance = {
            at: (logprobs[at] - means[0]) * (advantages[at] - means[1]) for at in logprobs
        }
        for name, column, values in (
            ("forks", "weights", entropy),
            ("covariant", "marked", covariance),
        ):
            top = set(sorted(values, key=lambda at: -values[at])[: int(0.3 * len(values))])
            for row in step:
                given = found[name][row][column].tolist()
                assert [float(value) for value in given] == [
                    float((row, position) in top) for position in range(len(given))
                ]


def reference_entropy(folder: str, sample: Sample) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.tensor(sample.prompt.token_ids + sample.token_ids)
    with torch.no_grad():
        logp = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return torch.cat([torch.zeros(1), -(logp.exp() * logp).sum(-1)[:-1]])


# -- the divergence from the reference model


def make_divergent(folder: str, held: list[int]) -> dict[str, Any]:
    policy = make_policy(folder, 8, reference=True)
    fields = {
        "advantage_estimator": "reinforce",
        "kl_estimator": "k3",
        "init_kl_coef": 0.5,
        "gamma": 0.9,
    }
    in_reward = AlgorithmSection(**fields)
    in_loss = AlgorithmSection(**fields, use_kl_loss=True)
    compared = {"advantage_estimator": "rloo", "kl_estimator": "k1", "init_kl_coef": 0.5}
    moved = KLCoefficient(0.5, target=0.001, horizon=8)  # far above: 0.5 * (1 + 0.2 * 8 / 8) = 0.6

    return {
        "reward": experience_of(policy, all_samples(), held, algorithm=in_reward),
        "loss": experience_of(policy, all_samples(), held, algorithm=in_loss),
        "moved": experience_of(
            policy, all_samples(), held, algorithm=in_reward, kl_coefficient=moved
        ),
        "moved in loss": experience_of(
            policy, all_samples(), held, algorithm=in_loss, kl_coefficient=moved
        ),
        "compared": experience_of(
            policy, all_samples(), held, algorithm=AlgorithmSection(**compared)
        ),
        "after": experience_of(
            policy,
            all_samples(),
            held,
            algorithm=AlgorithmSection(**compared, kl_after_baseline=True),
        ),
        "masked": experience_of(
            policy,
            cut(all_samples(), 3),
            held,
            algorithm=AlgorithmSection(**compared, mask_truncated=True),
        ),
        "coefficient": moved.value,
    }


@pytest.fixture(scope="module", params=[[8], [3, 5]], ids=str)
def divergent(request, folder) -> list[dict[str, Any]]:
    return run_ranks(len(request.param), make_divergent, folder, request.param)


def by_row(results: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, torch.Tensor]]]:
    return {
        name: {r: c for result in results for r, c in sequences(result[name]).items()}
        for name in list(results[0])[:-1]
    }


def test_rloo_compares_penalised_rewards(divergent, folder):
    """R' = R - beta KL of the response, less the mean R' of the others of the group.

    Responses that are left out have no divergence.
    """
    made = by_row(divergent)
    samples = all_samples()
    divergences = []
    for sample in samples:
        mine = reference_logprobs(folder, sample)
        reference = reference_logprobs(folder + "/reference", sample)
        divergences.append(0.5 * (mine - reference)[len(sample.prompt.token_ids) :])

    for row, sample in enumerate(samples):
        prompt = len(sample.prompt.token_ids)
        others = [
            index
            for index, other in enumerate(samples)
            if other.group == sample.group and index != row
        ]
        baseline = sum(samples[index].reward for index in others) / len(others)
        penalties = [divergences[index].sum().item() for index in others]
        whole = (
            sample.reward - divergences[row].sum().item() - baseline + sum(penalties) / len(others)
        )
        length = len(divergences[row])
        assert made["compared"][row]["advantages"][prompt:].tolist() == pytest.approx(
            [whole] * length, abs=1e-4
        )
        after = sample.reward - baseline - divergences[row].flip(0).cumsum(0).flip(0)
        assert made["after"][row]["advantages"][prompt:].tolist() == pytest.approx(
            after.tolist(), abs=1e-4
        )

    # group 1 has rows 2, 3 and 4, of which row 3 is left out: its reward still counts, its
    # divergence is not known
    penalty = divergences[2].sum().item() - divergences[4].sum().item()
    assert made["masked"][2]["advantages"][-1].item() == pytest.approx(
        2 - (6 + 1) / 2 - penalty, abs=1e-4
    )


def test_divergence_in_the_reward_of_each_token(divergent, folder):
    """The reward has k3 of every token, discounted with what comes after it.

    It has none if the divergence is in the loss.
    """
    results = divergent
    made = by_row(divergent)
    everything = []

    for row, sample in enumerate(all_samples()):
        prompt = len(sample.prompt.token_ids)
        mine = reference_logprobs(folder, sample)
        reference = reference_logprobs(folder + "/reference", sample)
        divergence = kl_estimators["k3"](mine, reference)[prompt:].tolist()
        everything += divergence

        for name, coefficient in (
            ("reward", 0.5),
            ("loss", 0.0),
            ("moved", 0.6),
            ("moved in loss", 0.0),
        ):
            earned = 0.0
            expected = []
            for token in reversed(range(len(divergence))):
                end = sample.reward if token == len(divergence) - 1 else 0.0
                earned = end - coefficient * divergence[token] + 0.9 * earned
                expected.append(earned)
            found = made[name][row]
            assert found["advantages"][prompt:].tolist() == pytest.approx(expected[::-1], abs=1e-4)
            assert ("old_logprobs" in found) == (name != "loss")  # a single update needs none

    mean = sum(everything) / len(everything)
    for result in results:
        assert result["coefficient"] == pytest.approx(0.72)
        assert result["reward"]["metrics"]["rollout/kl"] == pytest.approx(mean, abs=1e-5)
        assert result["moved"]["metrics"]["rollout/kl_coef"] == pytest.approx(0.6)
        assert "rollout/kl" not in result["loss"]["metrics"]
