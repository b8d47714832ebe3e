"""What a run leaves behind does not depend on the layout.

Checkpoints load into any other layout, and the exported model is whole.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.parallel.families import family_model
from ranks import run_ranks
from strategy.test_checkpoint import Run
from strategy.training import distance


def saved(folder, root, args):
    run = Run(folder, root, **args).steps(0, 2)
    run.save("step2")
    run.strategy.save_model(run.model, None, root / "model")
    return run.state(), run.steps(2, 3).metrics[-1][:2]


def loaded(folder, root, args):
    run = Run(folder, root, **args)
    run.load()
    return run.state(), run.steps(2, 3).metrics[-1][:2]


LAYOUTS = {
    "tp": (2, {"tp_size": 2}),
    "fsdp x tp": (4, {"tp_size": 2}),
    "fsdp": (4, {}),
    "one": (1, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "tie", "family"),
    [
        ("fsdp", "tp", False, "qwen3"),
        ("fsdp x tp", "one", False, "qwen3"),
        ("tp", "one", True, "qwen3"),
        ("fsdp x tp", "one", False, "phi3"),
    ],
)
def test_a_checkpoint_loads_into_another_layout(tmp_path, root, before, after, tie, family):
    """No layout divides the vocabulary of 261. Phi-3 has fused layers.

    tests/invariants/test_factorisations.py loads tied embeddings in pieces.
    """
    split_folder = family_model(tmp_path / "model", family, tie=tie)
    (world_size, args), (other_size, other_args) = LAYOUTS[before], LAYOUTS[after]
    state, going_on = run_ranks(world_size, saved, split_folder, root, args)[0]
    for its_state, its_going_on in run_ranks(other_size, loaded, split_folder, root, other_args):
        assert distance(its_state, state) == 0
        assert its_going_on == pytest.approx(going_on, rel=1e-5)
    exported = dict(AutoModelForCausalLM.from_pretrained(root / "model").named_parameters())
    assert all(torch.equal(parameter, state[name]) for name, parameter in exported.items())
