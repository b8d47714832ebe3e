#!/usr/bin/env bash
# GSPO on GSM8K: ratios of whole responses, clipped within 4e-4, no divergence: bash scripts/run_gspo_gsm8k.sh [flags of train_ppo]
set -euo pipefail
exec bash "$(dirname "$0")/run_grpo_gsm8k.sh" --policy_loss gspo --eps_clip_low 3e-4 --eps_clip_high 4e-4 \
    --use_kl_loss false --init_kl_coef 0 --save_path runs/gspo_gsm8k "$@"
