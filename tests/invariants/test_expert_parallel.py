"""Why: tokens that visit experts on other ranks bring gradients there, which nobody sums again.

Each family of mixtures learns the same as in plain torch in one process, in every product of
experts, data, sequences and replicas on up to four ranks.
"""

from pathlib import Path

import pytest

from invariants.test_layouts import Layout, assert_all_are_plain_torch
from lightrft.config.facts import EXPERT_FAMILIES
from parallel.families import family_model

STEPS = 2
ON_TWO = [
    Layout(2, ep=2, tokens=60, checkpointing="full"),
    Layout(2, ep=2, sp=2, tokens=60, memory="offload_idle"),
]
ON_FOUR = [
    Layout(4, ep=2, tokens=30, checkpointing="selective"),
    Layout(4, ep=2, replicas=2, tokens=60, memory="fsdp_cpu_offload"),
    Layout(4, ep=2, sp=2, impl="zigzag", tokens=60, checkpointing="full"),
    Layout(4, ep=4, tokens=30),
    Layout(4, ep=4, sp=2, tokens=60),
]


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_each_family_learns_the_same(tmp_path: Path, family: str) -> None:
    folder = family_model(tmp_path, family, kv_heads=4)
    assert_all_are_plain_torch(folder, "token-mean", [*ON_TWO, *ON_FOUR], steps=STEPS)
