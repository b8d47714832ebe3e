"""Find the flags that the user wrote and that change nothing in this run."""

from collections.abc import Iterator, Sequence

from lightrft.config.commands import COMMANDS, JUDGE_FIELDS, LORA, fields_read
from lightrft.config.recipe import TEACHERS
from lightrft.config.references import (
    JUDGE,
    TRACKERS,
    engine_name,
    eval_sources,
    report_names,
    reward_terms,
)
from lightrft.config.sections import (
    Config,
    has_episodes,
    media_columns,
    needs_critic,
    needs_reference,
    section_of_field,
)

CRITIC = ("critic_pretrain", "critic_learning_rate", "lambd", "value_clip")
"""Fields of the critic."""

RANDOM = ("temperature", "top_p", "top_k", "first_token_temperature")
"""Fields of sampling that greedy responses do not use."""

ZERO = ("zero_stage", "zpg", "adam_offload", "param_offload", "overlap_comm", "grad_accum_dtype")
"""Fields of DeepSpeed only."""

FSDP = ("fsdp_cpu_offload", "reduce_gradients_once")
"""Fields of FSDP2 only."""

OF_MEDIA = ("freeze_vision_tower", "media_root", "check_media", "media_max_mb", "media_urls")
"""Fields of prompts with images, videos or sound."""

REWARDS = ("reward", "reward_key", "reward_pretrain")
"""Fields of the rewards that score data in columns of the user's own."""

TRACKER_NAMES = {
    **{name: set(TRACKERS) for name in ("tracker_project", "tracker_run_name")},
    "tracker_org": {"wandb", "swanlab", "comet_ml"},
    "tracker_group": {"wandb", "swanlab", "trackio"},
}
"""Fields of names in trackers -> the trackers that know them."""

OF_CHECKPOINTS = ("ckpt_path", "max_ckpt_num", "max_ckpt_mem", "save_hf_ckpt", "async_save")
CORRECTION = ("rollout_correction_level", "rollout_correction_low", "rollout_correction_high")
OF_EPISODES = (
    "tool_parser",
    "max_turns",
    "turn_max_len",
    "episode_minutes",
    "tool_seconds",
    "environment_minutes",
    "environment_workers",
    "environment_memory_gb",
)
OF_FAST_ENGINES = ("engine_mem_util", "engine_kv_cache_gb", "engine_enforce_eager")
"""Fields of vLLM and SGLang that the hf engine does not read."""

MEANT = {("train_ppo", "beta"): "; the coefficient of the divergence is --init_kl_coef"}
"""Command and a flag of another one -> the flag that has the meaning here which other tools give to
it."""

Condition = tuple[bool, str, Sequence[str]]
"""(True if the fields have an effect, the flag that they need for one, the fields)."""


def flags_without_effect(config: Config, command: str) -> list[str]:
    """Return a sentence for each flag that the user changed and that nothing reads in this run,
    with the reason.
    """
    written = _changed(config)
    read = fields_read(command)
    if command == "evaluate" and not config.rollout.eval_n_samples:
        read -= set(RANDOM)
    unused = [
        f"--{name} has no effect in {command}{MEANT.get((command, name), '')}"
        for name in sorted(written - read)
    ]

    conditions = (
        *_of_models(config, command),
        *_of_algorithm(config),
        *_of_rollout(config),
        *_of_data(config, command),
    )
    unused += [
        f"--{name} has no effect without {flag}"
        for has_effect, flag, names in conditions
        if not has_effect
        for name in names
        if name in written & read
    ]

    if config.strategy.strategy == "fsdp":
        unused += [
            f"--{name} has no effect with --strategy fsdp" for name in sorted(written & set(ZERO))
        ]

    if config.strategy.strategy == "deepspeed":
        unused += [
            f"--{name} has no effect with --strategy deepspeed"
            for name in sorted(written & set(FSDP))
        ]

    return unused


def _changed(config: Config) -> set[str]:
    """Return the written fields without those at their default: a file of a resolved configuration
    contains every field.
    """
    owners = section_of_field()
    default = Config()
    return {
        name
        for name in config.written
        if getattr(getattr(config, owners[name]), name)
        != getattr(getattr(default, owners[name]), name)
    }


def _computes_before_updates(config: Config) -> bool:
    """Return True if models compute log-probs, entropies or values of samples before the first
    update on them.
    """
    algorithm = config.algorithm
    rollout = config.rollout
    train = config.train
    several = (
        rollout.rollout_batch_size * rollout.n_samples_per_prompt > train.train_batch_size
        or train.max_epochs > 1
    )
    entropy = bool(algorithm.entropy_filter or algorithm.high_entropy_token_ratio)
    marked = algorithm.policy_loss in ("kl_cov", "clip_cov") or algorithm.distill_coef > 0
    return several or entropy or marked or needs_reference(algorithm) or needs_critic(algorithm)


