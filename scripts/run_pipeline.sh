#!/usr/bin/env bash
# The whole chain from nothing, on a machine without an accelerator: SFT, pairs of the model's own answers, a reward model,
# PPO with it, DPO, and evaluations.
#     bash scripts/run_pipeline.sh [--seed N] [--out folder] [--small]
# NPROC (2) is the number of processes. It runs in the present environment if that has lightrft, else in the one of environment.sh.
# --small shortens everything. DPO still learns then, and the reward model and PPO only show that the parts fit together.
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
ranks() { torchrun --standalone --nproc-per-node "${NPROC:-2}" -m lightrft "$1" --seed "$seed" "${@:2}"; }

# COMMAND CONFIG NAME FLAGS...: a run in $out/NAME.
run() { ranks "$1" --config "configs/$2" --save_path "$out/$3" --overwrite "${@:4}"; }

# MODEL NAME: share of right answers to held-out problems, in $out/NAME.
evaluate() {
    python -m lightrft evaluate --fsdp --engine_type hf --pretrain "$1" --eval_data "$out/data/test.jsonl" \
        --generate_max_len 4 --micro_rollout_batch_size 512 --seed "$seed" --save_path "$out/$2"
}

if [[ -n $small ]]; then
    problems=2000 rm_steps=2 ppo_steps=2 dpo_steps=80
else
    problems=9500 rm_steps=1500 ppo_steps=30 dpo_steps=200
fi

phase "1 of 7: a random model and 10,000 problems"
python scripts/prepare_quickstart.py --out "$out/data" --seed "$seed"

phase "2 of 7: supervised fine-tuning"
run train_sft quickstart_sft.yaml sft --pretrain "$out/data/model" --prompt_data "$out/data/train.jsonl"
evaluate "$out/sft/model" eval_after_sft

# A reward model has to judge the answers that the policy gives. So it learns from these, and DPO as well.
phase "3 of 7: pairs of a right and a wrong answer of this model to one problem"
ranks evaluate --fsdp --engine_type hf --pretrain "$out/sft/model" \
    --eval_data "train=$out/data/train.jsonl,test=$out/data/test.jsonl" --max_eval_samples "$problems" \
    --eval_n_samples 4 --eval_temperature 1 --generate_max_len 4 --micro_rollout_batch_size 2048 --save_path "$out/sampled"
python scripts/prepare_pairs.py --responses "$out/sampled/responses.jsonl" --out "$out/pairs"
pairs=(--pretrain "$out/sft/model" --prompt_data "$out/pairs" --eval_data "$out/pairs" --num_episodes 20 --eval_steps=-1)

phase "4 of 7: a reward model"
run train_rm quickstart_rm.yaml rm "${pairs[@]}" --max_steps "$rm_steps"

# The KL penalty keeps the model close to the one whose answers the reward model was trained on.
phase "5 of 7: PPO (GRPO) with the reward model as the only reward"
run train_ppo quickstart.yaml ppo --pretrain "$out/sft/model" --prompt_data "$out/data/train.jsonl" --engine_type hf \
    --micro_rollout_batch_size 512 --reward none --reward_pretrain "$out/rm/model" --max_steps "$ppo_steps" \
    --learning_rate 6e-4 --init_kl_coef 0.1 --eval_data "$out/data/test.jsonl" --eval_steps=-1 --save_steps=-1 \
    ${small:+--rollout_batch_size 8 --train_batch_size 64}
evaluate "$out/ppo/model" eval_after_ppo

# DPO alone makes the right answers less probable too, only less so than the wrong ones. Their likelihood in the loss prevents that.
phase "6 of 7: DPO on the same pairs"
run train_dpo quickstart_dpo.yaml dpo "${pairs[@]}" --max_steps "$dpo_steps" --learning_rate 1e-3 --sft_coef 1
evaluate "$out/dpo/model" eval_after_dpo

phase "7 of 7: share of right answers to held-out problems, with its interval of 95 %"
for stage in sft ppo dpo; do
    printf '  after %-4s %s\n' "$stage" "$(python -c '
import json, sys
found = json.load(open(sys.argv[1]))
print("{accuracy:.3f}  {accuracy_low:.3f} to {accuracy_high:.3f}".format(**found))' "$out/eval_after_$stage/evaluation.json")"
done
