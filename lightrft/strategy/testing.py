"""The contract of every strategy, as test cases that can be run against a custom strategy.

    results = run_contract(MyStrategy, bf16=False)  # on every rank: case -> traceback, or empty

or `torchrun --nproc-per-node 2 -m lightrft.strategy.testing my_package:MyStrategy zpg=2`, or in a
single process. Numbers are compared with a loop in plain torch over the whole batch. The cases use
public verbs only, and layouts without model parallelism (sp, tp).
"""

import inspect
import math
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from loguru import logger
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from lightrft.data.loader import share_of
from lightrft.engine.base import Sampling
from lightrft.registry import Registry
from lightrft.strategy import StrategyBase, is_actor
from lightrft.strategy.bench import (
    PROBE_LENGTHS,
    PROBE_STEPS,
    Bench,
    TrainingRun,
    batch,
    distance,
    loss_of,
    plain,
    refused,
    sgd,
    tiny_model,
    tokens,
)


def run_contract(
    strategy_class: type[StrategyBase], tolerance: float = 1e-5, **args: Any
) -> dict[str, str]:
    """Run all cases in this process group; `args` are passed to the strategy.

    All ranks call it together. `tolerance` is the allowed relative distance of numbers and
    parameters from plain torch in float32; use 2e-2 for bfloat16.
    """
    with tempfile.TemporaryDirectory() as local_folder:
        strategy = strategy_class(
            seed=1, max_norm=1.0, args={"weight_sync_bucket_mb": 1, "engine_type": "hf", **args}
        )
        strategy.setup_distributed()
        try:
            bench = Bench(strategy, Path(strategy.mesh.world.broadcast(local_folder)), tolerance)
            results = {case.__name__: _outcome(case, bench) for case in CASES}
            strategy.mesh.world.barrier()  # rank 0 deletes the folder
        finally:
            strategy.close()

    return results


def _outcome(case: Callable[[Bench], None], bench: Bench) -> str:
    try:
        case(bench)
    except BaseException:
        return traceback.format_exc()
    return ""


# -- training


def steps_are_those_of_plain_torch(bench: Bench) -> None:
    bench.assert_near(bench.course(*bench.prepared(sgd)), plain(sgd))


def decay_groups_warm_up_and_schedule(bench: Bench) -> None:
    """Check that only matrices decay, and the schedule: two warm-up steps, a cosine to a tenth."""
    strategy = bench.strategy
    model = tiny_model()
    optimizer = strategy.create_optimizer(model, 2e-3, (0.8, 0.9), weight_decay=0.3)
    scheduler = strategy.create_scheduler(optimizer, "cosine", 2, 5)
    prepared = strategy.prepare((model, optimizer, scheduler))
    run = bench.course(*prepared[:2], range(5), scheduler)
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * progress / 3)) for progress in range(3)]
    bench.assert_near(
        run,
        plain(_decay_optimizer, range(5), rates=[2e-3 * share for share in (0.5, 1.0, *cosine)]),
    )


def _decay_optimizer(model: nn.Module) -> Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is matrix]}
        for matrix in (True, False)
    ]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.3, 0.0
    return AdamW(groups, lr=2e-3, betas=(0.8, 0.9))


def micro_batches_add_up(bench: Bench) -> None:
    bench.assert_near(bench.course(*bench.prepared(sgd), micro_batches=3), plain(sgd))


def nothing_is_left_for_the_next_step(bench: Bench) -> None:
    """Train three times on the same rows at rate 0; leftover gradients would change the norms."""
    model, optimizer = bench.prepared(lambda model: SGD(model.parameters(), lr=0.0))
    norms = []
    for micro_batches in (3, 2, 1):
        bench.backward(model, optimizer, 0, micro_batches)
        norms.append(bench.strategy.optimizer_step(optimizer, model).item())
    assert max(norms) - min(norms) <= bench.tolerance * norms[0], norms


def each_model_is_clipped_by_its_own_norm(bench: Bench) -> None:
    """Alternate between the actor and a critic with gradients a hundred times as large."""
    with bench.max_norm(0.1):
        actor = bench.prepared(sgd)
        critic = bench.prepared(sgd, seed=1)
        norms = []
        for step in range(PROBE_STEPS):
            bench.backward(*actor, step)
            bench.backward(*critic, step, change=lambda loss: loss * 100)
            norms += [
                bench.strategy.optimizer_step(pair[1], pair[0], name=name).item()
                for pair, name in ((critic, "critic"), (actor, "actor"))
            ]

    run = TrainingRun(norms=norms[1::2], parameters=bench.snapshot(actor[0]))
    expected = plain(sgd, max_norm=0.1)
    bench.assert_near(
        TrainingRun([], run.norms, run.parameters),
        TrainingRun([], expected.norms, expected.parameters),
    )
    # The gradients are clipped, so the factor shows in the norm alone.
    other = plain(sgd, model=tiny_model(1), max_norm=0.1)
    assert distance(bench.snapshot(critic[0]), other.parameters) < bench.tolerance
    torch.testing.assert_close(
        torch.tensor(norms[0]), torch.tensor(100 * other.norms[0]), rtol=bench.tolerance, atol=0
    )


