"""Translate the launch scripts of opendilab/LightRFT and OpenRLHF to the flags of this program.

docs/migrating.md has the tables for readers.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.config.command_line import Flags, group_flags
from lightrft.config.errors import ConfigError

DOTTED = {
    "actor.model_name_or_path": "pretrain",
    "actor.adam.lr": "learning_rate",
    "actor.adam.betas": "adam_betas",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.lr_scheduler": "lr_scheduler",
    "actor.lr_warmup_ratio": "lr_warmup_ratio",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.dual_clip": "dual_clip",
    "actor.aux_loss_coef": "aux_loss_coef",
    "critic.model_name_or_path": "critic_pretrain",
    "critic.adam.lr": "critic_learning_rate",
    "critic.value_clip": "value_clip",
    "critic.freezing_steps": "freezing_actor_steps",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "reward.normalize_enable": "normalize_reward",
    "reward.clip_range": "reward_clip_range",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_steps": "save_steps",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes",
    "train.seed": "seed",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.async_enable": "async_train",
    "train.agent_func_path": "agent_func_path",
    "train.colocate_all": "colocate_all_models",
    "train.enable_ema": "enable_ema",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.max_new_tokens": "max_new_tokens",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "rollout.vllm_generate_batch_size": "vllm_generate_batch_size",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.prompt_split": "prompt_split",
    "data.max_len": "max_len",
    "data.max_samples": "max_samples",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.image_key": "images_key",
    "data.max_images_per_prompt": "limit_mm_image_per_prompt",
    "data.input_template": "input_template",
    "data.apply_chat_template": "apply_chat_template",
    "ds.zero_stage": "zero_stage",
    "ds.zpg": "zpg",
    "ds.adam_offload": "adam_offload",
    "ds.overlap_comm": "overlap_comm",
    "ds.grad_accum_dtype": "reduce_dtype",
    "ds.packing_samples": "packing_samples",
    "ds.attn_implementation": "attn_implementation",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.param_dtype": "param_dtype",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
    "ds.load_in_4bit": "load_in_4bit",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.target": "kl_target",
    "algo.kl.horizon": "kl_horizon",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.enforce_eager": "enforce_eager",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.sync_backend": "vllm_sync_backend",
    "vllm.enable_prefix_caching": "enable_prefix_caching",
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "logger.logging_steps": "logging_steps",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.project": "tracker_project",
    "logger.wandb.run_name": "tracker_run_name",
    "logger.wandb.group": "tracker_group",
    "logger.wandb.org": "tracker_org",
    "logger.tensorboard_dir": "use_tensorboard",
    **{
        f"{role}.{count}": f"{role}_{count}"
        for role in ("actor", "critic", "ref", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    },
    "actor.freeze_visual_encoder": "freeze_vision_tower",
}
DOTTED |= {
    f"fsdp.{name.removeprefix('ds.')}": flag
    for name, flag in DOTTED.items()
    if name.startswith("ds.")
}
"""OpenRLHF's flags of 2026 -> earlier names there, or flags of this program."""

OPENRLHF_NAMES = {
    "max_new_tokens": "generate_max_len",
    "vllm_tensor_parallel_size": "engine_tp_size",
    "vllm_gpu_memory_utilization": "engine_mem_util",
    "ring_attn_size": "cp_size",
    "full_determinism": "deterministic",
    "ds_tensor_parallel_size": "tp_size",
    "entropy_loss_coef": "entropy_coef",
    "policy_loss_type": "policy_loss",
    "train_max_tokens_per_gpu": "max_tokens_per_microbatch",
    "vllm_is_truncated_threshold": "rollout_correction_high",
    "eval_dataset": "eval_data",
    "eval_n_samples_per_prompt": "eval_n_samples",
}
"""Flags of other tools -> flags of this program with the same values."""

OPENRLHF_SWITCHES: dict[str, list[str]] = {
    "disable_engine_sleep": ["--no_enable_engine_sleep"],
    "packing_samples": ["--batching=packed"],
    "use_dynamic_batch": ["--batching=packed"],
    "use_fire": ["--first_token_temperature=10"],
    "use_gspo": ["--policy_loss=gspo"],
    "use_cpg_loss": ["--policy_loss=cpgd"],
    "normalize_reward": ["--reward_running_norm", "--reward_running_norm_minus_mean"],
    "dynamic_filtering": ["--dynamic_sampling"],
    "enforce_eager": ["--engine_enforce_eager"],
    "vllm_enable_sleep": ["--enable_engine_sleep"],
    "deepspeed_enable_sleep": ["--offload_idle"],
    "enable_vllm_is_correction": ["--rollout_correction=tis"],
}
"""Switches of other tools -> the equivalent flags."""

