"""Make runs that are sick on purpose, for the tests of `lightrft diagnose`.

    python scripts/prepare_quickstart.py --out runs/quickstart && (the supervised part of scripts/quickstart.sh)
    python scripts/bench/symptoms.py --out runs/sick

trains the model of the quick start ten times for 30 to 60 steps, about 30 seconds each on two quiet
cores. `--collect tests/app/observe/histories.json RUN ...` writes the metrics of any runs, with three
digits and at most about 50 steps, into the file that tests/app/observe/test_symptoms.py reads.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from lightrft.app.observe.curves import read_history
from lightrft.app.observe.symptoms import METRICS, REWARD_COMPONENT_PREFIX

MOST_STEPS = 50

REWARDS = """
def longer(samples, label, **columns):
    return [len(one.token_ids) / 32 for one in samples]


def parts(samples, label, **columns):
    return [
        {"right": float(one.text == str(answer)), "style": 10.0 * one.text.count("1")}
        for one, answer in zip(samples, label)
    ]
"""
NOISY_ENGINE = """
import sys

import torch

from lightrft.app.cli import MAINS
from lightrft.engine.hf import HFEngine

load_weights, count = HFEngine.load_weights, 0


def with_noise(engine, *arguments, **options):
    global count
    result = load_weights(engine, *arguments, **options)
    count += 1
    generator = torch.Generator().manual_seed(1)
    for weight in engine.weights.values():
        if weight.dim() == 2:
            with torch.no_grad():
                weight += 2e-5 * count * torch.randn(weight.shape, generator=generator)
    return result


HFEngine.load_weights = with_noise
MAINS["train_ppo"](sys.argv[1:])
"""


def commands(out: Path, start: Path) -> dict[str, list[str]]:
    """Return the command of each run by the name of what it shows."""
    common = (
        f"--config configs/quickstart.yaml --pretrain {start / 'sft/model'}"
        f" --prompt_data {start / 'data/train.jsonl'} --eval_data {start / 'data/test.jsonl'}"
        " --engine_type hf --rollout_batch_size 32 --train_batch_size 256 --max_steps 60"
        " --eval_steps 15 --save_steps 1000 --micro_rollout_batch_size 256 --report_to jsonl"
    ).split()
    module = ["-m", "lightrft", "train_ppo"]
    alone = [sys.executable, *module, *common]
    two = ["torchrun", "--standalone", "--nproc-per-node", "2", *module, *common]
    return {
        "entropy collapse": [*alone, "--learning_rate=3e-2"],
        "dead groups": [*alone, f"--pretrain={start / 'model'}", "--max_steps=30"],
        "length drift": [*alone, f"--reward={out}/rewards.py:longer", "--generate_max_len=24"],
        "truncation": [*alone, "--generate_max_len=1"],
        "clipping": [
            *alone,
            "--train_batch_size=64",
            "--max_epochs=6",
            "--learning_rate=4e-4",
            "--eps_clip=0.05",
            "--max_steps=30",
        ],
        "growing mismatch": [
            sys.executable,
            f"{out}/noisy_engine.py",
            *common,
            "--learning_rate=0",
            "--no_verify_weight_sync",
        ],
        "stale samples": [
            *two,
            "--rollout_ranks=1",
            "--max_staleness=6",
            "--rollout_correction=tis",
            "--max_steps=30",
        ],
        "reward without evaluation": [
            *alone,
            f"--prompt_data={out}/eight.jsonl",
            "--num_episodes=1000",
            "--rollout_batch_size=8",
            "--n_samples_per_prompt=32",
            "--eval_steps=6",
        ],
        "one part of the reward dominates": [*alone, f"--reward={out}/rewards.py:parts"],
        "exploding gradients": [*alone, "--learning_rate=0.3", "--max_steps=30"],
    }


def make(out: Path, start: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "rewards.py").write_text(REWARDS)
    (out / "noisy_engine.py").write_text(NOISY_ENGINE)
    rows = [json.loads(line) for line in (start / "data/train.jsonl").read_text().splitlines()[:8]]
    draw = random.Random(1)
    # wrong labels: what is learned by heart here is no help for other problems
    wrong = [row | {"label": str(int(row["label"]) + draw.choice([1, -1, 10]))} for row in rows]
    (out / "eight.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wrong))

    for name, command in commands(out, start).items():
        folder = out / name.replace(" ", "_")
        if not (folder / "metrics.jsonl").exists():
            subprocess.run([*command, f"--save_path={folder}"], check=True)


def collect(file: Path, folders: list[Path]) -> None:
    """Write metric -> values by run into the file."""
    histories = {}
    for folder in folders:
        history = read_history(folder / "metrics.jsonl")
        found = {}
        for name, points in sorted(history.items()):
            if name in METRICS or name.startswith(REWARD_COMPONENT_PREFIX):
                values = [value for _, value in points if value is not None]
                stride = max(1, len(values) // MOST_STEPS)
                found[name] = [float(f"{value:.3g}") for value in values[::stride]]
        histories[folder.name.replace("_", " ")] = found
    file.write_text(
        "{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in histories.items())
        + "\n}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/sick"))
    parser.add_argument("--start", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--collect", type=Path, metavar="FILE")
    parser.add_argument("folders", type=Path, nargs="*", metavar="RUN")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.folders)
    else:
        make(arguments.out, arguments.start)


if __name__ == "__main__":
    main()