def max_norm_0_does_not_clip(bench: Bench) -> None:
    with bench.max_norm(0.0):
        bench.assert_near(bench.course(*bench.prepared(sgd)), plain(sgd, max_norm=0.0))


def a_norm_that_is_not_finite_skips_the_step_everywhere(bench: Bench) -> None:
    """Check that a NaN loss on one rank makes all ranks skip step and schedule.

    It must not affect later steps. The same holds if the loss is NaN but the gradients are finite.
    """
    strategy = bench.strategy
    model = tiny_model()
    optimizer = strategy.create_optimizer(model, 1e-2)
    scheduler = strategy.create_scheduler(optimizer, "constant", 4, 10)
    strategy.prepare((model, optimizer, scheduler))
    bench.course(model, optimizer, range(1), scheduler)
    before = bench.snapshot(model)
    rates = scheduler.get_last_lr()

    skipped = strategy.skipped_steps
    wrong = math.nan if strategy.is_rank_0() else 0.0
    for count, change in enumerate((lambda loss: loss * (1 + wrong), lambda loss: loss + wrong), 1):
        bench.backward(model, optimizer, 1, change=change)
        norm = strategy.optimizer_step(optimizer, model, scheduler)
        assert not torch.isfinite(norm) and strategy.skipped_steps == skipped + count

    assert distance(bench.snapshot(model), before) == 0 and scheduler.get_last_lr() == rates
    run = bench.course(model, optimizer, range(1, 3), scheduler)
    expected = plain(
        lambda model: AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0),
        rates=[2.5e-3, 5e-3, 7.5e-3],
    )
    bench.assert_near(
        run, TrainingRun(expected.losses[1:], expected.norms[1:], expected.parameters)
    )


def an_unfinished_step_is_refused(bench: Bench) -> None:
    model, optimizer = bench.prepared(sgd)
    data = bench.strategy.mesh.data
    rows = [batch(0)[row] for row in share_of(data.rank, data.size, len(PROBE_LENGTHS))]
    bench.strategy.backward(loss_of(model, rows, tokens(0)), model, optimizer, last=False)
    assert "critic" in refused(
        lambda: bench.strategy.optimizer_step(optimizer, model, name="critic"), RuntimeError
    )
    refused(lambda: bench.strategy.offload_model(model), RuntimeError)


def forgotten_gradients_are_forgotten(bench: Bench) -> None:
    """Clear the gradients of a whole accumulation; training goes on as if it had not happened."""
    model, optimizer = bench.prepared(sgd)
    bench.backward(model, optimizer, 7, micro_batches=2)
    bench.strategy.clear_gradients(model)
    bench.assert_near(bench.course(model, optimizer, micro_batches=2), plain(sgd))


# -- models


def prepare_returns_what_it_was_given(bench: Bench) -> None:
    strategy = bench.strategy
    model = tiny_model()
    other = tiny_model(1)
    optimizer = sgd(model)
    scheduler = strategy.create_scheduler(optimizer, "constant", 0, 1)
    parameters = list(model.parameters())
    triple, nothing, frozen = strategy.prepare(
        (model, optimizer, scheduler), None, other.requires_grad_(False)
    )
    assert triple[0] is model and triple[1] is optimizer and triple[2] is scheduler
    assert nothing is None and frozen is other and strategy.prepare(None) is None
    assert isinstance(model, Qwen3ForCausalLM) and len(list(model.parameters())) == len(parameters)
    assert strategy.unwrap_model(model) is model
    assert scheduler.optimizer is optimizer and optimizer.param_groups[0]["lr"] == 0.3


def wrong_optimizers_are_refused(bench: Bench) -> None:
    model = tiny_model()
    assert "not in Qwen3ForCausalLM" in refused(
        lambda: bench.strategy.prepare((model, sgd(tiny_model()))), ValueError
    )
    optimizer = AdamW(model.parameters())
    loss_of(model, batch(0), 1).backward()
    optimizer.step()
    assert "not stepped" in refused(lambda: bench.strategy.prepare((model, optimizer)), ValueError)


