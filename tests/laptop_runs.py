"""Write folders like scripts/laptop/run.sh, with numbers and responses that a test chooses."""

import json
from pathlib import Path

import yaml

from lightrft.algorithms.rollout.scores import estimate
from scripts.laptop import results

STEP = {
    "time/step": 30.0,
    "perf/steps": 1.0,
    "memory/peak_gb": 4.5,
    "train/loss": 0.5,
    "train/not_kept": 1.0,
}
VERSIONS = dict.fromkeys(results.VERSIONS, "1.0") | {"numpy": "2.0"}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_training(folder: Path, command: str, steps: list[dict], *, seed: int = 1, **run) -> None:
    write_rows(
        folder / "metrics.jsonl",
        [STEP | {"step": number} | row for number, row in enumerate(steps, 1)],
    )
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": {"seed": seed}}))
    of_run = {
        "command": command,
        "status": "finished",
        "steps": len(steps),
        "seconds": 100.0,
        "world_size": 2,
    }
    (folder / "run.json").write_text(json.dumps(of_run | {"versions": VERSIONS} | run))


def write_evaluation(
    folder: Path, texts: list[str], rights: list[int], *, sets: tuple[str, ...] = ("known", "new")
) -> None:
    """Write what `lightrft evaluate` writes; a text that ends with `...` was cut off."""
    rows = [
        {
            "set": name,
            "row": row,
            "sample": sample,
            "prompt": f"<user>question {row}<assistant>",
            "response": text,
            "reward": float(right),
            "finish_reason": "length" if text.endswith("...") else "stop",
        }
        for name in sets
        for row, (text, right) in enumerate(zip(texts, rights, strict=True))
        for sample in ("greedy", 0)
    ]
    if sets == ("",):
        rows = [{key: value for key, value in row.items() if key != "set"} for row in rows]
    write_rows(folder / "responses.jsonl", rows)

    mean, low, high = estimate([float(right) for right in rights])
    numbers = {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
    prefixes = [f"{name}/" if name else "" for name in sets]
    evaluation = {prefix + key: value for prefix in prefixes for key, value in numbers.items()}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
