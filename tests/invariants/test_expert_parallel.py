"""Why: tokens that visit experts on other ranks bring gradients there, which nobody sums again.

Mixtures learn the same as in plain torch in one process: one family in every product of experts,
data, sequences and replicas on up to four ranks, and the others in the largest of them.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from invariants.test_layouts import (
    Layout,
    Trained,
    assert_all_are_plain_torch,
    assert_is_plain_torch,
    plain_torch,
    tensors_of,
    trained,
)
from lightrft.config.facts import EXPERT_FAMILIES
from models.parallel.families import family_model
from ranks import run_ranks

STEPS = 2
LAYOUTS = [
    Layout(2, ep=2, tokens=60, checkpointing="full"),
    Layout(2, ep=2, sp=2, tokens=60, memory="offload_idle"),
    Layout(4, ep=2, tokens=30, checkpointing="selective"),
    Layout(4, ep=2, replicas=2, tokens=60, memory="fsdp_cpu_offload"),
    Layout(4, ep=2, sp=2, impl="zigzag", tokens=60, checkpointing="full"),
    Layout(4, ep=4, tokens=30),
    Layout(4, ep=4, sp=2, tokens=60),
]


def layout_of(family: str) -> Layout:
    """Return experts x data x sequences; recurrent states run through all tokens of a sequence."""
    impl = "ulysses" if family == "qwen3_5_moe_text" else "zigzag"
    return Layout(4, ep=2, sp=2, impl=impl, tokens=60, checkpointing="full")


def all_trained(folders: dict[str, str]) -> dict[str, Trained]:
    return {
        family: trained(folder, "token-mean", layout_of(family), 1)
        for family, folder in folders.items()
    }


@pytest.mark.slow
def test_divided_experts_learn_as_plain_torch(tmp_path: Path) -> None:
    folder = family_model(tmp_path, "qwen3_moe", kv_heads=4)
    assert_all_are_plain_torch(folder, "token-mean", LAYOUTS, steps=STEPS)


@pytest.mark.slow
def test_every_family_learns_as_plain_torch(tmp_path: Path) -> None:
    families = [family for family in EXPERT_FAMILIES if family != "qwen3_moe"]
    folders = {name: family_model(tmp_path / name, name, kv_heads=4) for name in families}
    plain = {name: plain_torch(folder, "token-mean", 1) for name, folder in folders.items()}

    by_rank = run_ranks(4, all_trained, folders, timeout=600)
    for name, folder in folders.items():
        start = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        on_ranks = [results[name] for results in by_rank]
        assert_is_plain_torch(on_ranks, plain[name], start, layout_of(name))
