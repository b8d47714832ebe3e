"""The command line and the YAML file: what they set, which one wins, and what their errors say."""

import ast
import builtins
import copy
import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from string import Formatter
from typing import get_origin

import pytest
import torch

import lightrft
from lightrft.__main__ import main
from lightrft.app.run.prepare import slow_float32
from lightrft.config import (
    COMMANDS,
    SECTIONS,
    AlgorithmSection,
    Config,
    ConfigError,
    DataSection,
    ModelSection,
    as_config,
    field_docs,
    fields_read,
    needs_reference,
    resolve,
    section_of_field,
    summary,
)
from lightrft.config import rules as configuration_rules
from lightrft.config.command_line import help_text, parse
from lightrft.config.effects import COMPUTED_NEEDS
from lightrft.config.facts import RunFacts
from lightrft.config.presets import COMMAND_DEFAULTS
from lightrft.config.references import DataSource, data_sources, reward_terms
from lightrft.config.resolve import range_problems
from lightrft.config.rules import COMMANDS_OF_RULES, RULES, problems_of
from lightrft.config.sections import field_types, options
from lightrft.config.values import CommaSeparated
from lightrft.models.parallel.device import has_bf16
from lightrft.rewards.functions import rewards

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RUNNABLE = ["--pretrain", "some/model", "--prompt_data", "train.jsonl"]


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def parsed(*argv: str) -> Config:
    return parse([*argv])


def check(*argv: str, command: str = "train_ppo", world_size: int = 2) -> list[str]:
    return resolve(parsed(*argv), command, world_size)


def problems(*argv: str, command: str = "train_ppo", world_size: int = 2) -> str:
    with pytest.raises(ConfigError) as error:
        check(*argv, command=command, world_size=world_size)
    return str(error.value)


# -- what is written is what is read


def test_defaults_without_a_word():
    config = parse([])
    assert config == Config() and config.written == set()


def test_types_come_from_the_declaration():
    config = parsed(
        "--actor_learning_rate",
        "1e-3",
        "--max_steps",
        "7",
        "--adam_betas",
        "0.8",
        "0.9",
        "--dual_clip=3",
    )
    assert config.optim.learning_rate == 1e-3 and config.train.max_steps == 7
    assert config.optim.adam_betas == [0.8, 0.9] and config.algorithm.dual_clip == 3.0


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--bf16"], True),
        (["--bf16", "true"], True),
        (["--bf16", "False"], False),
        (["--bf16=no"], False),
        ([], False),
    ],
)
def test_forms_of_a_switch(argv, value):
    assert parsed(*argv).model.bf16 is value


@pytest.mark.parametrize("argv", [["--no_verify_weight_sync"], ["--verify_weight_sync", "false"]])
def test_forms_of_switching_off(argv):
    config = parse(argv)
    assert config.engine.verify_weight_sync is False and config.written == {"verify_weight_sync"}


def test_a_file_gives_defaults_and_flags_override_it(file):
    path = file(
        "train:\n  seed: 7\n  max_steps: 5\noptim:\n  learning_rate: 1.0e-3\n  adam_betas: [0.5,"
        " 0.6]\n"
    )
    for argv in (["--config", path, "--seed", "8"], ["--seed", "8", f"--config={path}"]):
        config = parse(argv)
        assert (config.train.seed, config.train.max_steps, config.optim.adam_betas) == (
            8,
            5,
            [0.5, 0.6],
        )
        assert config.written == {"seed", "max_steps", "learning_rate", "adam_betas"}


def test_a_switch_of_the_file_can_be_switched_off(file):
    path = file("strategy:\n  fsdp: true\nengine:\n  verify_weight_sync: false\n")
    assert (
        parsed("--config", path).strategy.fsdp
        and not parsed("--config", path).engine.verify_weight_sync
    )
    assert not parsed("--config", path, "--fsdp", "false").strategy.fsdp


def test_a_later_file_wins(file, tmp_path):
    first = file("train:\n  seed: 1\n  max_steps: 1\n")
    second = tmp_path / "second.yaml"
    second.write_text("train:\n  seed: 2\n")
    config = parsed("--config", first, "--config", str(second))
    assert (config.train.seed, config.train.max_steps) == (2, 1)


def test_an_empty_value_keeps_the_default(file):
    assert parsed("--config", file("model:\ntrain:\n  max_steps:\n")) == Config()


@pytest.mark.parametrize("text", ["-1 is a number", "--be brief", "- a list?"])
def test_text_of_a_file_may_begin_like_a_flag(file, text):
    config = parse(["--config", file(f'data:\n  system_prompt: "{text}"\n')])
    assert config.data.system_prompt == text and config.written == {"system_prompt"}


@pytest.mark.parametrize(
    ("argv", "bf16"),
    [
        ([], True),
        (["--no_bf16"], False),
        (["--zero_stage=0", "--strategy=deepspeed"], False),
        (["--zero_stage=0", "--fsdp"], True),
    ],
)
def test_a_gpu_with_fast_bfloat16_uses_it_unless_told_otherwise(argv, bf16):
    for fast, expected in ((True, bf16), (False, False)):
        config = parsed(*RUNNABLE, *argv)
        resolve(config, "train_ppo", 2, has_bf16=fast)
        assert config.model.bf16 is expected


@pytest.mark.parametrize(
    ("argv", "capability", "warning"),
    [
        ([], (9, 0), ""),
        ([], (7, 5), "FakeGPU has no fast bfloat16"),
        (["--no_bf16"], (7, 5), ""),
        (["--zero_stage=0", "--strategy=deepspeed"], (9, 0), "--zero_stage 0 computes in float32"),
    ],
)
def test_a_gpu_that_computes_in_float32_unasked_says_so(monkeypatch, argv, capability, warning):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "FakeGPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    config = parsed(*RUNNABLE, *argv)
    resolve(config, "train_ppo", 2, has_bf16=has_bf16())
    notices = slow_float32(config)
    assert bool(notices) == bool(warning) and all(warning in notice for notice in notices)


def test_the_resolved_configuration_reads_back(tmp_path):
    config = parsed(
        "--seed",
        "3",
        "--no_verify_weight_sync",
        "--input_template",
        "Q: {}\nA: ",
        "--adam_betas",
        "0.8",
        "0.9",
    )
    config.write(tmp_path / "deep" / "config.yaml")
    assert parsed("--config", str(tmp_path / "deep" / "config.yaml")) == config


def test_a_recipe_fills_what_the_user_left_open():
    config = parse(["--eps_clip_high", "0.3"])
    config.expand({"eps_clip_high": 0.28, "eps_clip_low": 0.1, "use_kl_loss": True})
    assert (
        config.algorithm.eps_clip_high,
        config.algorithm.eps_clip_low,
        config.algorithm.use_kl_loss,
    ) == (0.3, 0.1, True)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_files_can_run(path):
    command = next(
        (name for name in COMMANDS if path.stem.endswith(name.removeprefix("train"))), "train_ppo"
    )
    # Layers of experts, or sequences, are divided over the eight ranks of a node.
    divided = path.stem in ("grpo_qwen3_30b_a3b", "grpo_128k_llama3.1_8b")
    for world_size in (8,) if divided else (2, 8):
        assert (
            check(
                "--config",
                str(path),
                "--pretrain",
                "some/model",
                command=command,
                world_size=world_size,
            )
            == []
        )

    named = reward_terms(parse([f"--config={path}"]).reward.reward)
    assert all(term.name in rewards for term in named if ":" not in term.name)


# -- errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rat", "1"], "unknown flag --learning_rat; did you mean --learning_rate"),
        (["--max_stps=3"], "unknown flag --max_stps; did you mean --max_steps. All flags"),
        (["--scale_for_train", "x"], "unknown flag --scale_for_train. All flags"),
        (["--no_seed"], "unknown flag --no_seed; did you mean --seed"),
        (["--nothing_like_it"], "unknown flag --nothing_like_it. All flags"),
        (["--seed", "many"], "seed: expected an integer, not 'many'"),
        (
            ["--loss_agg_mode", "median"],
            "loss_agg_mode: invalid choice 'median'; choose from token-mean",
        ),
        (["--bf16", "perhaps"], "--bf16"),
        (["--config"], "--config needs the path of a YAML file"),
        (["--config", "no/such.yaml"], "--config no/such.yaml: No such file or directory"),
        (["stray"], "stray"),
    ],
)
def test_errors_of_the_command_line(argv, message):
    with pytest.raises(ConfigError) as error:
        parse(argv)
    assert message in str(error.value)


