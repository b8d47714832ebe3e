"""Why: people arrive with launch scripts.

LightRFT's and OpenRLHF's start here, or say in one message what to change.
"""

import os
import re
from pathlib import Path

import pytest

from lightrft.app.cli import MAINS, read_command_line
from lightrft.config import Config, ConfigError, resolve, section_of_field
from lightrft.extras.compat.counterparts import answer, names, table
from runs import prepare, rows_of
from teacher_server import teacher_server

GSM8K = """
--save_trajectories --advantage_estimator group_norm --fsdp --use_kl_loss --flash_attn --rm_use_engine --reward_pretrain {}
--save_path results/run --ckpt_path results/run --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 4
--rollout_batch_size 128 --max_epochs 1 --num_episodes 30 --lr_warmup_ratio 0.03 --n_samples_per_prompt 5 --prompt_max_len 1024
--generate_max_len 2048 --zero_stage 3 --bf16 --actor_learning_rate 1e-6 --init_kl_coef 0.01 --kl_estimator k3 --prompt_data DATA
--input_key prompt --label_key label --eval_steps 20 --eval_split test --max_eval_samples 1319 --apply_chat_template
--gradient_checkpointing --save_steps 20 --max_ckpt_num 3 --engine_type sglang --engine_mem_util 0.6 --engine_tp_size 2
--enable_engine_sleep --l2 1.0e-2 --freeze_prefix --adam_offload --text_only
""".split()
"""Flags of examples/gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh, without its paths and prompts."""

DISTILLATION = """
--save_trajectories --advantage_estimator on_policy_distillation --fsdp --use_kl_loss --flash_attn --rm_use_engine
--reward_pretrain {} --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 4 --rollout_batch_size 128
--max_epochs 1 --num_episodes 30 --lr_warmup_ratio 0.03 --n_samples_per_prompt 4 --prompt_max_len 1024 --generate_max_len 2048
--zero_stage 3 --bf16 --actor_learning_rate 1e-6 --init_kl_coef 0.01 --kl_estimator k3 --max_ckpt_num 3 --max_ckpt_mem 160
--logging_steps 1 --eval_steps -1 --rm_engine_tp 2
""".split()
"""Flags of examples/on_policy_distillation/run_opd_qwen.sh."""

VISION = """
--save_trajectories --fsdp --mixed_mm_data --advantage_estimator gae --critic_pretrain MODEL --critic_learning_rate 9e-6
--init_kl_coef 0.01 --kl_estimator k1 --eps_clip 0.2 --value_clip 0.2 --gamma 1.0 --lambd 0.95 --advantages_norm --freeze_prefix
--fsdp_cpu_offload --limit_mm_image_per_prompt 10 --rm_use_engine --fps 2.0 --max_pixels 360000
""".split()
"""What the scripts of models with images have beside these."""

OPENRLHF = """
--ref_num_nodes 1 --ref_num_gpus_per_node 8 --colocate_all_models --vllm_num_engines 8 --vllm_tensor_parallel_size 2
--vllm_gpu_memory_utilization 0.7 --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep --vllm_sync_backend nccl
--pretrain some/model --remote_rm_url http://host:5000/get_reward --prompt_data prompts.jsonl --normalize_reward
--eps_clip_low_high 0.1 0.3 --ring_attn_size 2 --entropy_loss_coef 0.01 --policy_loss_type gspo --max_len 3072
--generate_max_len 2048 --train_max_tokens_per_gpu 8192 --lr_scheduler cosine_with_min_lr --attn_implementation flash_attention_2
--use_wandb SECRET --wandb_group mine --eval_dataset held_out.jsonl --eval_n_samples_per_prompt 4 --eval_temperature 0.6
--enable_vllm_is_correction --vllm_is_truncated_threshold 3 --dynamic_filtering --save_value_network --packing_samples
""".split()

