import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from lightrft.config import OptimSection
from lightrft.models.outermost import outermost
from lightrft.strategy.backends.optim import (
    create_adamw,
    create_lr_scheduler,
    global_grad_norm,
    kept_settings,
)
from lightrft.strategy.fsdp import blocks
from ranks import run_ranks
from strategy.training import (
    distance,
    load,
    my_rows,
    one_step,
    sgd,
    share_of_loss,
    snapshot,
    strategy,
)


def poisoned(folder: str, value: float):
    """One rank's loss is not finite at the second of three steps."""
    made = strategy()
    model = load(folder)
    optimizer = made.create_optimizer(model, lr=1e-3)
    scheduler = made.create_scheduler(optimizer, "constant", 4, 10)
    model, optimizer, scheduler = made.prepare((model, optimizer, scheduler))
    one_step(made, model, optimizer, 0, scheduler=scheduler)
    before = snapshot(made, model)
    rate = scheduler.get_last_lr()
    loss = share_of_loss(model, my_rows(made, 1), 50)
    made.backward(loss * (value if made.is_rank_0() else 1.0), model, optimizer)
    norm = made.optimizer_step(optimizer, model, scheduler)
    state_steps = {state["step"].item() for state in optimizer.state.values()}
    same = distance(snapshot(made, model), before) == 0 and scheduler.get_last_lr() == rate
    skipped = made.skipped_steps
    _, later, _ = one_step(made, model, optimizer, 2, scheduler=scheduler)

    return (
        norm.isfinite().item(),
        same,
        skipped,
        made.skipped_steps,
        state_steps,
        math.isfinite(later),
    )


def test_an_infinite_norm_skips_the_step_on_all_ranks(folder):
    for result in run_ranks(2, poisoned, folder, math.inf):
        assert result == (False, True, 1, 1, {1.0}, True)


def reductions(folder: str, flags: dict):
    """Count reduce-scatters, all-reduces and elements of whole gradients left, for three
    micro-batches.

    Return the counts and the norm.
    """
    made = strategy(**flags)
    model = load(folder)

    model, optimizer = made.prepare((model, sgd(model)))
    found = []
    for last in (False, False, True):
        loss = share_of_loss(model, my_rows(made, 0), 50)
        with CommDebugMode() as traffic:
            made.backward(loss, model, optimizer, last=last)
        calls = [
            sum(count for op, count in traffic.get_comm_counts().items() if kind in str(op))
            for kind in ("reduce_scatter", "allreduce")
        ]
        found.append((*calls, whole_gradients(model)))

    return found, made.optimizer_step(optimizer, model).item()


def whole_gradients(model: nn.Module) -> int:
    """Elements of the gradients that FSDP2 keeps beside the shards."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    inside = [parameter for group in groups for parameter in group.fsdp_params]
    kept = [
        gradient
        for inner in inside
        for gradient in (inner.unsharded_accumulated_grad, inner.unsharded_param.grad)
    ]

    return sum(gradient.numel() for gradient in kept if gradient is not None)


ONCE = {"reduce_gradients_once": True}


def test_no_rank_keeps_a_whole_gradient_unless_told(folder):
    """Two layers and the rest: three reductions a micro-batch. Replicas meet after the last one."""
    numel = load(folder).num_parameters()
    once = [(0, 0, numel), (0, 0, numel), (3, 0, 0)]
    (sharded, norm), (whole, norm_once) = (
        run_ranks(2, reductions, folder, flags)[0] for flags in ({}, ONCE)
    )
    assert sharded == [(3, 0, 0)] * 3 and whole == once
    assert norm == pytest.approx(norm_once, rel=1e-5)


@pytest.mark.slow
def test_replicas_communicate_after_the_last_micro_batch(folder):
    hybrid, norm = run_ranks(4, reductions, folder, {"dp_replicate": 2})[0]
    assert hybrid == [(3, 0, 0), (3, 0, 0), (3, 3, 0)]
    _, norm_once = run_ranks(4, reductions, folder, {"dp_replicate": 2} | ONCE)[0]
    assert norm == pytest.approx(norm_once, rel=1e-5)


class Transfers(TorchDispatchMode):
    """While entered, records the dtype of every tensor that FSDP2 gathers and reduces."""

    def __init__(self):
        super().__init__()
        self.gathered: list[torch.dtype] = []
        self.reduced: list[torch.dtype] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if "allgather" in name:
            self.gathered.append(args[1].dtype)
        elif "reduce_scatter" in name:
            self.reduced.append(args[1].dtype)
        return function(*args, **(kwargs or {}))


def transfers(folder: str, flags: dict):
    """Return what three micro-batches gather and reduce, the norm, and the step's result."""
    made = strategy(**flags)
    model = load(folder)
    model, optimizer = made.prepare((model, sgd(model)))
    found = []
    for step in range(2):
        for micro_batch, last in enumerate((False, False, True)):
            with Transfers() as seen:
                loss = share_of_loss(model, my_rows(made, step + micro_batch), 50)
                made.backward(loss, model, optimizer, last=last)
            found.append((len(seen.gathered), set(seen.reduced)))
        norm = made.optimizer_step(optimizer, model).item()

    return found, norm, snapshot(made, model)