def test_two_unknown_flags_are_named_at_once():
    with pytest.raises(ConfigError, match="--sed.*--max_stps"):
        parse(["--sed", "1", "--max_stps", "2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [", "not valid YAML"),
        ("trian:\n  seed: 1\n", "unknown section 'trian'; did you mean train?"),
        ("train:\n  sed: 1\n", "unknown key 'sed' under `train:`; did you mean seed?"),
        ("model:\n  seed: 1\n", "unknown key 'seed' under `model:`; it belongs under `train:`"),
        ("sed: 1\n", "unknown key 'sed'; did you mean seed?"),
        (
            "sed: 1\nmodel:\n  seed: 1\n",
            "\n  - unknown key 'sed'; did you mean seed?\n  - unknown key 'seed' under `model:`",
        ),
        ("seed: 1\ntrain:\n  seed: 2\n", "the key 'seed' occurs twice, alone and under `train:`"),
        ("train:\n  seed: many\n", "seed: expected an integer, not 'many'"),
    ],
)
def test_errors_of_the_file(file, text, message):
    path = file(text)
    with pytest.raises(ConfigError) as error:
        parse(["--config", path])
    assert message in str(error.value)


def test_a_flat_file_is_read(file):
    """Keys may stand alone.

    Names that are also names of sections are told apart by what follows them.
    """
    text = (
        "pretrain: some/model\nseed: 7\nstrategy: fsdp\nreward: math\nactor_learning_rate:"
        " 2.0e-6\ntrain:\n  max_steps: 5\n"
    )
    config = parse(["--config", file(text + "tools: [calculator, python]\n")])
    assert config.written == {
        "pretrain",
        "seed",
        "strategy",
        "reward",
        "learning_rate",
        "max_steps",
        "tools",
    }
    assert (config.strategy.strategy, config.reward.reward, config.optim.learning_rate) == (
        "fsdp",
        "math",
        2e-6,
    )


@pytest.mark.parametrize(
    "text", ["- a\n- list\n", "just text\n", "train: 3\n", "train:\n  - seed\n"]
)
def test_a_file_of_another_shape_is_an_error_of_the_user(file, text):
    path = file(text)
    with pytest.raises(ConfigError, match="run.yaml"):
        parse(["--config", path])


# -- validate


def test_a_sound_configuration_passes():
    check(*RUNNABLE, command="train_ppo", world_size=8)
    check("--pretrain", "some/model", "--eval_data", "test.jsonl", command="evaluate", world_size=1)


def test_all_problems_in_one_message():
    message = problems(
        "--max_epochs", "0", "--temperature", "0", "--adam_betas", "0.9", "--num_episodes", "-1"
    )
    for flag in (
        "--pretrain",
        "--prompt_data",
        "--max_epochs",
        "--temperature",
        "--adam_betas",
        "--num_episodes",
    ):
        assert flag in message

    assert message.count("\n") == 6


def test_a_missing_folder(tmp_path):
    assert f"--pretrain {tmp_path}/none: no such folder" in problems(
        "--pretrain", f"{tmp_path}/none", "--prompt_data", "x"
    )


@pytest.mark.parametrize(
    ("report_to", "message"),
    [
        ("wandbb", "--report_to 'wandbb': unknown; did you mean wandb?"),
        ("", "--report_to '': unknown (choices: wandb, mlflow"),
        ("jsonl,jsonl", "--report_to jsonl,jsonl: jsonl is listed twice"),
    ],
)
def test_destinations_are_checked_before_anything_heavy(report_to, message):
    assert message in problems(*RUNNABLE, "--report_to", report_to)


def test_a_missing_folder_of_the_critic():
    assert "--critic_pretrain ./none: no such folder" in problems(
        *RUNNABLE, "--critic_pretrain", "./none"
    )


def test_layouts_that_do_not_divide():
    message = problems(*RUNNABLE, "--engine_tp_size", "4", "--dp_replicate", "5", world_size=6)
    assert "--engine_tp_size 4 does not divide the 6 processes" in message
    assert "--dp_replicate 5 does not divide the 6 processes" in message
    message = problems(*RUNNABLE, "--zero_stage", "3", "--zpg", "4", world_size=6)
    assert "--zpg 4 does not divide the 6 processes" in message
    assert "--adam_betas takes two numbers, at least 0 and below 1" in problems(
        *RUNNABLE, "--adam_betas", "1", "0.9"
    )


def test_all_that_tensor_parallelism_does_not_divide(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "num_key_value_heads": 2}')
    flags = [
        "--pretrain",
        str(tmp_path),
        "--prompt_data",
        "x",
        "--tp_size",
        "4",
        "--dp_replicate",
        "2",
        "--engine_tp_size",
        "4",
    ]
    message = problems(*flags, world_size=6)
    assert "--engine_tp_size 4 does not divide the 6 processes" in message
    assert "--dp_replicate 2 x --tp_size 4 does not divide the 6 processes" in message
    assert "--tp_size 4 does not divide the model's 6 attention heads" in message
    assert "--tp_size 4 does not divide the model's 2 key-value heads" in message


def test_heads_that_do_not_divide_are_named_with_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "num_key_value_heads": 2}')
    flags = ["--pretrain", str(tmp_path), "--prompt_data", "train.jsonl"]
    message = problems(*flags, "--sp_size", "4", "--engine_tp_size", "3", world_size=4)
    assert (
        "--sp_size 4 does not divide the model's 6 attention heads; --sp_impl zigzag has no such"
        " condition" in message
    )
    assert "--engine_tp_size 3 does not divide" in message
    message = problems(*flags, "--sp_size", "2", "--tp_size", "2", world_size=4)
    assert (
        "--sp_size 2 does not divide the model's 3 attention heads on each rank of --tp_size 2"
        in message
    )
    for free in (["--sp_size", "4", "--sp_impl", "zigzag"], ["--sp_size", "3"]):
        check(*flags, *free, command="train_ppo", world_size=12)
    message = problems(*flags, "--sp_size", "2", "--tp_size", "2", world_size=6)
    assert "--sp_size 2 x --tp_size 2 does not divide the 6 processes" in message


def test_cp_size_is_short_for_zigzag(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "num_key_value_heads": 2}')
    flags = ["--pretrain", str(tmp_path), "--prompt_data", "train.jsonl", "--cp_size", "4"]
    for agreeing in (
        [],
        ["--sp_size", "4"],
        ["--sp_impl", "zigzag"],
        ["--sp_size", "4", "--sp_impl", "zigzag"],
    ):
        check(*flags, *agreeing, command="train_ppo", world_size=8)

    assert "--cp_size 4 does not divide the 6 processes" in problems(*flags, world_size=6)
    message = problems(*flags, "--sp_size", "2", "--sp_impl", "ulysses", world_size=8)
    assert "--cp_size 4 is short for --sp_size 4 --sp_impl zigzag" in message
    assert "contradicts --sp_size 2 --sp_impl ulysses: set only one" in message


def test_batches_that_do_not_divide_show_all_numbers():
    message = problems(
        *RUNNABLE,
        "--rollout_batch_size",
        "10",
        "--n_samples_per_prompt",
        "3",
        "--train_batch_size",
        "7",
    )
    assert (
        "rollout_batch_size 10 x n_samples_per_prompt 3 = 30 samples are not a multiple of"
        " train_batch_size 7, but of 6" in message
    )


@pytest.mark.parametrize("value", [1e18, -1e18, math.inf, math.nan])
def test_every_number_has_bounds(value):
    """A number that is set in Python, where no text is parsed, has them too."""
    config = Config()
    for name, section in section_of_field().items():
        if options()[name].bound and name != "seed":
            kind = field_types()[name]
            setattr(getattr(config, section), name, [value] if get_origin(kind) is list else value)
    found = {problem.split()[0] for problem in range_problems(config, section_of_field())}
    bounded = {name for name, option in options().items() if option.bound}
    assert found == {f"--{name}" for name in bounded - {"seed"}}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            [
                "--max_steps=0",
                "--max_samples=0",
                "--max_eval_samples=0",
                "--micro_train_batch_size=-1",
                "--zpg=0",
            ],
            "must be at least 1",
        ),
        (["--dual_clip=1"], "must be above 1"),
        (
            [
                "--sapo_tau_positive=0",
                "--timeout_minutes=0",
                "--arrival_minutes=0",
                "--rollout_correction_high=-1",
            ],
            "must be above 0",
        ),
        (["--max_norm=-1", "--eval_n_samples=-1", "--eps_clip_low=-0.2"], "must not be negative"),
        (
            ["--ema_beta=2", "--lr_warmup_ratio=3", "--engine_mem_util=60", "--learning_rate=1e6"],
            "must be between 0 and 1",
        ),
        (["--learning_rate=-1"], "must be between 0 and 1"),
    ],
)
def test_numbers_out_of_their_range_are_named(argv, said):
    message = problems(*RUNNABLE, *argv)
    assert all(f"{flag.split('=')[0]} {said}" in message for flag in argv)


