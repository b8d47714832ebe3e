"""Why: a token computed for another one with a different past spoils a whole group.

Its log-probs are wrong, and nobody notices.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft.core.batch import Batch
from lightrft.models.heads import computed_images
from lightrft.strategy.batching.micro_batches import find_shared_prefixes, prompts

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(ROWS)
def test_a_token_represents_all_tokens_with_the_same_past(rows):
    pasts = [tuple(row[: index + 1]) for row in rows for index in range(len(row))]
    shared = find_shared_prefixes(
        torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows])
    )
    if shared is None:
        assert len(set(pasts)) == len(pasts)
        return
    computed = shared.computed.tolist()
    assert computed == sorted(set(computed)) and len(computed) == len(set(pasts)) < len(pasts)
    assert [pasts[computed[index]] for index in shared.indices.tolist()] == pasts


@given(ROWS)
def test_the_first_row_that_has_a_prefix_computes_it(rows):
    """So rows of one prompt side by side have their own tokens side by side."""
    shared = find_shared_prefixes(
        torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows])
    )
    if shared is not None:
        assert (shared.computed[shared.indices] <= torch.arange(len(shared.indices))).all()


@given(ROWS, st.sampled_from([0.1, 0.5, 2.0]))
def test_where_a_small_saving_is_not_shared_all_that_is_shared_is_the_same(rows, min_saving):
    """Each row still computes its last tokens, however many they are."""
    lengths = torch.tensor([len(row) for row in rows])
    pasts = [tuple(row[: index + 1]) for row in rows for index in range(len(row))]
    all_, some = (
        find_shared_prefixes(torch.tensor(sum(rows, [])), lengths, min_saving=saving)
        for saving in (0.0, min_saving)
    )
    if some is None:
        return

    assert len(some.computed) >= len(all_.computed)
    computed = some.computed.tolist()
    assert [pasts[computed[index]] for index in some.indices.tolist()] == pasts
    is_computed = (
        torch.zeros(sum(map(len, rows)), dtype=torch.int64)
        .index_fill(0, some.computed, 1)
        .split(lengths.tolist())
    )
    assert all(torch.equal(row, row.sort().values) for row in is_computed)


@pytest.mark.parametrize(("prompt", "shared"), [(3, False), (4, True)])
def test_a_prompt_of_a_few_tokens_is_not_shared_by_long_responses(prompt, shared):
    """Two rows save it once; a 32nd of the 96 tokens behind it is 3.

    The same holds behind a longer prefix that a third row has.
    """
    rows = [[*range(prompt), *range(100 * row, 100 * row + 48)] for row in (1, 2)]
    assert (found(rows, 1 / 32) is not None) == shared
    other = [*range(30), 30, 31]
    longer = [[*range(30), *row] for row in rows] + [other]
    assert len(found(longer, 1 / 32).computed) == sum(map(len, longer)) - 2 * 30 - prompt * shared


def found(rows, min_saving):
    return find_shared_prefixes(
        torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows]), min_saving=min_saving
    )


def test_large_and_negative_token_ids():
    """Sequences are ordered by bytes, and bytes are not in the order of numbers."""
    rows = [[256, 1, 5], [1, 256, 5], [256, 1, 6], [2**40, 1], [-1, 1], [2**40, 2]]
    shared = find_shared_prefixes(
        torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows])
    )
    assert len(shared.computed) == 15 - 3


def test_images_are_a_part_of_the_past():
    """The same tokens stand for two images.

    The images of a prompt are there once, where its tokens are computed.
    """
    one = {"pixels": torch.ones(1)}
    other = {"pixels": torch.zeros(1)}
    rows = [[7, 1], [7, 1, 3], [7, 1, 2], [7, 1, 3]]
    media = [one, other, one, {}]
    batch = Batch(
        lengths=torch.tensor([len(row) for row in rows]),
        input_ids=torch.tensor(sum(rows, [])),
        media=media,
        loss_mask=torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1]).bool(),
        rows=torch.arange(4),
        tower_tokens=torch.tensor([8, 9, 8, 0]),
    )
    shared = find_shared_prefixes(batch.input_ids, batch.lengths, media)
    assert shared.computed.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10]
    assert computed_images(replace(batch, shared=shared)) == [one, other, {}]
    _, second, third, fourth = prompts(batch).tolist()
    assert second != third and third[1:] == [2, 8] and fourth[1:] == [2, 0] and third != fourth


def test_what_is_computed_spreads_with_its_gradient():
    shared = find_shared_prefixes(torch.tensor([7, 8, 7, 9]), torch.tensor([2, 2]))
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spread = shared.spread(values)
    assert spread.tolist() == [1, 2, 1, 3]
    (spread * torch.tensor([1.0, 10, 100, 1000])).sum().backward()
    assert values.grad.tolist() == [101, 10, 1000]


def test_prompts_end_at_the_first_learned_token():
    rows = [[4, 5, 6], [4, 5, 7, 8], [4, 5], [5, 4, 6]]
    mask = torch.tensor([0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1]).bool()
    found = prompts(
        Batch(
            lengths=torch.tensor([3, 4, 2, 3]),
            input_ids=torch.tensor(sum(rows, [])),
            loss_mask=mask,
            rows=torch.arange(4),
        )
    ).tolist()
    assert found[0] == found[1] == found[2] != found[3]
    assert [rest for _, *rest in found] == [[2, 0]] * 4