def all_roles_of_a_run(bench: Bench) -> None:
    args = {
        "actor_learning_rate": 1e-2,
        "critic_learning_rate": 2e-2,
        "adam_betas": [0.9, 0.99],
        "l2": 0.1,
        "lr_warmup_ratio": 0.2,
        "lr_scheduler": "cosine",
    }
    models = [tiny_model(seed) for seed in range(4)]
    for frozen in models[2:]:
        frozen.requires_grad_(False)
    actor, critic, rewards, initial = bench.strategy.prepare_models_and_optimizers(
        *models[:2], models[2:3], models[3], args, 10
    )
    assert [actor[0], critic[0], *rewards, initial] == models
    assert is_actor(models[0]) and not any(map(is_actor, models[1:]))

    assert [item[1].param_groups[0]["lr"] for item in (actor, critic)] == [5e-3, 1e-2], (
        "the first of two steps of warm-up"
    )
    bench.course(*actor[:2], range(1), actor[2])
    assert actor[1].param_groups[0]["lr"] == 1e-2 and critic[1].param_groups[0]["lr"] == 1e-2
    nobody = bench.strategy.prepare_models_and_optimizers(tiny_model(), None, None, None, args, 10)[
        1:
    ]
    assert nobody == ((None, None, None), None, None)
    reward_model, optimizer, _ = bench.strategy.prepare_reward_model(tiny_model(), args, 10)
    assert bench.course(reward_model, optimizer, range(1)).norms[0] > 0 and not is_actor(
        reward_model
    )


def a_frozen_model_answers_as_ever(bench: Bench) -> None:
    """Check that a frozen model gives the same losses before, between and after the actor's steps.

    The actor's steps must not be affected by it either.
    """
    frozen = bench.strategy.prepare(tiny_model(5).requires_grad_(False).eval())
    model, optimizer = bench.prepared(sgd)
    with torch.no_grad():
        expected = loss_of(tiny_model(5), batch(0), 1).item()
        answers = [loss_of(frozen, batch(0), 1).item()]
        course = TrainingRun()
        for step in range(PROBE_STEPS):
            loss_of(model, batch(0), 1)
            with torch.enable_grad():
                one = bench.course(model, optimizer, range(step, step + 1))
            course = TrainingRun(
                course.losses + one.losses, course.norms + one.norms, one.parameters
            )
            answers.append(loss_of(frozen, batch(0), 1).item())

    assert len(set(answers)) == 1 and abs(answers[0] / expected - 1) < bench.tolerance
    bench.assert_near(course, plain(sgd))


def the_stream_is_whole(bench: Bench) -> None:
    """Check that full_params() yields every parameter once, by name and dtype.

    Tied parameters come once too. An offloaded model is streamed as well.
    """
    for tie in (False, True):
        model, optimizer = bench.prepared(sgd, tie=tie)
        expected = plain(sgd, model=tiny_model(tie=tie)).parameters
        bench.course(model, optimizer)
        bench.strategy.offload_model(model)
        streamed = [
            (name, tensor.clone())
            for name, tensor in bench.strategy.full_params(model, torch.bfloat16)
        ]
        assert [name for name, _ in streamed] == list(expected)

        assert all(
            tensor.dtype == torch.bfloat16 and tensor.shape == expected[name].shape
            for name, tensor in streamed
        )
        assert distance({name: tensor.float().cpu() for name, tensor in streamed}, expected) < max(
            bench.tolerance, 4e-3
        )


def an_average_follows_the_model(bench: Bench) -> None:
    strategy = bench.strategy
    average = bench.strategy.prepare(tiny_model())

    model, optimizer = bench.prepared(sgd)
    expected = {name: parameter.detach() for name, parameter in tiny_model().named_parameters()}
    for step in range(PROBE_STEPS):
        now = bench.course(model, optimizer, range(step, step + 1)).parameters
        strategy.moving_average(model, average, beta=0.9)
        expected = {name: 0.9 * expected[name] + 0.1 * now[name] for name in expected}

    assert distance(bench.snapshot(average), expected) < bench.tolerance
    torch.testing.assert_close(
        loss_of(average, batch(0), 1).item(), _loss_with(expected), rtol=bench.tolerance, atol=0
    )


def _loss_with(parameters: dict[str, Tensor]) -> float:
    model = tiny_model()
    model.load_state_dict(parameters, strict=False)
    return loss_of(model, batch(0), 1).item()


# -- memory


def what_is_away_comes_back_bit_by_bit(bench: Bench) -> None:
    """Train with everything offloaded and reloaded between steps.

    The parameters stay the same objects.
    """
    model, optimizer = bench.prepared(_decay_optimizer)
    expected = bench.course(*bench.prepared(_decay_optimizer))
    course = TrainingRun()
    before = list(map(id, model.parameters()))

    for step in range(PROBE_STEPS):
        for verb in (
            bench.strategy.offload_model,
            bench.strategy.offload_model,
            bench.strategy.reload_model,
        ):
            verb(model)
        for verb in (bench.strategy.maybe_offload_optimizer, bench.strategy.maybe_load_optimizer):
            verb(optimizer)
            verb(optimizer)
        one = bench.course(model, optimizer, range(step, step + 1))
        course = TrainingRun(course.losses + one.losses, course.norms + one.norms, one.parameters)

    assert (course.losses, course.norms) == (expected.losses, expected.norms)
    assert (
        distance(course.parameters, expected.parameters) == 0
        and list(map(id, model.parameters())) == before
    )


