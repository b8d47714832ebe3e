"""Why: a loss normalised per micro-batch or per rank trains another objective for every layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from lightrft.algorithms.means import MeanCounts, PromptTokens, means
from lightrft.core.batch import Experience
from lightrft.core.losses import Denominator, sequence_sums

MODES = (
    *("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "prompt-mean",
)


def make_batch(masks: list[list[int]], groups: list[int] | None = None) -> Experience:
    lengths = [len(mask) for mask in masks]
    return Experience(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        loss_mask=torch.tensor([bool(m) for mask in masks for m in mask], dtype=torch.bool),
        rows=torch.arange(len(masks)),
        groups=torch.tensor(groups or [7 + len(masks) - row for row in range(len(masks))]),
    )


# sequences 0 1 1, 0 1, 0 0 0 (nothing learned), 0 1 1 1; 999 where nothing is learned
MASKS = [[0, 1, 1], [0, 1], [0, 0, 0], [0, 1, 1, 1]]
VALUES = [999.0, 1.0, 2.0, 999.0, 6.0, 999.0, 999.0, 999.0, 999.0, 1.0, 1.0, 4.0]
# the first and the last sequence answer prompt 4, with 5 learned tokens, the others prompts 9, 2
GROUPS = [4, 9, 2, 4]
DENOMINATOR = Denominator(
    tokens=torch.tensor(6.0),
    sequences=torch.tensor(3.0),
    mean_counts=MeanCounts(10, PromptTokens.of({4: 5.0, 9: 1.0, 2: 0.0})),
)
BY_HAND = {
    "token-mean": 15 / 6,
    "seq-mean-token-mean": (1.5 + 6 + 2) / 3,
    "seq-mean-token-sum": (3 + 6 + 6) / 3,
    "seq-mean-token-sum-norm": (3 + 6 + 6) / 3 / 10,
    "prompt-mean": ((3 + 6) / 5 + 6) / 2,
}
# weight of each learned token of the three sequences that have any
GRADIENTS = {
    "token-mean": [1 / 6, 1 / 6, 1 / 6],
    "seq-mean-token-mean": [1 / 6, 1 / 3, 1 / 9],
    "seq-mean-token-sum": [1 / 3, 1 / 3, 1 / 3],
    "seq-mean-token-sum-norm": [1 / 30, 1 / 30, 1 / 30],
    "prompt-mean": [1 / 10, 1 / 2, 1 / 10],
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_by_hand(mode):
    values = torch.tensor(VALUES, requires_grad=True)
    loss = means[mode](values, make_batch(MASKS, GROUPS), DENOMINATOR)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(BY_HAND[mode], rel=1e-6)
    a, b, c = GRADIENTS[mode]
    assert grad(loss, values)[0].tolist() == pytest.approx(
        [0, a, a, 0, b, 0, 0, 0, 0, c, c, c], rel=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unlearned", [float("nan"), float("inf")])
def test_masked_tokens_do_not_count_whatever_they_hold(mode, unlearned):
    batch = make_batch(MASKS, GROUPS)
    values = torch.where(batch.loss_mask, torch.tensor(VALUES), unlearned).requires_grad_()
    loss = means[mode](values, batch, DENOMINATOR)
    assert loss.item() == pytest.approx(BY_HAND[mode], rel=1e-6)
    assert grad(loss, values)[0][~batch.loss_mask].tolist() == [0.0] * 6


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_learns_nothing_has_loss_zero(mode):
    values = torch.ones(3, requires_grad=True)
    mean_counts = MeanCounts(10, PromptTokens.of({9: 0.0, 8: 0.0}))
    nothing = Denominator(torch.tensor(0.0), torch.tensor(0.0), mean_counts=mean_counts)
    loss = means[mode](values, make_batch([[0, 0], [0]]), nothing)
    assert loss.item() == 0.0
    assert grad(loss, values)[0].tolist() == [0.0, 0.0, 0.0]


SEQUENCES = st.lists(
    st.lists(st.tuples(st.booleans(), st.integers(-8, 8)), min_size=1, max_size=6).map(
        lambda s: [(False, s[0][1]), *s[1:]]
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60)
@given(SEQUENCES, st.integers(1, 5), st.randoms(use_true_random=False))
def test_shares_add_up_to_the_mean_for_every_split(mode, sequences, num_ranks, random):
    """Sequences are dealt at random over ranks and micro-batches; the shares add up to the mean in
    plain Python.
    """
    learned = [[value for is_learned, value in sequence if is_learned] for sequence in sequences]
    tokens = sum(len(s) for s in learned)
    present = [s for s in learned if s]
    groups = [100 - row // 3 for row in range(len(sequences))]
    of_group = {
        group: [v for s, g in zip(learned, groups, strict=True) if g == group for v in s]
        for group in set(groups)
    }
    prompts = [values for values in of_group.values() if values]
    plain = {
        "token-mean": sum(map(sum, learned)) / max(tokens, 1),
        "seq-mean-token-mean": sum(sum(s) / len(s) for s in present) / max(len(present), 1),
        "seq-mean-token-sum": sum(map(sum, learned)) / max(len(present), 1),
        "seq-mean-token-sum-norm": sum(map(sum, learned)) / max(len(present), 1) / 7,
        "prompt-mean": sum(sum(s) / len(s) for s in prompts) / max(len(prompts), 1),
    }[mode]
    counts = {group: float(len(s)) for group, s in of_group.items()}
    denominator = Denominator(
        torch.tensor(float(tokens)),
        torch.tensor(float(len(present))),
        mean_counts=MeanCounts(7, PromptTokens.of(counts)),
    )
    share = [random.randrange(num_ranks) for _ in sequences]
    total = 0.0

    for rank in range(num_ranks):
        mine = [sequence for sequence, owner in zip(sequences, share, strict=True) if owner == rank]
        of_mine = [group for group, owner in zip(groups, share, strict=True) if owner == rank]
        batch = make_batch(
            [[is_learned for is_learned, _ in sequence] for sequence in mine], of_mine
        )
        values = torch.tensor([float(value) for sequence in mine for _, value in sequence])
        total += means[mode](values, batch, denominator).item()

    assert total == pytest.approx(plain, rel=1e-5, abs=1e-5)


def test_sequence_sums():
    assert sequence_sums(
        torch.tensor([1.0, 2.0, 4.0, 8.0]), make_batch([[0], [0, 1], [0]])
    ).tolist() == [1.0, 6.0, 8.0]


@pytest.mark.parametrize("mean_counts", [None, MeanCounts(10)])
def test_the_mean_over_prompts_needs_their_tokens(mean_counts):
    denominator = Denominator(torch.tensor(1.0), torch.tensor(1.0), mean_counts=mean_counts)
    with pytest.raises(ValueError, match="prompt-mean needs the tokens of each prompt"):
        means["prompt-mean"](torch.zeros(2), make_batch([[0, 1]]), denominator)