def test_a_sequence_that_fits_no_microbatch_of_log_probs():
    message = problems(
        *RUNNABLE,
        "--prompt_max_len=100",
        "--generate_max_len=60",
        "--max_tokens_per_logprob_microbatch=159",
    )
    assert "= 160 tokens do not fit into max_tokens_per_logprob_microbatch 159" in message


def test_a_sequence_that_fits_no_microbatch():
    message = problems(
        *RUNNABLE,
        "--prompt_max_len",
        "100",
        "--generate_max_len",
        "60",
        "--max_tokens_per_microbatch",
        "128",
    )
    assert (
        "prompt_max_len 100 + generate_max_len 60 = 160 tokens do not fit into"
        " max_tokens_per_microbatch 128" in message
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--length_filter", "5"],
            "--length_filter takes two numbers: the minimum and the maximum",
        ),
        (
            ["--difficulty_filter", "0.5"],
            "--difficulty_filter takes two numbers: the minimum and the maximum",
        ),
        (
            ["--entropy_filter", "2", "1"],
            "--entropy_filter takes two numbers: the minimum and the maximum",
        ),
        (
            ["--advantage_clip", "-1"],
            "--advantage_clip must be above 0; omit it to disable clipping",
        ),
        (["--reward_clip", "-1"], "--reward_clip must be above 0"),
        (
            ["--advantage_estimator", "gdpo", "--overlong_buffer", "--reward_clip", "2"],
            "--advantage_estimator gdpo does not support --overlong_buffer --reward_clip",
        ),
        (
            ["--advantage_estimator", "turn_grpo", "--gamma", "0.9"],
            "--gamma 1.0: it compares sums of rewards without a discount",
        ),
        (
            ["--advantage_estimator", "remax", "--overlong_buffer"],
            "--advantage_estimator remax does not support --overlong_buffer",
        ),
        (
            ["--rollout_mask", "geometric", "--use_engine_logprobs"],
            "--rollout_mask with --use_engine_logprobs",
        ),
        (
            ["--rollout_mask_low", "2", "--rollout_mask_high", "1"],
            "--rollout_mask_low is above --rollout_mask_high",
        ),
        (["--use_kl_loss", "--kl_estimator", "k1"], "--kl_estimator k1, which is for rewards"),
        (["--init_kl_coef", "-1"], "--init_kl_coef must not be negative"),
        (["--kl_target", "0"], "--kl_target must be above 0"),
        (
            ["--clip_cov_range", "5", "1"],
            "--clip_cov_range takes two numbers: the minimum and the maximum",
        ),
        (
            ["--high_entropy_token_ratio", "1.2"],
            "--high_entropy_token_ratio must be between 0 and 1, because it is a share",
        ),
        (
            ["--policy_loss", "cpgd", "--eps_clip_low", "1"],
            "--policy_loss cpgd computes the logarithm of 1 - eps_clip_low",
        ),
        (
            ["--rollout_correction", "tis", "--use_engine_logprobs"],
            "--rollout_correction with --use_engine_logprobs",
        ),
        (
            ["--environment", "guess_number", "--partial_rollout", "--over_sampling", "2"],
            "--partial_rollout does not support --environment",
        ),
        (
            ["--overlap", "--offload_idle"],
            "--overlap does not support --offload_idle: the models are in device memory",
        ),
        (
            ["--rollout_correction=mis", "--rollout_correction_low=3"],
            "--rollout_correction_low is above --rollout_correction_",
        ),
        (["--gamma", "1.5"], "--gamma must be between 0 and 1"),
        (["--lambd", "-0.1"], "--lambd must be between 0 and 1"),
        (["--value_clip", "-1"], "--value_clip must not be negative; 0 disables clipping"),
        (["--ptx_coef", "0"], "--ptx_coef must be above 0; omit --pretrain_data"),
        (["--aux_loss_coef", "-1"], "--aux_loss_coef must not be negative"),
        (["--distill_coef", "-1"], "--distill_coef must not be negative"),
        (
            ["--distill_coef", "1"],
            "--distill_coef needs a teacher: set --teacher_pretrain or --teacher_url",
        ),
        (
            ["--advantage_estimator=distill", "--distill_coef=0"],
            "needs --distill_coef: it learns only from the teacher",
        ),
        (
            ["--teacher_pretrain", "a/b", "--teacher_url", "http://c", "--distill_coef", "1"],
            "both name a teacher: set only one",
        ),
        (
            ["--teacher_url", "http://c", "--distill_coef", "1", "--temperature", "0.5"],
            "computes log-probs at temperature 1",
        ),
        (
            ["--self_teacher=actor", "--distill_coef=1"],
            "the actor agrees with itself unless it sees another prompt",
        ),
        (
            ["--self_teacher=average", "--distill_coef=1"],
            "--self_teacher average needs --enable_ema",
        ),
        (
            [
                "--self_teacher=average",
                "--enable_ema",
                "--teacher_url=http://c",
                "--distill_coef=1",
            ],
            "--self_teacher average with --teacher_url, which both name a teacher",
        ),
        (["--teacher_pretrain=a/b,c/d", "--distill_coef=1"], "needs a label of its own"),
        (["--teacher_pretrain=x=a/b,x=c/d", "--distill_coef=1"], "needs a label of its own"),
        (
            ["--teacher_pretrain=x=a/b,y=c/d", "--distill_coef=1"],
            "--teacher_key selects one of several teachers",
        ),
        (
            ["--teacher_pretrain=a/b", "--distill_coef=1", "--teacher_key=teacher"],
            "--teacher_key selects one of several teachers",
        ),
        (
            [
                "--self_teacher=actor",
                "--distill_coef=1",
                "--teacher_prompt_key=hint",
                "--environment=guess_number",
            ],
            "--teacher_prompt_key does not support --environment",
        ),
        (
            [
                "--self_teacher=actor",
                "--distill_coef=1",
                "--teacher_prompt_key=hint",
                "--images_key=images",
            ],
            "--teacher_prompt_key does not support --images_key",
        ),
        (
            ["--teacher_url=http://c", "--distill_coef=1", "--distill_top_k=8"],
            "--distill_top_k does not support --teacher_url",
        ),
        (
            ["--teacher_pretrain=a/b", "--distill_coef=1", "--distill_top_k=8", "--top_p=0.9"],
            "--distill_top_k does not support --top_p",
        ),
        (
            ["--teacher_pretrain=a/b", "--distill_coef=1", "--distill_top_k=8", "--exact"],
            "--distill_top_k does not support --exact",
        ),
        (["--distill_beta=2"], "--distill_beta must be between 0 and 1"),
        (
            ["--measure_kl", "--ref_ema=0.9", "--ref_refresh_steps=5"],
            "both move the reference: set only one",
        ),
        (
            ["--teacher_pretrain=a/b", "--distill_coef=1", "--pretrain_data=x", "--ptx_teacher"],
            "--ptx_teacher learns what one teacher says about the prompts",
        ),
        (
            ["--entropy_target=5", "--entropy_coef=-0.1"],
            "--entropy_coef -0.1 is below 0, and --entropy_target never lowers it below 0",
        ),
        (["--entropy_target=0"], "--entropy_target must be above 0"),
        (
            ["--observation_coef=0.1", "--environment=a.py:B", "--top_p=0.9"],
            "--observation_coef does not support --top_p: observations were not sampled",
        ),
        (
            ["--off_policy_delta=0"],
            "--off_policy_delta must be above 0, because rounding decides at 0; omit it",
        ),
        (["--freezing_actor_steps", "-2"], "--freezing_actor_steps must not be negative"),
        (
            ["--freezing_actor_steps", "1"],
            "--freezing_actor_steps needs --advantage_estimator ppo or gae, which have a critic",
        ),
        (
            ["--n_samples_per_prompt", "1"],
            "--advantage_estimator grpo compares the samples of a prompt",
        ),
        (
            ["--advantage_estimator", "pass_at_k", "--pass_k", "9"],
            "--pass_k 9 must be between 1 and 8",
        ),
        (
            ["--overlong_buffer", "--overlong_buffer_len", "2000"],
            "must be between 1 and --generate_max_len 1024",
        ),
    ],
)
def test_algorithms_that_cannot_run(argv, message):
    assert message in problems(*RUNNABLE, *argv)
    check("--pretrain", "some/model", "--eval_data", "x", *argv, command="evaluate", world_size=1)


