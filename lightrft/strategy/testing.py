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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
import yaml
from loguru import logger
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lightrft.data.loader import share_of
from lightrft.engine.base import Sampling
from lightrft.engine.testing import outcome
from lightrft.registry import Registry
from lightrft.strategy import StrategyBase, is_actor

PROBE_VOCABULARY = 96
PROBE_STEPS = 3
PROBE_LENGTHS = [3, 9, 4, 12, 2, 6, 7, 5, 11, 3, 8, 4]
"""Vocabulary size, optimizer steps, and lengths of a step's sequences. With these lengths ranks
have different numbers of tokens."""
OptimizerOf = Callable[[nn.Module], Optimizer]


# -- a tiny model on fixed batches, under a strategy and in plain torch


@dataclass
class TrainingRun:
    """Losses and gradient norms of some optimizer steps, and the parameters after them.

    The parameters have Hugging Face names.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def followed_by(self, later: Self) -> Self:
        losses = self.losses + later.losses
        return type(self)(losses, self.norms + later.norms, later.parameters)


@dataclass
class Bench:
    strategy: StrategyBase
    folder: Path
    """Empty folder that all ranks share."""
    tolerance: float

    def prepared(
        self, optimizer_of: OptimizerOf, **options: Any
    ) -> tuple[PreTrainedModel, Optimizer]:
        model = tiny_model(**options)
        return self.strategy.prepare((model, optimizer_of(model)))

    def backward(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        step: int,
        micro_batches: int = 1,
        change: Callable[[Tensor], Tensor] = lambda loss: loss,
        *,
        last: bool = True,
    ) -> float:
        """Run backward on this rank's share of an optimizer step; return its loss.

        `change` is applied to the loss first. Without `last` more micro-batches follow.
        """
        data = self.strategy.mesh.data
        total = 0.0
        denominator = tokens(step)
        rows = [batch(step)[row] for row in share_of(data.rank, data.size, len(PROBE_LENGTHS))]
        for index in range(micro_batches):
            loss = change(loss_of(model, rows[index::micro_batches], denominator))
            ends = last and index == micro_batches - 1
            self.strategy.backward(loss, model, optimizer, last=ends)
            total += loss.item()
        return total

    def course(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: range = range(PROBE_STEPS),
        scheduler: Any = None,
        micro_batches: int = 1,
    ) -> TrainingRun:
        course = TrainingRun()
        # Losses are shares of the global mean, so the sum over ranks is the loss of the step.
        for step in steps:
            loss = self.backward(model, optimizer, step, micro_batches)
            course.norms.append(self.strategy.optimizer_step(optimizer, model, scheduler).item())
            course.losses.append(self.strategy.all_reduce(loss, "sum"))
        course.parameters = self.snapshot(model)
        return course

    def snapshot(self, model: nn.Module) -> dict[str, Tensor]:
        return {
            name: tensor.cpu().clone()
            for name, tensor in self.strategy.full_params(model, torch.float32)
        }

    def assert_near(self, run: TrainingRun, expected: TrainingRun) -> None:
        near = {"rtol": self.tolerance, "atol": self.tolerance / 10}
        for actual, other in ((run.losses, expected.losses), (run.norms, expected.norms)):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(other), **near)
        assert distance(run.parameters, expected.parameters) < self.tolerance

    @contextmanager
    def max_norm(self, value: float) -> Iterator[None]:
        before = self.strategy.max_norm
        self.strategy.max_norm = value
        try:
            yield
        finally:
            self.strategy.max_norm = before


def tiny_model(seed: int = 0, tie: bool = False) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": PROBE_VOCABULARY}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    options = {"head_dim": 16, "initializer_range": 0.08, "use_cache": False}
    config = Qwen3Config(**sizes, **layers, **special, **options, tie_word_embeddings=tie)

    with torch.random.fork_rng(devices=[]):
        # All ranks and the plain loop need the same model, whatever was drawn before.
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).train()


def batch(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randint(3, PROBE_VOCABULARY, (length,), generator=generator)
        for length in PROBE_LENGTHS
    ]


def tokens(step: int) -> int:
    return sum(len(row) - 1 for row in batch(step))


def loss_of(model: nn.Module, rows: list[Tensor], denominator: int) -> Tensor:
    """Return the share of these rows in the mean loss over all tokens of an optimizer step."""
    device = next(model.parameters()).device
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / denominator


def sgd(model: nn.Module) -> Optimizer:
    """Build SGD: unlike Adam it reveals a constant factor on the gradients."""
    return SGD(model.parameters(), lr=0.3)


def plain(
    optimizer_of: OptimizerOf,
    steps: range = range(PROBE_STEPS),
    *,
    model: nn.Module | None = None,
    max_norm: float = 1.0,
    rates: list[float] | None = None,
) -> TrainingRun:
    """Run the same steps in plain torch: one process, one batch.

    `rates` are the learning rates of the steps.
    """
    model = model or tiny_model()
    optimizer = optimizer_of(model)
    course = TrainingRun()
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rates[step] if rates else group["lr"]
        loss = loss_of(model, batch(step), tokens(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
        course.norms.append(norm.item())
        course.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    course.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return course


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative distance between two tensors of the same name."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max(
        ((actual[name] - expected[name]).norm() / (expected[name].norm() + 1e-8)).item()
        for name in expected
    )


def refused(action: Callable[[], Any], kind: type[Exception]) -> str:
    """Return the message of the error that `action` must raise; AssertionError without one."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("this should have been an error")


