"""Runs of a flattened tensor become boxes: the right elements, in order, and few boxes."""

import copy

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from lightrft.strategy.checkpoint.zero_fragment import Fragment, LoadPlanner, SavePlanner, boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    start, end = sorted(draw(st.tuples(*[st.integers(0, torch.Size(shape).numel())] * 2)))
    return shape, start, end


@given(runs())
def test_boxes_hold_the_run_in_order(run):
    shape, start, end = run
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = [
        whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten()
        for box in boxes(shape, start, end)
    ]
    assert torch.cat([torch.zeros(0, dtype=torch.int64), *found]).tolist() == list(
        range(start, end)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_what_is_written_in_runs_is_read_in_others(tmp_path):
    """Also into a plain tensor, and from one."""
    whole = torch.randn(5, 3, 4)
    flat = whole.flatten()
    state = {"run": Fragment(whole.shape, 0, flat), "plain": whole}
    dcp.save(state, checkpoint_id=tmp_path, planner=SavePlanner(), no_dist=True)

    for name in state:
        middle = torch.zeros(17)
        into = torch.zeros(5, 3, 4)
        dcp.load(
            {name: Fragment(whole.shape, 11, middle)},
            checkpoint_id=tmp_path,
            planner=LoadPlanner(),
            no_dist=True,
        )
        dcp.load({name: into}, checkpoint_id=tmp_path, planner=LoadPlanner(), no_dist=True)
        assert torch.equal(middle, flat[11:28]) and torch.equal(into, whole)


def test_a_copy_is_of_its_own_elements():
    large = torch.zeros(1000)
    copied = copy.deepcopy(Fragment(torch.Size([1000]), 10, large[10:20]))
    large.fill_(1)
    assert copied.values.sum() == 0 and copied.values.untyped_storage().nbytes() == 40