ALWAYS = "always enabled"
PLACEMENT = (
    "torchrun or srun sets the number of processes, and models and engine share their devices"
)
OPENRLHF_IGNORED = {
    **dict.fromkeys(
        (
            "flash_attn",
            "save_trajectories",
            "meta_init",
            "fused_linear_logprob",
            "enable_prefix_caching",
            "save_value_network",
            "use_mp_opt",
        ),
        ALWAYS,
    ),
    **dict.fromkeys(
        (
            *(
                f"{role}_{count}"
                for role in ("actor", "critic", "ref", "reward")
                for count in ("num_nodes", "num_gpus_per_node")
            ),
            "colocate_actor_ref",
            "colocate_critic_reward",
            "colocate_all_models",
            "vllm_num_engines",
            "vllm_sync_backend",
            "vllm_sync_with_ray",
            "rollout_tasks_per_gpu",
            "local_rank",
        ),
        PLACEMENT,
    ),
    **dict.fromkeys(
        ("rm_use_engine", "rm_engine_tp", "rm_engine_cudagraph", "ref_reward_offload"),
        "reward models are sharded like the reference",
    ),
    **dict.fromkeys(
        ("text_only", "mixed_mm_data", "no_shard_vit"),
        "prompts with and without images can be mixed",
    ),
    **dict.fromkeys(("fps", "max_pixels", "min_pixels"), "the model's processor sets this"),
    "attn_implementation": "the device determines it",
    **dict.fromkeys(
        (
            "actor_init_on_gpu",
            "disable_fast_tokenizer",
            "gradient_checkpointing_use_reentrant",
            "disable_ds_ckpt",
            "use_ds_universal_ckpt",
            "disable_logprobs_flashattn",
            "chunk_size",
            "log_dir",
            "plot_every",
            "perf",
            "value_head_prefix",
            "vllm_generate_batch_size",
            "rollout_max_tokens_per_gpu",
            "ring_head_stride",
            "use_liger_kernel",
            "deepcompile",
            "print_replay_buffer_stats",
            "mark_high_entropy_tokens",
            "trajectory_analysis",
            "normalize_advantages",
            "use_sequence_rewards",
            "pretrain_data_probs",
        ),
        "there is no counterpart, and no result depends on it",
    ),
}
"""Flags of other tools that are ignored -> the reason."""

OPENRLHF_REFUSED = {
    "async_train": (
        "each step trains on samples of the newest weights; --rollout_ranks N --max_staleness K"
        " generates beside it"
    ),
    "agent_func_path": "--environment file.py:function takes an async function of an agent",
    "no_advantage_std_norm": (
        "use --advantage_estimator dr_grpo, which does not divide by the standard deviation of a"
        " group"
    ),
    "use_ms": (
        "models are loaded from a folder or the Hugging Face hub: download the model and use its"
        " folder"
    ),
    "normalize_reward_for_critic": (
        "use --reward_running_norm, which divides the rewards of actor and critic"
    ),
    "dynamic_filtering_reward_range": (
        "use --dynamic_sampling, which keeps the groups whose rewards differ, whatever their range"
    ),
}
"""Flags of other tools without an equivalent -> the alternative."""

OFF = {
    "reward_clip": ("0", "0.0"),
    "advantage_clip": ("0", "0.0"),
    "freezing_actor_steps": ("-1",),
    "eval_steps": ("0",),
    "limit_mm_image_per_prompt": ("-1",),
    "prompt_data_probs": ("1", "1.0"),
    "reward_pretrain": ("", "{}"),
    "reduce_dtype": ("",),
    "use_wandb": ("",),
    "use_tensorboard": ("",),
    "remote_rm_url": ("",),
    "critic_pretrain": ("",),
    "freeze_prefix": (),
}
"""Flag -> values (none: without a value) that mean the same as omitting it."""

