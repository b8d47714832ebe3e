"""Faults that are planted into the second step of a small run, each in one place."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightrft.algorithms.roles.policy import Policy
from lightrft.app.trainer import base as trainer
from lightrft.core.advantages import CompareRewards
from lightrft.engine.hf import HFEngine
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.backends import base as backend
from runs import run_here

Plant = Callable[[pytest.MonkeyPatch], None]
Run = tuple[str, list[str], str]
"""Folder, flags, and the name of a function of this module; empty for a run without a fault."""


def run_all(runs: list[Run]) -> None:
    """Do all runs in this rank, one after another."""
    for folder, flags, plant in runs:
        with pytest.MonkeyPatch.context() as patch:
            if plant:
                globals()[plant](patch)
            run_here("train_ppo", [*flags, f"--save_path={folder}"])


def _in_call(number: int, change: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Return a function that applies `change` to the result and arguments of one call."""
    calls = count(1)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == number:
            result = change(result, *args)
        return result

    return changed


def _rewarded(patch: pytest.MonkeyPatch, change: Callable[[list], None]) -> None:
    """Change the samples of the second step as soon as they have rewards."""

    def of_samples(result: Any, runner: RewardRunner, samples: list) -> Any:
        change(samples)
        return result

    patch.setattr(RewardRunner, "finish", _in_call(2, of_samples, RewardRunner.finish))


def reward(patch: pytest.MonkeyPatch) -> None:
    def change(samples: list) -> None:
        samples[5].reward += 1e-9

    _rewarded(patch, change)


def logprob(patch: pytest.MonkeyPatch) -> None:
    def change(samples: list) -> None:
        samples[3].logprobs[2] = torch.tensor(samples[3].logprobs[2]).bfloat16().item()

    _rewarded(patch, change)


def token(patch: pytest.MonkeyPatch) -> None:
    def change(samples: list) -> None:
        samples[4].token_ids[1] ^= 1
        samples[0].logprobs[0] -= 1e-9  # as the engine's other batches round

    _rewarded(patch, change)


def mask(patch: pytest.MonkeyPatch) -> None:
    def change(samples: list) -> None:
        samples[0].masked = True

    _rewarded(patch, change)


def advantage(patch: pytest.MonkeyPatch) -> None:
    def change(advantages: torch.Tensor, *_: Any) -> torch.Tensor:
        advantages[3] += 1e-6
        return advantages

    patch.setattr(CompareRewards, "__call__", _in_call(2, change, CompareRewards.__call__))


def output(patch: pytest.MonkeyPatch) -> None:
    def change(logprobs: torch.Tensor, *_: Any) -> torch.Tensor:
        learned = logprobs.nonzero()[7]
        logprobs[learned] = logprobs[learned].bfloat16().float()
        return logprobs

    patch.setattr(Policy, "logprobs", _in_call(2, change, Policy.logprobs))


def gradient(patch: pytest.MonkeyPatch) -> None:
    def change(result: Any, parameters: list, *_: Any) -> Any:
        of_tensor = parameters[-3].grad
        local = of_tensor.to_local() if isinstance(of_tensor, DTensor) else of_tensor
        local = local.view(-1)
        local[0] = local[0].bfloat16().float()
        return result

    patch.setattr(backend, "clip_gradients", _in_call(3, change, backend.clip_gradients))


def decay(patch: pytest.MonkeyPatch) -> None:
    step = backend.step
    calls = count(1)

    def changed(optimizer: torch.optim.Optimizer) -> None:
        if next(calls) == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        step(optimizer)

    patch.setattr(backend, "step", changed)


def stale(patch: pytest.MonkeyPatch) -> None:
    load = HFEngine._load_weights
    calls = count(1)

    def changed(engine: HFEngine, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        if next(calls) != 3:  # the first one is at the start
            return load(engine, stream)
        for _ in stream:
            pass

    patch.setattr(HFEngine, "_load_weights", changed)


def version(patch: pytest.MonkeyPatch) -> None:
    versions = trainer.installed_versions() | {"tokenizers": "0.99", "torch": "9.9.9"}
    patch.setattr(trainer, "installed_versions", lambda: versions)


def clock(patch: pytest.MonkeyPatch) -> None:
    now = time.time
    elapsed = time.perf_counter
    patch.setattr(time, "time", lambda: now() + 86400)
    patch.setattr(time, "perf_counter", lambda: elapsed() * 1.5)