DOTTED = """
--actor.num_nodes 1 --vllm.num_engines 8 --train.colocate_all --vllm.tensor_parallel_size 2 --actor.model_name_or_path some/model
--reward.remote_url http://host:5000/get_reward --data.prompt_dataset prompts.jsonl --data.max_len 3072
--rollout.max_new_tokens 2048 --train.batch_size 128 --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --ds.zero_stage 3
--ds.param_dtype bf16 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 --algo.advantage.estimator group_norm
--algo.kl.use_loss --reward.normalize_enable --actor.gradient_checkpointing_enable --ds.packing_samples --logger.wandb.key SECRET
""".split()


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def values(config: Config, *names: str) -> dict:
    return {
        name: value
        for name in names
        for section in vars(config).values()
        if hasattr(section, "__dict__")
        for key, value in vars(section).items()
        if key == name
    }


def test_openrlhf_is_understood():
    config = read_command_line(OPENRLHF)
    expected = {
        "engine_tp_size": 2,
        "engine_mem_util": 0.7,
        "engine_enforce_eager": True,
        "enable_engine_sleep": True,
        "offload_idle": True,
        "reward": "http://host:5000/get_reward",
        "reward_running_norm": True,
        "reward_running_norm_minus_mean": True,
        "eps_clip_low": 0.1,
        "eps_clip_high": 0.3,
        "cp_size": 2,
        "entropy_coef": 0.01,
        "policy_loss": "gspo",
        "prompt_max_len": 1024,
        "generate_max_len": 2048,
        "max_tokens_per_microbatch": 8192,
        "lr_scheduler": "cosine",
        "report_to": "tensorboard,wandb",
        "tracker_group": "mine",
        "eval_data": "held_out.jsonl",
        "eval_n_samples": 4,
        "eval_temperature": 0.6,
        "rollout_correction": "tis",
        "rollout_correction_high": 3.0,
        "dynamic_sampling": True,
    }
    assert values(config, *expected) == expected
    assert os.environ.pop("WANDB_API_KEY") == "SECRET" and "SECRET" not in repr(config) + "".join(
        config.notices
    )
    understood, left_out, *renamed = config.notices
    assert "--eps_clip_low_high is --eps_clip_low=0.1 --eps_clip_high=0.3" in understood
    assert (
        "--ref_num_nodes, --ref_num_gpus_per_node, --colocate_all_models, --vllm_num_engines"
        in left_out
    )


def test_openrlhfs_dotted_names_are_its_old_ones():
    config = read_command_line(DOTTED)
    expected = {
        "pretrain": "some/model",
        "prompt_data": "prompts.jsonl",
        "prompt_max_len": 1024,
        "generate_max_len": 2048,
        "bf16": True,
        "train_batch_size": 128,
        "rollout_batch_size": 64,
        "zero_stage": 3,
        "learning_rate": 5e-7,
        "init_kl_coef": 0.01,
        "advantage_estimator": "group_norm",
        "use_kl_loss": True,
        "gradient_checkpointing": True,
        "reward_running_norm": True,
    }
    assert values(config, *expected) == expected


def test_the_scripts_of_models_with_images_are_understood():
    config = read_command_line(
        [*VISION, "--images_key=images", "--pretrain=some/model", "--prompt_data=x"]
    )
    assert config.model.freeze_prefix == [] and config.engine.limit_mm_image_per_prompt == 10
    assert config.algorithm.advantage_estimator == "gae"
    assert "--fps, --max_pixels (the model's processor sets this)" in config.notices[0]
    resolve(config, "train_ppo", 8)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--use_wandb", "true"], "report_to", "tensorboard,wandb"),
        (["--use_wandb", ""], "report_to", "tensorboard"),
        (["--use_tensorboard", "logs"], "report_to", "tensorboard"),
        (["--reward_pretrain", '{"a": "one", "b": "two"}'], "reward_pretrain", ["one", "two"]),
        (["--reward_pretrain", "one,two"], "reward_pretrain", ["one", "two"]),
        (["--reward_clip", "0"], "reward_clip", None),
        (["--reward_clip_range", "-5", "5"], "reward_clip", 5.0),
        (["--advantage_clip", "0.0"], "advantage_clip", None),
        (["--freezing_actor_steps", "-1"], "freezing_actor_steps", 0),
        (["--limit_mm_image_per_prompt", "-1"], "limit_mm_image_per_prompt", 4),
        (["--prompt_data_probs", "1.0"], "prompt_data_probs", []),
        (["--prompt_data_probs", "0.3,0.7"], "prompt_data_probs", [0.3, 0.7]),
        (["--freeze_prefix", "model.visual"], "freeze_prefix", ["model.visual"]),
        (
            ["--max_len", "4096", "--prompt_max_len", "7", "--generate_max_len", "100"],
            "prompt_max_len",
            7,
        ),
    ],
)
def test_values_in_other_forms(argv, field, value):
    assert values(read_command_line(argv), field) == {field: value}


