"""Write what README.md shows of the quick start: its numbers and its picture.

    bash scripts/quickstart.sh && python scripts/quickstart_page.py runs/quickstart

keeps the numbers of the run in docs/quickstart.json, draws docs/quickstart.svg from them, and writes the sentence between the
marks of README.md. A test compares all three, so that none of them is written by hand.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD, PICTURE = ROOT / "docs/quickstart.json", ROOT / "docs/quickstart.svg"
BEGIN, END = "<!-- quickstart -->", "<!-- end of quickstart -->"
"""Marks around the sentence in README.md."""
ACCURACIES = {"eval_before_sft": "at the start", "eval_after_sft": "after SFT", "eval_after_rl": "after GRPO"}
PANEL, HEIGHT, LEFT, TOP, BOTTOM = 280, 190, 40, 34, 160
STYLE = 'font-family="sans-serif" font-size="11" fill="#444"'

Json = dict[str, Any]
Curve = list[tuple[int, float]]


def record(folder: Path) -> Json:
    """Return the numbers of a run's folder that the page shows."""
    summary, run = (json.loads((folder / name).read_text()) for name in ("summary.json", "run.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {"reward": "rollout/reward", "accuracy": "eval/accuracy", "mismatch": "engine/logprob_mismatch"}
    curves = {short: [[row["step"], float(f"{row[name]:.3g}")] for row in rows if name in row] for short, name in names.items()}
    numbers = {name: round(summary[name], 3) for name in ACCURACIES}
    return numbers | {"parameters": run["parameters"], "steps": run["steps"], "engine": run["engine"], "curves": curves}


def sentence(of: Json) -> str:
    """Return the sentence of README.md about a run."""
    accuracies = ", ".join(f"{of[name]:.0%} {when}" for name, when in ACCURACIES.items())
    largest = max(value for _, value in of["curves"]["mismatch"])
    return (
        f"A run on two cores: {of['parameters']:,} parameters, {of['steps']} steps of GRPO, held-out accuracy {accuracies};\n"
        f"the log-probs of {of['engine']} and trainer differ by {largest:.0e} on average in the worst step."
    )


def picture(of: Json) -> str:
    """Return an SVG with the curves of a run beside each other."""
    curves = of["curves"]
    panels = (
        ("Reward, mean of a step", curves["reward"], (0.0, 1.0), "{:g}"),
        ("Held-out accuracy", curves["accuracy"], (0.0, 1.0), "{:.0%}"),
        ("Engine and trainer, log-prob gap", curves["mismatch"], (0.0, 1.25 * max(y for _, y in curves["mismatch"])), "{:.0e}"),
    )
    drawn = "".join(f'<g transform="translate({PANEL * place} 0)">{_panel(*panel)}</g>' for place, panel in enumerate(panels))
    width = PANEL * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" {STYLE}>'
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>{drawn}</svg>\n'
    )


def _panel(title: str, curve: Curve, bounds: tuple[float, float], form: str) -> str:
    low, high = bounds
    last, right = curve[-1][0], PANEL - 14

    def at(step: float, value: float) -> str:
        across = LEFT + (right - LEFT) * step / last
        return f"{across:.1f},{BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low):.1f}"

    ticks = ""
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        height = BOTTOM - (BOTTOM - TOP) * share
        ticks += f'<path d="M{LEFT} {height}H{right}" stroke="#ddd"/>'
        ticks += f'<text x="{LEFT - 4}" y="{height + 4}" text-anchor="end">{form.format(value) if value else 0}</text>'
    line = " ".join(at(step, value) for step, value in curve)
    x, y = at(*curve[-1]).split(",")
    end = f'<circle cx="{x}" cy="{y}" r="2.5" fill="#2a6fbb"/>'
    return (
        f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>{ticks}'
        f'<polyline points="{line}" fill="none" stroke="#2a6fbb" stroke-width="1.5"/>{end}'
        f'<text x="{right}" y="{BOTTOM + 18}" text-anchor="end">step {last}</text>'
    )


def with_sentence(readme: str, of: Json) -> str:
    """Return README.md with the sentence between its marks."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{sentence(of)}\n{END}", readme, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what scripts/quickstart.sh has left")
    of = record(parser.parse_args().folder)
    RECORD.write_text(json.dumps(of) + "\n")
    PICTURE.write_text(picture(of))
    readme = ROOT / "README.md"
    readme.write_text(with_sentence(readme.read_text(), of))


if __name__ == "__main__":
    main()
