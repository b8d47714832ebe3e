"""Why: a reference that follows the actor is a second model that changes. It must follow by the
formula in every layout, and a resumed run must find it where it was.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.trainer.in_turn import train_and_resume
from lightrft.strategy import get_strategy
from ranks import run_ranks
from runs import PPO, build, parse, prepare, prepare_config, repeatable
from strategy.zero import DeepSpeedStrategy

KL = ["--use_kl_loss", "--init_kl_coef=0.1", "--kl_estimator=k3", "--actor_learning_rate=1e-3"]
EMA = "--ref_ema=0.75"
REFRESHED = "--ref_refresh_steps=2"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    assert DeepSpeedStrategy
    flags = prepare(tmp_path_factory.mktemp("inputs"))
    return [*[flag for flag in flags if flag != "--fsdp"], *PPO, *KL, "--reward_workers=0"]


def followed_in_turn(runs: list[list[str]]) -> list[list[tuple[Weights, Weights]]]:
    return [followed(flags) for flags in runs]


def followed(flags: list[str]) -> list[tuple[Weights, Weights]]:
    """Return the weights of actor and reference before the first step and after each one."""
    config = prepare_config("train_ppo", parse(flags, "train_ppo"))
    torch.manual_seed(0)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    trainer: Any = build("train_ppo", config, strategy)

    def weights() -> tuple[Weights, Weights]:
        models = trainer.policy.actor, trainer.policy.reference
        return tuple(
            {name: tensor.clone() for name, tensor in strategy.full_params(model)}
            for model in models
        )

    found = [weights()]
    step = trainer.step

    def followed_step(number: int) -> Any:
        record = step(number)
        found.append(weights())
        return record

    trainer.step = followed_step
    trainer.fit()
    strategy.close()
    return found


@pytest.mark.slow
def test_the_reference_follows_the_actor(inputs, tmp_path):
    layouts = ["--fsdp", "--tp_size=2", "--offload_idle"], ["--fsdp=false", "--zero_stage=3"]
    runs = [
        [*inputs, *layout, "--max_steps=3", moves, f"--save_path={tmp_path / moves}{len(layout)}"]
        for layout in layouts
        for moves in (EMA, REFRESHED)
    ]
    found = run_ranks(2, followed_in_turn, runs, timeout=400)[0]
    for averaged, refreshed in (found[:2], found[2:]):
        assert_followed(averaged, refreshed)


def assert_followed(
    averaged: list[tuple[Weights, Weights]], refreshed: list[tuple[Weights, Weights]]
) -> None:
    for (_, before), (actor, reference) in zip(averaged[:-1], averaged[1:], strict=True):
        for name, now in reference.items():
            expected = 0.75 * before[name].double() + 0.25 * actor[name].double()
            torch.testing.assert_close(now.double(), expected, rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(averaged[0][1][name], now) for name, now in averaged[1][1].items())

    for step, (_, reference) in enumerate(refreshed):
        of_reference = refreshed[0][1] if step < 2 else refreshed[2][0]
        assert all(torch.equal(now, of_reference[name]) for name, now in reference.items())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "moves"), [(2, EMA), (1, REFRESHED)], ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(inputs, tmp_path, ranks, moves):
    """With adapters too, and with a coefficient of the entropy that has changed."""
    flags = [*inputs, "--fsdp", moves, "--save_steps=3", "--no_async_save"]
    flags += ["--entropy_coef=0.01", "--entropy_target=9", "--entropy_step=0.02"]
    if moves == EMA:
        flags += ["--lora_rank=4"]

    runs = train_and_resume("train_ppo", ranks, flags, tmp_path, stop=3, end=5)
    whole, resumed = map(repeatable, runs)
    assert resumed == whole
    assert [row["rollout/entropy_coef"] for row in whole] == pytest.approx(
        [0.01, 0.03, 0.05, 0.07, 0.09]
    )
    assert whole[0]["train/kl"] < 1e-9 < whole[3]["train/kl"]

    mine, theirs = (
        load_file(Path(tmp_path) / each / "model" / "model.safetensors")
        for each in ("parts", "whole")
    )
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
