"""Why: an axis that counts a replica as data, or forgets a sum, shows only in combination with others.

Three GRPO updates on every product data x sequence x tensor of up to four ranks, both kinds of sequence parallelism, hybrid
sharding, and with the residual stream cut, come out as those of the loop in plain torch, on every rank, and the copies of every
parameter stay equal to the last bit.
"""

import pytest

from invariants.test_layouts import Layout, assert_all_are_plain_torch
from parallel.families import family_model

LAYOUTS = [
    Layout(1, tokens=40),
    Layout(2, tokens=24),
    Layout(2, sp=2, tokens=40),
    Layout(2, sp=2, impl="zigzag", tokens=40, checkpointing="selective"),
    Layout(2, tp=2, tokens=30),
    Layout(2, tp=2, tokens=30, sequence=True, checkpointing="full"),
    Layout(4, tokens=24),
    Layout(4, replicas=2, tokens=24),
    Layout(4, sp=2, tokens=24, checkpointing="full"),
    Layout(4, sp=2, impl="zigzag", tokens=24),
    Layout(4, sp=2, replicas=2, tokens=40),
    Layout(4, sp=2, impl="zigzag", replicas=2, tokens=40),
    Layout(4, sp=4),
    Layout(4, sp=4, impl="zigzag"),
    Layout(4, tp=2, tokens=30, chunk=7 * 131),
    Layout(4, tp=2, replicas=2, tokens=24),
    Layout(4, tp=2, tokens=24, sequence=True, checkpointing="selective"),
    Layout(4, tp=4, checkpointing="full"),
    Layout(4, tp=4, tokens=50, sequence=True),
    Layout(4, sp=2, tp=2, tokens=60),
    Layout(4, sp=2, impl="zigzag", tp=2, tokens=60, checkpointing="full"),
    Layout(4, sp=2, tp=2, tokens=60, sequence=True),
    Layout(4, sp=2, impl="zigzag", tp=2, tokens=40, sequence=True),
]


def test_no_product_is_left_out():
    products = {(layout.ranks // layout.sp // layout.tp, layout.sp, layout.tp) for layout in LAYOUTS}
    assert products == {(dp, sp, tp) for dp in (1, 2, 4) for sp in (1, 2, 4) for tp in (1, 2, 4) if dp * sp * tp in (1, 2, 4)}


@pytest.mark.slow
def test_every_product_is_plain_torch(tmp_path):
    assert_all_are_plain_torch(family_model(tmp_path, "qwen3", vocabulary=261, kv_heads=4), "token-mean", LAYOUTS)


@pytest.mark.slow
def test_products_of_windows_tied_embeddings_and_four_norms(tmp_path):
    """What Gemma 3 has beside the others, where it matters."""
    folder = family_model(tmp_path, "gemma3", tie=True, vocabulary=261, kv_heads=4)
    chosen = [layout for layout in LAYOUTS if layout.ranks == 4 and (layout.sequence or layout.impl == "zigzag")]
    assert_all_are_plain_torch(folder, "seq-mean-token-mean", chosen)
