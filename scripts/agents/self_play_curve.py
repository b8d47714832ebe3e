"""Run the self-play example, and draw its curves.

    python scripts/agents/self_play_curve.py               # six minutes on one busy core
    python scripts/agents/self_play_curve.py --draw FOLDER # the curves of a run that is there

docs/self_play.svg has what the first player wins in a game, and the number of letters that the
players add.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.curves import Curve, Panel, figure  # noqa: E402  after its folder

RUN = ROOT / "runs/self_play"
DATA = RUN / "data"
PICTURE = ROOT / "docs/self_play.svg"
PREPARE = ["scripts/prepare_quickstart.py", "--task=guessing", f"--out={DATA}"]
TRAIN = [
    *("-m", "lightrft", "train_ppo", "--config=configs/guess_number.yaml"),
    *(f"--pretrain={DATA}/model", f"--prompt_data={DATA}/train.jsonl"),
    *("--environment=", "--agent=scripts/agents/self_play.py:play", "--engine_type=hf"),
    *("--rollout_batch_size=16", "--train_batch_size=256", "--max_steps=120", "--save_steps=-1"),
    f"--save_path={RUN}",
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=Path, help="folder of a run")
    folder = parser.parse_args().draw
    if folder is None:
        folder = RUN
        for arguments in (PREPARE, [*TORCHRUN, *TRAIN]):
            subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    won, letters = (
        Curve([(row["step"], row[name]) for row in rows])
        for name in ("reward/first", "episodes/turns")
    )
    panels = [
        Panel("What the first player wins", [won], (-1.0, 1.0), "{:.1f}"),
        Panel("Letters of a game", [letters], (1.0, 3.0), "{:.1f}"),
    ]
    PICTURE.write_text(figure(panels, 2))


if __name__ == "__main__":
    main()
