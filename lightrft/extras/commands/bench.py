"""Run ten steps and print their speed, what limits it, and the flag to try next, as a table and as
one JSON object.

torchrun --nproc-per-node 8 -m lightrft bench configs/grpo_gsm8k_qwen2.5_7b.yaml --max_steps 10

It takes all flags of train_ppo. Nothing is kept: the run has a temporary folder and writes no
checkpoint.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from lightrft.app.cli import run_command
from lightrft.app.observe.scoreboard import scoreboard
from lightrft.app.observe.sinks import read_rows

BENCH_STEPS = 10


def main(argv: list[str] | None = None) -> None:
    flags = list(sys.argv[1:] if argv is None else argv)
    if flags and not flags[0].startswith("-"):
        flags.insert(0, "--config")
    run = os.environ.get("MASTER_PORT", os.getpid())
    folder = Path(tempfile.gettempdir()) / f"lightrft-bench-{run}"

    if any(flag.split("=")[0] == "--save_path" for flag in flags):
        sys.exit(
            "bench has a folder of its own and removes it: set TMPDIR to one that all nodes see,"
            " instead of --save_path"
        )

    own = [f"--save_path={folder}", "--save_steps=-1", "--eval_data=", "--report_to=jsonl"]
    flags = [f"--max_steps={BENCH_STEPS}", *flags, *own]
    try:
        run_command("train_ppo", __doc__, flags)
    except SystemExit as ended:
        code = ended.code

    if code == 0 and not int(os.environ.get("RANK", 0)) and folder.exists():
        described = json.loads((folder / "run.json").read_text())
        board = scoreboard(read_rows(folder / "metrics.jsonl"), described)
        shutil.rmtree(folder)
        sys.stdout.write("\n".join([*board.lines, json.dumps(asdict(board))]) + "\n")

    sys.exit(code)