def test_a_single_sample_is_enough_for_some():
    check(
        *RUNNABLE,
        "--n_samples_per_prompt",
        "1",
        "--train_batch_size",
        "128",
        "--advantage_estimator",
        "reinforce",
    )


def test_sft_asks_nothing_about_rollouts():
    check(
        *RUNNABLE,
        "--rollout_batch_size",
        "10",
        "--train_batch_size",
        "7",
        command="train_sft",
        world_size=2,
    )


def test_each_turn_or_the_last_one():
    each_turn = ("--apply_chat_template", "--expand_turns", "--learned_turns", "last")
    assert "--expand_turns does not support --learned_turns last, which leaves out" in problems(
        *RUNNABLE, *each_turn, command="train_sft"
    )


def test_sft_computes_the_loss_of_one_held_out_set():
    assert "train_sft computes the loss of one set" in problems(
        *RUNNABLE, "--eval_data=gsm8k=x", command="train_sft"
    )
    assert "a:gsm9k: unknown format; did you mean gsm8k?" in problems(
        *RUNNABLE, "--eval_data=a:gsm9k=x"
    )


def test_media_that_sglang_is_not_given_are_named():
    for medium, command in (("videos", "train_ppo"), ("audios", "evaluate")):
        flags = [
            *RUNNABLE,
            f"--{medium}_key=x",
            "--images_key=y",
            "--eval_data=z",
            "--limit_mm_video_per_prompt=1",
        ]
        said = problems(*flags, "--engine_type=sglang", command=command)
        assert (
            f"--{medium}_key does not support --engine_type sglang" in said
            and "--images_key" not in said
        )


def test_what_cannot_speculate_is_named(tmp_path):
    vllm = [*RUNNABLE, "--engine_type=vllm"]
    for engine in ("hf", "sglang"):
        message = f"--speculative group needs --engine_type vllm; {engine} generates without"
        assert message in problems(*RUNNABLE, f"--engine_type={engine}", "--speculative=group")

    assert "--min_p with --speculative: vLLM does not verify drafts with min p" in problems(
        *vllm, "--speculative=ngram", "--min_p=0.1"
    )
    assert "--min_p must be between 0 and 1, because it is a share" in problems(
        *RUNNABLE, "--min_p=1.5"
    )
    assert "--speculative draft needs --draft_pretrain, a small model" in problems(
        *vllm, "--speculative=draft"
    )
    assert "--speculative eagle3 needs --draft_pretrain, an EAGLE-3 head" in problems(
        *vllm, "--speculative=eagle3"
    )
    assert "--draft_pretrain a/b needs --speculative draft or eagle3" in problems(
        *vllm, "--draft_pretrain=a/b"
    )
    (tmp_path / "draft").mkdir()
    for folder, size in ((tmp_path, 100), (tmp_path / "draft", 90)):
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    rate = "--draft_learning_rate=1e-5"
    assert (
        "--draft_learning_rate needs --speculative draft, whose model it trains: --speculative is none"
        in problems(*vllm, rate)
    )

    assert (
        "--images_key does not support --draft_learning_rate: a model of text is trained"
        in problems(*vllm, rate, "--images_key=images")
    )
    draft = [*vllm, f"--pretrain={tmp_path}", "--speculative=draft"]
    assert f"--draft_pretrain {tmp_path}/no: no such folder" in problems(
        *draft, f"--draft_pretrain={tmp_path}/no"
    )
    assert "has a vocabulary of 90 tokens, and --pretrain" in problems(
        *draft, f"--draft_pretrain={tmp_path}/draft"
    )
    mtp = [*vllm, f"--pretrain={tmp_path}", "--speculative=mtp"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}}))
    assert f"--speculative mtp: {tmp_path} has no layers for it" in problems(*mtp)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"mtp_num_hidden_layers": 1}}))
    check(*mtp)


@pytest.mark.parametrize("reward", ["owner/model", "math,owner/model-v1.1:0.5", "/models/judge"])
def test_a_reward_model_is_no_reward(reward):
    assert "names a model: a reward model is --reward_pretrain owner/model" in problems(
        *RUNNABLE, f"--reward={reward}"
    )


@pytest.mark.parametrize(
    ("message", "found", "said"),
    [
        ("no {seed}: {found}", ["a", "", "b"], ["no 42: a", "no 42: b"]),
        ("no {seed}: {found}", "a {b}", ["no 42: a {b}"]),
        ("no {seed}", ["a", "b"], ["no 42"]),
        ("no {seed}", [""], ["no 42"]),
        ("no {seed}", [], []),
    ],
)
def test_a_rule_says_what_it_found(message, found, said):
    assert problems_of([{"says": message, "if": repr(found)}], RunFacts(Config())) == said


def test_every_placeholder_of_a_rule_has_a_value():
    """A misspelt one would show only when the rule is broken."""
    run = RunFacts(Config(), "train_ppo", 2)
    assert RULES.keys() == {*COMMANDS_OF_RULES, "deepspeed", "layout"}
    every = [rule for rules in RULES.values() for rule in rules]
    assert all(isinstance(problem, str) for problem in problems_of(every, run))

    messages = [rule if isinstance(rule, str) else rule["says"] for rule in every]
    names = {name for message in messages for _, name, *_ in Formatter().parse(message) if name}
    assert len(every) > 90 and len(names) > 20
    assert all(run[name] is not Ellipsis for name in names - {"found"})


def test_every_condition_of_a_rule_names_facts():
    """A misspelt one would show only when what stands before it is true."""
    run = RunFacts(Config(), "train_ppo", 2)
    known = {"run": run, **vars(builtins), **vars(configuration_rules)}
    every = [rule for rules in RULES.values() for rule in rules if not isinstance(rule, str)]
    assert len(every) > 40
    for rule in every:
        nodes = list(ast.walk(ast.parse(rule["if"], mode="eval")))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        for name in {node.id for node in names} - bound:
            assert name in known or run[name] is not Ellipsis
        for node in nodes:
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in known:
                assert node.attr in dir(known[node.value.id])


def test_every_need_names_fields():
    """A misspelt flag in what a field needs would be silence."""
    texts = set()
    for option in options().values():
        needs = [option.needs] if isinstance(option.needs, str) else option.needs.values()
        texts |= {*needs, option.unless} - {""}

    assert len(texts) > 40 and COMPUTED_NEEDS.keys() <= texts
    for text in texts - COMPUTED_NEEDS.keys():
        assert re.fullmatch(r"--\w+( \w+)?((, | or )(--)?\w+( \w+)?)*", text)
        assert set(re.findall(r"--(\w+)", text)) <= set(section_of_field())


# -- flags without effect


