#!/usr/bin/env bash
# GRPO on GSM8K, Qwen2.5-0.5B, FSDP2, vLLM: bash scripts/run_grpo_gsm8k.sh [flags of train_ppo]
# DATA: folder of the prepared problems.   CONFIG: another recipe for them.   NPROC, NNODES, ...: see launch.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

DATA=${DATA:-data/gsm8k}
[[ -e $DATA/test.jsonl ]] || python scripts/prepare_gsm8k.py --out "$DATA"

exec bash scripts/launch.sh train_ppo --config "${CONFIG:-configs/grpo_gsm8k_qwen2.5_0.5b.yaml}" \
    --prompt_data "$DATA/train.jsonl" --eval_data "$DATA/test.jsonl" "$@"
