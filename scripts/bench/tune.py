"""Compare what `lightrft tune` chooses with the best of a grid that was run whole.

    lightrft quickstart                                         # the models and the data
    python scripts/prepare_quickstart.py --out runs/quickstart/data    # the pairs of DPO
    python -m scripts.bench.tune runs/quickstart --out runs/bench_tune

Recipes are GRPO of the quick start from the model after the warm-up, the warm-up itself, and DPO
after it. The grid is run once. Then the same ranges are searched with several seeds, and what each
search chose is compared with the grid by the results of its own last run. `--write` puts the table
into docs/tune.md. A run of GRPO takes half a minute on a quiet core, the others ten seconds.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lightrft.app.observe.sinks import read_rows
from lightrft.config.values import read_object
from scripts.bench.harness import parser_of, write_measured

QUIET = "--report_to jsonl --save_steps -1 --digests false --trace_steps 0"


@dataclass(frozen=True)
class Recipe:
    """A run with the values of its grid, and what is searched in their place."""

    title: str
    command: str
    flags: str
    metrics: list[str]
    """The first one is searched, the others are compared as well."""
    grid: dict[str, list[str]]
    over: list[str]


RECIPES = {
    "grpo": Recipe(
        "GRPO, quick start",
        "train_ppo",
        "--config {configs}/train_ppo.yaml --engine_type hf --pretrain {quickstart}/sft/model"
        " --prompt_data {quickstart}/data/train.jsonl --eval_data {quickstart}/data/test.jsonl"
        " --max_steps 144 --eval_steps 16",
        ["eval/accuracy"],
        {
            "learning_rate": ["1e-4", "2e-4", "5e-4", "1e-3", "2e-3", "4e-3", "1e-2"],
            "n_samples_per_prompt": ["4", "8"],
        },
        ["learning_rate=1e-4..1e-2:log", "n_samples_per_prompt=4,8"],
    ),
    "sft": Recipe(
        "SFT, its warm-up",
        "train_sft",
        "--config {configs}/train_sft.yaml --pretrain {quickstart}/data/model"
        " --prompt_data {quickstart}/data/train.jsonl --eval_data {quickstart}/data/test.jsonl"
        " --max_steps 180 --eval_steps 20 --stop_loss -1",
        ["eval/loss"],
        {
            "learning_rate": ["1e-4", "3e-4", "6e-4", "1e-3", "3e-3", "1e-2", "3e-2"],
            "train_batch_size": ["32", "64"],
        },
        ["learning_rate=1e-4..3e-2:log", "train_batch_size=32,64"],
    ),
    "dpo": Recipe(
        "DPO, right answers beside wrong ones",
        "train_dpo",
        "--config {repository}/configs/quickstart_dpo.yaml --pretrain {quickstart}/sft/model"
        " --prompt_data {quickstart}/data/pairs --eval_data {quickstart}/data/pairs"
        " --max_steps 180 --eval_steps 20",
        ["eval/loss", "eval/accuracy"],
        {
            "learning_rate": ["1e-4", "3e-4", "6e-4", "1e-3", "3e-3", "1e-2", "3e-2"],
            "train_batch_size": ["32", "64"],
        },
        ["learning_rate=1e-4..3e-2:log", "train_batch_size=32,64"],
    ),
}
CLOSE = 0.1
"""Part of the grid's best result by which a choice may be worse."""


def main() -> None:
    options = arguments()
    lines = [
        "| run | best of the grid | of the grid within 10 % | tune chose, median of seeds |"
        " within 10 % | tokens of the grid |",
        "|---|---|---|---|---|---|",
    ]
    for name in options.recipes:
        recipe = RECIPES[name]
        grid, tokens = whole_grid(options, name, recipe)
        found = [searched(options, name, recipe, seed) for seed in range(options.seeds)]
        price = fmean(price for _, price in found) / tokens
        for metric in recipe.metrics:
            results = [row[metric] for row in grid]
            chosen = [row[metric] for row, _ in found]
            best = min(results) if lower_is_better(metric) else max(results)
            lines.append(
                f"| {recipe.title}, `{metric}` | {best:.3f} |"
                f" {num_close(results, best, metric)} of {len(results)} | {np.median(chosen):.3f} |"
                f" {num_close(chosen, best, metric)} of {len(chosen)} | {price:.0%} |"
            )
        print("\n".join(lines), flush=True)

    if options.write:
        write_measured("tune.md", "\n".join(lines))