@pytest.mark.parametrize(
    ("command", "argv", "warning"),
    [
        ("train_sft", ["--temperature", "0.5"], "--temperature has no effect in train_sft"),
        ("train_sft", ["--max_epochs", "3"], "--max_epochs has no effect in train_sft"),
        ("evaluate", ["--num_episodes", "3"], "--num_episodes has no effect in evaluate"),
        ("evaluate", ["--report_to=jsonl"], "--report_to has no effect in evaluate"),
        (
            "evaluate",
            ["--eval_data=gsm8k=x", "--reward=math"],
            "--reward has no effect without --eval_data in other formats",
        ),
        (
            "evaluate",
            ["--eval_data=a:aime=x", "--eval_label_key=k"],
            "--eval_label_key has no effect without --eval_data in",
        ),
        (
            "train_sft",
            ["--tracker_project=p"],
            "--tracker_project has no effect without --report_to comet_ml or mlflow or swan",
        ),
        (
            "train_sft",
            ["--tracker_org=o"],
            "--tracker_org has no effect without --report_to comet_ml or swanlab or wandb",
        ),
        (
            "train_ppo",
            ["--init_kl_coef=0", "--kl_estimator=k2"],
            "--kl_estimator has no effect without --init_kl_coef",
        ),
        ("train_ppo", ["--eval_steps", "5"], "--eval_steps has no effect without --eval_data"),
        (
            "train_ppo",
            ["--no_enable_engine_sleep", "--engine_sleep_level", "1"],
            "--engine_sleep_level has no effect without",
        ),
        ("train_ppo", ["--sp_impl", "zigzag"], "--sp_impl has no effect without --sp_size"),
        (
            "train_sft",
            [r"--input_template=Question: {}\nAnswer: "],
            "--input_template has a backslash and the letter n, which stay as they are; for a line",
        ),
        (
            "train_sft",
            ["--apply_chat_template", r"--system_prompt=Think.\tAnswer."],
            "--system_prompt has a backslash and the letter t",
        ),
        ("train_prm", [r"--step_separator=\n\n"], "--step_separator has a backslash"),
        ("train_ppo", ["--stop", "x", r"\n"], "--stop has a backslash"),
        (
            "train_sft",
            ["--gradient_checkpointing_policy", "selective"],
            "_policy has no effect without --gradient_checkpointing",
        ),
        (
            "train_ppo",
            ["--tp_sequence_parallel"],
            "--tp_sequence_parallel has no effect without --tp_size",
        ),
        (
            "train_ppo",
            ["--overlong_buffer_len", "5"],
            "--overlong_buffer_len has no effect without --overlong_buffer",
        ),
        (
            "train_ppo",
            ["--init_kl_coef=0", "--kl_target", "0.1"],
            "--kl_target has no effect without --init_kl_coef",
        ),
        ("train_ppo", ["--ptx_coef", "1"], "--ptx_coef has no effect without --pretrain_data"),
        ("train_sft", ["--pretrain_data", "a"], "--pretrain_data has no effect in train_sft"),
        (
            "train_ppo",
            ["--teacher_pretrain", "a/b"],
            "--teacher_pretrain has no effect without --distill_coef",
        ),
        (
            "train_ppo",
            ["--distill_beta", "0.1"],
            "--distill_beta has no effect without --distill_top_k",
        ),
        (
            "train_ppo",
            ["--entropy_step", "0.1"],
            "--entropy_step has no effect without --entropy_target",
        ),
        (
            "train_ppo",
            ["--ref_ema=0.9", "--init_kl_coef=0"],
            "--ref_ema has no effect without --init_kl_coef or --measure_kl",
        ),
        (
            "train_ppo",
            ["--lambd", "0.9"],
            "--lambd has no effect without --advantage_estimator ppo",
        ),
        (
            "train_ppo",
            ["--critic_learning_rate", "1"],
            "--critic_learning_rate has no effect without --advantage_estimator ppo",
        ),
        ("train_ppo", ["--kl_horizon", "100"], "--kl_horizon has no effect without --kl_target"),
        (
            "train_ppo",
            ["--rollout_correction_high", "5"],
            "--rollout_correction_high has no effect without --rollout_correction",
        ),
        (
            "train_ppo",
            ["--reward_running_norm_minus_mean"],
            "has no effect without --reward_running_norm",
        ),
        (
            "train_ppo",
            ["--reward_model_coef=2"],
            "--reward_model_coef has no effect without --reward_pretrain",
        ),
        (
            "train_sft",
            ["--prompt_data_probs", "1", "2"],
            "has no effect without several --prompt_data, joined by commas",
        ),
        ("evaluate", ["--reward_clip", "5"], "--reward_clip has no effect in evaluate"),
        (
            "train_ppo",
            ["--fsdp", "--zero_stage", "3"],
            "--zero_stage has no effect with --strategy fsdp",
        ),
        (
            "train_ppo",
            ["--grad_accum_dtype", "bf16"],
            "--reduce_dtype has no effect without --bf16",
        ),
        (
            "train_ppo",
            ["--limit_mm_image_per_prompt", "2"],
            "--limit_mm_image_per_prompt has no effect without --images_key",
        ),
        (
            "train_ppo",
            ["--system_prompt", "Be brief."],
            "--system_prompt has no effect without --apply_chat_template",
        ),
        ("train_ppo", ["--save_hf_ckpt"], "--save_hf_ckpt has no effect without --save_steps"),
        (
            "train_ppo",
            ["--no_async_save", "--max_ckpt_num=2"],
            "--async_save has no effect without --save_steps",
        ),
        ("train_ppo", ["--max_ckpt_num=2"], "--max_ckpt_num has no effect without --save_steps"),
        (
            "train_ppo",
            ["--engine_type=vllm", "--micro_rollout_batch_size=2"],
            "has no effect without --engine_type hf",
        ),
        (
            "train_ppo",
            ["--engine_type=hf", "--engine_mem_util=0.5"],
            "has no effect without --engine_type vllm",
        ),
        (
            "train_ppo",
            ["--engine_type=hf", "--engine_enforce_eager"],
            "--engine_enforce_eager has no effect without",
        ),
        (
            "train_ppo",
            ["--num_draft_tokens=4"],
            "--num_draft_tokens has no effect without --speculative",
        ),
        ("train_ppo", ["--eval_n_samples=4"], "--eval_n_samples has no effect without --eval_data"),
        ("train_ppo", ["--stop_loss=4"], "--stop_loss has no effect in train_ppo"),
        (
            "train_sft",
            ["--critic_learning_rate=4"],
            "--critic_learning_rate has no effect in train_sft",
        ),
    ],
)
def test_a_flag_without_effect_is_named(command, argv, warning):
    held_out = ["--eval_data=test.jsonl"] if command == "evaluate" else []
    assert any(
        warning in line for line in check("--fsdp", *RUNNABLE, *held_out, *argv, command=command)
    )


def test_flags_with_effect_are_not_named():
    assert (
        check(
            *RUNNABLE,
            "--fsdp",
            "--init_kl_coef=0.1",
            "--kl_estimator=k1",
            "--use_kl_loss=false",
            "--eval_data=x",
            "--eval_steps=5",
            "--bf16",
            "--dynamic_sampling",
            "--partial_rollout",
            "--load_checkpoint",
            "--ckpt_path=x",
        )
        == []
    )


# -- the declaration itself


def test_every_field_says_what_it_means():
    names = [
        (f.name, field_docs(cls).get(f.name, "")) for cls in SECTIONS.values() for f in fields(cls)
    ]
    assert [name for name, text in names if not text.endswith((".", "`"))] == []


def test_field_names_are_unique_over_all_sections():
    assert len(section_of_field()) == sum(len(fields(cls)) for cls in SECTIONS.values())


def test_the_number_of_knobs_stays_in_hand():
    assert len(section_of_field()) <= 321


def test_commands_read_sections_that_exist():
    assert all(sections <= set(asdict(Config())) for sections in COMMANDS.values())


# -- help


def shown(capsys, *argv: str, command: str = "train_ppo") -> str:
    with pytest.raises(SystemExit) as end:
        parse([*argv], command, "Description of the command.")
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_what_the_command_reads_by_group(capsys, command):
    text = shown(capsys, "--seed", "3", "--help", command=command)
    assert f"usage: lightrft {command}" in text and "Description of the command." in text
    assert fields_read(command) <= set(text.split()) and (
        "max_steps" in text
    ) is command.startswith("train_")


def test_help_explains_a_group_a_flag_or_everything(capsys):
    group = shown(capsys, "--help", "optim")
    assert (
        "--lr_scheduler {cosine,constant,linear,wsd,inverse_sqrt,polynomial} Schedule after the warm-up"
        in group
        and "--seed" not in group
    )
    assert (
        shown(capsys, "--help=max-steps")
        == "--max_steps int Largest number of steps; the end of --num_episodes may come earlier."
    )
    everything = shown(capsys, "-h", "all")
    assert all(f"--{name}" in everything for name in fields_read("train_ppo"))


