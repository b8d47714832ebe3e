"""Flags of TRL's configurations, and other common names, that this program does not have -> what to
write instead.

An answer is the name of a flag, or a sentence if more than the name differs.
"""

TRL_FLAGS = {
    # ModelConfig and ScriptArguments
    "model_name_or_path": "pretrain",
    "model_revision": (
        "models are loaded from a folder or from the hub's main branch: download the revision and"
        " name its folder"
    ),
    "dtype": "write --bf16, or nothing for float32",
    "torch_dtype": "write --bf16, or nothing for float32",
    "fp16": "write --bf16: half precision is not supported",
    "use_peft": "write --lora_rank N",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "load_in_8bit": (
        "quantised weights are not supported; --lora_rank trains adapters of the unquantised model"
    ),
    "dataset_name": "prompt_data",
    "dataset_path": "prompt_data",
    "dataset_train_split": "prompt_split",
    "dataset_test_split": "eval_split",
    # TrainingArguments
    "output_dir": "save_path",
    "overwrite_output_dir": "overwrite",
    "per_device_train_batch_size": (
        "write --train_batch_size, the samples of one optimizer step on all devices, and "
        "--max_tokens_per_microbatch for what fits on one"
    ),
    "gradient_accumulation_steps": (
        "write --train_batch_size, the samples of one optimizer step on all devices"
    ),
    "per_device_eval_batch_size": "write --max_tokens_per_logprob_microbatch",
    "num_train_epochs": "num_episodes",
    "max_grad_norm": "max_norm",
    "warmup_ratio": "lr_warmup_ratio",
    "warmup_steps": "write --lr_warmup_ratio, the share of all steps",
    "lr_scheduler_type": "lr_scheduler",
    "weight_decay": "l2",
    "adam_beta1": "write --adam_betas 0.9,0.95",
    "adam_beta2": "write --adam_betas 0.9,0.95",
    "optim": "write --optimizer adamw or muon; its other flags are --help optim",
    "eval_strategy": "write --eval_steps N",
    "save_strategy": "write --save_steps N",
    "save_total_limit": "max_ckpt_num",
    "resume_from_checkpoint": "load_checkpoint",
    "run_name": "tracker_run_name",
    "logging_dir": "metrics are in --save_path",
    "deepspeed": "write --strategy deepspeed and --zero_stage N",
    "fsdp_config": "write --fsdp; its flags are --help strategy",
    "ddp_timeout": "timeout_minutes",
    "dataloader_num_workers": "data are read in the background without a setting",
    "remove_unused_columns": "all columns reach the reward function without a setting",
    "hub_model_id": "push_to_hub",
    # GRPOConfig, RLOOConfig, PPOConfig
    "num_generations": "n_samples_per_prompt",
    "max_prompt_length": "prompt_max_len",
    "max_completion_length": "generate_max_len",
    "response_length": "generate_max_len",
    "num_iterations": "max_epochs",
    "num_ppo_epochs": "max_epochs",
    "steps_per_generation": (
        "write --rollout_batch_size, the prompts of a step, and --train_batch_size, the samples of"
        " an update"
    ),
    "generation_batch_size": "write --rollout_batch_size, the prompts of a step",
    "epsilon": "eps_clip_low",
    "epsilon_high": "eps_clip_high",
    "cliprange": "eps_clip",
    "cliprange_value": "value_clip",
    "kl_coef": "init_kl_coef",
    "whiten_rewards": "advantages_norm",
    "delta": "dual_clip",
    "loss_type": (
        "write --advantage_estimator (grpo, dapo, dr_grpo, ...) or --loss_agg_mode; in train_dpo"
        " --dpo_loss"
    ),
    "scale_rewards": (
        "write --advantage_estimator dr_grpo, which does not divide by the standard deviation of a"
        " group"
    ),
    "importance_sampling_level": "write --policy_loss gspo for ratios of sequences",
    "off_policy_mask_threshold": "off_policy_delta",
    "multi_objective_aggregation": (
        "write --advantage_estimator gdpo to normalise each reward before the sum"
    ),
    "reward_funcs": "reward",
    "reward_func": "reward",
    "reward_weights": "write --reward NAME:WEIGHT,NAME:WEIGHT",
    "reward_model_path": "reward_pretrain",
    "reward_model_name_or_path": "reward_pretrain",
    "mask_truncated_completions": "mask_truncated",
    "top_entropy_quantile": "high_entropy_token_ratio",
    "sync_ref_model": "the reference of --init_kl_coef stays the model of the start",
    "use_vllm": "write --engine_type vllm",
    "vllm_mode": (
        "the engine shares the devices of training; --rollout_ranks N keeps N processes for"
        " generation alone"
    ),
    "vllm_importance_sampling_correction": "write --rollout_correction tis",
    "log_completions": "num_trajectories_to_save",
    # SFTConfig, DPOConfig, KTOConfig, RewardConfig
    "max_length": (
        "write --prompt_max_len; an answer may be as long as --max_tokens_per_microbatch allows"
    ),
    "max_seq_length": (
        "write --prompt_max_len; an answer may be as long as --max_tokens_per_microbatch allows"
    ),
    "packing": "sequences are packed without a setting (--batching)",
    "padding_free": "sequences are packed without a setting (--batching)",
    "assistant_only_loss": (
        "only answers are learned without a setting; --learned_turns last: the last one alone"
    ),
    "completion_only_loss": "only answers are learned without a setting",
    "dataset_text_field": "input_key",
    "rpo_alpha": "sft_coef",
    "precompute_ref_log_probs": "precompute_reference",
    "ref_model": "the reference is --pretrain itself",
    # names of no particular tool
    "train_data": "prompt_data",
    "dataset": "prompt_data",
    "output_key": "label_key",
    "lr": "learning_rate",
    "batch_size": "train_batch_size",
    "epochs": "num_episodes",
    "max_response_length": "generate_max_len",
}