def _of_models(config: Config, command: str) -> Iterator[Condition]:
    model = config.model
    strategy = config.strategy
    train = config.train
    engine = engine_name(config.engine) if "engine" in COMMANDS[command] else ""
    process_model = bool(model.process_reward_pretrain)
    yield (
        model.gradient_checkpointing,
        "--gradient_checkpointing",
        ("gradient_checkpointing_policy",),
    )
    yield model.lora_rank > 0, "--lora_rank", (*LORA, "save_adapter_only")
    yield model.bf16, "--bf16", ("grad_accum_dtype",)
    yield process_model, "--process_reward_pretrain", ("step_rewards",)
    yield process_model or command == "train_prm", "--process_reward_pretrain", ("step_separator",)
    yield strategy.tp_size > 1, "--tp_size", ("tp_sequence_parallel",)
    yield strategy.sp_size > 1 or strategy.cp_size > 1, "--sp_size", ("sp_impl",)
    yield train.enable_ema, "--enable_ema", ("ema_beta",)
    yield train.save_steps > 0 or train.load_checkpoint, "--save_steps", OF_CHECKPOINTS
    yield config.preference.rm_loss == "ties", "--rm_loss ties", ("tie_threshold",)
    yield engine != "hf", "--engine_type vllm or sglang", OF_FAST_ENGINES
    yield engine == "hf", "--engine_type hf", ("micro_rollout_batch_size",)
    yield config.engine.speculative != "none", "--speculative", ("num_draft_tokens",)
    yield config.engine.speculative == "draft", "--speculative draft", ("draft_learning_rate",)
    yield config.engine.enable_engine_sleep, "--enable_engine_sleep", ("engine_sleep_level",)


def _of_algorithm(config: Config) -> Iterator[Condition]:
    algorithm = config.algorithm
    yield needs_reference(algorithm), "--init_kl_coef", ("kl_estimator",)
    yield algorithm.init_kl_coef > 0, "--init_kl_coef", ("use_kl_loss", "kl_target")
    yield algorithm.kl_target is not None, "--kl_target", ("kl_horizon",)
    yield (
        algorithm.advantage_estimator == "rloo",
        "--advantage_estimator rloo",
        ("kl_after_baseline",),
    )

    yield (
        algorithm.rollout_mask != "none",
        "--rollout_mask",
        ("rollout_mask_low", "rollout_mask_high"),
    )
    yield bool(algorithm.rollout_correction), "--rollout_correction", CORRECTION
    yield needs_critic(algorithm), "--advantage_estimator ppo", CRITIC
    yield algorithm.distill_coef > 0, "--distill_coef", TEACHERS


def _of_rollout(config: Config) -> Iterator[Condition]:
    rollout = config.rollout
    reward = config.reward
    reward_models = bool(config.model.reward_pretrain or config.model.process_reward_pretrain)
    over_sampling = rollout.over_sampling > 1
    longest_first = rollout.rollout_schedule == "longest_first"
    yield rollout.dynamic_sampling, "--dynamic_sampling", ("dynamic_sampling_rounds",)
    yield (
        over_sampling or longest_first or rollout.overlap,
        "--over_sampling",
        ("early_stop_every",),
    )
    yield over_sampling or rollout.dynamic_sampling, "--over_sampling", ("partial_rollout",)
    yield rollout.max_staleness > 0, "--max_staleness", ("weight_update",)
    yield has_episodes(config.environment), "--environment, --agent or --tools", OF_EPISODES
    overlaps = _computes_before_updates(config) or reward_models
    yield overlaps, "--init_kl_coef, --max_epochs 2, a critic, or a reward model", ("overlap",)
    yield bool(rollout.curriculum), "--curriculum", ("curriculum_rest",)
    yield rollout.eval_n_samples > 0, "--eval_n_samples", ("eval_temperature",)

    yield (
        JUDGE in [term.name for term in reward_terms(reward.reward)],
        "--reward judge",
        JUDGE_FIELDS,
    )
    yield (
        reward.overlong_buffer,
        "--overlong_buffer",
        ("overlong_buffer_len", "overlong_buffer_penalty_factor"),
    )
    yield reward.reward_running_norm, "--reward_running_norm", ("reward_running_norm_minus_mean",)


def _of_data(config: Config, command: str) -> Iterator[Condition]:
    data = config.data
    reward_models = bool(config.model.reward_pretrain or config.model.process_reward_pretrain)
    own_columns = "reward" not in COMMANDS[command] or not all(
        each.benchmark for each in eval_sources(data.eval_data)
    )
    scored = own_columns or command == "train_ppo"
    other_formats = "--eval_data in other formats than those of benchmarks"
    yield "," in data.prompt_data, "several --prompt_data, joined by commas", ("prompt_data_probs",)
    yield scored, other_formats, REWARDS
    yield scored and reward_models, "--reward_pretrain", ("reward_model_coef",)

    yield (
        bool(data.eval_data),
        "--eval_data",
        ("eval_n_samples", "eval_steps", "eval_split", "max_eval_samples"),
    )
    yield bool(data.eval_data) and own_columns, other_formats, ("eval_input_key", "eval_label_key")
    yield bool(data.images_key), "--images_key", ("limit_mm_image_per_prompt",)
    yield (
        bool(data.videos_key),
        "--videos_key",
        ("limit_mm_video_per_prompt", "video_fps", "video_max_frames"),
    )

    yield (
        bool(data.audios_key),
        "--audios_key",
        ("limit_mm_audio_per_prompt", "audio_sampling_rate"),
    )
    yield bool(media_columns(data)), "--images_key, --videos_key or --audios_key", OF_MEDIA
    yield (
        data.apply_chat_template,
        "--apply_chat_template",
        ("system_prompt", "chat_template_kwargs", "chat_template_date"),
    )
    yield bool(data.pretrain_data), "--pretrain_data", ("ptx_coef", "pretrain_split")
    yield command != "train_ppo" or bool(data.pretrain_data), "--pretrain_data", ("learned_turns",)
    destinations = set(report_names(config.observe.report_to))
    for name, trackers in TRACKER_NAMES.items():
        yield bool(trackers & destinations), f"--report_to {' or '.join(sorted(trackers))}", (name,)
