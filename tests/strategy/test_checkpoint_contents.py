"""What a checkpoint holds besides one model.

That is several models, items with a state of their own, counters and the engine.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config import ModelSection
from lightrft.core.batch import Batch
from lightrft.engine.base import Sampling
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import load_model, load_scorer
from ranks import run_ranks, run_refusals
from strategy.training import snapshot, strategy


class Moments:
    """A user's own item of a checkpoint, as running moments of rewards would be.

    It is the same on all ranks after every update.
    """

    def __init__(self, world: Any):
        self.world = world
        self.count = 0
        self.total = torch.zeros(2, dtype=torch.float64)
        self.history: list[dict[str, Any]] = []

    def update(self, value: float) -> None:
        self.total += self.world.sum(torch.tensor([value, value**2], dtype=torch.float64))
        self.count += self.world.size
        self.history.append({"value": value, "text": f"step {self.count}", "kept": (1, None, True)})

    def state_dict(self) -> dict[str, Any]:
        """What differs between ranks is gathered."""
        return {
            "count": self.count,
            "total": self.total,
            "history": self.world.gather(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.total = state["total"]
        self.history = [
            row for rows in state["history"][self.world.rank :: self.world.size] for row in rows
        ]


class PPO:
    """Actor, critic and a moving average.

    Actor and critic learn, each with a separate optimizer and schedule.
    """

    def __init__(self, folder: str, **args: Any):
        self.strategy = strategy(**args)
        section = ModelSection(pretrain=folder)
        torch.manual_seed(1)
        self.actor = Actor(load_model(section))
        self.critic = Scorer(load_scorer(section))
        self.ema = Actor(load_model(section))
        self.ema.requires_grad_(False)
        self.optimizers = [
            self.strategy.create_optimizer(model, lr)
            for model, lr in ((self.actor, 1e-3), (self.critic, 3e-3))
        ]

        schedulers = [
            self.strategy.create_scheduler(optimizer, "cosine", 1, steps)
            for optimizer, steps in zip(self.optimizers, (6, 9), strict=True)
        ]
        self.strategy.prepare(
            (self.actor, self.optimizers[0], schedulers[0]),
            (self.critic, self.optimizers[1], schedulers[1]),
            self.ema,
        )
        self.schedulers = schedulers
        self.moments = Moments(self.strategy.mesh.world)
        self.models = {
            "actor": self.actor,
            "critic": (self.critic, self.optimizers[1], schedulers[1]),
            "ema": self.ema,
        }

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            batch = Batch(
                lengths=torch.tensor([7, 4]),
                input_ids=torch.randint(0, 256, (11,), generator=generator),
                loss_mask=torch.ones(11, dtype=torch.bool),
                rows=torch.arange(2),
            )

            for model, optimizer, scheduler in zip(
                (self.actor, self.critic), self.optimizers, self.schedulers, strict=True
            ):
                loss = (
                    -self.actor(batch, 1.0)[0].sum()
                    if model is self.actor
                    else (self.critic(batch) - 1).square().sum()
                )
                self.strategy.backward(loss / self.strategy.mesh.world.size, model, optimizer)
                norm = self.strategy.optimizer_step(optimizer, model, scheduler)
                losses += [
                    self.strategy.all_reduce(loss.item()),
                    norm.item(),
                    scheduler.get_last_lr()[0],
                ]

            with torch.no_grad():
                for mine, theirs in zip(
                    self.ema.parameters(), self.actor.parameters(), strict=True
                ):
                    mine.lerp_(theirs, 0.1)

            self.moments.update(losses[0])

        return losses

    def state(self) -> dict[str, torch.Tensor]:
        models = {"actor": self.actor, "critic": self.critic, "ema": self.ema}
        whole = {name: snapshot(self.strategy, model) for name, model in models.items()}
        return {
            f"{name}.{key}": tensor
            for name, tensors in whole.items()
            for key, tensor in tensors.items()
        }


def trained(folder: str, root: Path):
    run = PPO(folder)
    run.steps(0, 2)
    run.strategy.skipped_steps = 3
    run.strategy.save_ckpt(run.models, root, "two", items={"moments": run.moments})
    return run.state(), run.moments.total.clone(), run.steps(2, 4)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """A checkpoint of two ranks, and what they had."""
    root = tmp_path_factory.mktemp("saved")
    return root, run_ranks(2, trained, folder, root)[0]


def resumed(folder: str, root: Path):
    run = PPO(folder)
    run.strategy.load_ckpt(run.models, root, items={"moments": run.moments})
    moments = (run.moments.count, run.moments.total.clone(), list(run.moments.history))
    return run.state(), moments, run.strategy.skipped_steps, run.steps(2, 4)


@pytest.mark.parametrize("world_size", [2, 1])
def test_models_items_and_counters_come_back(folder, saved, world_size):
    root, (expected, total, losses) = saved
    results = run_ranks(world_size, resumed, folder, root)
    for state, (count, found_total, history), skipped, found_losses in results:
        assert state.keys() == expected.keys() and all(
            torch.equal(state[name], expected[name]) for name in expected
        )
        assert (
            any(name.startswith("critic.score") for name in state)
            and len({name.split(".")[0] for name in state}) == 3
        )
        assert count == 4 and torch.equal(found_total, total)
        assert all(row["kept"] == (1, None, True) for row in history)
        assert skipped == 3
        assert found_losses == (losses if world_size == 2 else pytest.approx(losses, rel=1e-5))

    assert sum(len(moments[2]) for _, moments, *_ in results) == 4


def only_the_actor(folder: str, root: Path):
    """The actor alone, for whoever wants to generate with it."""
    run = PPO(folder)
    before = run.state()
    run.strategy.load_ckpt({"actor": run.actor}, root, load_module_only=True)
    after = run.state()
    return {
        name.split(".")[0] for name in before if not torch.equal(before[name], after[name])
    }, run.strategy.skipped_steps


def test_one_of_the_models_can_be_loaded_alone(folder, saved):
    assert run_ranks(1, only_the_actor, folder, saved[0]) == [({"actor"}, 0)]


def without(folder: str, root: Path, missing: str):
    run = PPO(folder)
    items = {} if missing == "moments" else {"moments": run.moments}
    models = {name: model for name, model in run.models.items() if name != missing}
    run.strategy.load_ckpt(models, root, items=items)


def test_what_is_not_asked_for_is_an_error(folder, saved):
    problems = {
        "critic": "it contains a model for each of: actor, critic, ema; requested are: actor, ema",
        "moments": "it contains a state for each of: moments; requested are: none",
    }
    refusals = run_refusals(
        1, without, {missing: (folder, saved[0], missing) for missing in problems}
    )
    assert all(problems[missing] in refusals[missing][0] for missing in problems)


def unreadable(folder: str, root: Path):
    run = PPO(folder)
    run.moments.history = [{"value": run.strategy.config}]
    try:
        run.strategy.save_ckpt(run.models, root, "two", items={"moments": run.moments})
    except RuntimeError as error:
        return str(error), root.exists()


def test_a_state_that_could_not_be_read_back_is_an_error_when_saved(folder, root):
    for message, there in run_ranks(2, unreadable, folder, root):
        assert (
            "rank 0: TypeError: the state of moments contains objects other than tensors and plain"
            in message
            and not there
        )


def options(folder: str, root: Path):
    """The optimizer, or the schedule, as it is and not as it was."""
    run = PPO(folder)
    run.steps(0, 1)

    found = []
    for flag in ("load_optimizer_states", "load_lr_scheduler_states"):
        run.strategy.load_ckpt(run.models, root, items={"moments": run.moments}, **{flag: False})
        steps = {
            state["step"].item()
            for optimizer in run.optimizers
            for state in optimizer.state.values()
        }
        found.append((steps, {scheduler.last_epoch for scheduler in run.schedulers}))

    return found


def test_optimizers_and_schedules_may_stay(folder, saved):
    assert run_ranks(1, options, folder, saved[0])[0] == [({1.0}, {2}), ({2.0}, {2})]


# -- the engine


def versions(folder: str, root: Path, resume: bool):
    made = strategy(pretrain=folder, engine_type="hf", prompt_max_len=8, generate_max_len=4)
    actor = made.prepare(Actor(load_model(ModelSection(pretrain=folder))))
    made.setup_inference_engine(actor=actor)
    prompts = [[1, 2, 3]]
    sampling = Sampling(max_tokens=4, temperature=0.0)

    def generated():
        with made.engine_awake():
            return made.engine_generate_local(sampling, prompts)[0]

    if resume:
        made.load_ckpt(actor, root)
        return made.weight_version, generated()
    for _ in range(3):
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.mul_(1.1)
        made.update_engine_weights(actor)
        made.maybe_sleep_inference_engine()
    made.save_ckpt(actor, root, "three")
    return made.weight_version, generated()


def test_the_weight_version_goes_on_and_old_weights_never_generate(folder, root):
    (version, expected), (found_version, found) = (
        run_ranks(1, versions, folder, root, resume)[0] for resume in (False, True)
    )
    assert version == found_version == 4
    assert found["weight_version"] == expected["weight_version"] == 5
    assert found["output_token_ids"] == expected["output_token_ids"]
    assert found["output_logprobs"] == expected["output_logprobs"]