# -- the contract


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
            results = {case.__name__: outcome(case, bench) for case in CASES}
            strategy.mesh.world.barrier()  # rank 0 deletes the folder
        finally:
            strategy.close()

    return results


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
    bench.assert_near(run, replace(plain(sgd, max_norm=0.1), losses=[]))
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
    bench.backward(model, optimizer, 0, last=False)
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
    rates = {"actor_learning_rate": 1e-2, "critic_learning_rate": 2e-2, "adam_betas": [0.9, 0.99]}
    args = rates | {"l2": 0.1, "lr_warmup_ratio": 0.2, "lr_scheduler": "cosine"}
    models = [tiny_model(seed) for seed in range(4)]
    for frozen in models[2:]:
        frozen.requires_grad_(False)
    strategy = bench.strategy
    actor, critic, rewards, initial = strategy.prepare_models_and_optimizers(
        *models[:2], models[2:3], models[3], args, 10
    )
    assert [actor[0], critic[0], *rewards, initial] == models
    assert is_actor(models[0]) and not any(map(is_actor, models[1:]))

    assert [item[1].param_groups[0]["lr"] for item in (actor, critic)] == [5e-3, 1e-2], (
        "the first of two steps of warm-up"
    )
    bench.course(*actor[:2], range(1), actor[2])
    assert actor[1].param_groups[0]["lr"] == 1e-2 and critic[1].param_groups[0]["lr"] == 1e-2
    nobody = strategy.prepare_models_and_optimizers(tiny_model(), None, None, None, args, 10)
    assert nobody[1:] == ((None, None, None), None, None)
    reward_model, optimizer, _ = strategy.prepare_reward_model(tiny_model(), args, 10)
    assert bench.course(reward_model, optimizer, range(1)).norms[0] > 0
    assert not is_actor(reward_model)


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
            course = course.followed_by(one)
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
        parameters = {name: tensor.float().cpu() for name, tensor in streamed}
        assert distance(parameters, expected) < max(bench.tolerance, 4e-3)


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
    strategy = bench.strategy
    model, optimizer = bench.prepared(_decay_optimizer)
    expected = bench.course(*bench.prepared(_decay_optimizer))
    course = TrainingRun()
    before = list(map(id, model.parameters()))

    for step in range(PROBE_STEPS):
        for _ in range(2):
            strategy.offload_model(model)
            strategy.maybe_offload_optimizer(optimizer)
        for _ in range(2):
            strategy.reload_model(model)
            strategy.maybe_load_optimizer(optimizer)
        course = course.followed_by(bench.course(model, optimizer, range(step, step + 1)))

    assert (course.losses, course.norms) == (expected.losses, expected.norms)
    assert distance(course.parameters, expected.parameters) == 0
    assert list(map(id, model.parameters())) == before


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
    reduced = strategy.all_reduce({"a": rank, "b": torch.ones(2)}, "sum")
    assert reduced["a"] == size * (size - 1) // 2
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
        loaded = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
        assert distance(dict(loaded.named_parameters()), course.parameters) == 0


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


CASES = [
    case
    for case in list(vars(sys.modules[__name__]).values())
    if inspect.isfunction(case) and [*inspect.signature(case).parameters] == ["bench"]
]


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