VALUES = {"lr_scheduler": {"cosine_with_min_lr": "cosine"}}
"""Flag -> values that have another name here."""
BOOLEAN = ("true", "false", "yes", "no", "on", "off", "1", "0")


OPENRLHF_DEFAULTS = {
    "advantage_estimator": "gae",
    "init_kl_coef": "0.01",
    "kl_estimator": "k1",
    "value_clip": "0.5",
    "reward_clip": "10",
    "rollout_batch_size": "1024",
    "n_samples_per_prompt": "1",
    "train_batch_size": "128",
    "eval_temperature": "0.6",
    "eval_n_samples": "4",
    "critic_pretrain": "the reward model",
}
"""Flag -> OpenRLHF's default, where it is another one than here."""

OPENRLHF = ("vllm_", "colocate_", "actor_num_", "ref_num_", "critic_num_", "reward_num_")
"""Beginnings of the flags that only OpenRLHF's scripts have."""


@dataclass
class Translation:
    """A command line in the flags of this program."""

    flags: Flags = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    """Sentences about flags that were translated or ignored."""
    refused: list[str] = field(default_factory=list)
    """Sentences about flags without an equivalent."""


def translate(written: Flags) -> Translation:
    """Translate flags of other tools' scripts; all others stay as they are.

    A flag of this program takes precedence over the translation of a switch.
    """
    from_openrlhf = any(name in DOTTED or name.startswith(OPENRLHF) for name in written)
    written = {DOTTED.get(name, name): words for name, words in written.items()}
    result = Translation()
    switched: Flags = {}
    understood: list[str] = []

    for name, words in written.items():
        if name in OPENRLHF_REFUSED:
            result.refused.append(f"--{name}: {OPENRLHF_REFUSED[name]}")
        elif name in OPENRLHF_IGNORED or _means_nothing(name, words):
            continue
        elif name in OPENRLHF_NAMES:
            result.flags[OPENRLHF_NAMES[name]] = words
            understood.append(f"--{name} is --{OPENRLHF_NAMES[name]}")
        elif name in OPENRLHF_SWITCHES or name in SPECIAL:
            try:
                tokens = _tokens(name, words, written)
            except ConfigError as error:
                result.refused.append(f"--{name}{error}")
                continue
            switched |= group_flags(tokens)
            if tokens and name not in (tokens[0][2:], "remote_rm_url"):
                understood.append(f"--{name} is {' '.join(tokens)}")
        else:
            result.flags[name] = [VALUES.get(name, {}).get(word, word) for word in words]

    result.flags = switched | result.flags
    if understood:
        result.notices.append(f"translated flags of other tools: {'; '.join(understood)}")
    result.notices += _ignored(written)
    if from_openrlhf:
        result.notices += _other_defaults(result.flags)

    return result


def _tokens(name: str, words: list[str], written: Flags) -> list[str]:
    """Return the translation of a flag. Raises ConfigError with the rest of a sentence that begins
    with the flag.
    """
    if name in SPECIAL:
        try:
            return SPECIAL[name](words, written)
        except ConfigError as error:
            raise ConfigError(f": {error}") from error
    if words and words[0].lower() not in ("true", "false"):
        raise ConfigError(f" {words[0]}: the flag takes no value, or true or false")
    return [] if words[:1] == ["false"] else OPENRLHF_SWITCHES[name]


def _means_nothing(name: str, words: list[str]) -> bool:
    """Return whether leaving the flag out means the same."""
    if name not in OFF:
        return False
    return not words if not OFF[name] else len(words) == 1 and words[0] in OFF[name]


def _ignored(written: Flags) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name in written:
        if name in OPENRLHF_IGNORED:
            reasons.setdefault(OPENRLHF_IGNORED[name], []).append(f"--{name}")
    left_out = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return [f"ignored flags: {'; '.join(left_out)}"] if left_out else []


def _other_defaults(written: Flags) -> list[str]:
    """Return a sentence about the flags that a script leaves out and that have another default in
    OpenRLHF.
    """
    left_out = [
        f"--{name} ({value})" for name, value in OPENRLHF_DEFAULTS.items() if name not in written
    ]
    start = "flags that are not set and have another default in OpenRLHF (theirs): "
    return [start + ", ".join(left_out)] if left_out else []


