"""What only DeepSpeed does, or could do wrong: where memory goes, whose checkpoints load, and what
it switches on for others.
"""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled

from lightrft.strategy import StrategyBase, get_strategy
from ranks import run_ranks
from strategy.training import (
    distance,
    load,
    my_rows,
    rows,
    sgd,
    share_of_loss,
    snapshot,
    tokens_learned,
)
from strategy.zero import DeepSpeedStrategy


def strategy(**args: Any) -> StrategyBase:
    made = get_strategy({"seed": 1, "max_norm": 1.0, **args})
    made.setup_distributed()
    return made


def prepared(folder: str, **args: Any):
    made = strategy(**args)
    model = load(folder).train()
    optimizer = made.create_optimizer(model, 1e-2, weight_decay=0.1)
    scheduler = made.create_scheduler(optimizer, "cosine", 2, 8)
    return made, *made.prepare((model, optimizer, scheduler))


def steps(made, model, optimizer, scheduler, numbers: range) -> list[tuple[float, float, float]]:
    found = []
    for step in numbers:
        loss = share_of_loss(model, my_rows(made, step), tokens_learned(rows(step)))
        made.backward(loss, model, optimizer)
        norm = made.optimizer_step(optimizer, model, scheduler).item()
        found.append((made.all_reduce(loss.item(), "sum"), norm, scheduler.get_last_lr()[0]))
    return found


# -- memory


def live_bytes(made: DeepSpeedStrategy | None = None) -> int:
    """Of all tensors of this process, whoever holds them, without what waits in host memory."""
    gc.collect()
    offloaded = made.memory.offloaded.values() if made else ()
    waiting = {
        copy.untyped_storage().data_ptr() for item in offloaded for copy in item.copies.copies
    }

    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type == "cpu":
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = (
                        tensor.untyped_storage().nbytes()
                    )

    return sum(size for pointer, size in storages.items() if pointer not in waiting)


def released(folder: str, args: dict[str, Any]) -> tuple[dict[str, int], bool]:
    before = live_bytes()
    made, model, optimizer, scheduler = prepared(folder, **args)
    steps(made, model, optimizer, scheduler, range(2))
    size = sum(tensor.numel() for _, tensor in made.full_params(model)) * (
        2 if args.get("bf16") else 4
    )
    measured = {"model": size, "here": live_bytes() - before}
    made.offload_model(model)
    made.maybe_offload_optimizer(optimizer)
    measured["away"] = live_bytes(made) - before
    made.maybe_load_optimizer(optimizer)
    measured["optimizer"] = live_bytes(made) - before
    made.reload_model(model)
    measured["back"] = live_bytes() - before

    return measured, steps(made, model, optimizer, scheduler, range(2, 3))[0][1] > 0


FAST = [{"zero_stage": 2, "bf16": True}, {"zero_stage": 3, "bf16": True}]
SLOW = [{"zero_stage": 1, "bf16": True}, {"zero_stage": 2}, {"zero_stage": 3}]


@pytest.mark.parametrize(
    "args", [*FAST, *[pytest.param(args, marks=pytest.mark.slow) for args in SLOW]], ids=str
)
def test_what_is_away_frees_its_bytes(folder, args):
    """Masters, moments, parameters and buffers of gradients are freed, wherever ZeRO keeps them.

    Less than 3 % of the model stays.
    """
    for measured, learns in run_ranks(2, released, folder, args):
        assert measured["here"] > 2 * measured["model"], measured
        assert measured["away"] < 0.03 * measured["model"], measured
        assert measured["away"] < measured["optimizer"] < measured["back"], measured
        assert measured["back"] < measured["here"] + 0.03 * measured["model"], measured
        assert learns


# -- checkpoints


def in_the_background(folder: str, root: str, args: dict[str, Any]):
    """What is saved is the state of the call, however long the writing takes."""
    run = prepared(folder, **args)
    steps(*run, range(2))
    made, model, optimizer, scheduler = run
    before = snapshot(made, model)
    made.save_ckpt(model, root, "step2", optimizer=optimizer, scheduler=scheduler, async_save=True)
    going_on = steps(*run, range(2, 4))
    made.finish_ckpt()
    made.load_ckpt(model, root, optimizer=optimizer, scheduler=scheduler)
    return distance(snapshot(made, model), before), steps(*run, range(2, 4)) == going_on


@pytest.mark.slow
def test_a_checkpoint_written_in_the_background(folder, tmp_path):
    assert (
        run_ranks(2, in_the_background, folder, str(tmp_path), {"zero_stage": 3}) == [(0, True)] * 2
    )