def lower_is_better(metric: str) -> bool:
    return metric.endswith("loss")


def num_close(values: list[float], best: float, metric: str) -> int:
    """Return the number of values that are at most 10 % worse than the best one of the grid."""
    sign = 1 if lower_is_better(metric) else -1
    return sum(sign * (value - best) <= CLOSE * best for value in values)


def whole_grid(
    options: argparse.Namespace, name: str, recipe: Recipe
) -> tuple[list[dict[str, Any]], int]:
    """Run each combination to its end; return the last rows, and the tokens of all runs."""
    last = []
    tokens = 0
    for values in list(product(*recipe.grid.values()))[: options.most]:
        folder = options.out / f"{name}_grid_{'_'.join(values)}"
        flags = [f"--{flag}={value}" for flag, value in zip(recipe.grid, values, strict=True)]
        start(options, [recipe.command], recipe, [*flags, f"--save_path={folder}"], folder)
        rows = read_rows(folder / "metrics.jsonl")
        last.append(rows[-1])
        tokens += tokens_of(folder)
    return last, tokens


def searched(
    options: argparse.Namespace, name: str, recipe: Recipe, seed: int
) -> tuple[dict[str, Any], int]:
    """Search with a seed; return the last row of the choice, and the tokens of all runs."""
    metric = recipe.metrics[0]
    folder = options.out / f"{name}_tune_{seed}"
    over = ["--over", *recipe.over, "--metric", metric, "--trials", str(options.trials)]
    own = [*over, f"--seed={seed}", f"--out={folder}"]
    start(options, ["tune", recipe.command], recipe, own, folder)
    runs = sorted(folder.glob("trial_*"))
    whole = [run for run in runs if read_object(run / "run.json").get("status") == "finished"]
    ends = [read_rows(run / "metrics.jsonl")[-1] for run in whole]
    select = min if lower_is_better(metric) else max
    return select(ends, key=lambda row: row[metric]), sum(map(tokens_of, runs))


def start(
    options: argparse.Namespace, words: list[str], recipe: Recipe, own: list[str], folder: Path
) -> None:
    """Run a command unless its folder says that it was run."""
    done = folder / "bench_done.json"
    if done.exists():
        return
    repository = Path(__file__).parents[2]
    flags = f"{recipe.flags} {QUIET}".format(
        repository=repository,
        configs=repository / "lightrft" / "app" / "quickstart",
        quickstart=options.quickstart,
    )
    resumed = [] if words[0] == "tune" else ["--overwrite"]
    command = [sys.executable, "-m", "lightrft", *words, *flags.split(), *own, *resumed]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)}\n{ran.stderr[-3000:]}")
    done.write_text(json.dumps(command))


def tokens_of(folder: Path) -> int:
    names = ("rollout/tokens", "train/tokens")
    return sum(
        int(row.get(name, 0)) for row in read_rows(folder / "metrics.jsonl") for name in names
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        {
            "--out": (
                Path("runs/bench_tune"),
                "folder of all runs; what is there is not run again",
            ),
            "--seeds": (5, "searches of each recipe"),
            "--trials": (12, "trials of a search"),
            "--most": (1000, "largest number of runs of a grid, for a first try"),
            "--recipes": ([*RECIPES], "which recipes"),
        },
    )
    parser.add_argument("quickstart", type=Path, help="folder of the quick start")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    return parser.parse_args()


if __name__ == "__main__":
    main()