def gradients_are_not_lost(bench: Bench) -> None:
    model, optimizer = bench.prepared(sgd)
    bench.backward(model, optimizer, 0)
    assert "gradients" in refused(lambda: bench.strategy.offload_model(model), RuntimeError)
    bench.strategy.optimizer_step(optimizer, model)
    bench.strategy.offload_model(model)


def housekeeping(bench: Bench) -> None:
    strategy = bench.strategy
    strategy.sync_and_clear_cache()
    memory = strategy.report_memory("contract")
    assert memory["memory/peak_gb"] > 0 and strategy.get_rank() == strategy.mesh.world.rank
    rank = strategy.mesh.data.rank
    size = strategy.mesh.data.size
    assert (
        strategy.all_reduce({"a": rank, "b": torch.ones(2)}, "sum")["a"] == size * (size - 1) // 2
    )
    assert strategy.all_gather(torch.tensor([rank])).tolist() == list(range(size))


# -- files and the engine


def a_checkpoint_continues_bit_by_bit(bench: Bench) -> None:
    def begin() -> tuple[PreTrainedModel, Optimizer, Any]:
        model = tiny_model()
        optimizer = bench.strategy.create_optimizer(model, 1e-2, weight_decay=0.1)
        return bench.strategy.prepare(
            (model, optimizer, bench.strategy.create_scheduler(optimizer, "cosine", 1, 6))
        )

    strategy = bench.strategy
    root = bench.folder / "checkpoints"
    model, optimizer, scheduler = begin()
    bench.course(model, optimizer, range(2), scheduler)
    saved = strategy.save_ckpt(
        model, root, "step2", client_state={"step": 2}, optimizer=optimizer, scheduler=scheduler
    )
    expected = bench.course(model, optimizer, range(2, 4), scheduler)
    model, optimizer, scheduler = begin()
    assert strategy.load_ckpt(model, root, optimizer=optimizer, scheduler=scheduler) == (
        saved,
        {"step": 2},
    )
    run = bench.course(model, optimizer, range(2, 4), scheduler)
    assert (run.losses, run.norms) == (expected.losses, expected.norms)
    assert distance(run.parameters, expected.parameters) == 0


def the_exported_model_loads(bench: Bench) -> None:
    for tie in (False, True):
        model, optimizer = bench.prepared(sgd, tie=tie)
        course = bench.course(model, optimizer)
        folder = bench.strategy.save_model(
            model, None, bench.folder / f"model-{tie}", torch.float32
        )
        loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert (
            distance({name: tensor.detach() for name, tensor in loaded.items()}, course.parameters)
            == 0
        )


def the_engine_has_the_newest_weights(bench: Bench) -> None:
    """Check that the engine's log-probs equal the exported actor's, before and after a step."""
    strategy = bench.strategy
    model, optimizer = bench.prepared(sgd)
    pretrain = strategy.save_model(model, None, bench.folder / "pretrain")
    sizes = {"prompt_max_len": 8, "generate_max_len": 8}
    strategy.setup_inference_engine(
        {"pretrain": str(pretrain), "engine_type": "hf", **sizes}, actor=model
    )

    for step in range(2):
        with strategy.engine_awake(model):
            (sample,), *_ = strategy.gather_and_generate(
                Sampling(max_tokens=6, seed=step), [[5, 6, 7], [8]]
            )

        folder = strategy.save_model(model, None, bench.folder / f"actor{step}")
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=strategy.dtype)
        ids = torch.tensor([[5, 6, 7, *sample.token_ids]])
        with torch.no_grad():
            logprobs = exported(ids).logits[0, 2:-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 3:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(sample.logprobs), expected, rtol=0, atol=10 * bench.tolerance
        )
        bench.course(model, optimizer, range(step, step + 1))


_here = [
    case
    for _, case in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    if list(inspect.signature(case).parameters) == ["bench"]
]
CASES = sorted(_here, key=lambda case: case.__code__.co_firstlineno)


def main(argv: list[str]) -> int:
    """Run the contract for `module:Class name=value ...`; return how many cases have failed."""
    options = {
        name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in argv[1:])
    }
    results = run_contract(Registry("strategy", flag="the first argument")[argv[0]], **options)
    for case, failure in results.items():
        logger.log("ERROR" if failure else "INFO", "{}: {}", case, failure or "passed")
    return sum(map(bool, results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