def partly_frozen(folder: str, root: str, args: dict[str, Any]):
    """Embeddings stay as they are; everything else learns.

    Through a checkpoint, a stream and a Hugging Face folder.
    """
    made = strategy(**args)

    def begin() -> tuple:
        model = load(folder).train()
        model.model.embed_tokens.requires_grad_(False)
        optimizer = sgd_of_trained(model)
        return made, *made.prepare(
            (model, optimizer, made.create_scheduler(optimizer, "constant", 0, 1))
        )

    run = begin()
    steps(*run, range(2))
    made.save_ckpt(run[1], root, "step2", optimizer=run[2], scheduler=run[3])
    state = snapshot(made, run[1])
    fresh = begin()
    made.load_ckpt(fresh[1], root, optimizer=fresh[2], scheduler=fresh[3])
    path = made.save_model(fresh[1], None, f"{root}/model", torch.float32)
    exported = {
        name: p.detach()
        for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()
    }

    return (
        state,
        distance(snapshot(made, fresh[1]), state),
        distance(exported, state),
        steps(*run, range(2, 3)),
    )


def sgd_of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.slow
def test_what_is_frozen_inside_a_model_stays(folder, tmp_path):
    strategies = [{"fsdp": True}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}]
    results = [
        run_ranks(2, partly_frozen, folder, str(tmp_path / str(i)), args)[0]
        for i, args in enumerate(strategies)
    ]

    start = {name: parameter.detach() for name, parameter in load(folder).named_parameters()}
    for state, reloaded, exported, going_on in results:
        assert distance(state, results[0][0]) < 1e-5 and (reloaded, exported) == (0, 0)
        assert torch.equal(state["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
        assert not torch.equal(state["lm_head.weight"], start["lm_head.weight"])
        assert going_on[0] == pytest.approx(results[0][3][0], rel=1e-5)


# -- bfloat16


def masters(folder: str, args: dict[str, Any]):
    made, model, optimizer, scheduler = prepared(folder, **args, bf16=True)
    steps(made, model, optimizer, scheduler, range(2))
    made.maybe_offload_optimizer(optimizer)
    exact = snapshot(made, model)
    rounded = {name: tensor.clone() for name, tensor in made.full_params(model)}
    same = all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    return same, any((exact[name] != rounded[name].float()).any() for name in exact), model.dtype


@pytest.mark.parametrize(
    "stage", [1, *[pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3)]]
)
def test_float32_masters_are_exported_when_asked_for(folder, stage):
    """They are the optimizer's; it comes back for that.

    Asked for bfloat16, the stream has what the model computes with.
    """
    assert (
        run_ranks(2, masters, folder, {"zero_stage": stage}) == [(True, True, torch.bfloat16)] * 2
    )


# -- what else could go wrong


def left_alone(folder: str):
    made, *_ = prepared(folder, zero_stage=3)
    other = AutoModelForCausalLM.from_pretrained(folder)
    logits = other(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits
    return (
        is_deepspeed_zero3_enabled(),
        all(parameter.numel() for parameter in other.parameters()),
        logits.shape[1],
    )


def test_models_loaded_beside_zero_3_are_whole(folder):
    """While transformers' own DeepSpeed configuration lives, every model it loads is cut.

    It never lives here.
    """
    assert run_ranks(2, left_alone, folder) == [(False, True, 3)] * 2


def without_optimizer(folder: str, stage: int):
    made = strategy(zero_stage=stage)
    model = made.prepare(load(folder))
    errors = []
    for action in (
        lambda: made.backward(share_of_loss(model, my_rows(made, 0), 50), model),
        lambda: made.optimizer_step(sgd(model), model),
    ):
        with pytest.raises(RuntimeError) as caught:
            action()
        errors.append(str(caught.value))

    return errors


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_belongs_into_prepare(folder, stage):
    says = "Qwen3ForCausalLM has no optimizer under DeepSpeed: pass both to prepare(), as a pair"
    assert run_ranks(1, without_optimizer, folder, stage) == [[says] * 2]


def parameters_left(folder: str):
    """Return the share of a ZeRO-3 model's elements that a rank holds between uses.

    Matrices are cut, and vectors stay whole.
    """
    made, model, *_ = prepared(folder, zero_stage=3)
    frozen = made.prepare(load(folder).requires_grad_(False))
    share_of_loss(frozen, my_rows(made, 0), 50)
    whole = sum(parameter.numel() for parameter in load(folder).parameters())
    held = [
        sum(parameter.numel() + parameter.ds_tensor.numel() for parameter in module.parameters())
        for module in (model, frozen)
    ]
    return [size / whole for size in held]


def test_zero_3_cuts_what_learns_and_what_is_frozen(folder):
    for shares in run_ranks(2, parameters_left, folder):
        assert all(0.5 <= share < 0.52 for share in shares), shares
