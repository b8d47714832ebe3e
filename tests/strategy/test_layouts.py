"""The numbers do not depend on how the run is distributed: all against plain torch in one process."""

import pytest
import torch
from torch import nn

from flat_models import make_batch
from lightrft.backends.optim import create_adamw
from lightrft.config import ModelSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from ranks import run_ranks
from strategy.training import adamw, assert_equal_courses, distance, plain_course, sgd, strategy, strategy_course

SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}
LAYOUTS = {"1": (1, {}), "2": (2, {}), "2x2": (4, {"dp_replicate": 2}), "2 replicas": (2, {"dp_replicate": 2})}


def ours(model: nn.Module) -> torch.optim.Optimizer:
    """strategy.create_optimizer without a strategy at hand."""
    return create_adamw(model, 1e-3, (0.9, 0.95), 0.1, 1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sgd_steps_equal_plain_torch(folder, layout):
    world_size, args = LAYOUTS[layout]
    expected = plain_course(folder, sgd)
    for course in run_ranks(world_size, strategy_course, folder, sgd, 1, 1.0, True, args):
        assert_equal_courses(course, expected)


@pytest.mark.parametrize("layout", ["1", "2", "2x2"])
def test_adamw_steps_equal_plain_torch(folder, layout):
    world_size, args = LAYOUTS[layout]
    expected = plain_course(folder, adamw)
    for course in run_ranks(world_size, strategy_course, folder, ours, 1, 1.0, True, args):
        assert_equal_courses(course, expected)


@pytest.mark.parametrize("num_micro", [2, 4])
@pytest.mark.parametrize("layout", ["1", "2"])
def test_accumulation_equals_one_batch(folder, layout, num_micro):
    world_size, args = LAYOUTS[layout]
    expected = plain_course(folder, sgd)
    for course in run_ranks(world_size, strategy_course, folder, sgd, num_micro, 1.0, True, args):
        assert_equal_courses(course, expected)


def test_accumulation_in_replicas(folder):
    expected = plain_course(folder, sgd)
    for course in run_ranks(2, strategy_course, folder, sgd, 4, 1.0, True, {"dp_replicate": 2}):
        assert_equal_courses(course, expected)


@pytest.mark.parametrize("optimizer_of", [sgd, ours])
def test_optimizer_made_after_prepare_is_the_same(folder, optimizer_of):
    before = run_ranks(2, strategy_course, folder, optimizer_of, 1, 1.0, True)
    after = run_ranks(2, strategy_course, folder, optimizer_of, 1, 1.0, False)
    assert before[0].norms == after[0].norms
    assert distance(before[0].parameters, after[0].parameters) == 0


def test_tied_embeddings_stay_tied(tied_folder):
    expected = plain_course(tied_folder, sgd)
    assert "lm_head.weight" not in expected.parameters
    for course in run_ranks(2, strategy_course, tied_folder, sgd):
        assert_equal_courses(course, expected)


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, SELECTIVE, {"fsdp_cpu_offload": True}])
def test_memory_options_change_nothing(folder, option):
    expected = plain_course(folder, sgd)
    for course in run_ranks(2, strategy_course, folder, sgd, 2, 1.0, True, option):
        assert_equal_courses(course, expected)


def test_bf16_stays_near_float32_and_keeps_float32_masters(folder):
    expected = plain_course(folder, sgd)
    course = run_ranks(2, strategy_course, folder, sgd, 2, 1.0, True, {"bf16": True})[0]
    assert abs(course.losses[0] / expected.losses[0] - 1) < 2e-3
    assert abs(course.norms[0] / expected.norms[0] - 1) < 2e-2
    assert 0 < distance(course.parameters, expected.parameters) < 2e-2
    assert all(tensor.dtype == torch.float32 for tensor in course.gradients.values())


def layouts_seen(folder: str) -> list[int]:
    actor, seen = strategy(bf16=True).prepare(Actor(load_model(ModelSection(pretrain=folder)))), []
    for block in actor.language_model.model.layers:
        block.self_attn.register_forward_pre_hook(lambda _, args, options: seen.append(options["layout"]), with_kwargs=True)
    actor(make_batch(), 1.0)
    return [sum(other is one for other in seen) for one in seen]


def test_all_layers_share_what_is_known_of_a_batch(folder):
    """FSDP casts what goes into a block, and copies what it finds tensors in."""
    assert run_ranks(1, layouts_seen, folder) == [[2, 2]]
