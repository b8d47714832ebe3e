"""Why: an axis that counts a replica as data, or forgets a sum, shows only with other axes.

Two GRPO updates, the second with the moments of the first, run on every product data x sequence x
tensor of up to four ranks, both kinds of sequence parallelism, hybrid sharding, with the residual
stream cut, with memory saved in every way. They come out like the loop in plain torch, on every
rank, and the copies of every parameter stay equal to the last bit.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from invariants import test_layouts
from invariants.test_layouts import (
    Layout,
    Trained,
    assert_all_are_plain_torch,
    assert_same_parameters,
    build,
    parameters_of,
    plain_torch,
    updated,
)
from models.parallel.families import family_model
from ranks import run_ranks

STEPS = 2
# most with two micro-batches of a rank: for every other length of one, DTensor derives each
# operation anew
LAYOUTS = [
    Layout(2, sp=2, tokens=60, memory="offload_idle"),
    Layout(2, sp=2, impl="zigzag", tokens=60, checkpointing="selective"),
    Layout(2, tp=2, tokens=60, memory="fsdp_cpu_offload"),
    Layout(2, tp=2, tokens=60, sequence=True, checkpointing="full"),
    Layout(4, replicas=2, tokens=24),
    Layout(4, sp=2, tokens=30, checkpointing="full", memory="fsdp_cpu_offload"),
    Layout(4, sp=2, impl="zigzag", replicas=2, tokens=40, memory="fsdp_cpu_offload"),
    Layout(4, sp=4),
    Layout(4, sp=4, impl="zigzag", memory="offload_idle"),
    Layout(4, tp=2, tokens=30, chunk=7 * 131, memory="offload_idle"),
    Layout(4, tp=2, replicas=2, tokens=30),
    Layout(4, tp=2, tokens=30, sequence=True, checkpointing="selective"),
    Layout(4, tp=4, checkpointing="full"),
    Layout(4, tp=4, tokens=60, sequence=True, memory="fsdp_cpu_offload"),
    Layout(4, sp=2, tp=2, tokens=60, memory="fsdp_cpu_offload"),
    Layout(4, sp=2, impl="zigzag", tp=2, tokens=60, checkpointing="full"),
    Layout(4, sp=2, tp=2, tokens=60, sequence=True, checkpointing="selective"),
    Layout(4, sp=2, impl="zigzag", tp=2, tokens=60, sequence=True, memory="offload_idle"),
]


def test_no_product_is_left_out():
    """test_layouts.py has the products of data alone."""
    layouts = [*LAYOUTS, *test_layouts.LAYOUTS]
    products = {
        (layout.ranks // layout.sp // layout.tp, layout.sp, layout.tp) for layout in layouts
    }
    assert products == {
        (dp, sp, tp)
        for dp in (1, 2, 4)
        for sp in (1, 2, 4)
        for tp in (1, 2, 4)
        if dp * sp * tp in (1, 2, 4)
    }


@pytest.mark.slow
def test_every_product_is_plain_torch(tmp_path):
    assert_all_are_plain_torch(
        family_model(tmp_path, "qwen3", vocabulary=261, kv_heads=4),
        "token-mean",
        LAYOUTS,
        steps=STEPS,
    )


@pytest.mark.slow
def test_every_axis_at_once_is_plain_torch(tmp_path):
    """Two replicas of one shard each, with divided sequences and layers."""
    layouts = [
        Layout(8, replicas=2, sp=2, tp=2, tokens=60),
        Layout(8, replicas=2, sp=2, impl="zigzag", tp=2, tokens=60, sequence=True),
    ]
    assert_all_are_plain_torch(
        family_model(tmp_path, "qwen3", vocabulary=261, kv_heads=4),
        "token-mean",
        layouts,
        steps=STEPS,
    )


@pytest.mark.slow
def test_products_of_windows_tied_embeddings_and_four_norms(tmp_path):
    """What Gemma 3 has beside the others, where it matters."""
    folder = family_model(tmp_path, "gemma3", tie=True, vocabulary=261, kv_heads=4)
    chosen = [
        Layout(4, sp=4, impl="zigzag", memory="offload_idle"),
        Layout(4, tp=4, tokens=60, sequence=True, memory="fsdp_cpu_offload"),
        Layout(4, sp=2, impl="zigzag", tp=2, tokens=60, sequence=True, checkpointing="full"),
    ]
    assert_all_are_plain_torch(folder, "seq-mean-token-mean", chosen, steps=STEPS)


@pytest.mark.slow
def test_divided_sequences_under_deepspeed(tmp_path):
    """ZeRO averages over ranks, and some of these share their data."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    layouts = [
        Layout(2, sp=2, impl="zigzag", tokens=60, zero=1, checkpointing="selective"),
        Layout(4, sp=2, tokens=30, zero=3, checkpointing="full"),
        Layout(4, sp=2, impl="zigzag", tokens=30, zero=2),
        Layout(4, sp=4, zero=0),
    ]
    assert_all_are_plain_torch(
        family_model(tmp_path, "qwen3", tie=True, kv_heads=4), "token-mean", layouts, steps=STEPS
    )


def one_more_each(folder: str, root: Path, layouts: list[Layout], begin: int) -> list[Trained]:
    """Run each layout for one update more, from where the one before has stopped."""
    results = []
    for step, layout in enumerate(layouts, begin):
        config, policy = build(folder, "token-mean", layout)
        if step:
            policy.strategy.load_ckpt(policy.actor, root)
        results.append((updated(config, policy, layout, 1), parameters_of(policy)))
        policy.strategy.save_ckpt(policy.actor, root, f"step{step + 1}")
        policy.strategy.close()
    return results


@pytest.mark.slow
def test_a_run_that_changes_its_layout_after_each_step(tmp_path):
    """Parameters and optimizer move through checkpoints between layouts.

    The layouts are both kinds of sequence parallelism, tensor, data, and back.
    """
    folder = family_model(tmp_path / "model", "qwen3", tie=True, kv_heads=4)
    root = tmp_path / "checkpoints"
    first = [Layout(4, sp=2, tp=2, impl="zigzag", tokens=60), Layout(4, sp=2, tokens=24)]
    results = run_ranks(4, one_more_each, folder, root, first, 0)[0]
    results += run_ranks(2, one_more_each, folder, root, [Layout(2, tp=2, sequence=True)], 2)[0]
    expected_numbers, expected = plain_torch(folder, "token-mean", steps=3)
    numbers = [its_numbers[0] for its_numbers, _ in results]
    torch.testing.assert_close(
        torch.tensor(numbers), torch.tensor(expected_numbers), rtol=1e-5, atol=1e-6
    )

    start = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    assert_same_parameters(results[-1][1], expected, start, "in turn")
