"""Why: a flag that is accepted and changes nothing is worse than a missing one.

Every field of the algorithm and of the reward is changed in a real step, which must then report
other numbers than without; a field that is not listed here fails too.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from algorithms.roles import rows
from lightrft.app.quickstart.inputs import tiny_qwen3
from lightrft.app.run.prepare import prepare_config
from lightrft.app.trainer.build import ppo_trainer
from lightrft.config import AlgorithmSection, RewardSection, parse
from lightrft.strategy import get_strategy
from models.parallel.families import family_model
from ranks import run_apart
from runs import PPO, prepare, repeatable, rows_of
from tiny import tiny_experts

CORRECTED = [
    "--rollout_correction=mis",
    "--rollout_correction_low=0.99999",
    "--rollout_correction_high=1.00001",
]
MARKED = ["--policy_loss=kl_cov", "--cov_ratio=0.3"]
DRAWN = ["--policy_loss=clip_cov", "--cov_ratio=0.3", "--clip_cov_range", "-9", "9"]
OVERLONG = ["--overlong_buffer", "--overlong_buffer_len=2"]
KL = ["--init_kl_coef=0.5", "--use_kl_loss=false", "--kl_estimator=k1"]
COMPARED = [*KL, "--advantage_estimator=rloo", "--use_engine_logprobs", "--init_kl_coef=1000"]
"""At the first step the KL is between engine and reference: some last bits."""
EXPERTS = ["--pretrain={folder}/experts", "--aux_loss_coef=1"]
BIASED = ["--pretrain={folder}/biased", "--router_bias_rate=1e-6"]
TEACHER = ["--teacher_pretrain={folder}/teacher", "--distill_coef=0.5"]
DISTRIBUTION = [*TEACHER, "--distill_top_k=20"]
CRITIC = ["--advantage_estimator=gae", "--critic_learning_rate=1e-3"]
"""Further flags that a flag of the critic needs."""

STEPS = [
    "--process_reward_pretrain={folder}/model/scorer1",
    "--step_separator=\N{REPLACEMENT CHARACTER}",
]
"""Random responses of bytes have several steps: invalid bytes are decoded to this character."""
TURNED: dict[str, tuple[list[str], list[str]]] = {
    "advantage_estimator": ([], ["--advantage_estimator=rloo"]),
    "policy_loss": ([], ["--policy_loss=sapo"]),
    "eps_clip": ([], ["--eps_clip=0.001"]),
    "eps_clip_low": ([], ["--eps_clip_low=0.001"]),
    "eps_clip_high": ([], ["--eps_clip_high=0.001"]),
    "dual_clip": ([], ["--dual_clip=1.001"]),
    "sapo_tau_positive": (["--policy_loss=sapo"], ["--sapo_tau_positive=3"]),
    "sapo_tau_negative": (["--policy_loss=sapo"], ["--sapo_tau_negative=3"]),
    "vespo_power": (["--policy_loss=vespo"], ["--vespo_power", "1", "1"]),
    "vespo_decay": (["--policy_loss=vespo"], ["--vespo_decay", "1", "9"]),
    "policy_drift_coef": (["--policy_loss=cpgd"], ["--policy_drift_coef=1"]),
    "policy_drift_clip": (
        ["--policy_loss=cpgd", "--policy_drift_coef=1"],
        ["--policy_drift_clip=1e-9"],
    ),
    "cov_ratio": (MARKED, ["--cov_ratio=0.6"]),
    "kl_cov_coef": (MARKED, ["--kl_cov_coef=9"]),
    "clip_cov_range": (DRAWN, ["--clip_cov_range", "0.01", "9"]),
    "high_entropy_token_ratio": ([], ["--high_entropy_token_ratio=0.3"]),
    "entropy_coef": ([], ["--entropy_coef=0.1"]),
    "entropy_target": (["--entropy_coef=0.1"], ["--entropy_target=0.01"]),
    "rollout_correction": ([], ["--rollout_correction=tis"]),
    "rollout_correction_level": (CORRECTED, ["--rollout_correction_level=sequence"]),
    "rollout_correction_low": (CORRECTED, ["--rollout_correction_low=0.9999999"]),
    "rollout_correction_high": (CORRECTED, ["--rollout_correction_high=1.0000001"]),
    "rollout_mask": (["--rollout_mask_low=1"], ["--rollout_mask=geometric"]),
    "rollout_mask_low": (["--rollout_mask=geometric"], ["--rollout_mask_low=1"]),
    "rollout_mask_high": (["--rollout_mask=sequence"], ["--rollout_mask_high=1"]),
    "off_policy_delta": ([], ["--off_policy_delta=1e-9"]),
    "use_engine_logprobs": ([], ["--use_engine_logprobs"]),
    "loss_agg_mode": ([], ["--loss_agg_mode=seq-mean-token-sum"]),
    "gamma": ([], ["--gamma=0.5"]),
    "lambd": (CRITIC, ["--lambd=0.5"]),
    "value_clip": (CRITIC, ["--value_clip=0.001"]),
    "pass_k": (["--advantage_estimator=pass_at_k"], ["--pass_k=1"]),
    "distill_coef": (TEACHER, ["--distill_coef=0.9"]),
    "distill_top_k": (TEACHER, ["--distill_top_k=20"]),
    "distill_beta": (DISTRIBUTION, ["--distill_beta=1"]),
    "aux_loss_coef": (EXPERTS, ["--aux_loss_coef=9"]),
    "router_bias_rate": (BIASED, ["--router_bias_rate=9"]),
    "ptx_coef": (["--pretrain_data={folder}/train.jsonl"], ["--ptx_coef=0.5"]),
    "ptx_teacher": (
        ["--pretrain_data={folder}/train.jsonl", *DISTRIBUTION, "--ptx_coef=0.5"],
        ["--ptx_teacher"],
    ),
    "advantages_norm": ([], ["--advantages_norm"]),
    "advantage_clip": ([], ["--advantage_clip=0.05"]),
    "mask_truncated": ([], ["--mask_truncated"]),
    "length_filter": ([], ["--length_filter", "6", "6"]),
    "difficulty_filter": ([], ["--difficulty_filter", "0.5", "1"]),
    "difficulty_weights": ([], ["--difficulty_weights", "0.4", "1.5"]),
    "entropy_filter": ([], ["--entropy_filter", "5.4", "5.8"]),
    "use_kl_loss": (["--init_kl_coef=0.5", "--kl_estimator=k2"], ["--use_kl_loss"]),
    "init_kl_coef": (KL, ["--init_kl_coef=5"]),
    "kl_estimator": (KL, ["--kl_estimator=k3"]),
    "kl_after_baseline": (COMPARED, ["--kl_after_baseline"]),
    "kl_target": (KL, ["--kl_target=0.1"]),
    "kl_horizon": ([*KL, "--kl_target=0.1"], ["--kl_horizon=100"]),
    "reward": ([], ["--reward={folder}/reward.py:share_of_letters"]),
    "reward_key": (
        ["--reward={folder}/reward.py:share_of_ascii,{folder}/reward.py:share_of_letters"],
        ["--reward_key=task"],
    ),
    "reward_model_coef": (["--reward_pretrain={folder}/model/scorer1"], ["--reward_model_coef=2"]),
    "step_rewards": (STEPS, ["--step_rewards=min"]),
    "overlong_buffer": ([], OVERLONG),
    "overlong_buffer_len": (OVERLONG, ["--overlong_buffer_len=5"]),
    "overlong_buffer_penalty_factor": (OVERLONG, ["--overlong_buffer_penalty_factor=3"]),
    "reward_running_norm": ([], ["--reward_running_norm"]),
    "reward_running_norm_minus_mean": (
        ["--reward_running_norm"],
        ["--reward_running_norm_minus_mean"],
    ),
    "reward_clip": ([], ["--reward_clip=0.4"]),
    "reward_group_norm": ([], ["--reward_group_norm"]),
}
"""Field -> (flags of both runs, flags of the second)."""
EXTREMES = ["--advantage_estimator=dr_grpo", "--loss_agg_mode=token-mean", "--seed=4"]
"""Flags without the standard deviation of groups, and with responses that end early.