def test_gathered_parameters_stay_for_a_step_if_told(folder):
    """Two layers and the rest are gathered for each pass, or for the first micro-batch alone."""
    (for_passes, norm, result), (once, norm_once, result_once) = (
        run_ranks(2, transfers, folder, flags)[0]
        for flags in ({}, {"gather_parameters_once": True})
    )
    assert len({gathered for gathered, _ in for_passes}) == 1 and for_passes[0][0] >= 5
    assert [gathered for gathered, _ in once] == [for_passes[0][0], 0, 0] * 2
    assert norm == norm_once and distance(result, result_once) == 0


def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(folder):
    (exact, norm, _), (half, norm_of_half, _) = (
        run_ranks(2, transfers, folder, {"bf16": True, "reduce_dtype": dtype})[0]
        for dtype in ("fp32", "bf16")
    )
    assert {dtype for _, each in exact for dtype in each} == {torch.float32}
    assert {dtype for _, each in half for dtype in each} == {torch.bfloat16}
    assert norm != norm_of_half and norm_of_half == pytest.approx(norm, rel=0.02)


def frozen_and_forwarded(folder: str):
    """A forward pass without gradients leaves only shards behind.

    So an optimizer that is made afterwards trains the right tensors.
    """
    made = strategy()
    model = made.prepare(load(folder))
    with torch.no_grad():
        share_of_loss(model, my_rows(made, 0), 50)
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    before = snapshot(made, model)
    optimizer = sgd(model)
    one_step(made, model, optimizer, 0)
    return kinds, distance(snapshot(made, model), before)


def test_optimizer_after_a_forward_without_gradients(folder):
    for kinds, change in run_ranks(2, frozen_and_forwarded, folder):
        assert kinds == {"DTensor"}
        assert change > 0


def norms_of_sharded_and_plain():
    made = strategy()
    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    sharded = nn.Linear(5, 3)
    expected = torch.cat([torch.full((4,), 2.0), torch.full((18,), 3.0)]).norm()
    made.prepare(sharded)

    for parameter, value in [(p, 2.0) for p in plain.parameters()] + [
        (p, 3.0) for p in sharded.parameters()
    ]:
        parameter.grad = torch.full_like(parameter, value)

    norm = global_grad_norm([*plain.parameters(), *sharded.parameters()], made.device)
    return (norm / expected).item(), norm.dtype, norm.shape


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norm_over_plain_and_unevenly_sharded_parameters(world_size):
    for ratio, dtype, shape in run_ranks(world_size, norms_of_sharded_and_plain):
        assert ratio == pytest.approx(1, rel=1e-6)
        assert (dtype, shape) == (torch.float32, ())


# -- what is wrapped


def test_blocks_are_the_decoder_layers(folder):
    assert [type(block).__name__ for block in blocks(load(folder))] == ["Qwen3DecoderLayer"] * 2


def test_blocks_fall_back_to_module_lists():
    model = nn.Sequential(nn.Embedding(4, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]))
    assert blocks(model) == list(reversed(model[1]))


def test_a_block_with_a_tied_parameter_is_left_to_the_root():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model.head = nn.Linear(8, 8)
    model.head.weight = model.layers[0].weight
    assert blocks(model) == [model.layers[1]]


def roots_of_a_container(folder: str):
    made = strategy()
    container = nn.ModuleDict({"inner": made.prepare(load(folder))})
    return len(list(outermost(container, FSDPModule)))


def test_roots_are_found_inside_a_container(folder):
    assert run_ranks(2, roots_of_a_container, folder) == [1, 1]
    assert run_ranks(1, roots_of_a_container, folder) == [0], "one rank has nothing to gather"


def prepared_shapes(folder: str):
    made = strategy()
    model = load(folder)
    optimizer = sgd(model)
    scheduler = create_lr_scheduler(optimizer, "constant", 0, 1, OptimSection())
    triple, nothing, frozen = made.prepare(
        (model, optimizer, scheduler), None, load(folder).requires_grad_(False)
    )
    same = (
        triple == (model, optimizer, scheduler)
        and nothing is None
        and isinstance(frozen, nn.Module)
    )
    nobody = made.prepare(None)
    follows = scheduler.optimizer is optimizer
    made.device = torch.device("meta")  # as if it were an accelerator's
    other = load(folder)
    made.distribute(other, None)

    return same, nobody, follows, {parameter.device.type for parameter in other.parameters()}


