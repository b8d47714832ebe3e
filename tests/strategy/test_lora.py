"""LoRA under every strategy: the steps of plain peft, engines and folders with merged weights, checkpoints without the base."""

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close

from ranks import run_ranks
from strategy.lora_course import (
    PROMPTS,
    logprobs_of,
    names_in,
    plain_course,
    strategy_course,
)
from strategy.training import distance, load

LAYOUTS = {
    "fsdp-1": (1, {"fsdp": True}),
    "fsdp-2": (2, {"fsdp": True}),
    "zero0-2": (2, {"zero_stage": 0}),
    "zero1-2": (2, {"zero_stage": 1}),
    "zero2-2": (2, {"zero_stage": 2}),
    "zero3-2": (2, {"zero_stage": 3}),
}
PARAMS = [name if name == "fsdp-1" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]


@pytest.fixture(scope="module")
def expected(folder):
    return plain_course(folder)


@pytest.fixture(scope="module", params=PARAMS)
def course(request, folder, tmp_path_factory):
    """(results of every rank, the folder that they wrote to)."""
    world_size, args = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(request.param)
    return run_ranks(world_size, strategy_course, folder, args, out), out


def test_three_steps_are_those_of_peft(course, expected):
    losses, norms, merged = expected
    for found in course[0]:
        assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=0)
        assert_close(torch.tensor(found["norms"]), torch.tensor(norms), rtol=1e-5, atol=0)
        assert distance(found["merged"], merged) < 1e-5


def test_what_has_no_adapter_is_untouched(course, folder):
    base = dict(load(folder).named_parameters())
    merged = course[0][0]["merged"]
    same = {name for name in base if torch.equal(base[name], merged[name])}
    assert {name for name in base if not name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))} == same


def test_the_engine_has_the_merged_weights(course):
    results, out = course
    before, after = results[0]["said"]
    model = load(str(out / "model"))
    for prompt, (ids, logprobs) in zip(PROMPTS, after, strict=True):
        assert logprobs == pytest.approx(logprobs_of(model, prompt, ids), abs=1e-5)
    changes = [abs(old[0] - new[0]) for (_, old), (_, new) in zip(before, after, strict=True)]
    assert max(changes) > 1e-2


def test_both_exports_compute_the_same(course, folder):
    _, out = course
    ids = torch.arange(5, 25)[None]
    merged, adapter = load(str(out / "model")), PeftModel.from_pretrained(load(folder), out / "adapter")
    with torch.no_grad():
        assert_close(merged(ids).logits, adapter(ids).logits, rtol=1e-5, atol=1e-5)
        assert (merged(ids).logits - load(folder)(ids).logits).abs().max() > 1e-2


def test_a_checkpoint_holds_adapters_alone(course):
    names = names_in(course[1] / "checkpoints" / "three")
    tensors = {name for name in names if ".model." in name or ".optimizer.state." in name}
    assert tensors and all(".lora_A." in name or ".lora_B." in name for name in tensors)
    assert any(name.startswith("model.optimizer.state.") for name in tensors)


def test_training_goes_on_bit_by_bit(course):
    for found in course[0]:
        assert all(torch.equal(found["loaded"][name], tensor) for name, tensor in found["merged"].items())
        assert all(torch.equal(found["resumed"][name], tensor) for name, tensor in found["uninterrupted"].items())
    assert distance(course[0][0]["resumed"], course[0][0]["loaded"]) > 1e-4