The standard deviation would hide what only scales rewards.
"""
OTHER_REWARD = """

def share_of_letters(samples, label, **columns):
    return [sum(97 <= token < 123 for token in sample.token_ids) / len(sample.token_ids) for sample in samples]
"""


def test_every_field_is_covered():
    names = {
        field.name for section in (AlgorithmSection, RewardSection) for field in fields(section)
    }
    where_and_how_long = {
        "reward_workers",
        "reward_memory_gb",
        "reward_minutes",
        "reward_failure",
        "server_minutes",
    }
    # tests/rewards/test_judge.py
    where_and_how_long |= {name for name in names if name.startswith("judge_")}
    reported = {"measure_kl"}  # a metric more, and no other number
    # tests/app/trainer/test_reference.py
    later = {"entropy_step", "ref_refresh_steps", "ref_ema"}
    # tests/extras/agents/test_roles.py, tests/algorithms/rollout/test_experience.py,
    # tests/algorithms/roles/test_observations.py
    of_episodes = {"role_advantage", "train_roles", "branch_weight", "observation_coef"}
    assert set(TURNED) == names - where_and_how_long - reported - later - of_episodes, (
        "those say where and how long a reward is asked"
    )


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("inputs")
    inputs = prepare(folder)
    tiny_qwen3(folder / "teacher", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    tiny_experts(folder / "experts")
    family_model(folder / "biased", "glm4_moe", vocabulary=384)
    tokenizer.save_pretrained(rows.dense_scorer(str(folder / "model"), 1))
    (folder / "reward.py").open("a").write(OTHER_REWARD)
    rows_of_data = [
        json.loads(line) | {"task": "share_of_letters"} for line in (folder / "train.jsonl").open()
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_data))
    fields = list(TURNED)
    halves = fields[: len(fields) // 2], fields[len(fields) // 2 :]
    first, second = run_apart(
        every_step, [(inputs, str(folder), half) for half in halves], timeout=400
    )

    return first | second


def every_step(
    inputs: list[str], folder: str, names: list[str]
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the metrics of one step with two updates, for the pairs of flags of these fields."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def step(flags: list[str]) -> dict[str, Any]:
        key = tuple(flags)
        if key not in known:
            known[key] = one_step(
                [*inputs, *PPO, *EXTREMES, *flags, f"--save_path={folder}/{names[0]}{len(known)}"]
            )
        return known[key]

    made = {}
    for name in names:
        both, flags = ([flag.format(folder=folder) for flag in part] for part in TURNED[name])
        made[name] = step(both), step([*both, *flags])
    again = one_step([*inputs, *PPO, *EXTREMES, f"--save_path={folder}/{names[0]}_again"])
    return made | {"nothing": (step([]), again)}


def one_step(flags: list[str]) -> dict[str, Any]:
    config = prepare_config(
        "train_ppo", parse([*flags, "--max_steps=1", "--train_batch_size=16"], "train_ppo")
    )
    torch.manual_seed(0)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    trainer = ppo_trainer(config, strategy)
    trainer.fit()
    return repeatable(rows_of(Path(config.train.save_path)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("field", TURNED)
def test_a_field_changes_a_number(numbers, field):
    before, after = numbers[field]
    shared = before.keys() & after.keys()
    assert any(before[name] != after[name] for name in shared)


@pytest.mark.slow
def test_nothing_changes_nothing(numbers):
    before, after = numbers["nothing"]
    assert before == after
