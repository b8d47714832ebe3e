"""Run the recipes of docs/environments.md and docs/preferences.md, shortened, with several seeds.

It shows what each reaches, and has to reach.

    python scripts/bench/recipes.py --seeds 3  # docs/benchmarks.md, half an hour
    python scripts/bench/recipes.py --recipe tool --seeds 1

The seed is for the model, the data and all runs, which torchrun starts. The tests run the recipe
`tool` with one seed, and each run of the chain for a few steps. Prints one JSON object as its last
line, and ends with 1 if a figure is out of its bounds.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightrft.app.quickstart.inputs import tiny_qwen3, write_jsonl  # noqa: E402
from scripts.bench.harness import TORCHRUN, parser_of  # noqa: E402
from scripts.prepare_quickstart import (  # noqa: E402
    CALL,
    CALL_END,
    demonstrations,
    guessing_problems,
    product_problems,
)
from scripts.prepare_quickstart import main as prepare_quickstart  # noqa: E402

Rows = list[dict[str, Any]]
"""Metrics of each step of a run."""
Train = Callable[[str, int, list[str], Path], Rows]
"""Runs a command with a number of ranks, flags and --save_path."""


@dataclass
class Figure:
    value: float
    above: float = -inf
    below: float = inf

    @property
    def holds(self) -> bool:
        return self.above < self.value < self.below

    def shown(self) -> dict[str, float]:
        """Return the value and its bounds."""
        return {name: round(value, 4) for name, value in vars(self).items() if isfinite(value)}


Figures = dict[str, Figure]

CHAIN = {
    "sft": ("train_sft", "quickstart_sft.yaml", "data/model", "data/train.jsonl", []),
    "rm": ("train_rm", "quickstart_rm.yaml", "sft/model", "data/pairs", ["--max_steps=120"]),
    "prm": ("train_prm", "quickstart_prm.yaml", "sft/model", "data/steps", ["--max_steps=200"]),
    "dpo": (
        "train_dpo",
        "quickstart_dpo.yaml",
        "sft/model",
        "data/pairs",
        ["--max_steps=40", "--max_samples=2560"],
    ),
    "kto": ("train_kto", "quickstart_kto.yaml", "sft/model", "data/answers", ["--max_steps=100"]),
    "teacher": (
        "train_sft",
        "quickstart_sft.yaml",
        "sft/model",
        "data/train.jsonl",
        ["--stop_loss=0", "--max_steps=110", "--lr_scheduler=cosine"],
    ),
    "distill": (
        "train_ppo",
        "quickstart_distill.yaml",
        "sft/model",
        "data/train.jsonl",
        ["--max_steps=12"],
    ),
}
"""Command, file, model, data and further flags of each run of the chain.

All but the first start from the model of SFT.
"""
ACCURACY = {"rm": 0.65, "prm": 0.7, "dpo": 0.75, "kto": 0.62, "distill": 0.6}
"""Accuracy over 500 held-out rows, where two standard deviations are at most 0.045.

