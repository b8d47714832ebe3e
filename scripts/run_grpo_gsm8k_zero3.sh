#!/usr/bin/env bash
# GRPO on GSM8K with DeepSpeed ZeRO-3 (pip install '.[vllm,deepspeed]'): bash scripts/run_grpo_gsm8k_zero3.sh [flags of train_ppo]
set -euo pipefail
exec bash "$(dirname "$0")/run_grpo_gsm8k.sh" --fsdp false --zero_stage 3 --save_path runs/grpo_gsm8k_zero3 "$@"
