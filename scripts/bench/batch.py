"""Compare the steps that batches of several sizes need with what the noise of the gradient predicts.

    lightrft quickstart                                        # the model and the data
    python -m scripts.bench.batch runs/quickstart --out runs/batch

GRPO learns to add, and to sort letters, until held-out accuracy reaches a target. Each batch is one
update of the policy, with the best of several learning rates. The first batch is the run that one
has: its steps and its noise scale predict the steps of the others, as S(B) ~ 1 + scale / B
(McCandlish et al., arXiv 1812.06162, equation 2.11). `--write` puts the table into docs/noise.md.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from lightrft.app.observe.sinks import read_rows
from lightrft.config.values import read_object
from scripts.bench.harness import parser_of, write_measured

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "lightrft" / "app" / "quickstart"
QUIET = "--report_to jsonl --save_steps -1 --digests false --trace_steps 0"
SAMPLES = 8
TRIALS = 4
"""Samples of each held-out problem."""
SMOOTHED = 3
"""Evaluations whose mean must reach the target."""
FLAGS = f"""--engine_type hf --n_samples_per_prompt {SAMPLES} --lr_warmup_ratio 0 --reward_workers 0
    --measure_noise 2 --eval_n_samples {TRIALS} --num_episodes 1000 {QUIET}"""


@dataclass(frozen=True)
class Task:
    """What is learned, and the accuracy that counts as learned."""

    title: str
    flags: str
    target: float
    batches: tuple[int, ...]
    """Samples of an update, around the noise scale; the first one predicts the others."""
    rates: tuple[float, ...]
    """Learning rates to try."""


TASKS = {
    "addition": Task(
        "sums of the quick start", "", 0.45, (64, 256, 512), (2.5e-4, 5e-4, 1e-3, 2e-3)
    ),
    "sorting": Task(
        "letters in order",
        "--prompt_max_len 20 --generate_max_len 18",
        0.57,
        (128, 512, 1024),
        (2.5e-4, 1.25e-4, 5e-4),
    ),
}


@dataclass(frozen=True)
class Reached:
    """A batch with its best learning rate."""

    batch: int
    rate: float
    steps: list[float]
    """Steps to the target, with each seed."""
    scale: float
    """Median of the noise scales that were measured until then, over all seeds."""


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    lines = [
        "| task | batch | best learning rate | noise scale | steps to the target | predicted (the steps"
        " against it) |",
        "|---|---|---|---|---|---|",
    ]
    for name in options.tasks:
        prepare(options, name)
        found: list[Reached] = []
        for batch in TASKS[name].batches:
            rates = sorted(TASKS[name].rates, key=lambda rate: _distance(rate, found))
            found.append(of_batch(options, name, batch, rates))
        lines += rows_of(TASKS[name], found)
        print("\n".join(lines), flush=True)

    if options.write:
        write_measured("noise.md", "\n".join(lines), mark="batches")


def _distance(rate: float, found: Sequence[Reached]) -> float:
    """Return how far a rate is from the best one of the batch before: far ones are soon given up."""
    return abs(math.log(rate / found[-1].rate)) if found else 0.0


def rows_of(task: Task, found: Sequence[Reached]) -> list[str]:
    first = found[0]
    rows = []
    for each in found:
        steps = fmean(each.steps)
        factor = (1 + first.scale / each.batch) / (1 + first.scale / first.batch)
        predicted = fmean(first.steps) * factor
        compared = f"{predicted:.0f} ({steps / predicted - 1:+.0%})" if each is not first else ""
        spread = f"{min(each.steps):.0f} to {max(each.steps):.0f}"
        rows.append(
            f"| {task.title}, {task.target:.0%} | {each.batch} | {each.rate:g} | {each.scale:.0f} |"
            f" {steps:.0f} ({spread}) | {compared} |"
        )
    return rows


def of_batch(options: argparse.Namespace, name: str, batch: int, rates: Sequence[float]) -> Reached:
    """Return the steps of a batch with the rate that is fastest with the first seed."""
    most = options.most * options.samples // batch
    steps = {}
    for rate in rates:
        steps[rate] = steps_to_target(options, name, batch, rate, 0, most)
        most = math.ceil(min(most, 1.1 * steps[rate]))
    best = min(steps, key=steps.__getitem__)
    if math.isinf(steps[best]):
        sys.exit(f"{name}, batch {batch}: no learning rate reaches the target")

    most = options.most * options.samples // batch
    seeds = range(options.seeds)
    reached = [steps_to_target(options, name, batch, best, seed, most) for seed in seeds]
    folders = [folder_of(options, name, batch, best, seed) for seed in seeds]
    rows = [row for folder in folders for row in read_rows(folder / "metrics.jsonl")]
    scales = [row["noise/scale"] for row in rows if row.get("noise/scale") is not None]
    return Reached(batch, best, reached, median(scales))


def folder_of(options: argparse.Namespace, name: str, batch: int, rate: float, seed: int) -> Path:
    return options.out / f"{name}_{batch}_{rate:g}_{seed}"


def steps_to_target(
    options: argparse.Namespace, name: str, batch: int, rate: float, seed: int, most: int
) -> float:
    """Return the steps until the target, infinite if `most` are too few; what was run is not again.

    Held-out data are evaluated equally often in numbers of samples.
    """
    folder = folder_of(options, name, batch, rate, seed)
    target = TASKS[name].target
    done = read_object(folder / "bench_done.json").get("most", 0)
    if done and (done >= most or math.isfinite(reached_at(folder, target))):
        return reached_at(folder, target)

    command = [
        *(sys.executable, "-m", "lightrft", "train_ppo", "--config", CONFIGS / "train_ppo.yaml"),
        *FLAGS.split(),
        *TASKS[name].flags.split(),
        f"--pretrain={inputs_of(options, name) / 'sft' / 'model'}",
        f"--prompt_data={inputs_of(options, name) / 'data' / 'train.jsonl'}",
        f"--eval_data={inputs_of(options, name) / 'data' / 'test.jsonl'}",
        f"--rollout_batch_size={batch // SAMPLES}",
        f"--train_batch_size={batch}",
        f"--learning_rate={rate}",
        f"--max_steps={most}",
        f"--eval_steps={max(1, options.every * options.samples // batch)}",
        *(f"--seed={seed}", f"--save_path={folder}", "--overwrite"),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    with (folder / "bench.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and math.isinf(reached_at(folder, target)):
            time.sleep(0.5)
        if process.poll() is None:
            process.kill()
            process.wait()
        elif process.returncode:
            sys.exit(f"{folder / 'bench.log'}: exit code {process.returncode}")

    steps = reached_at(folder, target)
    (folder / "bench_done.json").write_text(json.dumps({"most": most}))
    print(f"{name}, batch {batch}, rate {rate:g}, seed {seed}: {steps:.0f} of {most}", flush=True)
    return steps


def reached_at(folder: Path, target: float) -> float:
    """Return the step at which the mean of some evaluations reaches the target, between two."""
    metric = f"eval/avg_at_{TRIALS}"
    rows = [row for row in read_rows(folder / "metrics.jsonl") if metric in row]
    values = [row[metric] for row in rows]
    means = [fmean(values[end - SMOOTHED : end]) for end in range(SMOOTHED, len(rows) + 1)]
    middles = [row["step"] for row in rows[SMOOTHED // 2 :]]
    for place, mean in enumerate(means):
        if mean >= target:
            before, last = (means[place - 1], middles[place - 1]) if place else (0.0, 0)
            share = (target - before) / (mean - before)
            return last + share * (middles[place] - last)
    return math.inf


def inputs_of(options: argparse.Namespace, name: str) -> Path:
    return options.quickstart if name == "addition" else options.out / name


def prepare(options: argparse.Namespace, name: str) -> None:
    """Make the problems and the model after a warm-up, unless they are there."""
    folder = inputs_of(options, name)
    if (folder / "sft" / "model").exists():
        return
    script = [sys.executable, REPOSITORY / "scripts" / "prepare_quickstart.py", "--task", name]
    subprocess.run([*script, "--out", folder / "data"], check=True)
    command = [
        sys.executable,
        "-m",
        "lightrft",
        "train_sft",
        "--config",
        CONFIGS / "train_sft.yaml",
    ]
    flags = [
        *("--prompt_max_len=20", f"--stop_loss={options.stop_loss}", "--overwrite"),
        f"--pretrain={folder / 'data' / 'model'}",
        f"--prompt_data={folder / 'data' / 'train.jsonl'}",
        f"--save_path={folder / 'sft'}",
    ]
    subprocess.run([*command, *flags, *QUIET.split()], check=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        {
            "--out": (Path("runs/batch"), "folder of all runs; what is there is not run again"),
            "--tasks": ([*TASKS], "which tasks"),
            "--seeds": (2, "seeds of the best rate"),
            "--samples": (512, "samples of the units below"),
            "--most": (100, "so many units that a run has at most"),
            "--every": (2, "so many units between two evaluations"),
            "--stop_loss": (0.15, "loss that ends the warm-up of sorting"),
        },
    )
    parser.add_argument("quickstart", type=Path, help="folder of the quick start")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
