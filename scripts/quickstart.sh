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

source "$(dirname "$0")/environment.sh"
exec python -m lightrft quickstart --seed "$seed" --out "$out"
