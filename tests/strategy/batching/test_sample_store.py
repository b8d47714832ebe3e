"""The columns of a step's samples under their ids.

What is written is read by whoever may read it, and what is missing is reported.
"""

import pytest
import torch

from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.sample_store import MemoryStore, SampleRows, check_owners

ALONE = Axis("alone", 1, 0, None)
IDS = torch.tensor([7, 3, 5])
LENGTHS = torch.tensor([2, 0, 3])


def store() -> MemoryStore:
    made = MemoryStore(ALONE, ALONE)
    tokens = {
        "half": torch.arange(5).bfloat16(),
        "wide": torch.arange(10).view(5, 2),
        "mask": torch.arange(5) > 1,
    }
    made.put(
        IDS,
        LENGTHS,
        tokens=tokens,
        sequences={"group": torch.tensor([70, 30, 50])},
        objects={"name": ["a", "b", "c"]},
    )

    return made


def test_rows_of_any_length_are_read_in_any_order_with_their_types():
    found = store().get([5, 3, 7])
    assert (
        found["lengths"].tolist() == [3, 0, 2]
        and found["group"].tolist() == [50, 30, 70]
        and found["name"] == ["c", "b", "a"]
    )
    assert found["half"].dtype == torch.bfloat16 and found["half"].tolist() == [2, 3, 4, 0, 1]
    assert (
        found["wide"].tolist() == [[4, 5], [6, 7], [8, 9], [0, 1], [2, 3]]
        and found["mask"].dtype == torch.bool
    )
    assert store().get([7], ["half"]).keys() == {"lengths", "half"}


def test_results_go_under_the_ids_of_their_rows_whatever_the_order_of_the_plan():
    made = store()
    made.put(
        torch.tensor([5, 7]),
        torch.tensor([3, 2]),
        tokens={"values": torch.tensor([1.0, 2, 3, 4, 5])},
    )
    assert made.get([7, 5], ["values"])["values"].tolist() == [4, 5, 1, 2, 3]
    made.put(torch.tensor([7]), torch.tensor([2]), tokens={"values": torch.tensor([6.0, 7])})
    assert made.get([5, 7], ["values", "half"])["values"].tolist() == [1, 2, 3, 6, 7]
    assert made.produced_ids("values") == {5, 7} and made.produced_ids("nothing") == set()


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"tokens": {"x": torch.zeros(4)}}, "'x' has 4 values for 5 tokens of 3 samples"),
        ({"sequences": {"x": torch.zeros(2)}}, "'x' has 2 values for 3 samples"),
    ],
)
def test_values_that_do_not_match_the_rows_are_refused(columns, says):
    with pytest.raises(ValueError, match=says):
        store().put(IDS, LENGTHS, **columns)


def test_what_was_not_produced_or_was_cleared_is_named():
    made = store()
    with pytest.raises(LookupError, match="sample 5 has no 'values' on this rank"):
        made.get([5, 7], ["values"])
    with pytest.raises(LookupError, match="sample 4 has no 'half' on this rank"):
        made.get([7, 4], ["half"])
    made.clear([5])
    for name in ("half", "name", "lengths"):
        with pytest.raises(LookupError, match="sample 5 was cleared"):
            made.get([5], [name])
    assert made.get([7, 3], ["half"])["half"].tolist() == [0, 1]


def test_results_are_written_back_only_to_rows_that_the_rank_holds():
    made = store()
    made.rows()
    made.put(IDS[:1], LENGTHS[:1], tokens={"values": torch.zeros(2)})
    with pytest.raises(LookupError, match="sample 4 is not held by this rank"):
        made.put(torch.tensor([7, 4]), torch.tensor([2, 3]), tokens={"values": torch.zeros(5)})
    with pytest.raises(ValueError, match="sample 7 has 2 tokens, not 3"):
        made.put(IDS[:1], LENGTHS[:1] + 1, tokens={"values": torch.zeros(3)})
    assert made.produced_ids("values") == {7}
    made.clear(IDS.tolist())
    made.put(torch.tensor([4]), torch.tensor([3]), tokens={"values": torch.zeros(3)})
    assert made.rows().ids.tolist() == [4]


def test_only_the_leader_of_a_replica_writes():
    sibling = MemoryStore(ALONE, Axis("replica", 2, 1, None))
    sibling.put(IDS, LENGTHS, tokens={"x": torch.zeros(5)})
    assert not sibling.leads and sibling.produced_ids("x") == set()


def test_metadata_selects_without_the_values():
    rows = SampleRows(
        IDS, LENGTHS, torch.tensor([0, 0, 1]), {"solved": torch.tensor([[1], [0], [1]])}
    )
    assert rows.select(rows.tags["solved"][:, 0] > 0).ids.tolist() == [7, 5]
    assert rows.select(slice(1, 3)).lengths.tolist() == [0, 3]
    moved = rows.held_by([[5], [7, 3]])
    assert moved.ids.tolist() == [5, 7, 3] and moved.ranks.tolist() == [0, 1, 1]
    assert moved.tags["solved"].tolist() == [[1], [1], [0]]


@pytest.mark.parametrize(
    ("owners", "says"),
    [
        ([[0, 3], [1]], "row 2 is held 1 times and named 0 times"),
        ([[0, 3, 2], [1, 2]], "row 2 is held 1 times and named 2 times"),
        ([[0, 3, 2], [1, 7]], "row 7 is held 0 times and named 1 times"),
    ],
)
def test_a_row_without_or_with_several_owners_is_an_error(owners, says):
    with pytest.raises(ValueError, match=says):
        check_owners(torch.arange(4), owners)
