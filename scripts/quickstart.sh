#!/usr/bin/env bash
# From nothing to a model that learned by GRPO, on a machine without an accelerator:
#     bash scripts/quickstart.sh [--seed N] [--out folder]
# Once more into the same folder: the results of before are then in FOLDER.previous and FOLDER/sft.previous.
set -euo pipefail

seed=0 out=runs/quickstart
while (($#)); do
    case $1 in
        --seed) seed=${2:?--seed needs a number} ;;
        --out) out=$(realpath -m "${2:?--out needs a folder}") ;;
        *) echo "usage: bash scripts/quickstart.sh [--seed N] [--out folder]; unknown: $1" >&2; exit 2 ;;
    esac
    shift 2
done

phase() { printf '\n=== %4d s  %s\n' "$SECONDS" "$*"; }
two_ranks() { torchrun --standalone --nproc-per-node 2 -m "$@"; }

# Greedy answers of transformers itself: another program than the engine that trained.
evaluate() {
    python -m lightrft evaluate --fsdp --engine_type hf --pretrain "$1" --eval_data "$out/data/test.jsonl" \
        --generate_max_len 4 --micro_rollout_batch_size 512 --seed "$seed" --save_path "$out/$2"
}

source "$(dirname "$0")/environment.sh"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 # nothing is downloaded here
export TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-torch._library.triton # a CPU without Triton and NUMA is no news here

phase "1 of 7: a tokenizer, a random Qwen3 and 10,000 problems"
python scripts/prepare_quickstart.py --out "$out/data" --seed "$seed"

phase "2 of 7: what the random model can do"
evaluate "$out/data/model" eval_before_sft

phase "3 of 7: warm-up by supervised fine-tuning"
two_ranks lightrft train_sft --config configs/quickstart_sft.yaml --seed "$seed" \
    --pretrain "$out/data/model" --prompt_data "$out/data/train.jsonl" --save_path "$out/sft" --overwrite

phase "4 of 7: what the warmed-up model can do"
evaluate "$out/sft/model" eval_after_sft

phase "5 of 7: GRPO, two ranks, vLLM beside the trainer"
two_ranks lightrft train_ppo --config configs/quickstart.yaml --seed "$seed" \
    --pretrain "$out/sft/model" --prompt_data "$out/data/train.jsonl" --eval_data "$out/data/test.jsonl" --save_path "$out" \
    --overwrite

phase "6 of 7: what the trained model can do"
evaluate "$out/model" eval_after_rl

phase "7 of 7: summary and report"
python scripts/summarize_quickstart.py "$out" --wall_s "$SECONDS" --install_s "$(cat "$VIRTUAL_ENV/install_s")" --seed "$seed"
python -m lightrft report "$out"