For prm it is over 1,500 steps, with 0.024. By chance it is 0.5, and 0.667 for prm. For distill it
is the share of right answers.
"""


def chain(train: Train, folder: Path, seed: int) -> Figures:
    """Train on preferences, judged steps and answers, and a teacher (docs/preferences.md).

    All of them start from SFT.
    """
    prepare_quickstart([f"--out={folder}/data", f"--seed={seed}"])
    held_out = {name: CHAIN[name][3] for name in ("rm", "prm", "dpo", "kto")} | {
        "distill": "data/test.jsonl"
    }

    rows = {}
    for name, (command, file, model, data, flags) in CHAIN.items():
        flags = [
            f"--config=configs/{file}",
            f"--pretrain={folder}/{model}",
            f"--prompt_data={folder}/{data}",
            f"--seed={seed}",
            *flags,
        ]
        flags += (
            [f"--eval_data={folder}/{held_out[name]}", "--eval_steps=-1"]
            if name in held_out
            else []
        )
        flags += [f"--teacher_pretrain={folder}/teacher/model"] if name == "distill" else []
        rows[name] = train(command, 1, flags, folder / name)

    loss = [row["train/loss"] for row in rows["sft"]]
    divergence = [row["rollout/teacher_kl"] for row in rows["distill"]]
    accuracy = {
        name: Figure(rows[name][-1]["eval/accuracy"], above=least)
        for name, least in ACCURACY.items()
    }

    return accuracy | {
        "sft: loss of the last step": Figure(loss[-1], below=0.2 * loss[0]),
        "distill: divergence of the last step": Figure(divergence[-1], below=0.75 * divergence[0]),
    }


def game(train: Train, folder: Path, seed: int) -> Figures:
    """Guess a digit that only the answers of earlier turns tell.

    120 steps reach 0.69 of at most 0.72.
    """
    flags = [
        *guessing(folder, seed),
        "--rollout_batch_size=16",
        "--train_batch_size=256",
        "--learning_rate=3e-3",
        "--max_steps=14",
    ]
    rows = train("train_ppo", 2, flags, folder / "run")
    return _reward(rows, first_below=0.12, last_above=0.25) | {
        "turns, mean of the last three steps": Figure(
            _mean_of_last(rows, "episodes/turns"), below=rows[0]["episodes/turns"]
        )
    }


def agent(train: Train, folder: Path, seed: int) -> Figures:
    """Play the same game by a client of the OpenAI API."""
    flags = [
        *guessing(folder, seed),
        "--environment=",
        "--agent=scripts/agents/guess_number.py:play",
        "--rollout_batch_size=8",
        "--train_batch_size=128",
        "--environment_workers=16",
        "--max_steps=16",
    ]
    return _reward(train("train_ppo", 2, flags, folder / "run"), first_below=0.08, last_above=0.18)


def tool(train: Train, folder: Path, seed: int) -> Figures:
    """Multiply with the calculator; no product is known without it.

    A quarter of the demonstrations call it well.
    """
    model = tiny_qwen3(folder / "model", seed, [CALL, CALL_END])
    problems = product_problems(seed)[0]
    write_jsonl(folder / "train.jsonl", problems[:512])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(problems, seed))
    flags = [
        "--config=configs/calculator_sft.yaml",
        f"--pretrain={model}",
        f"--prompt_data={folder}/demonstrations.jsonl",
        f"--seed={seed}",
    ]
    train("train_sft", 1, flags, folder / "sft")

    flags = [
        "--config=configs/calculator.yaml",
        f"--pretrain={folder}/sft/model",
        f"--prompt_data={folder}/train.jsonl",
        "--eval_data=",
        "--eval_steps=-1",
        "--engine_type=hf",
        "--learning_rate=2e-3",
        "--max_steps=8",
        f"--seed={seed}",
    ]
    rows = train("train_ppo", 2, flags, folder / "run")
    return _reward(rows, first_below=0.3, last_above=0.6) | {
        "calls of the first step": Figure(rows[0]["episodes/tool_calls"], below=0.85),
        "calls of the last step": Figure(rows[-1]["episodes/tool_calls"], above=0.85),
    }


def reasoning_gym(train: Train, folder: Path, seed: int) -> Figures:
    """Count bits in up to five attempts. 60 steps reach 0.58."""
    model = tiny_qwen3(folder / "model", seed)
    flags = [
        "--config=configs/reasoning_gym.yaml",
        f"--pretrain={model}",
        "--engine_type=hf",
        "--rollout_batch_size=16",
        "--train_batch_size=256",
        "--environment_workers=16",
        "--max_steps=14",
        f"--seed={seed}",
    ]
    rows = train("train_ppo", 1, flags, folder / "run")

    return _reward(rows, first_below=0.03, last_above=0.25) | {
        "turns of the first step": Figure(rows[0]["episodes/turns"], above=4),
        "turns of the last step": Figure(rows[-1]["episodes/turns"], below=4),
    }


RECIPES = {recipe.__name__: recipe for recipe in (chain, game, agent, tool, reasoning_gym)}


def guessing(folder: Path, seed: int) -> list[str]:
    write_jsonl(folder / "train.jsonl", guessing_problems(seed)[0][:512])
    return [
        "--config=configs/guess_number.yaml",
        f"--pretrain={tiny_qwen3(folder / 'model', seed)}",
        f"--prompt_data={folder}/train.jsonl",
        "--engine_type=hf",
        f"--seed={seed}",
    ]


def _reward(rows: Rows, *, first_below: float, last_above: float) -> Figures:
    return {
        "reward of the first step": Figure(rows[0]["rollout/reward"], below=first_below),
        "reward, mean of the last three steps": Figure(
            _mean_of_last(rows, "rollout/reward"), above=last_above
        ),
    }


def _mean_of_last(rows: Rows, name: str) -> float:
    return sum(row[name] for row in rows[-3:]) / 3


def by_torchrun(command: str, world_size: int, flags: list[str], save_path: Path) -> Rows:
    launcher = [*TORCHRUN, f"--nproc-per-node={world_size}"]
    ran = subprocess.run(
        [*launcher, "-m", "lightrft", command, *flags, f"--save_path={save_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError(
            f"{command} {' '.join(flags)} ended with {ran.returncode}:\n{ran.stderr}"
        )

    return [json.loads(line) for line in (save_path / "metrics.jsonl").read_text().splitlines()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, {"--seeds": (3, "seeds 0, 1, ... up to this number")})
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=[*RECIPES])

    args = parser.parse_args(argv)
    found = {}
    for name in args.recipe:
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(RECIPES[name](by_torchrun, Path(folder), seed))

    print(
        json.dumps(
            {
                name: [
                    {figure: each.shown() for figure, each in figures.items()}
                    for figures in by_seed
                ]
                for name, by_seed in found.items()
            }
        )
    )
    sys.exit(
        not all(
            each.holds
            for by_seed in found.values()
            for figures in by_seed
            for each in figures.values()
        )
    )


if __name__ == "__main__":
    main()
