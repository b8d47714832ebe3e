"""Commands that read a configuration, and the fields that each of them reads."""

from dataclasses import fields

from lightrft.config.sections import (
    REWARD_MODELS,
    SECTIONS,
    PreferenceSection,
    RewardSection,
    ServerSection,
    StrategySection,
    TrainSection,
)

COMMANDS: dict[str, set[str]] = {
    "train_ppo": set(SECTIONS) - {"preference", "server"},
    "train_sft": {"model", "data", "strategy", "optim", "train", "observe"},
    **{
        command: {"model", "data", "preference", "strategy", "optim", "train", "observe"}
        for command in ("train_rm", "train_dpo", "train_kto", "train_prm")
    },
    "serve_reward": {"model", "data", "strategy", "reward", "train", "server"},
    "serve": {"model", "data", "strategy", "engine", "rollout", "environment", "train", "server"},
    "evaluate": {
        "model",
        "data",
        "strategy",
        "engine",
        "rollout",
        "environment",
        "reward",
        "train",
    },
}
"""Command -> the sections that it reads."""

PREFERENCES: dict[str, set[str]] = {
    "train_rm": {
        "chosen_key",
        "rejected_key",
        "margin_key",
        "tie_key",
        "head_key",
        "rm_loss",
        "tie_threshold",
        "reward_heads",
        "learn_scale",
    },
    "train_dpo": {
        "chosen_key",
        "rejected_key",
        "dpo_loss",
        "beta",
        "label_smoothing",
        "length_normalized",
        "sft_coef",
        "precompute_reference",
    },
    "train_kto": {"completion_key", "beta", "desirable_weight", "undesirable_weight"},
    "train_prm": {"completion_key"},
}
"""Command that learns from judged answers -> the fields of the preference section that it reads."""

LORA = ("lora_alpha", "lora_dropout", "target_modules")
"""Fields of adapters, without effect if there are none."""

COLLECTING = (
    *(
        "dynamic_sampling",
        "dynamic_sampling_rounds",
        "over_sampling",
        "early_stop_every",
        "partial_rollout",
    ),
    *(
        "rollout_schedule",
        "curriculum",
        "curriculum_rest",
        "rollout_ranks",
        "max_staleness",
        "weight_update",
        "overlap",
    ),
    *("dump_rollouts", "replay_rollouts"),
)
"""Fields of the choice of prompts and groups in training."""

OF_SAMPLES = ("max_epochs", "freezing_actor_steps", "num_trajectories_to_save", "mismatch_limit")
"""Fields of the training and the observation sections about samples and the engine."""

OF_THE_FINAL_MODEL = ("lora_rank", *LORA, "freeze_prefix", "freeze_vision_tower", "critic_pretrain")
OF_EVALUATION = ("seed", "save_path")
"""Fields of the training section that an evaluation reads."""
JUDGE_FIELDS = (
    "judge_url",
    "judge_model",
    "judge_template",
    "judge_pattern",
    "judge_range",
    "judge_max_tokens",
)
REWARD_FIELDS = (
    "reward",
    "reward_key",
    "reward_workers",
    "reward_memory_gb",
    "reward_minutes",
    "reward_failure",
    "server_minutes",
    "reward_model_coef",
    "step_rewards",
    *JUDGE_FIELDS,
)
"""Fields of the reward section that define a reward, not its use in training."""
SERVED = (
    *REWARD_MODELS,
    "bf16",
    "trust_remote_code",
    "step_separator",
    "step_rewards",
    "max_tokens_per_microbatch",
)
"""Fields of the model, data, reward and train sections that serve_reward reads."""
GENERATING = (
    *("pretrain", "bf16", "trust_remote_code", "chat_template_kwargs", "chat_template_date"),
    *("prompt_max_len", "generate_max_len", "seed"),
    *("temperature", "top_p", "top_k", "stop", "stop_token_ids", "min_tokens"),
    *("tool_parser", "turn_max_len", "environment_minutes"),
    *(
        "engine_type",
        "engine_tp_size",
        "engine_mem_util",
        "engine_kv_cache_gb",
        "engine_enforce_eager",
    ),
    *("micro_rollout_batch_size", "speculative", "num_draft_tokens", "draft_pretrain"),
)
"""Fields of other sections than strategy and server that serve reads."""
ROLES = ("critic_pretrain", "teacher_pretrain", "teacher_url", *REWARD_MODELS)
"""Models in addition to the actor."""


def fields_read(command: str) -> set[str]:
    """Return the names of the fields that `command` reads in some configuration."""
    if command in ("serve", "serve_reward"):
        own = SERVED if command == "serve_reward" else GENERATING
        return {
            *own,
            *(
                field.name
                for section in (StrategySection, ServerSection)
                for field in fields(section)
            ),
        }

    read = {field.name for section in COMMANDS[command] for field in fields(SECTIONS[section])}
    if command == "evaluate":
        read -= {field.name for field in fields(TrainSection)} - set(OF_EVALUATION)
        read -= {field.name for field in fields(RewardSection)} - set(REWARD_FIELDS)
        read -= {
            *OF_THE_FINAL_MODEL,
            *COLLECTING,
            "teacher_pretrain",
            "teacher_url",
            "learned_turns",
            "deduplicate",
        }

    if "rollout" in COMMANDS[command]:
        read -= {"stop_loss"}
    else:
        read -= {*ROLES, "critic_learning_rate", "draft_learning_rate"}
        read -= {"step_separator"} if command != "train_prm" else set()

    if command in PREFERENCES:
        read -= {field.name for field in fields(PreferenceSection)} - PREFERENCES[command]
        read -= {"reference_key"}

    if command in ("train_rm", "train_dpo"):
        read -= {"label_key", "eval_label_key"}
    if command in ("train_rm", "train_prm"):
        read -= {"learned_turns", "save_adapter_only"}
    if command != "train_ppo":
        read -= {"pretrain_data", "pretrain_split", *OF_SAMPLES}

    return read
