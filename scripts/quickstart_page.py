"""Write what README.md shows of the quick start: numbers and a picture.

    bash scripts/quickstart.sh && python scripts/quickstart_page.py runs/quickstart

keeps the numbers of the run in docs/quickstart.json, draws docs/quickstart.svg from them, and
writes the sentence between the marks of README.md. A test compares all three, so that none of them
is written by hand.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.curves import Curve, Panel, figure  # noqa: E402  after its folder
from scripts.pages import between_marks  # noqa: E402

RECORD = ROOT / "docs/quickstart.json"
PICTURE = ROOT / "docs/quickstart.svg"
ACCURACIES = {
    "eval_before_sft": "at the start",
    "eval_after_sft": "after SFT",
    "eval_after_rl": "after GRPO",
}

Json = dict[str, Any]


def record(folder: Path) -> Json:
    """Return the numbers of a run's folder that the page shows."""
    summary, run = (
        json.loads((folder / name).read_text()) for name in ("summary.json", "run.json")
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {
        "reward": "rollout/reward",
        "accuracy": "eval/accuracy",
        "mismatch": "engine/logprob_mismatch",
    }
    curves = {
        short: [[row["step"], float(f"{row[name]:.3g}")] for row in rows if name in row]
        for short, name in names.items()
    }
    numbers = {name: round(summary[name], 3) for name in ACCURACIES}

    return numbers | {
        "parameters": run["parameters"],
        "steps": run["steps"],
        "engine": run["engine"],
        "curves": curves,
    }


def sentence(of: Json) -> str:
    """Return the sentence of README.md about a run."""
    accuracies = ", ".join(f"{of[name]:.0%} {when}" for name, when in ACCURACIES.items())
    largest = max(value for _, value in of["curves"]["mismatch"])
    return (
        f"A run on two cores: {of['parameters']:,} parameters, {of['steps']} steps of GRPO,"
        f" held-out accuracy {accuracies};\nthe log-probs of {of['engine']} and trainer differ by"
        f" {largest:.0e} on average in the worst step."
    )


def picture(of: Json) -> str:
    """Return an SVG with the curves of a run beside each other."""
    curves = of["curves"]
    gaps = curves["mismatch"]
    panels = (
        Panel("Reward, mean of a step", [Curve(curves["reward"])], (0.0, 1.0), "{:g}"),
        Panel("Held-out accuracy", [Curve(curves["accuracy"])], (0.0, 1.0), "{:.0%}"),
        Panel(
            "Engine and trainer, log-prob gap",
            [Curve(gaps)],
            (0.0, 1.25 * max(y for _, y in gaps)),
            "{:.0e}",
        ),
    )

    return figure(panels, columns=3)


def with_sentence(readme: str, of: Json) -> str:
    """Return README.md with the sentence between the marks."""
    return between_marks(readme, "quickstart", sentence(of) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what scripts/quickstart.sh has left")
    of = record(parser.parse_args().folder)
    RECORD.write_text(json.dumps(of) + "\n")
    PICTURE.write_text(picture(of))
    readme = ROOT / "README.md"
    readme.write_text(with_sentence(readme.read_text(), of))


if __name__ == "__main__":
    main()
