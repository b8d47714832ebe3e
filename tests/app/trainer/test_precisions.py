"""Every trainer takes two steps in bfloat16, and with a part of a model, under both strategies."""

import json
import math
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


ON_ONE_RANK = [
    *((trainer, "whole", "bfloat16") for trainer in TRAINERS),
    ("ppo without reference", "freezing", "float32"),
    ("ppo with critic", "freezing", "bfloat16"),
    ("sft", "freezing", "bfloat16"),
    ("rm", "freezing", "float32"),
]
ON_TWO_RANKS = [
    (trainer, "lora", "bfloat16") for trainer in ("ppo", "ppo with critic", "kto", "sft", "prm")
]
"""What the tests of each trainer don't compare with plain torch: they do so for whole models and
adapters in float32."""


def test_every_value_is_tried():
    """Each choice of parameters meets each precision, or a comparison with plain torch; each trainer is there."""
    assert {trainer for trainer, *_ in ON_ONE_RANK} == {*TRAINERS}
    tried = {(learned, precision) for _, learned, precision in ON_ONE_RANK + ON_TWO_RANKS}
    assert tried == {*product(LEARNED, PRECISIONS)} - {("whole", "float32"), ("lora", "float32")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "chosen"), [(1, ON_ONE_RANK), (2, ON_TWO_RANKS)], ids=["1", "2"]
)
def test_two_steps(inputs, tmp_path, world_size, chosen):
    """The strategies take turns."""
    cases = {}
    for turn, (trainer, learned, precision) in enumerate(chosen):
        strategy = [*STRATEGIES][turn % 2]
        name = ", ".join((trainer, strategy, learned, precision))
        flags = [*STRATEGIES[strategy], *LEARNED[learned], *PRECISIONS[precision]]
        folder = tmp_path / name.replace(", ", "-").replace(" ", "-")
        cases[name] = (inputs, folder, trainer, flags)

    for name, ranks in run_cases(world_size, two_steps, cases).items():
        rows = ranks[0]
        assert [row["step"] for row in rows] == [1, 2], name
        assert all(math.isfinite(value) for row in rows for value in row.values()), name
        assert all(row["train/grad_norm"] > 0 for row in rows), name
