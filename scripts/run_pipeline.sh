#!/usr/bin/env bash
# The whole chain from nothing, on a machine without an accelerator: SFT, a reward model, PPO with it, DPO, and evaluations.
#     bash scripts/run_pipeline.sh [--seed N] [--out folder] [--small]
# NPROC (2) is the number of processes. It runs in the present environment if that has lightrft, else in the one of environment.sh.
# --small takes two steps of everything, to see that the parts fit together.
set -euo pipefail

seed=0 out=runs/pipeline small=""
while (($#)); do
    case $1 in
        --seed) seed=${2:?--seed needs a number}; shift 2 ;;
        --out) out=$(realpath -m "${2:?--out needs a folder}"); shift 2 ;;
        --small) small=yes; shift ;;
        *) echo "usage: bash scripts/run_pipeline.sh [--seed N] [--out folder] [--small]; unknown: $1" >&2; exit 2 ;;
    esac
done

# From the root of a clone lightrft can be imported everywhere, so torch is asked for too.
if python -c 'import torch, transformers, lightrft' 2>/dev/null; then
    cd "$(dirname "$0")/.."
else
    # shellcheck source=scripts/environment.sh
    source "$(dirname "$0")/environment.sh"
fi
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR

phase() { printf '\n=== %4d s  %s\n' "$SECONDS" "$*"; }

# COMMAND CONFIG NAME STEPS FLAGS...: a run in $out/NAME.
run() {
    local command=$1 config=$2 name=$3 steps=$4
    shift 4
    [[ -n $small ]] && steps=2
    torchrun --standalone --nproc-per-node "${NPROC:-2}" -m "lightrft.cli.$command" --config "configs/$config" \
        --max_steps "$steps" --seed "$seed" --save_path "$out/$name" --overwrite \
        ${small:+--max_samples 128 --max_eval_samples 16} "$@"
}

# Share of right answers to held-out problems.
evaluate() {
    python -m lightrft.cli.evaluate --fsdp --engine_type hf --pretrain "$1" --eval_data "$out/data/test.jsonl" \
        --generate_max_len 4 --micro_rollout_batch_size 512 --seed "$seed" --save_path "$out/$2" ${small:+--max_eval_samples 16}
}

phase "1 of 6: a random model and 10,000 problems with judged answers"
python scripts/prepare_quickstart.py --out "$out/data" --seed "$seed"

phase "2 of 6: supervised fine-tuning"
run train_sft quickstart_sft.yaml sft 600 --pretrain "$out/data/model" --prompt_data "$out/data/train.jsonl"
evaluate "$out/sft/model" eval_after_sft

phase "3 of 6: a reward model, from the model after SFT"
run train_rm quickstart_rm.yaml rm 1500 --pretrain "$out/sft/model" --prompt_data "$out/data/pairs" \
    --eval_data "$out/data/pairs" --num_episodes 20

# The KL penalty keeps the model close to the one after SFT, whose answers the reward model was trained on.
phase "4 of 6: PPO (GRPO) with the reward model as the only reward"
run train_ppo quickstart.yaml ppo 45 --pretrain "$out/sft/model" --prompt_data "$out/data/train.jsonl" \
    --eval_data "$out/data/test.jsonl" --engine_type hf --micro_rollout_batch_size 512 --reward none \
    --reward_pretrain "$out/rm/model" --learning_rate 6e-4 --init_kl_coef 0.03 \
    --eval_steps=-1 --save_steps=-1 ${small:+--rollout_batch_size 8 --train_batch_size 64}
evaluate "$out/ppo/model" eval_after_ppo

phase "5 of 6: DPO, from the model after PPO"
run train_dpo quickstart_dpo.yaml dpo 200 --pretrain "$out/ppo/model" --prompt_data "$out/data/pairs" \
    --eval_data "$out/data/pairs" --learning_rate 3e-4 --eval_steps=-1
evaluate "$out/dpo/model" eval_after_dpo

phase "6 of 6: share of right answers to held-out problems"
for stage in sft ppo dpo; do
    printf '  after %-4s %s\n' "$stage" "$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["accuracy"])' \
        "$out/eval_after_$stage/evaluation.json")"
done
