"""Every trainer takes two steps in both precisions, under both strategies, whatever it trains of a
model.
"""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from ranks import run_cases
from runs import prepare, rows_of, run_here

BATCH = ["--train_batch_size=4", "--max_steps=2", "--max_tokens_per_microbatch=64"]
GENERATION = [
    "--engine_type=hf",
    "--rollout_batch_size=2",
    "--n_samples_per_prompt=2",
    "--generate_max_len=4",
    "--prompt_max_len=8",
    "--no_enable_engine_sleep",
]
TRAINERS = {
    "ppo without reference": ["--init_kl_coef=0"],
    "ppo": ["--init_kl_coef=0.1"],
    "ppo with critic": ["--init_kl_coef=0.1", "--advantage_estimator=gae"],
    "dpo": [],
    "kto": [],
    "sft": [],
    "rm": [],
    "prm": [],
}
STRATEGIES = {"fsdp": ["--fsdp"], "zero": ["--fsdp=false", "--zero_stage=2"]}
LEARNED = {
    "whole": [],
    "lora": ["--lora_rank=4"],
    "freezing": ["--freeze_prefix=model.embed_tokens"],
}
PRECISIONS = {"float32": [], "bfloat16": ["--bf16"]}
ROWS = {
    "dpo": {"prompt": "a=", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a=", "completion": "b", "label": True},
    "sft": {"input": "a=", "label": "b"},
    "rm": {"prompt": "a=", "chosen": "b", "rejected": "c"},
    "prm": {"prompt": "a=", "completions": ["b", "c"], "labels": [True, False]},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder)
    for name, row in ROWS.items():
        rows = [row] * 8
        if name == "kto":
            rows = [row | {"label": good, "completion": "bc"[good]} for good in (True, False)] * 4
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def two_steps(inputs: Path, out: Path, trainer: str, flags: list[str]) -> list[dict]:
    kind = trainer.partition(" ")[0]
    data = [f"--prompt_data={inputs / kind}.jsonl"]
    if kind == "ppo":
        reward = f"--reward={inputs / 'reward.py'}:share_of_ascii"
        data = [f"--prompt_data={inputs / 'train.jsonl'}", reward, *GENERATION]

    run_here(
        f"train_{kind}",
        [
            f"--pretrain={inputs / 'model'}",
            "--report_to=jsonl",
            f"--save_path={out}",
            *data,
            *BATCH,
            *TRAINERS[trainer],
            *flags,
        ],
    )
    return rows_of(out)


def combinations() -> Iterator[tuple[str, str, str, str]]:
    """Yield trainers with a strategy, parameters and a precision each, three for every trainer.

    Any two values come together somewhere, and so do any strategy, parameters and precision.
    """
    for row, trainer in enumerate(TRAINERS):
        for turn, learned in enumerate(LEARNED):
            strategy = [*STRATEGIES][(row + turn) % 2]
            precision = [*PRECISIONS][(row // 2 + turn) % 2]
            yield trainer, strategy, learned, precision


def test_any_two_values_come_together():
    """No trainer has parameters, a strategy or a precision that it is never tried with."""
    chosen = [*combinations()]
    tables = (TRAINERS, STRATEGIES, LEARNED, PRECISIONS)
    for some in ((0, 1), (0, 2), (0, 3), (1, 2, 3)):
        together = {tuple(each[table] for table in some) for each in chosen}
        assert together == {*product(*(tables[table] for table in some))}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_steps(inputs, tmp_path, world_size):
    """All on one rank, and each trainer's adapters in bfloat16 on two."""
    cases = {}
    for trainer, strategy, learned, precision in combinations():
        if world_size == 2 and learned != "lora":
            continue
        chosen = "bfloat16" if world_size == 2 else precision
        name = ", ".join((trainer, strategy, learned, chosen))
        flags = [*STRATEGIES[strategy], *LEARNED[learned], *PRECISIONS[chosen]]
        folder = tmp_path / name.replace(", ", "-").replace(" ", "-")
        cases[name] = (inputs, folder, trainer, flags)

    for name, ranks in run_cases(world_size, two_steps, cases).items():
        rows = ranks[0]
        assert [row["step"] for row in rows] == [1, 2], name
        assert all(math.isfinite(value) for row in rows for value in row.values()), name
        assert all(row["train/grad_norm"] > 0 for row in rows), name