def test_a_system_prompt_may_be_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Think first.\n")
    assert (
        read_command_line(["--system_prompt_path", str(tmp_path / "prompt.txt")]).data.system_prompt
        == "Think first."
    )


def test_all_refusals_come_in_one_message():
    with pytest.raises(ConfigError) as error:
        read_command_line(
            [
                "--use_ms",
                "--async_train",
                "--agent_func_path",
                "a.py",
                "--reward_clip_range",
                "-1",
                "2",
                "--sed=1",
            ]
        )

    for said in (
        "unknown flag --sed; did you mean --seed",
        "--use_ms: ",
        "--async_train: ",
        "--agent_func_path: ",
        "--reward_clip_range: the two bounds",
        "docs/migrating.md",
    ):
        assert said in str(error.value)


def test_every_translation_leads_to_a_flag_that_exists():
    from lightrft.extras.compat import openrlhf as other_tools

    known = set(section_of_field())
    words = {
        *other_tools.NAMES,
        *other_tools.EQUIVALENT_FLAGS,
        *other_tools.IGNORED,
        *other_tools.REFUSED_FLAGS,
        *other_tools.SPECIAL,
        *other_tools.TRACKER_SWITCHES,
    }
    assert set(other_tools.NAMES.values()) <= known
    assert set(other_tools.TABLE["off"]) <= known | words
    assert {old for old in other_tools.DOTTED.values()} <= known | words
    assert not (words - set(other_tools.SPECIAL)) & known, (
        "a flag of here is never taken for one of theirs"
    )
    for flags in other_tools.EQUIVALENT_FLAGS.values():
        read_command_line(flags)


VERL = """
data.train_files=train.parquet data.train_batch_size=1024 data.max_prompt_length=512 data.filter_overlong_prompts=True
actor_rollout_ref.model.path=some/model actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.actor.ppo_mini_batch_size=256 algorithm.adv_estimator=grpo trainer.n_gpus_per_node=8
+trainer.total_epochs=15 trainer.nonsense=1
""".split()


def test_keys_of_verl_are_answered_with_our_flags_all_at_once():
    with pytest.raises(ConfigError) as error:
        read_command_line([*VERL, "--num_generations", "8"])
    for said in (
        "data.train_batch_size: write --rollout_batch_size 1024",
        "actor_rollout_ref.actor.optim.lr: write --learning_rate 1e-6",
        "algorithm.adv_estimator: write --advantage_estimator grpo",
        "data.filter_overlong_prompts: write --bad_rows skip",
        "trainer.n_gpus_per_node: torchrun",
        "trainer.total_epochs: write --num_episodes 15",
        "trainer.nonsense: no flag has this meaning",
        "--num_generations; write --n_samples_per_prompt 8",
        "where nothing is written, verl has --generate_max_len 512",
    ):
        assert said in str(error.value)

    # and a line of verl's defaults
    assert str(error.value).count("\n  - ") == len(VERL) + 2


TRL = """--model_name_or_path --dataset_name --per_device_train_batch_size --gradient_accumulation_steps --num_train_epochs
--output_dir --num_generations --max_completion_length --warmup_ratio --lr_scheduler_type --use_vllm --epsilon --epsilon_high
--scale_rewards --use_peft --lora_r --max_length --packing --num_iterations""".split()


def test_flags_of_trl_are_answered_with_our_flags_all_at_once():
    with pytest.raises(ConfigError) as error:
        read_command_line([f"{flag}=1" for flag in TRL])
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == len(TRL)
    assert all("; write --" in line or "packed" in line for line in lines)


