#!/usr/bin/env bash
# GRPO on GSM8K on this machine: bash scripts/run_grpo_gsm8k.sh [flags of train_ppo]
# NPROC: processes, one per GPU; unset: all GPUs of the machine.   DATA: folder of the prepared problems.
set -euo pipefail
cd "$(dirname "$0")/.."

DATA=${DATA:-data/gsm8k}
NPROC=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)}
if ((NPROC == 0)); then
    echo "no GPU found; on another kind of accelerator say how many processes: NPROC=4 bash $0" >&2
    exit 1
fi

[[ -e $DATA/test.jsonl ]] || python scripts/prepare_gsm8k.py --out "$DATA"

exec torchrun --standalone --nproc-per-node "$NPROC" -m lightrft.cli.train_ppo \
    --config configs/grpo_gsm8k_qwen2.5_0.5b.yaml \
    --prompt_data "$DATA/train.jsonl" --eval_data "$DATA/test.jsonl" "$@"
