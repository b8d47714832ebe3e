"""Compare the numbers of two versions of lightrft, bit by bit: what a change of the design must keep.

    git worktree add ../old main
    python scripts/same_numbers.py ../old . --ranks 1 2

Each version trains the same tiny model by GRPO and its relatives: several updates, KL in the loss
and in the rewards, a critic, offloading, adapters, and on two ranks FSDP2 and ZeRO. Weights,
gradients, samples, advantages and plans (digests.jsonl) must be equal, and so must all metrics but
those of time and memory. The exit code is 1 if anything differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 3
NOT_REPEATABLE = ("time/", "memory/", "perf/")
CASES = {
    "one update": [],
    "four updates": ["--max_epochs=2", "--train_batch_size=16"],
    "KL, entropy, correction": [
        *("--use_kl_loss", "--init_kl_coef=0.1", "--entropy_loss_coef=0.01"),
        "--rollout_correction=tis",
    ],
    "rloo": ["--advantage_estimator=rloo"],
    "remax": ["--advantage_estimator=remax"],
    "gspo": ["--advantage_estimator=gspo"],
    "critic": ["--advantage_estimator=ppo"],
    "offloading": ["--offload_idle", "--enable_engine_sleep", "--enable_ema", "--save_steps=1"],
    "adapters": ["--lora_rank=4"],
}
"""Name -> flags of a run on one rank."""
CASES_OF_RANKS = {
    "two ranks": [],
    "two ranks, critic, offloading": ["--advantage_estimator=ppo", "--offload_idle"],
    "ZeRO 1": ["--strategy=deepspeed", "--zero_stage=1"],
    "ZeRO 3": ["--strategy=deepspeed", "--zero_stage=3"],
}
"""The same on two ranks."""


def inputs(tree: Path, folder: Path) -> list[str]:
    """Write model, data and reward with the test code of a version; return the flags."""
    code = (
        "import json, sys; from pathlib import Path; from runs import PPO, prepare;"
        " print(json.dumps([*PPO, *prepare(Path(sys.argv[1]))]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment(tree),
        cwd=folder,  # python -c would import what is in the folder where this was started
        check=True,
        capture_output=True,
        text=True,
    )
    flags = json.loads(ran.stdout.splitlines()[-1])
    own = ("--fsdp", "--save_path", "--max_steps")
    return [flag for flag in flags if not flag.startswith(own)]


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{tree}:{tree}/tests", "OMP_NUM_THREADS": "1"}


def train(tree: Path, flags: list[str], ranks: int, run: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "lightrft", "train_ppo"]
    subprocess.run(
        [*command, *flags, f"--max_steps={STEPS}", f"--save_path={run}"],
        env=environment(tree),
        cwd=run.parent,
        check=True,
        capture_output=True,
    )


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between two runs."""
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (first, second)
    ]
    names = {
        name
        for old, new in zip(*rows, strict=True)
        for name in old.keys() | new.keys()
        if old.get(name) != new.get(name) and not name.startswith(NOT_REPEATABLE)
    }
    digests = [(run / "digests.jsonl").read_bytes() for run in (first, second)]
    return sorted(names) + (["digests.jsonl"] if digests[0] != digests[1] else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder of a version")
    parser.add_argument("new", type=Path, help="folder of another version")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="1, 2 or both")
    args = parser.parse_args()

    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    wrong = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        given = inputs(trees["old"], folder)
        for ranks in args.ranks:
            for name, flags in (CASES if ranks == 1 else CASES_OF_RANKS).items():
                runs = {tree: folder / tree / name.replace(" ", "_") for tree in trees}
                for tree, run in runs.items():
                    run.parent.mkdir(exist_ok=True)
                    sharding = [] if "--strategy=deepspeed" in flags else ["--fsdp"]
                    train(trees[tree], [*given, *sharding, *flags], ranks, run)
                found = differences(*runs.values())
                wrong |= bool(found)
                print(f"{name}: {', '.join(found) or 'equal'}", flush=True)

    sys.exit(wrong)


if __name__ == "__main__":
    main()
