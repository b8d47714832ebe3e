"""Keys of verl's configuration, such as `data.train_batch_size=1024` -> what to write instead.

An answer is the name of a flag, or a sentence if more than the name differs.
"""

import re

BY_LAUNCHER = "torchrun or srun sets the number of processes"
WITHOUT_SETTING = "this is so without a setting"
LOG_PROBS = "max_tokens_per_logprob_microbatch"

VERL_KEYS = {
    "data.train_files": "prompt_data",
    "data.val_files": "eval_data",
    "data.prompt_key": "input_key",
    "data.image_key": "images_key",
    "data.video_key": "videos_key",
    "data.reward_fn_key": "reward_key",
    "data.train_batch_size": "rollout_batch_size",
    "data.gen_batch_size": "write --over_sampling, a factor of --rollout_batch_size",
    "data.max_prompt_length": "prompt_max_len",
    "data.max_response_length": "generate_max_len",
    "data.train_max_samples": "max_samples",
    "data.val_max_samples": "max_eval_samples",
    "data.filter_overlong_prompts": "write --bad_rows skip",
    "data.truncation": "a prompt that is too long is a bad row: --bad_rows skip omits it",
    "data.shuffle": WITHOUT_SETTING,
    "data.seed": "seed",
    "data.trust_remote_code": "trust_remote_code",
    "data.apply_chat_template_kwargs": "chat_template_kwargs",
    "actor_rollout_ref.hybrid_engine": WITHOUT_SETTING,
    "actor_rollout_ref.model.path": "pretrain",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": WITHOUT_SETTING,
    "actor_rollout_ref.model.use_fused_kernels": WITHOUT_SETTING,
    "actor_rollout_ref.model.use_liger": "write --fused_kernels liger",
    "actor_rollout_ref.model.lora_rank": "lora_rank",
    "actor_rollout_ref.model.lora_alpha": "lora_alpha",
    "actor_rollout_ref.model.target_modules": "target_modules",
    "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
    "actor_rollout_ref.actor.strategy": "strategy",
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "lr_warmup_ratio",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": (
        "write --lr_warmup_ratio, the share of all steps"
    ),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "lr_scheduler",
    "actor_rollout_ref.actor.optim.warmup_style": "lr_scheduler",
    "actor_rollout_ref.actor.optim.weight_decay": "l2",
    "actor_rollout_ref.actor.optim.betas": "adam_betas",
    "actor_rollout_ref.actor.optim.clip_grad": "max_norm",
    "actor_rollout_ref.actor.grad_clip": "max_norm",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "write --train_batch_size, which counts samples where verl counts prompts: "
        "multiply by --n_samples_per_prompt"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": "micro_train_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "micro_train_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "max_tokens_per_microbatch",
    "actor_rollout_ref.actor.use_dynamic_bsz": WITHOUT_SETTING,
    "actor_rollout_ref.actor.ppo_epochs": "max_epochs",
    "actor_rollout_ref.actor.clip_ratio": "eps_clip",
    "actor_rollout_ref.actor.clip_ratio_low": "eps_clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "eps_clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": "use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef": "init_kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": (
        "write --kl_estimator: k1 (kl), k2 (mse), k3 (low_var_kl) or k3+"
    ),
    "actor_rollout_ref.actor.loss_agg_mode": "loss_agg_mode",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "policy_loss",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "sp_size",
    "actor_rollout_ref.actor.use_torch_compile": "torch.compile is not used",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "fsdp_cpu_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "fsdp_cpu_offload",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": (
        "write --dp_replicate, the number of copies of the model"
    ),
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "write --bf16, or nothing for float32",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "offload_idle",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": LOG_PROBS,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": LOG_PROBS,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": LOG_PROBS,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.name": "engine_type",
    "actor_rollout_ref.rollout.mode": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.n": "n_samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "temperature",
    "actor_rollout_ref.rollout.top_p": "top_p",
    "actor_rollout_ref.rollout.top_k": "write --top_k; all tokens are 0 instead of -1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine_tp_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "engine_mem_util",
    "actor_rollout_ref.rollout.enforce_eager": "engine_enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine": "enable_engine_sleep",
    "actor_rollout_ref.rollout.calculate_log_probs": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.enable_chunked_prefill": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.load_format": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.layered_summon": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": LOG_PROBS,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": LOG_PROBS,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": LOG_PROBS,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": WITHOUT_SETTING,
    "actor_rollout_ref.rollout.val_kwargs.n": "eval_n_samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval_temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (
        "a greedy response is always evaluated; --eval_n_samples N samples more"
    ),
    "actor_rollout_ref.rollout.multi_turn.enable": "write --tools or --environment",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools",
    "actor_rollout_ref.rollout.multi_turn.format": "tool_parser",
    "critic.model.path": "critic_pretrain",
    "critic.optim.lr": "critic_learning_rate",
    "critic.cliprange_value": "value_clip",
    "critic.enable": "write --advantage_estimator ppo, which has a critic",
    "reward_model.enable": "write --reward_pretrain",
    "reward_model.model.path": "reward_pretrain",
    "reward_model.reward_manager": "reward",
    "custom_reward_function.path": (
        "write --reward FILE:NAME; a function compute_score works unchanged"
    ),
    "custom_reward_function.name": (
        "write --reward FILE:NAME; a function compute_score works unchanged"
    ),
    "algorithm.adv_estimator": "advantage_estimator",
    "algorithm.gamma": "gamma",
    "algorithm.lam": "lambd",
    "algorithm.use_kl_in_reward": "write --init_kl_coef C --use_kl_loss false",
    "algorithm.kl_penalty": "write --kl_estimator: k1 (kl), k2 (mse), k3 (low_var_kl) or k3+",
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
    "algorithm.kl_ctrl.type": "the coefficient is fixed, unless --kl_target adapts it",
    "algorithm.kl_ctrl.target_kl": "kl_target",
    "algorithm.kl_ctrl.horizon": "kl_horizon",
    "algorithm.norm_adv_by_std_in_grpo": "write --advantage_estimator dr_grpo for false",
    "algorithm.filter_groups.enable": "dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": "dynamic_sampling_rounds",
    "algorithm.rollout_correction.rollout_is": "rollout_correction",
    "trainer.total_epochs": "num_episodes",
    "trainer.total_training_steps": "max_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.val_before_train": "write `lightrft evaluate` before the run",
    "trainer.critic_warmup": "freezing_actor_steps",
    "trainer.project_name": "tracker_project",
    "trainer.experiment_name": "tracker_run_name",
    "trainer.logger": "report_to",
    "trainer.default_local_dir": "save_path",
    "trainer.resume_mode": "load_checkpoint",
    "trainer.max_actor_ckpt_to_keep": "max_ckpt_num",
    "trainer.balance_batch": WITHOUT_SETTING,
    "trainer.device": WITHOUT_SETTING,
    "trainer.n_gpus_per_node": BY_LAUNCHER,
    "trainer.nnodes": BY_LAUNCHER,
}

SETTING_KEY = re.compile(
    r"\+{0,2}~?((?:data|actor_rollout_ref|critic|reward_model|reward|algorithm|trainer"
    r"|custom_reward_function|global_profiler|ray_kwargs)\.[\w.]+)=(.*)",
    re.DOTALL,
)


def is_verl_key(token: str) -> bool:
    """Return True for `data.train_batch_size=1024` and the like."""
    return SETTING_KEY.fullmatch(token) is not None


def verl_problems(tokens: list[str]) -> list[str]:
    """Return what to write instead of each key of verl."""
    answers = []
    for key, value in (match.groups() for match in map(SETTING_KEY.fullmatch, tokens) if match):
        answer = VERL_KEYS.get(key, "no flag has this meaning")
        answers.append(f"{key}: {answer}" if " " in answer else f"{key}: write --{answer} {value}")
    return answers