def test_help_begins_with_what_most_runs_set(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"], "train_ppo")
    text = capsys.readouterr().out.partition("\nmodel: ")[0]
    lines = [line.split() for line in text.splitlines() if line.startswith("  --")]
    assert len(lines) == 22 and all(len(words) > 2 for words in lines)
    assert lines[0] == ["--pretrain", "Model", "to", "start", "from"]


@pytest.mark.parametrize("word, flags", [("lora", 3), ("warmup", 1), ("tracker", 4)])
def test_help_of_a_word_lists_the_flags_that_have_it(word, flags):
    text = help_text("train_sft", word)
    names = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    assert len(names) >= flags and all(word in name for name in names)


def test_a_server_may_be_greedy_and_training_may_not():
    check("--pretrain=m", "--temperature=0", command="serve", world_size=1)
    assert "--temperature must be above 0" in problems(*RUNNABLE, "--temperature=0")


def test_help_shows_the_recipe_of_an_estimator(capsys):
    assert "--use_kl_loss True --init_kl_coef 0.04 --kl_estimator k3" in shown(
        capsys, "--help", "grpo"
    )


@pytest.mark.parametrize(
    ("topic", "near"), [("nsamples", "n_samples_per_prompt"), ("trian", "train"), ("grpoo", "grpo")]
)
def test_help_about_an_unknown_topic_suggests_one(topic, near):
    assert help_text("train_ppo", topic).startswith(
        f"no group, flag or recipe is called {topic}; did you mean {near}\n"
    )


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    main([])
    assert "train_sft" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["trian_ppo", "--seed", "1"])
    assert ended.value.code == 2 and "did you mean train_ppo" in capsys.readouterr().err


def test_sequences_longer_than_the_model_are_refused_before_the_engine_starts(tmp_path):
    content = {"max_position_embeddings": 64, "model_type": "qwen3"}
    flags = [
        "--pretrain",
        str(tmp_path),
        "--prompt_data",
        "d",
        "--prompt_max_len=40",
        "--generate_max_len=30",
    ]

    for changed, engine, refused in (
        ({}, "vllm", True),
        ({}, "sglang", True),
        ({}, "hf", False),
        ({"max_position_embeddings": 70}, "vllm", False),
        ({"rope_scaling": {"factor": 2}}, "vllm", False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | changed))
        if refused:
            assert "sequences of up to 70 tokens" in problems(*flags, f"--engine_type={engine}")
        else:
            check(*flags, f"--engine_type={engine}")


def test_the_version(capsys):
    assert shown(capsys, "--version") == f"lightrft {lightrft.__version__}"


def test_a_mistake_is_answered_without_heavy_imports():
    """Torch and transformers take each rank seconds, so nothing that reads a command line may
    import them.
    """
    program = (
        "import sys\nfrom lightrft.app.cli import MAINS\n"
        "try: MAINS['train_ppo'](['--max_stps=1'])\nexcept SystemExit as end: code = end.code\n"
        "print(code, sorted({'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "2 []" and "did you mean --max_steps" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora_rank=-1"], "--lora_rank must not be negative"),
        (["--lora_rank=4", "--lora_alpha=0"], "--lora_alpha must be above 0"),
        (["--lora_rank=4", "--lora_dropout=1"], "--lora_dropout must be at least 0 and below 1"),
        (
            ["--lora_rank=4", "--target_modules", "all-linear", "q_proj"],
            "--target_modules takes either all-linear or names",
        ),
        (
            ["--lora_rank=4", "--lora_dropout=0.1", "--fsdp", "--tp_size=2"],
            "--lora_dropout 0.1 needs --tp_size 1",
        ),
        (
            ["--lora_rank=4", "--fsdp", "--tp_size=2", "--bf16", "--lora_sync=merged"],
            "--lora_rank with --tp_size in bfloat16 needs --lora_sync adapter",
        ),
    ],
)
def test_adapters_that_cannot_be(argv, message):
    assert message in problems(*RUNNABLE, *argv)


INT8 = ["--rollout_quantization=int8", "--engine_type=vllm"]
FP8 = ["--fp8_training", "--fsdp", "--bf16"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*INT8, "--engine_type=hf"],
            "--rollout_quantization int8 does not support --engine_type hf",
        ),
        (
            [*INT8, "--engine_type=sglang"],
            "--rollout_quantization int8 does not support --engine_type sglang",
        ),
        (
            [*INT8, "--speculative=draft", "--draft_pretrain=Qwen/Qwen3-0.6B"],
            "--rollout_quantization int8 does not support --speculative draft",
        ),
        (["--fp8_training", "--fsdp", "--bf16=false"], "--fp8_training needs --bf16"),
        ([*FP8, "--lora_rank=4"], "--fp8_training needs --lora_rank 0"),
        ([*FP8, "--tp_size=2"], "--fp8_training needs --tp_size 1"),
        (["--fp8_training", "--bf16", "--strategy=deepspeed"], "--fp8_training needs --fsdp"),
    ],
)
def test_eight_bits_that_cannot_be(argv, message):
    assert message in problems(*RUNNABLE, *argv)


EXACT = ["--exact", "--fsdp", "--engine_type=hf"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*EXACT, "--engine_type=sglang"], "--exact needs --engine_type hf or vllm: sglang"),
        ([*EXACT, "--engine_tp_size=2"], "--exact needs --engine_tp_size 1: ranks that share"),
        ([*EXACT, "--speculative=ngram"], "--exact needs --speculative none: it was not tested"),
        ([*EXACT, "--rollout_quantization=int8"], "--exact needs --rollout_quantization none"),
        (["--exact", "--engine_type=hf", "--strategy=deepspeed"], "--exact needs --fsdp"),
        ([*EXACT, "--tp_size=2"], "--exact needs --tp_size 1: ranks that split a layer"),
        ([*EXACT, "--sp_size=2"], "--exact needs --sp_size 1"),
        ([*EXACT, "--cp_size=2"], "--exact needs --cp_size 1"),
        ([*EXACT, "--rollout_ranks=1"], "--exact needs --rollout_ranks 0"),
        ([*EXACT, "--lora_rank=4"], "--exact needs --lora_rank 0"),
        ([*EXACT, "--fp8_training", "--bf16"], "--exact does not support --fp8_training"),
        ([*EXACT, "--fused_kernels=liger"], "--exact does not support --fused_kernels liger"),
        ([*EXACT, "--images_key=images"], "--exact does not support --images_key: towers"),
    ],
)
def test_what_exact_does_not_support(argv, message):
    assert message in problems(*RUNNABLE, *argv)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_experts": 8}, "--exact does not support experts: --pretrain"),
        ({"layer_types": ["linear_attention"]}, "does not support layers of type linear_attention"),
    ],
)
def test_models_that_exact_does_not_support(tmp_path, settings, reason):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert reason in problems(*RUNNABLE, *EXACT, f"--pretrain={tmp_path}")


def test_exact_runs_end_at_the_first_difference():
    for argv, limit in (
        ([], 0.0),
        (["--mismatch_limit=0.1"], 0.1),
        (["--over_sampling=1.5", "--partial_rollout"], None),
    ):
        config = parsed(*RUNNABLE, *EXACT, *argv)
        resolve(config, "train_ppo", 2)
        assert config.train.mismatch_limit == limit


@pytest.mark.parametrize(
    ("argv", "correction"),
    [
        ([], "tis"),
        (["--rollout_correction=mis"], "mis"),
        (["--rollout_correction=none"], "none"),
        (["--use_engine_logprobs"], None),
    ],
)
def test_quantised_rollouts_are_corrected(argv, correction):
    config = parsed(*RUNNABLE, *INT8, *argv)
    notices = resolve(config, "train_ppo", 2)
    assert config.algorithm.rollout_correction == correction
    assert any("--rollout_correction is tis" in each for each in notices) == (not argv)


def test_settings_of_adapters_need_adapters():
    argv = [
        "--lora_alpha=8",
        "--lora_dropout=0.1",
        "--target_modules",
        "q_proj",
        "--save_adapter_only",
    ]
    unused = check("--fsdp", *RUNNABLE, *argv)
    assert unused == [
        f"--{name} has no effect without --lora_rank"
        for name in ("lora_alpha", "lora_dropout", "target_modules", "save_adapter_only")
    ]
    assert check("--fsdp", *RUNNABLE, *argv, "--lora_rank=4") == []
    unused = check("--fsdp", *RUNNABLE, *argv, "--lora_rank=4", "--eval_data=x", command="evaluate")
    assert "--lora_rank has no effect in evaluate" in unused


def test_samplings_that_nobody_can_draw_from_are_named():
    wrong = [
        "--temperature=0",
        "--top_p=0",
        "--top_k=-1",
        "--stop",
        "",
        "--stop_token_ids",
        "-3",
        "--first_token_temperature=0",
    ]
    said = problems(*RUNNABLE, *wrong)
    names = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "first_token_temperature")
    assert all(f"--{name} " in said for name in names)
    said = problems(*RUNNABLE, "--min_tokens=9", "--generate_max_len=8", "--stop", "a")
    assert (
        "--min_tokens 9 exceeds --generate_max_len 8" in said and "--min_tokens with --stop" in said
    )

    unused = check(
        *RUNNABLE, "--eval_data=x", "--top_p=0.5", "--first_token_temperature=3", command="evaluate"
    )
    assert [line.split()[0] for line in unused if "prompt_data" not in line] == [
        "--top_p",
        "--first_token_temperature",
    ]


