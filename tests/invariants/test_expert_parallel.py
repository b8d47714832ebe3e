"""Why: tokens that visit experts on other ranks bring gradients there, which nobody sums again.

Each family of mixtures learns the same as in plain torch in one process, in every product of
experts, data, sequences and replicas on up to four ranks.
"""

from dataclasses import replace
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
from parallel.families import family_model
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
Cases = dict[str, tuple[str, list[Layout]]]
"""Family -> folder of the model, and layouts."""


def layouts_of(family: str) -> list[Layout]:
    """Return two layouts, of data and of sequences, without what the family cannot do in any of them.

    transformers adds gpt_oss's biases to the products that selective recomputation keeps. Recurrent
    states run through all tokens, so zigzag refuses them.
    """
    layouts = [LAYOUTS[2], LAYOUTS[4]]
    if family == "gpt_oss":
        layouts = [replace(layout, checkpointing="full") for layout in layouts]
    if family == "qwen3_5_moe_text":
        layouts = [replace(layout, impl="ulysses") for layout in layouts]
    return layouts


def all_trained(cases: Cases) -> dict[str, list[Trained]]:
    return {
        family: [trained(folder, "token-mean", layout, 1) for layout in layouts]
        for family, (folder, layouts) in cases.items()
    }


def test_divided_experts_learn_as_plain_torch(tmp_path: Path) -> None:
    folder = family_model(tmp_path, "qwen3_moe", kv_heads=4)
    assert_all_are_plain_torch(folder, "token-mean", LAYOUTS, steps=STEPS)


@pytest.mark.slow
def test_every_family_learns_as_plain_torch(tmp_path: Path) -> None:
    families = [family for family in EXPERT_FAMILIES if family != "qwen3_moe"]
    folders = {name: family_model(tmp_path / name, name, kv_heads=4) for name in families}
    plain = {name: plain_torch(folder, "token-mean", 1) for name, folder in folders.items()}

    cases = {name: (folder, layouts_of(name)) for name, folder in folders.items()}
    by_rank = run_ranks(4, all_trained, cases, timeout=600)
    for name, (folder, layouts) in cases.items():
        start = tensors_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        for index, layout in enumerate(layouts):
            on_ranks = [results[name][index] for results in by_rank]
            assert_is_plain_torch(on_ranks, plain[name], start, layout)
