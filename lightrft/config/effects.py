"""Find the flags that the user wrote and that change nothing in this run."""

from lightrft.config.commands import COMMANDS, JUDGE_FIELDS, LORA, fields_read
from lightrft.config.recipe import TEACHERS
from lightrft.config.references import JUDGE, TRACKERS, engine_name, eval_sources, report_names, reward_terms
from lightrft.config.sections import Config, has_episodes, media_columns, needs_critic, needs_reference, section_of_field

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
OF_FAST_ENGINES = ("engine_mem_util", "engine_kv_cache_gb", "engine_enforce_eager")
"""Fields of vLLM and SGLang that the hf engine does not read."""


def flags_without_effect(config: Config, command: str) -> list[str]:
    """Return a sentence for each flag that the user changed and that nothing reads in this run, with the reason."""
    written, read = _changed(config), fields_read(command)
    if command == "evaluate" and not config.rollout.eval_n_samples:
        read -= set(RANDOM)
    unused = [f"--{name} has no effect in {command}" for name in sorted(written - read)]
    needs = _conditions(config, command)
    unused += [f"--{name} has no effect without {needs[name][1]}" for name in needs
               if name in written & read and not needs[name][0]]  # fmt: skip
    if config.strategy.strategy == "fsdp":
        unused += [f"--{name} has no effect with --strategy fsdp" for name in sorted(written & set(ZERO))]
    if config.strategy.strategy == "deepspeed":
        unused += [f"--{name} has no effect with --strategy deepspeed" for name in sorted(written & set(FSDP))]
    return unused


def _changed(config: Config) -> set[str]:
    """Return the written fields without those at their default: a file of a resolved configuration contains every field."""
    owners, default = section_of_field(), Config()
    return {name for name in config.written
            if getattr(getattr(config, owners[name]), name) != getattr(getattr(default, owners[name]), name)}  # fmt: skip


def _computes_before_updates(config: Config) -> bool:
    """Return True if models compute log-probs, entropies or values of samples before the first update on them."""
    algorithm, rollout, train = config.algorithm, config.rollout, config.train
    several = rollout.rollout_batch_size * rollout.n_samples_per_prompt > train.train_batch_size or train.max_epochs > 1
    entropy = bool(algorithm.entropy_filter or algorithm.high_entropy_token_ratio)
    marked = algorithm.policy_loss in ("kl_cov", "clip_cov") or algorithm.distill_coef > 0
    return several or entropy or marked or needs_reference(algorithm) or needs_critic(algorithm)