# -- values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init_kl_coef": float("nan")}, "init_kl_coef: expected a finite number, not nan"),
        (
            {"actor_learning_rate": "inf"},
            "actor_learning_rate: expected a finite number, not 'inf'",
        ),
        (
            {"seed": 10**30},
            "seed: 10000000000000000000... is too large: the maximum is 9223372036854775807",
        ),
        ({"max_steps": 1.5}, "max_steps: expected an integer, not 1.5"),
        ({"bf16": "perhaps"}, "bf16: expected true or false, not 'perhaps'"),
        ({"adam_betas": 0.9}, "adam_betas: expected a list, not 0.9"),
        ({"pretrain": ["a"]}, "pretrain: expected a string, not ['a']"),
        ({"engine_args": "seed=1"}, "engine_args: 'seed=1' is not valid JSON: Expecting value"),
        ({"engine_args": "[1]"}, """engine_args: '[1]' is not a JSON object: {"name": value}"""),
        ({"zero_stage": 4}, "zero_stage: invalid choice 4; choose from 0, 1, 2, 3"),
        ({"max_stps": 3}, "unknown name 'max_stps'; did you mean max_steps?"),
        (
            {"reward": lambda samples, **columns: [0.0]},
            "cannot be imported by its name: define the function at the top level",
        ),
    ],
)
def test_values_from_python_are_checked(values, message):
    with pytest.raises(ConfigError) as error:
        Config.of(**values)
    assert message in str(error.value)


def test_values_that_were_set_past_all_checks_are_found():
    config = Config.of(pretrain="some/model", prompt_data="x")
    config.algorithm.init_kl_coef = float("nan")
    config.train.max_steps = "7"
    with pytest.raises(ConfigError, match="--init_kl_coef: expected a finite number"):
        resolve(config, "train_ppo", 1)
    config.algorithm.init_kl_coef = 0.1
    resolve(config, "train_ppo", 1)
    assert config.train.max_steps == 7


def test_numbers_of_a_list_may_be_joined_by_commas():
    assert parsed("--prompt_data_probs", "0.3,0.7").data.prompt_data_probs == [0.3, 0.7]
    assert parsed("--adam_betas", "0.8,0.9").optim.adam_betas == [0.8, 0.9]


def test_a_function_stands_for_its_import_path():
    assert Config.of(reward=check).reward.reward == f"{__name__}:check"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train:\n  seed: 1\n  seed: 2\n", "the key 'seed' occurs twice"),
        (b"train:\n  seed: 1\ntrain:\n  max_steps: 2\n", "the key 'train' occurs twice"),
        (b"data:\n  prompt_data: \xff\xfe\n", "not a UTF-8 text file"),
        (b"train:\n  seed: " + b"9" * 5000 + b"\n", "run.yaml"),
        (b"optim:\n  max_norm: .nan\n", "run.yaml: max_norm: expected a finite number"),
    ],
)
def test_damage_in_a_file_is_named_with_the_file(tmp_path, content, message):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        parse(["--config", str(tmp_path / "run.yaml")])
    assert message in str(error.value) and "run.yaml" in str(error.value)


# -- Python and the command line


@pytest.mark.parametrize("estimator", ["dapo", "dr_grpo", "gspo", "ppo"])
def test_python_resolves_to_the_same_as_the_command_line(estimator):
    """It is tested with the estimator alone, and with a value that happens to be the section's
    default.
    """
    from_flags = parsed(*RUNNABLE, f"--advantage_estimator={estimator}", "--eps_clip_low=0.2")
    by_name = Config.of(
        pretrain="some/model",
        prompt_data="train.jsonl",
        advantage_estimator=estimator,
        eps_clip_low=0.2,
    )
    by_section = Config(
        ModelSection("some/model"),
        DataSection("train.jsonl"),
        algorithm=AlgorithmSection(estimator, eps_clip_low=0.2),
    )
    by_attribute = Config.of(
        pretrain="some/model", prompt_data="train.jsonl", advantage_estimator=estimator
    )
    by_attribute.algorithm.eps_clip_low = 0.2
    for config in (from_flags, by_name, by_section, by_attribute):
        resolve(config, "train_ppo", 2)

    assert (
        from_flags == by_name == by_section == by_attribute
        and from_flags.algorithm.eps_clip_low == 0.2
    )
    assert from_flags.algorithm != AlgorithmSection(estimator, eps_clip_low=0.2)
    assert from_flags.rollout.dynamic_sampling is (estimator == "dapo")


def test_what_was_written_survives_copies():
    config = parsed("--seed", "3")
    assert copy.deepcopy(config).written == pickle.loads(pickle.dumps(config)).written == {"seed"}


# -- the strategy


def resolved_strategy(*argv: str) -> tuple[str, bool]:
    config = parsed(*RUNNABLE, *argv)
    resolve(config, "train_ppo", 2)
    return config.strategy.strategy, config.strategy.fsdp


def test_the_strategy_is_what_was_asked_for():
    """FSDP2 is the default, whatever is installed; a flag that only ZeRO has chooses ZeRO."""
    assert resolved_strategy("--fsdp") == resolved_strategy("--strategy=fsdp") == ("fsdp", True)
    assert (
        resolved_strategy("--fsdp", "false")
        == resolved_strategy("--strategy=deepspeed")
        == ("deepspeed", False)
    )
    assert resolved_strategy("--strategy=mine.py:Mine", "--tp_size=2") == ("mine.py:Mine", False)
    assert resolved_strategy() == ("fsdp", True)
    for flag in ("--zero_stage=3", "--adam_offload", "--zpg=1"):
        assert resolved_strategy(flag) == ("deepspeed", False)
    assert resolved_strategy("--zero_stage=3", "--strategy=mine.py:Mine") == ("mine.py:Mine", False)

    config = parsed(*RUNNABLE, "--adam_offload")
    resolve(config, "train_ppo", 2)
    layout = "layout: deepspeed, ZeRO stage 2 (--adam_offload) on 2 processes, 2 data ranks"
    assert layout in summary(config, "train_ppo", 2)

    with pytest.raises(
        ConfigError, match="--strategy deepspeed contradicts --fsdp true: set only one"
    ):
        resolved_strategy("--strategy=deepspeed", "--fsdp")


def test_a_flag_of_the_strategy_replaces_both_forms_in_a_file(file):
    path = file("strategy:\n  strategy: fsdp\n  fsdp: true\n")
    assert resolved_strategy("--config", path) == ("fsdp", True)
    assert resolved_strategy("--config", path, "--fsdp=false") == ("deepspeed", False)
    assert resolved_strategy("--config", path, "--strategy=deepspeed") == ("deepspeed", False)


# -- the first lines of a log


def test_the_plan_of_a_run_in_a_few_lines():
    config = parsed(
        *RUNNABLE,
        "--fsdp",
        "--tp_size=2",
        "--engine_type=hf",
        "--engine_tp_size=2",
        "--train_batch_size=256",
    )
    resolve(config, "train_ppo", 8)
    assert summary(config, "train_ppo", 8) == [
        (
            "algorithm: grpo (default; for PPO with a critic: --advantage_estimator ppo), policy"
            " loss ppo, clip 0.2 to 0.2, seq-mean-token-mean"
        ),
        "KL penalty: 0.04 x k3 in the loss",
        "layout: fsdp on 8 processes, 4 data ranks, tp 2",
        "engine: hf, 4 replicas with 2 processes each",
        (
            "step: 128 prompts x 8 samples = 1024 samples, 4 optimizer steps of 256, "
            "at most 16384 tokens in a micro-batch of one rank"
        ),
        (
            "checkpoints: none unless Ctrl-C or SIGTERM stops the run; --save_steps N writes one"
            " after every N-th step"
        ),
    ]
    config = parsed(*RUNNABLE, "--fsdp", "--save_steps=20")
    resolve(config, "train_sft", 1)
    assert not any("checkpoints" in line for line in summary(config, "train_sft", 1))


