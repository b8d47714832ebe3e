"""Compare two ranks with one on the supervised part of the quick start, at equal tokens per step.

    python scripts/bench/replicas.py  # the table in docs/benchmarks.md, three minutes

Two ranks have shards of the model (FSDP2), or each has the whole model (--dp_replicate 0). The
three ways take turns. The seconds of a step are the median of a run without its first steps. One
thread per process. The last line is one JSON object.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bench.harness import TORCHRUN, in_turn, parser_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "one rank": (1, "--dp_replicate=1"),
    "two ranks, sharded": (2, "--dp_replicate=1"),
    "two ranks, a replica each": (2, "--dp_replicate=0"),
}
WARM_UP = 20
"""Number of steps that do not count."""


def median_step(data: Path, folder: Path, way: str, steps: int) -> float:
    """Train and return the seconds of a step."""
    ranks, layout = WAYS[way]
    command = [
        *(*TORCHRUN, f"--nproc-per-node={ranks}", "-m", "lightrft.cli.train_sft"),
        *("--config", ROOT / "configs/quickstart_sft.yaml", f"--pretrain={data}/model"),
        *(f"--prompt_data={data}/train.jsonl", f"--save_path={folder}", "--overwrite"),
        *(f"--max_steps={steps}", "--stop_loss=0", "--logging_steps=1", layout),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["time/step"] for row in rows[WARM_UP:] if "time/step" in row)


def main(argv: list[str] | None = None) -> None:
    flags = {"--steps": (200, "steps of a run"), "--repeat": (5, "runs of each way")}
    args = parser_of(__doc__, flags).parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        script = ROOT / "scripts/prepare_quickstart.py"
        subprocess.run([sys.executable, script, "--out", data], check=True, capture_output=True)
        run = Path(folder) / "run"
        ways = {way: partial(median_step, data, run, way, args.steps) for way in WAYS}
        seconds = in_turn(ways, args.repeat)

    first = seconds["one rank"]
    for way, found in seconds.items():
        ratios = sorted(one / each for one, each in zip(first, found, strict=True))
        print(
            f"| {way} | {1000 * statistics.median(found):.1f} ms |"
            f" {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
