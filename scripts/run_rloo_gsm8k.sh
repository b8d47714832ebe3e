#!/usr/bin/env bash
# RLOO on GSM8K: every sample against the mean of its prompt's others: bash scripts/run_rloo_gsm8k.sh [flags of train_ppo]
# Its loss is exact on policy only, so all samples of a step make one update.
set -euo pipefail
exec bash "$(dirname "$0")/run_grpo_gsm8k.sh" --advantage_estimator rloo --train_batch_size 1024 --save_path runs/rloo_gsm8k "$@"
