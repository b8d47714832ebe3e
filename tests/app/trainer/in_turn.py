"""Several small runs in one start of the ranks, which costs less than a start for each.

What the first run has imported, compiled and looked up is there for the others.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ranks import run_ranks
from runs import rows_of, run_here
from with_vllm import load_vllm

Run = tuple[list[str], Path]
"""Flags without --save_path, and the folder of the results."""


def train_in_turn(
    entrypoint: str, world_size: int, runs: Iterable[Run], timeout: float = 600
) -> list[list[dict[str, Any]]]:
    """Return the metrics that lie in the folder of each run when all runs have ended."""
    runs = [*runs]
    if any("--engine_type=vllm" in flags for flags, _ in runs):
        load_vllm()
        # of which vLLM writes every byte when it starts
        runs = [(["--engine_kv_cache_gb=0.05", *flags], folder) for flags, folder in runs]
    run_ranks(world_size, _each, entrypoint, runs, timeout=timeout)
    return [rows_of(folder) for _, folder in runs]


def train_and_resume(
    entrypoint: str,
    world_size: int,
    flags: list[str],
    folder: Path,
    *,
    stop: int,
    end: int,
    saving: Iterable[str] = (),
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metrics of a run of `end` steps, and of one that stops and is resumed.

    They lie in the folders `whole` and `parts`; only the latter has the flags `saving`.
    """
    runs = [
        ([*flags, f"--max_steps={end}"], folder / "whole"),
        ([*flags, *saving, f"--max_steps={stop}"], folder / "parts"),
        ([*flags, *saving, f"--max_steps={end}", "--load_checkpoint"], folder / "parts"),
    ]
    whole, _, resumed = train_in_turn(entrypoint, world_size, runs)
    return whole, resumed


def _each(entrypoint: str, runs: list[Run]) -> None:
    for flags, folder in runs:
        run_here(entrypoint, [*flags, f"--save_path={folder}"])
