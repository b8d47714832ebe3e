#!/usr/bin/env bash
# RLOO on GSM8K: every sample against the mean of its prompt's others: bash scripts/run_rloo_gsm8k.sh [flags of train_ppo]
set -euo pipefail
exec bash "$(dirname "$0")/run_grpo_gsm8k.sh" --advantage_estimator rloo --save_path runs/rloo_gsm8k "$@"