@pytest.mark.parametrize(
    ("flags", "ranks", "suggested"),
    [
        (["--fsdp"], 16, True),
        (["--fsdp"], 8, False),
        (["--fsdp", "--dp_replicate=2"], 16, False),
        (["--zero_stage=2"], 16, False),
        (["--fsdp", "--sp_size=16"], 16, False),
        (["--fsdp", "--rollout_ranks=8"], 24, True),
    ],
    ids=str,
)
def test_several_nodes_may_have_a_copy_of_the_model_each(flags, ranks, suggested):
    config = parsed(*RUNNABLE, *flags)
    resolve(config, "train_ppo", ranks)
    found = [
        line for line in summary(config, "train_ppo", ranks, 8) if "gathered over 2 nodes" in line
    ]
    assert len(found) == suggested and all("--dp_replicate 2 gathers" in line for line in found)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--init_kl_coef=0"], "none"),
        (["--init_kl_coef=0", "--measure_kl"], "only measured"),
        (["--advantage_estimator=rloo"], "0.05 x k1 subtracted from the rewards"),
    ],
)
def test_no_coefficient_no_reference_unless_it_is_to_be_measured(argv, line):
    config = parsed(*RUNNABLE, *argv)
    resolve(config, "train_ppo", 2)
    assert f"KL penalty: {line}" in summary(config, "train_ppo", 2)
    assert needs_reference(config.algorithm) is (line != "none")


def test_data_sets_may_be_a_list(tmp_path):
    (tmp_path / "run.yaml").write_text("data:\n  prompt_data: [a.jsonl:0.7, 'b:rows:0.3']\n")
    config = parsed("--config", str(tmp_path / "run.yaml"))
    assert config.data.prompt_data == "a.jsonl:0.7,b:rows:0.3"
    assert data_sources(config.data.prompt_data) == [
        DataSource("a.jsonl", 0.7),
        DataSource("b:rows", 0.3),
    ]
    message = "--prompt_data: b has no probability, and others have: write b:NUMBER"
    assert message in problems("--pretrain", str(tmp_path), "--prompt_data", "a:0.7,b")


@pytest.mark.parametrize(
    "argv",
    [
        ["--tools=calculator,my_tools.py"],
        ["--tools", "calculator", "my_tools.py"],
        ["--tools", "calculator,", "my_tools.py"],
    ],
)
def test_a_list_is_separated_by_commas_or_spaces(argv, file):
    expected = ["calculator", "my_tools.py"]
    assert parse(argv).environment.tools == expected
    for text in ("calculator,my_tools.py", "calculator, my_tools.py", "[calculator, my_tools.py]"):
        assert (
            parse(["--config", str(file(f"environment:\n  tools: {text}\n"))]).environment.tools
            == expected
        )
        assert Config.of(tools=text.strip("[]")).environment.tools == expected


LISTS = {
    name: kind
    for name, kind in field_types().items()
    if get_origin(kind) is list or kind is CommaSeparated
}


@pytest.mark.parametrize("name", sorted(LISTS))
def test_every_list_takes_both_forms(name):
    """Only the texts of --stop and --bad_words may contain commas."""
    one, other = {list[int]: ("1", "2"), list[float]: ("0.5", "2.5")}.get(LISTS[name], ("a", "b"))
    joined = getattr(parse([f"--{name}={one},{other}"]), name)
    spaced = getattr(parse([f"--{name}", one, other]), name)
    if name in ("stop", "bad_words"):
        assert (joined, spaced) == (["a,b"], ["a", "b"])
    else:
        assert spaced == joined


def test_arguments_of_the_engine_are_json_or_a_mapping(file):
    expected = '{"max_num_seqs": 512}'
    written = (
        ["--engine_args", expected],
        ["--config", str(file("engine:\n  engine_args: {max_num_seqs: 512}\n"))],
        ["--config", str(file("engine_args:\n  max_num_seqs: 512\n"))],
        ["--config", str(file(f"engine_args: '{expected}'\n"))],
    )
    assert [parse(each).engine.engine_args for each in written] == [expected] * 4

    said = problems(*RUNNABLE, "--engine_type=hf", "--engine_args", expected)
    assert "--engine_args needs --engine_type vllm or sglang" in said


@pytest.mark.parametrize("command", sorted(COMMAND_DEFAULTS))
def test_a_command_has_defaults_of_its_own(command, capsys):
    """What is written wins, and the help of the command shows its own value."""
    data = "rows.jsonl"
    config = Config.of(pretrain="model", prompt_data=data)
    resolve(config, command, world_size=1)
    owners = section_of_field()
    values = {
        name: getattr(getattr(config, owners[name]), name) for name in COMMAND_DEFAULTS[command]
    }
    assert values == COMMAND_DEFAULTS[command]
    if "learning_rate" not in values:
        return

    config = Config.of(pretrain="model", prompt_data=data, learning_rate=1e-3)
    resolve(config, command, world_size=1)
    assert (config.optim.learning_rate, config.train.train_batch_size) == (
        1e-3,
        COMMAND_DEFAULTS[command]["train_batch_size"],
    )
    assert f"Default: {COMMAND_DEFAULTS[command]['learning_rate']}." in help_text(
        command, "learning_rate"
    )


def test_the_learning_rate_has_another_name(file):
    path = file("optim:\n  actor_learning_rate: 1.0e-3\n")
    configs = [
        parse(["--actor_learning_rate", "1e-3"]),
        parse(["--config", str(path)]),
        Config.of(actor_learning_rate=1e-3),
        as_config({"actor_learning_rate": 1e-3}),
    ]

    for config in configs:
        assert (
            config.optim.learning_rate
            == config.optim.actor_learning_rate
            == config.actor_learning_rate
            == 1e-3
        )
        assert config.written == {"learning_rate"} and not config.notices

    config.optim.actor_learning_rate = 2e-3
    assert config.optim.learning_rate == 2e-3
    with pytest.raises(ConfigError, match="two values of one field"):
        parse(["--actor_learning_rate", "1e-3", "--learning_rate", "1e-4"])


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({}, ["--tp_size", "2"], "--ep_size 2 needs --tp_size 1: ranks that split a layer have"),
        ({}, ["--lora_rank", "4"], "--lora_rank with --ep_size needs --target_modules with the"),
        ({"num_experts": 5}, [], "it does not divide the 5 experts of a layer"),
        ({"model_type": "qwen3"}, [], "a model of type qwen3 has no experts"),
        (
            {"model_type": "dots1", "n_routed_experts": 4},
            [],
            "--ep_size 2 does not support models of type dots1; supported are deepseek_v3, glm4",
        ),
        ({}, ["--no_fsdp"], "--ep_size needs --fsdp: ZeRO shards every parameter over all ranks"),
        (
            {},
            ["--dp_replicate", "4"],
            "--ep_size 2 does not divide the 1 ranks that shard a copy of the model",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_before_anything_is_loaded(
    tmp_path, config, flags, message
):
    mixture = {"model_type": "qwen3_moe"} | ({} if config else {"num_experts": 4})
    (tmp_path / "config.json").write_text(json.dumps(mixture | config))
    common = [
        "--pretrain",
        str(tmp_path),
        "--prompt_data",
        "train.jsonl",
        "--ep_size",
        "2",
        "--fsdp",
    ]
    assert message in problems(*common, *flags, world_size=4)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (
            "dots1",
            ["--router_replay"],
            "--router_replay does not support models of type dots1; supported are deepseek_v3, glm4",
        ),
        (
            "qwen3_moe",
            ["--router_bias_rate", "0.001"],
            "--router_bias_rate 0.001 does not support models of type qwen3_moe; supported are"
            " deepseek_v3, glm4_moe, minimax_m2",
        ),
        (
            "qwen3_moe",
            ["--router_replay", "--engine_type", "sglang"],
            "needs --engine_type vllm or",
        ),
        (
            "qwen3_moe",
            ["--router_replay", "--engine_type", "vllm", "--speculative", "ngram"],
            "--router_replay needs --speculative none",
        ),
        (
            "qwen3_moe",
            ["--router_replay", "--replay_rollouts", "run"],
            "--router_replay does not support --replay_rollouts",
        ),
        (
            "qwen3_5_moe_text",
            ["--router_replay", "--images_key", "images"],
            "--images_key does not support --router_replay",
        ),
        (
            "glm4_moe",
            ["--router_bias_rate", "0.001", "--lora_rank", "4"],
            "--router_bias_rate needs --lora_rank 0",
        ),
    ],
)
def test_routers_that_cannot_be_replayed_or_moved_are_refused(
    tmp_path: Path, kind: str, flags: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_experts": 4}))
    common = ["--pretrain", str(tmp_path), "--prompt_data", "train.jsonl", "--fsdp"]
    assert message in problems(*common, *flags)
