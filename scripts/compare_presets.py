"""Run every preset on the task of the quick start, and draw the rewards: docs/presets/NAME.svg.

Each starts from the warmed-up model.

    bash scripts/quickstart.sh
    python scripts/compare_presets.py --quickstart runs/quickstart --out runs/presets --steps 40

One process and the hf engine, 128 prompts x 8 samples and one optimizer step each, learning rate
1e-3. What was run before is not run again. The last line is a JSON object: preset -> mean reward of
the first and of the last five steps.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from lightrft.config.presets import PRESETS

SETTINGS = (
    "--fsdp --engine_type hf --no_enable_engine_sleep --micro_rollout_batch_size 128"
    " --prompt_max_len 8 --generate_max_len 4 --rollout_batch_size 128 --n_samples_per_prompt 8"
    " --train_batch_size 1024 --reward exact_match --learning_rate 1e-3 --lr_scheduler constant"
    " --lr_warmup_ratio 0.125 --num_episodes 3 --report_to jsonl"
).split()
EXTRA_FLAGS = {
    "ppo": "--critic_learning_rate 1e-3",
    "distill": "--teacher_pretrain {quickstart}/model",
    "gkd": "--teacher_pretrain {quickstart}/model --distill_top_k 8",
}
"""Preset -> further flags that it needs."""
WIDTH = 420
HEIGHT = 130
LEFT = 34
BOTTOM = 108
TOP = 8
LOWEST = 0.0
HIGHEST = 1.0
STYLE = 'font-family="sans-serif" font-size="11" fill="#555"'


def run(name: str, quickstart: Path, out: Path, steps: int) -> list[float]:
    """Return the mean reward of each step."""
    file = out / name / "metrics.jsonl"
    if not file.exists() or len(file.read_text().splitlines()) < steps:
        extra = EXTRA_FLAGS.get(name, "").format(quickstart=quickstart).split()
        data = [
            f"--pretrain={quickstart}/sft/model",
            f"--prompt_data={quickstart}/data/train.jsonl",
            f"--save_path={out / name}",
        ]
        command = [
            "lightrft",
            "train_ppo",
            *SETTINGS,
            *extra,
            *data,
            f"--advantage_estimator={name}",
            f"--max_steps={steps}",
        ]
        command += ["--overwrite"]  # of a run with fewer steps
        subprocess.run([sys.executable, "-m", *command], check=True)

    return [json.loads(line)["rollout/reward"] for line in file.read_text().splitlines()][:steps]


def curve(rewards: list[float]) -> str:
    """Draw a line over the steps, in a picture of its own."""
    steps = max(len(rewards) - 1, 1)

    def place(step: int, reward: float) -> tuple[float, float]:
        share = (min(max(reward, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
        return round(LEFT + (WIDTH - LEFT - 8) * step / steps, 1), round(
            BOTTOM - (BOTTOM - TOP) * share, 1
        )

    line = " ".join("{},{}".format(*place(step, reward)) for step, reward in enumerate(rewards))
    ticks = "".join(
        f'<path d="M{LEFT} {place(0, tick)[1]}H{WIDTH - 8}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{place(0, tick)[1] + 4}" text-anchor="end">{tick}</text>'
        for tick in (0.0, 0.5, 1.0)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {STYLE}>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{ticks}'
        f'<polyline points="{line}" fill="none" stroke="#2a6fbb" stroke-width="2"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">reward of steps 1 to {len(rewards)}</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quickstart",
        type=Path,
        default=Path("runs/quickstart"),
        help="what scripts/quickstart.sh has left",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/presets"), help="folder of the runs")
    parser.add_argument(
        "--docs", type=Path, default=Path("docs/presets"), help="folder of the pictures"
    )
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.docs.mkdir(parents=True, exist_ok=True)

    summary = {}
    for name in reversed({id(preset): name for name, preset in reversed(PRESETS.items())}.values()):
        rewards = run(name, options.quickstart, options.out, options.steps)
        (options.docs / f"{name}.svg").write_text(curve(rewards))
        summary[name] = {
            "first": round(sum(rewards[:5]) / 5, 3),
            "last": round(sum(rewards[-5:]) / 5, 3),
        }
        print(name, summary[name], flush=True)

    print(json.dumps(summary))


if __name__ == "__main__":
    main()
