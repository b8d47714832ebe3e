#!/usr/bin/env bash
# GRPO on GSM8K, Qwen2.5-7B, FSDP2, two ranks to an engine: bash scripts/run_grpo_gsm8k_7b.sh [flags of train_ppo]
set -euo pipefail
export CONFIG=configs/grpo_gsm8k_qwen2.5_7b.yaml
exec bash "$(dirname "$0")/run_grpo_gsm8k.sh" "$@"