def _conditions(config: Config, command: str) -> dict[str, tuple[bool, str]]:
    """Return field -> (True if it has an effect, the flag that it needs for one)."""
    model, data, rollout, reward, algorithm = config.model, config.data, config.rollout, config.reward, config.algorithm
    strategy, train, observe = config.strategy, config.train, config.observe
    correction, engine = bool(algorithm.rollout_correction), engine_name(config.engine) if "engine" in COMMANDS[command] else ""
    reward_models = model.reward_pretrain or model.process_reward_pretrain
    several, preference = "," in data.prompt_data, config.preference
    own_columns = "reward" not in COMMANDS[command] or not all(each.benchmark for each in eval_sources(data.eval_data))
    scored = own_columns or command == "train_ppo"
    return {
        "gradient_checkpointing_policy": (model.gradient_checkpointing, "--gradient_checkpointing"),
        "kl_estimator": (needs_reference(algorithm), "--init_kl_coef"),
        "use_kl_loss": (algorithm.init_kl_coef > 0, "--init_kl_coef"),
        "kl_target": (algorithm.init_kl_coef > 0, "--init_kl_coef"),
        "kl_after_baseline": (algorithm.advantage_estimator == "rloo", "--advantage_estimator rloo"),
        **{name: (algorithm.rollout_mask != "none", "--rollout_mask") for name in ("rollout_mask_low", "rollout_mask_high")},
        "kl_horizon": (algorithm.kl_target is not None, "--kl_target"),
        **{name: (correction, "--rollout_correction")
           for name in ("rollout_correction_level", "rollout_correction_low", "rollout_correction_high")},
        "dynamic_sampling_rounds": (rollout.dynamic_sampling, "--dynamic_sampling"),
        "early_stop_every": (rollout.over_sampling > 1 or rollout.rollout_schedule == "longest_first" or rollout.overlap,
                             "--over_sampling"),
        "weight_update": (rollout.max_staleness > 0, "--max_staleness"),
        "partial_rollout": (rollout.over_sampling > 1 or rollout.dynamic_sampling, "--over_sampling"),
        **{name: (has_episodes(config.environment), "--environment, --agent or --tools")
           for name in ("tool_parser", "max_turns", "turn_max_len", "episode_minutes", "tool_seconds", "environment_minutes",
                        "environment_workers", "environment_memory_gb")},
        "overlap": (_computes_before_updates(config) or bool(reward_models), "--init_kl_coef, --max_epochs 2, a critic, or a "
                    "reward model"),
        "curriculum_rest": (bool(rollout.curriculum), "--curriculum"),
        "prompt_data_probs": (several, "several --prompt_data, joined by commas"),
        "reward_model_coef": (scored and bool(reward_models), "--reward_pretrain"),
        **{name: (JUDGE in [term.name for term in reward_terms(reward.reward)], "--reward judge") for name in JUDGE_FIELDS},
        "step_rewards": (bool(model.process_reward_pretrain), "--process_reward_pretrain"),
        "step_separator": (bool(model.process_reward_pretrain) or command == "train_prm", "--process_reward_pretrain"),
        "overlong_buffer_len": (reward.overlong_buffer, "--overlong_buffer"),
        "overlong_buffer_penalty_factor": (reward.overlong_buffer, "--overlong_buffer"),
        "reward_running_norm_minus_mean": (reward.reward_running_norm, "--reward_running_norm"),
        "num_draft_tokens": (config.engine.speculative != "none", "--speculative"),
        "engine_sleep_level": (config.engine.enable_engine_sleep, "--enable_engine_sleep"),
        "limit_mm_image_per_prompt": (bool(data.images_key), "--images_key"),
        **{name: (bool(data.videos_key), "--videos_key")
           for name in ("limit_mm_video_per_prompt", "video_fps", "video_max_frames")},
        **{name: (bool(data.audios_key), "--audios_key") for name in ("limit_mm_audio_per_prompt", "audio_sampling_rate")},
        **{name: (bool(media_columns(data)), "--images_key, --videos_key or --audios_key") for name in OF_MEDIA},
        **{name: (bool(data.eval_data), "--eval_data") for name in ("eval_n_samples", "eval_steps", "eval_split",
                                                                    "max_eval_samples")},
        **{name: (bool(data.eval_data) and own_columns, "--eval_data in other formats than those of benchmarks")
           for name in ("eval_input_key", "eval_label_key")},
        **{name: (scored, "--eval_data in other formats than those of benchmarks") for name in REWARDS},
        **{name: (bool(tracker & set(report_names(observe.report_to))), f"--report_to {' or '.join(sorted(tracker))}")
           for name, tracker in TRACKER_NAMES.items()},
        "eval_temperature": (rollout.eval_n_samples > 0, "--eval_n_samples"),
        "tp_sequence_parallel": (strategy.tp_size > 1, "--tp_size"),
        "sp_impl": (strategy.sp_size > 1 or strategy.cp_size > 1, "--sp_size"),
        "grad_accum_dtype": (model.bf16, "--bf16"),
        "ema_beta": (train.enable_ema, "--enable_ema"),
        "learned_turns": (command != "train_ppo" or bool(data.pretrain_data), "--pretrain_data"),
        "tie_threshold": (preference.rm_loss == "ties", "--rm_loss ties"),
        "system_prompt": (data.apply_chat_template, "--apply_chat_template"),
        "chat_template_kwargs": (data.apply_chat_template, "--apply_chat_template"),
        **{name: (train.save_steps > 0 or train.load_checkpoint, "--save_steps") for name in OF_CHECKPOINTS},
        **{name: (model.lora_rank > 0, "--lora_rank") for name in (*LORA, "save_adapter_only")},
        **{name: (needs_critic(algorithm), "--advantage_estimator ppo") for name in CRITIC},
        **{name: (bool(data.pretrain_data), "--pretrain_data") for name in ("ptx_coef", "pretrain_split")},
        **{name: (algorithm.distill_coef > 0, "--distill_coef") for name in TEACHERS},
        **{name: (engine != "hf", "--engine_type vllm or sglang") for name in OF_FAST_ENGINES},
        "micro_rollout_batch_size": (engine == "hf", "--engine_type hf"),
    }  # fmt: skip


