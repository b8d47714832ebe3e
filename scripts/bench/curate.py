"""Compare three rounds of sampling, choosing and supervised training with GRPO, at equal tokens.

    python -m scripts.bench.curate --out runs/bench_curate

For each seed the quick start trains a warm-up and then GRPO. From the same warm-up, a round answers
training prompts (`lightrft evaluate`), takes right responses to prompts that are neither always
right nor always wrong (`lightrft curate`), and learns them (`lightrft train_sft`). All rounds
together generate as many responses as GRPO did. `--write` puts the table into docs/results.md. A
seed takes about six minutes on two quiet cores.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from lightrft.app.observe.sinks import read_rows
from lightrft.config.values import read_object
from scripts.bench.harness import parser_of, write_measured

ROUNDS = 3
RESPONSES = 8
"""Responses to a prompt in a round: the greedy one, and seven others."""
OF_GRPO = 150 * 128 * 8
"""Responses that GRPO of the quick start generates."""
PROMPTS = OF_GRPO // (ROUNDS * RESPONSES)
LENGTHS = "--prompt_max_len 8 --generate_max_len 4 --reward exact_match --engine_kv_cache_gb 0.5"


def main() -> None:
    options = arguments()
    names = ["Seed", "After the warm-up", *(f"Round {n + 1}" for n in range(ROUNDS)), "GRPO"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    folders = [Path(options.out) / f"seed{seed}" for seed in options.seeds]
    for seed, folder in zip(options.seeds, folders, strict=True):
        if not (folder / "summary.json").exists():
            call(f"quickstart --seed {seed} --out {folder}")
        rounds = [curated(folder, number, seed) for number in range(ROUNDS)]
        before, after = (accuracy(folder / name) for name in ("eval_after_sft", "eval_after_rl"))
        cells = [before, *rounds, after]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")

    steps = [sum(steps_of(path) for path in folder.glob("round?")) for folder in folders]
    lines += ["", f"The rounds took {' and '.join(map(str, steps))} optimizer steps, GRPO 150."]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_measured("results.md", text, mark="curate")


def curated(folder: Path, number: int, seed: int) -> str:
    """Run a round, and return the accuracy on the held-out rows after it."""
    model = folder / (f"round{number - 1}/model" if number else "sft/model")
    sampled, rows, trained = (folder / f"{name}{number}" for name in ("sampled", "rows", "round"))
    if not (trained / "model").exists():
        call(
            f"evaluate --fsdp --pretrain {model} --eval_data {folder}/data/train.jsonl {LENGTHS}"
            f" --max_eval_samples {PROMPTS} --eval_n_samples {RESPONSES - 1} --seed {seed + number}"
            f" --save_path {sampled}"
        )
        call(
            f"curate {sampled} --rate 0.05..0.95 --per_prompt 2 --deduplicate --write {rows}.jsonl"
        )
        call(
            f"train_sft --fsdp --dp_replicate 0 --pretrain {model} --prompt_data {rows}.jsonl"
            f" --prompt_max_len 8 --train_batch_size 64 --num_episodes 2 --learning_rate 1e-3"
            f" --max_tokens_per_microbatch 2048 --seed {seed + number} --save_path {trained}"
        )
    held_out = folder / f"eval_round{number}"
    if not (held_out / "evaluation.json").exists():
        call(
            f"evaluate --fsdp --pretrain {trained}/model --eval_data {folder}/data/test.jsonl"
            f" {LENGTHS} --save_path {held_out}"
        )
    return accuracy(held_out)


def accuracy(folder: Path) -> str:
    """Return the share of right greedy responses of an evaluation, with its interval."""
    found = read_object(folder / "evaluation.json")
    low, middle, high = (found[f"accuracy{end}"] for end in ("_low", "", "_high"))
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def steps_of(folder: Path) -> int:
    """Return the number of steps of a run."""
    return int(read_rows(folder / "metrics.jsonl")[-1]["step"])


def call(command: str) -> None:
    subprocess.run([sys.executable, "-m", "lightrft", *command.split()], check=True)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, {"--out": "runs/bench_curate", "--seeds": [0, 1]})
    parser.add_argument("--write", action="store_true", help="write the table into docs/results.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