def flags_of(entry) -> set[str]:
    """Return the flags that an entry of a table names, in its sentences and as values."""
    if isinstance(entry, str):
        return set(re.findall(r"--([a-z_0-9]+)", entry)) if " " in entry else {entry}
    found = {entry["flag"]} if "flag" in entry else set()
    for value in entry.get("values", {}).values():
        found |= set(value) if isinstance(value, dict) else set()
        found |= flags_of(value) if isinstance(value, str) and " " in value else set()
    return found | flags_of(entry.get("say", "no flag"))


NO_ANSWERS = ("title", "like", "defaults", "objects")
"""Parts of a table that say nothing about single names."""


@pytest.mark.parametrize("tool", ["trl", "verl", "axolotl", "swift", "unsloth"])
def test_every_answer_names_a_flag_that_exists(tool):
    known = {*section_of_field(), "help"}
    tables = [table(tool)[section] for section in table(tool) if section not in NO_ANSWERS]
    for key, entry in (pair for section in tables for pair in section.items()):
        assert flags_of(entry) <= known, f"{key}: {entry}"
        assert answer(entry)


def test_the_tables_of_the_page_say_what_the_program_says():
    page = (Path(__file__).parents[3] / "docs/migrating.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)(?:=\S+)?` \| `--(\w+)", page, flags=re.MULTILINE)
    assert len(rows) > 20

    for key, flag in rows:
        assert flag in flags_of(names("verl")[key]) or key == "algorithm.use_kl_in_reward", key

    section = page.partition("## Flags of TRL")[2].partition("## ")[0]
    for theirs, ours in re.findall(r"^\| (`--.*?) \| (.*) \|$", section, flags=re.MULTILINE):
        for name in re.findall(r"`--(\w+)`", theirs):
            assert flags_of(names("trl")[name]) & flags_of(f" {ours}"), name

    for name, value in table("openrlhf")["defaults"].items():
        assert re.search(
            rf"^\| `--{name}` \| .* \| {re.escape(value)} \|$", page, flags=re.MULTILINE
        ), name


def test_a_script_of_openrlhf_is_told_which_defaults_differ():
    notice = next(each for each in read_command_line(OPENRLHF).notices if "another default" in each)
    assert (
        "--kl_estimator (k1)" in notice
        and "--advantage_estimator (gae)" in notice
        and "--eval_n_samples" not in notice
    )
    assert not any("another default" in each for each in read_command_line(["--seed=1"]).notices)
    config = read_command_line(
        ["--fsdp.param_dtype=bf16", "--fsdp.enable_sleep", "--actor.freeze_visual_encoder"]
    )
    assert config.bf16 and config.offload_idle and config.freeze_vision_tower


TINY = """--engine_type=hf --engine_tp_size=1 --rollout_batch_size=8 --n_samples_per_prompt=4 --train_batch_size=32
--micro_train_batch_size=8 --prompt_max_len=16 --generate_max_len=6 --max_steps=1 --bf16=false --no_apply_chat_template
--input_key=input --use_tensorboard=false""".split()


@pytest.mark.slow
@pytest.mark.parametrize("script", [GSM8K, DISTILLATION], ids=["gsm8k", "distillation"])
def test_lightrfts_scripts_of_text_start(tmp_path, monkeypatch, script):
    """Their flags as they stand, then what a tiny model needs."""
    monkeypatch.chdir(tmp_path)
    inputs = [
        flag for flag in prepare(tmp_path) if flag.startswith(("--pretrain", "--prompt_data"))
    ]
    with teacher_server(str(tmp_path / "model")) as address:
        more = (
            [f"--remote_rm_url={address.removesuffix('/v1')}/generate"]
            if script is DISTILLATION
            else ["--reward=gsm8k"]
        )
        with pytest.raises(SystemExit) as end:
            MAINS["train_ppo"](
                [
                    *script,
                    *more,
                    *inputs,
                    *TINY,
                    f"--save_path={tmp_path}/run",
                    f"--ckpt_path={tmp_path}/run",
                ]
            )

    assert end.value.code == 0 and len(rows_of(tmp_path / "run")) == 1