def _use_wandb(values: list[str], flags: Flags) -> list[str]:
    """Accept a key in place of true or false; it is put into WANDB_API_KEY, and into no file."""
    if values and values[0].lower() not in BOOLEAN:
        os.environ.setdefault("WANDB_API_KEY", values[0])
        return ["--use_wandb"]
    return ["--use_wandb", *values]


def _use_tensorboard(values: list[str], flags: Flags) -> list[str]:
    return ["--use_tensorboard", *(values if values and values[0].lower() in BOOLEAN else [])]


def _reward_pretrain(values: list[str], flags: Flags) -> list[str]:
    """Accept a JSON object of names and folders, or folders joined by commas."""
    if len(values) == 1 and values[0].startswith("{"):
        try:
            values = [str(folder) for folder in json.loads(values[0]).values()]
        except (json.JSONDecodeError, AttributeError) as error:
            raise ConfigError(f"{values[0]} is not a JSON object of names and folders") from error
    return ["--reward_pretrain", *(each for value in values for each in value.split(","))]


def _max_len(values: list[str], flags: Flags) -> list[str]:
    """Bound prompt and response together: the prompt gets the rest of the length after the
    response.
    """
    response = (flags.get("generate_max_len") or flags.get("max_new_tokens") or [""])[0]
    if (
        "prompt_max_len" in flags
        or not response.isdecimal()
        or not values
        or not values[0].isdecimal()
    ):
        return []
    return [f"--prompt_max_len={max(int(values[0]) - int(response), 1)}"]


def _pair(low: str, high: str) -> Callable[[list[str], Flags], list[str]]:
    def split(values: list[str], flags: Flags) -> list[str]:
        if len(values) != 2:
            raise ConfigError(f"expected two numbers, not {' '.join(values) or 'nothing'}")
        return [f"--{low}={values[0]}", f"--{high}={values[1]}"]

    return split


def _reward_clip_range(values: list[str], flags: Flags) -> list[str]:
    try:
        low, high = map(float, values)
    except ValueError:
        raise ConfigError(f"expected two numbers, not {' '.join(values) or 'nothing'}") from None
    if low != -high:
        raise ConfigError(
            "the two bounds must be -C and C, because --reward_clip C clips to [-C, C]"
        )
    return [f"--reward_clip={values[1]}"]


def _system_prompt_path(values: list[str], flags: Flags) -> list[str]:
    try:
        return [f"--system_prompt={Path(values[0]).read_text(encoding='utf-8').strip()}"]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise ConfigError(f"{' '.join(values)}: {error}") from error


def _param_dtype(values: list[str], flags: Flags) -> list[str]:
    if values not in (["bf16"], ["fp32"]):
        raise ConfigError(
            "expected bf16 or fp32: models compute in bfloat16 with --bf16, otherwise in float32"
        )
    return ["--bf16"] if values == ["bf16"] else []


def _advantage_estimator(values: list[str], flags: Flags) -> list[str]:
    """Translate on-policy distillation. The teacher in such a script is an SGLang server at
    --remote_rm_url.
    """
    if values != ["on_policy_distillation"]:
        return ["--advantage_estimator", *values]
    return ["--advantage_estimator", "distill", "--reward", "none"]


def _remote_rm_url(values: list[str], flags: Flags) -> list[str]:
    if flags.get("advantage_estimator") == ["on_policy_distillation"] and values:
        return [f"--teacher_url={values[0].removesuffix('/generate').rstrip('/')}/v1"]
    return ["--reward", *values]


SPECIAL: dict[str, Callable[[list[str], Flags], list[str]]] = {
    "use_wandb": _use_wandb,
    "use_tensorboard": _use_tensorboard,
    "reward_pretrain": _reward_pretrain,
    "max_len": _max_len,
    "eps_clip_low_high": _pair("eps_clip_low", "eps_clip_high"),
    "reward_clip_range": _reward_clip_range,
    "overlong_penalty_factor": lambda values, flags: [
        "--overlong_buffer",
        "--overlong_buffer_penalty_factor",
        *values,
    ],
    "system_prompt_path": _system_prompt_path,
    "param_dtype": _param_dtype,
    "advantage_estimator": _advantage_estimator,
    "remote_rm_url": _remote_rm_url,
}
"""Flags with another form of values in other tools -> a function of the values, and of all flags.
"""