def test_prepare_returns_what_it_was_given(folder):
    """And brings it to the device, also on one rank, where no sharding does."""
    assert run_ranks(1, prepared_shapes, folder) == [(True, None, True, {"meta"})]


def foreign_optimizer(folder: str):
    strategy().prepare((load(folder), sgd(load(folder))))


def test_prepare_refuses_an_optimizer_of_another_model(folder):
    with pytest.raises(RuntimeError, match="the optimizer trains parameters that are not in"):
        run_ranks(1, foreign_optimizer, folder)


def frozen_dtypes(folder: str):
    made = strategy(bf16=True)
    frozen = made.prepare(load(folder).requires_grad_(False))
    trained = made.prepare(load(folder).bfloat16())
    return (
        {p.dtype for p in frozen.parameters()},
        {p.dtype for p in trained.parameters()},
        frozen.model.rotary_emb.inv_freq.dtype,
    )


def test_bf16_frozen_models_are_half_the_size_and_trained_ones_have_masters(folder):
    assert run_ranks(1, frozen_dtypes, folder) == [
        ({torch.bfloat16}, {torch.float32}, torch.float32)
    ]


# -- optimizer and schedule


def test_only_matrices_decay(folder):
    model = load(folder)
    model.model.embed_tokens.requires_grad_(False)
    optimizer = create_adamw(model, 1e-3, (0.9, 0.95), 0.1, 1e-8)
    decay, rest = optimizer.param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in decay["params"]) and all(p.ndim == 1 for p in rest["params"])
    assert len(decay["params"]) + len(rest["params"]) == len(list(model.parameters())) - 1


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no parameter of Linear requires a gradient"):
        create_adamw(nn.Linear(2, 2).requires_grad_(False), 1e-3, (0.9, 0.95), 0.0, 1e-8)


def rates(steps: int, *args: Any, build: Callable = create_lr_scheduler) -> list[float]:
    """Return the shares of the peak of the first steps; a schedule is reloaded after three."""
    optimizer = sgd(nn.Linear(1, 1))
    scheduler = build(optimizer, *args)
    found = []
    for step in range(steps):
        if step == 3:
            state = scheduler.state_dict()
            optimizer = sgd(nn.Linear(1, 1))
            scheduler = build(optimizer, *args)
            with kept_settings(optimizer, scheduler):
                scheduler.load_state_dict(state)
        found.append(optimizer.param_groups[0]["lr"] / 0.1)
        optimizer.step()
        scheduler.step()
    return found


TRANSFORMERS = {
    "constant": lambda optimizer: get_constant_schedule_with_warmup(optimizer, 4),
    "linear": lambda optimizer: get_linear_schedule_with_warmup(optimizer, 4, 12),
    "cosine": lambda optimizer: get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, 4, 12, min_lr_rate=0.2
    ),
    "wsd": lambda optimizer: get_wsd_schedule(optimizer, 4, 3, 12, min_lr_ratio=0.2),
    "inverse_sqrt": lambda optimizer: get_inverse_sqrt_schedule(optimizer, 4),
    "polynomial": lambda optimizer: get_polynomial_decay_schedule_with_warmup(
        optimizer, 4, 12, lr_end=0.02, power=2.0
    ),
}


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_schedules_are_those_of_transformers_after_the_warm_up(kind):
    """A resumed one goes on; the last rate is kept."""
    section = OptimSection(lr_min_ratio=0.2, lr_decay_ratio=0.25, lr_power=2.0)
    found = rates(14, kind, 4, 12, section)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:13] == pytest.approx(rates(13, build=TRANSFORMERS[kind])[4:])
    assert found[13] == found[12]


def test_schedules_have_closed_forms():
    steps = [4, 8, 12]
    forms = {
        "constant": [1, 1, 1],
        "linear": [1, 0.5, 0],
        "cosine": [1, 0.55, 0.1],
        "wsd": [1, 1, 0.1],
        "inverse_sqrt": [1, 0.5**0.5, (1 / 3) ** 0.5],
        "polynomial": [1, 0.1 + 0.9 * 0.5, 0.1],
    }
    found = {kind: rates(13, kind, 4, 12, OptimSection()) for kind in forms}
    assert {kind: [each[step] for step in steps] for kind, each in found.items()} == {
        kind: pytest.approx(form) for kind, form in forms.items()
    }
    assert rates(3, "linear", 0, 2, OptimSection()) == [1, 0.5, 0], "without a warm-up"
    section = OptimSection(lr_decay_ratio=0.9)
    assert rates(4, "wsd", 2, 3, section) == pytest.approx([0.5, 1, 1, 0.1])


def test_schedule_errors():
    optimizer = sgd(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="unknown lr_scheduler 'step'"):
        create_lr_scheduler(optimizer, "step", 0, 1, OptimSection())
    with pytest.raises(ValueError, match="total_steps >= 1"):
        create_lr_scheduler(optimizer, "cosine", 0, 0, OptimSection())
