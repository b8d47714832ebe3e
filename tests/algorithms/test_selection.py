"""Why: the top of a minibatch must be the same set of tokens for every layout.

Taken on each rank or in each micro-batch it would be another one.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from algorithms.flat import make_batch
from lightrft.algorithms.covariance import covariances, drawn, highest, random_keys
from lightrft.algorithms.selection import (
    kth_largest,
    largest,
    share_of_tokens,
    top_share,
    value_keys,
)
from lightrft.core.batch import Experience
from ranks import run_ranks


def alone(total: torch.Tensor) -> torch.Tensor:
    return total


FLOATS = st.floats(allow_nan=False, width=32)
TOKENS = st.lists(
    st.lists(
        st.tuples(st.sampled_from([-1.5, 0.0, 0.25, 3.0]) | FLOATS, st.booleans()), min_size=1
    ),
    min_size=1,
)


@given(TOKENS, st.integers(0, 12))
def test_largest_agrees_with_sorting(sequences, count):
    batch = make_batch(
        ["".join("x" if learned else "." for _, learned in sequence) for sequence in sequences]
    )
    flat = [(value, learned) for sequence in sequences for value, learned in sequence]
    ranked = sorted(
        (index for index, (_, learned) in enumerate(flat) if learned),
        key=lambda index: (-flat[index][0], index),
    )
    chosen = largest(
        torch.tensor([value for value, _ in flat]), batch.loss_mask, count, batch, alone
    )
    assert chosen.nonzero()[:, 0].tolist() == sorted(ranked[:count])


@given(st.lists(FLOATS, min_size=2, max_size=2))
@example([-0.0, 0.0])
@example([-1e-45, 1e-45])
def test_keys_are_ordered_as_values(pair):
    first, second = value_keys(torch.tensor(pair)).tolist()
    assert (first > second) == (pair[0] > pair[1]) and (first == second) == (pair[0] == pair[1])
    assert 0 <= first < 2**32


def test_asking_for_more_than_there_are_gives_all():
    assert kth_largest(torch.tensor([5, 900, 70]), 9, 16, alone)[0] <= 5
    batch = make_batch(["x.x", "x"])
    assert largest(torch.zeros(4), batch.loss_mask, 9, batch, alone).tolist() == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("share", "learned", "count"),
    [(0.2, 10, 2), (0.1, 30, 3), (0.29, 10, 2), (0.001, 10, 1), (1.0, 7, 7)],
)
def test_shares_are_rounded_down_to_at_least_one(share, learned, count):
    batch = make_batch(["x" * learned + "."])
    assert share_of_tokens(share, batch, alone) == count
    assert top_share(torch.arange(learned + 1.0), share, batch, alone).sum() == count
    assert share_of_tokens(share, make_batch(["..."]), alone) == 0


# -- what is chosen does not depend on who holds what

MASKS = [".xxx", ".x", ".x..xx", ".xx", ".xxxxx", "."]
ENTROPY = [
    9.0,
    1.0,
    2.0,
    3.0,
    9.0,
    2.0,
    9.0,
    2.0,
    9.0,
    9.0,
    2.0,
    0.5,
    9.0,
    2.0,
    2.0,
    9.0,
    0.1,
    4.0,
    2.0,
    0.2,
    2.0,
    9.0,
]


def experience() -> Experience:
    plain = make_batch(MASKS)
    generator = torch.Generator().manual_seed(3)
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0, -2.0, 0.5]).repeat_interleave(plain.lengths)

    return Experience(
        lengths=plain.lengths,
        input_ids=plain.input_ids * 7 % 11,
        loss_mask=plain.loss_mask,
        rows=plain.rows,
        entropy=torch.tensor(ENTROPY),
        advantages=advantages,
        old_logprobs=-3 * torch.rand(22, generator=generator),
    )


def choose(rows: Experience, total) -> dict[str, torch.Tensor]:
    return {
        "forks": top_share(rows.entropy, 0.5, rows, total),
        "highest": highest(rows, total, cov_ratio=0.3),
        "drawn": drawn(rows, total, cov_ratio=0.2, clip_cov_range=[0.0, 3.0]),
    }


def choose_on_ranks(shares: list[list[int]]) -> dict[str, dict[int, list[bool]]]:
    import torch.distributed as dist

    mine = shares[dist.get_rank()]
    rows = experience().select(mine)

    def total(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    lengths = rows.lengths.tolist()
    return {
        name: {row: piece.tolist() for row, piece in zip(mine, chosen.split(lengths), strict=True)}
        for name, chosen in choose(rows, total).items()
    }


@pytest.mark.parametrize(
    "shares", [[[0, 1, 2], [3, 4, 5]], [[5, 3, 1], [4, 2, 0]], [[2], [5, 0, 4], [], [3, 1]]]
)
def test_ranks_choose_what_one_rank_would(shares):
    whole = experience()
    alone_ = choose(whole, alone)
    for name, chosen in alone_.items():
        expected = dict(enumerate(piece.tolist() for piece in chosen.split(whole.lengths.tolist())))
        found = {}
        for result in run_ranks(len(shares), choose_on_ranks, shares):
            found |= result[name]
        assert found == expected, name


def test_of_equal_entropies_the_first_are_taken():
    # 14 learned tokens, 7 wanted: 4, 3 and then five of the 2s, in order of rows and tokens; 9s are
    # not learned
    chosen = choose(experience(), alone)["forks"]
    assert chosen.nonzero()[:, 0].tolist() == [2, 3, 5, 7, 10, 13, 17]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_the_last_bits_choose_nothing(scale):
    """First tokens of a group have one entropy and one covariance.

    Other micro-batches compute them with other last bits.
    """
    batch = make_batch(["xxx"] * 8)
    shared = torch.tensor([0.7312345, 0.2, 1.9])
    others = torch.linspace(0.0, 0.4, 8)[:, None] * torch.tensor([0.0, 1.0, 1.0])

    values = scale * (shared + others).flatten()
    chosen = set()
    for seed in range(20):
        noise = 1 + 2e-7 * (torch.rand(24, generator=torch.Generator().manual_seed(seed)) - 0.5)
        chosen.add(tuple(top_share(values * noise, 0.5, batch, alone).nonzero()[:, 0].tolist()))

    assert chosen == {(0, 2, 3, 5, 6, 8, 9, 11, 14, 17, 20, 23)}, (
        "all third tokens, and the first of the first four rows"
    )


# -- covariance


def test_covariances_by_hand():
    # log-probs -1, -2, -6 have mean -3; advantages 4, 1, 1 mean 2: (2)(2), (1)(-1), (-3)(-1)
    batch = make_batch([".xx", "x"])
    rows = Experience(
        lengths=batch.lengths,
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        rows=batch.rows,
        old_logprobs=torch.tensor([50.0, -1.0, -2.0, -6.0]),
        advantages=torch.tensor([50.0, 4.0, 1.0, 1.0]),
    )
    assert covariances(rows, alone)[batch.loss_mask].tolist() == [4.0, -1.0, 3.0]
    assert highest(rows, alone, cov_ratio=0.67).tolist() == [False, True, False, True]

    assert drawn(rows, alone, cov_ratio=1.0, clip_cov_range=[2.5, 3.5]).tolist() == [
        False,
        False,
        False,
        True,
    ]
    assert not drawn(rows, alone, cov_ratio=1.0, clip_cov_range=[5.0, 9.0]).any()


def test_lots_are_fair_and_belong_to_the_sequence():
    ids = torch.arange(4000) % 997
    batch = make_batch(["x" * 2000] * 2)
    batch.input_ids = ids
    numbers = random_keys(batch)
    assert abs(numbers.mean().item() - 0.5) < 0.03 and numbers.unique().numel() > 3900
    assert torch.equal(numbers[2000:], random_keys(batch.select([1])))
