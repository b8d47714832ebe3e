"""Small but real training runs: a tiny model, a few prompts, forked gloo ranks."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.build import ppo_trainer
from lightrft.app.trainer.build_supervised import supervised_trainer
from lightrft.app.trainer.selfcheck import passed
from lightrft.config import Config, parse
from lightrft.strategy import get_strategy
from ranks import run_ranks
from with_vllm import load_vllm

ASCII_REWARD = '''
def share_of_ascii(samples, label, **columns):
    """The share of response tokens that are ASCII bytes: a third at random, and easy to raise."""
    assert len(label) == len(samples)
    return [sum(token < 128 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]
'''
CHECKED = Path(os.environ.get("TEST_RUN") or tempfile.mkdtemp(), "checked_models")
"""Folder that names the small copies of models that runs have checked, of all test processes."""
NOT_REPEATABLE = ("time/", "memory/", "perf/")
"""Metrics that depend on how busy the machine is."""


def prepare(folder: Path, rows: int = 24) -> list[str]:
    """Write model, data and reward into `folder`; return the flags that name them."""
    tiny_qwen3(folder / "model", seed=0)
    problems = [{"input": "abcdefgh"[: 2 + i % 5] + "=", "label": str(i)} for i in range(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    (folder / "reward.py").write_text(ASCII_REWARD)

    return [
        "--fsdp",
        f"--pretrain={folder / 'model'}",
        f"--prompt_data={folder / 'train.jsonl'}",
        f"--reward={folder / 'reward.py'}:share_of_ascii",
        "--prompt_max_len=8",
        "--report_to=jsonl",
    ]


PPO = [
    "--engine_type=hf",
    "--rollout_batch_size=8",
    "--n_samples_per_prompt=4",
    "--generate_max_len=6",
    "--train_batch_size=32",
    "--max_tokens_per_microbatch=128",
    "--num_episodes=20",
    "--actor_learning_rate=3e-3",
    "--lr_scheduler=constant",
    "--lr_warmup_ratio=0",
    "--no_enable_engine_sleep",
    "--init_kl_coef=0",
    "--loss_agg_mode=token-mean",
]


def train(
    entrypoint: str, world_size: int, flags: list[str], save_path: Path, timeout: float = 400
) -> list[dict[str, Any]]:
    """Run an entrypoint on forked ranks; return the rows of metrics.jsonl."""
    if "--engine_type=vllm" in flags:
        load_vllm()
        # of which vLLM writes every byte when it starts
        flags = ["--engine_kv_cache_gb=0.05", *flags]
    run_ranks(
        world_size, run_here, entrypoint, [*flags, f"--save_path={save_path}"], timeout=timeout
    )
    return rows_of(save_path)


def rows_of(save_path: Path | str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (Path(save_path) / "metrics.jsonl").read_text().splitlines()
    ]


def repeatable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(NOT_REPEATABLE)}
        for row in rows
    ]


def run_here(entrypoint: str, flags: list[str], seed: int = 0) -> None:
    """Run an entrypoint on the rank that this process is.

    `seed` seeds what the configuration's seed does not reach.
    """
    config = prepare_config(entrypoint, parse(flags, entrypoint))
    torch.manual_seed(seed)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    build(entrypoint, config, strategy).fit()
    strategy.close()


def build(entrypoint: str, config: Config, strategy: Any) -> Any:
    """Return a command's trainer.

    A model's small copy is checked in the first run that has it, because each check takes a second.
    """
    CHECKED.mkdir(exist_ok=True)
    known = [file.read_text() for file in CHECKED.iterdir()]
    passed.update(strategy.mesh.world.broadcast(known))  # ranks check a model together or not
    if entrypoint == "train_ppo":
        trainer = ppo_trainer(config, strategy)
    else:
        trainer = supervised_trainer(entrypoint, config, strategy)
    for key in passed:
        (CHECKED / hashlib.sha256(key.encode()).hexdigest()).write_text(key)
    return trainer
