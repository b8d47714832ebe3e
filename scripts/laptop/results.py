"""Write what the pages show of the published runs of the recipes for a laptop.

    for recipe in words instructions brevity; do
        for seed in 0 1; do
            bash scripts/laptop/run.sh $recipe --seed $seed --out runs/laptop/$recipe-seed$seed
        done
    done
    python scripts/laptop/results.py          # or folders of runs, each named RECIPE-seedN
    python scripts/laptop/results.py --check  # compare the pages with docs/results alone

The numbers of a run go to docs/results/RECIPE-seedN.json and the metrics of its steps to
docs/results/RECIPE-seedN.jsonl. From these two files alone, the script draws
docs/figures/results-RECIPE.svg and writes the tables between the marks of docs/results.md and
README.md. A test compares them, so that no number is written by hand.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightrft.algorithms.rollout.scores import estimate  # noqa: E402  after its folder
from scripts.curves import BLUE, ORANGE, Curve, Panel, Points, figure  # noqa: E402
from scripts.laptop.rewards import brevity  # noqa: E402
from scripts.pages import between_marks  # noqa: E402

RECORDS = ROOT / "docs/results"
PAGE = ROOT / "docs/results.md"
README = ROOT / "README.md"
DOCTOR = RECORDS / "doctor.txt"
"""What `lightrft doctor` says of the model."""
COLOURS = (BLUE, ORANGE)
"""Colour of each seed."""
LONGEST = 200
"""Largest number of characters of a response in the table of examples."""

METRICS = (
    *(
        "step",
        "rollout/reward",
        "rollout/reward_std",
        "rollout/response_length",
        "rollout/truncated",
    ),
    *("rollout/groups_without_signal", "rollout/groups_solved_0", "rollout/groups_solved_100"),
    *(
        "engine/logprob_mismatch",
        "engine/logprob_mismatch_max",
        "eval/known/accuracy",
        "eval/new/accuracy",
    ),
    *("train/loss", "train/entropy", "train/grad_norm", "train/clip_high", "train/learning_rate"),
    *("train/accuracy", "train/margin", "train/reward_chosen", "train/reward_rejected"),
    *("time/generate", "time/train", "time/step", "memory/peak_gb"),
)
"""Metrics of a step that are kept."""
VERSIONS = ("lightrft", "torch", "transformers", "vllm", "peft")
STAGES = {"before": "Before", "after_sft": "After SFT", "after": "At the end"}
"""Folder of an evaluation -> when it was made."""
NEW = "new"
"""Name of the held-out set of new kinds, and of a set that has no name."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the pages say about a recipe."""

    title: str
    method: str
    measure: str
    """What the held-out numbers are."""


RECIPES = {
    "words": Recipe("Word problems", "SFT, then GRPO", "right answers"),
    "instructions": Recipe(
        "Instructions that can be checked", "GRPO", "responses that pass all checks"
    ),
    "brevity": Recipe("Brevity", "SFT, then DPO", "wins against the model before"),
}


# -- from a run to its record


def record(folder: Path) -> tuple[Json, list[Json]]:
    """Return the numbers of a run and the kept metrics of its steps.

    Raise ValueError for a folder whose name is not RECIPE-seedN, and for a run that has another
    seed or has not finished.
    """
    named = re.fullmatch(rf"({'|'.join(RECIPES)})-seed(\d+)", folder.name)
    if named is None:
        raise ValueError(
            f"{folder}: the name of the folder must be RECIPE-seedN, with one of"
            f" {', '.join(RECIPES)}"
        )

    recipe = named[1]
    seed = int(named[2])

    run = json.loads((folder / "run.json").read_text())
    if run["status"] != "finished":
        raise ValueError(
            f"{folder}: the run is {run['status']}, not finished: continue it with"
            " scripts/laptop/run.sh"
        )

    if (used := yaml.safe_load((folder / "config.yaml").read_text())["train"]["seed"]) != seed:
        raise ValueError(
            f"{folder}: the run has seed {used}, and the folder is named after seed {seed}"
        )

    steps = _rows(folder / "metrics.jsonl")
    parts = {"sft": folder / "sft", "dpo" if run["command"] == "train_dpo" else "grpo": folder}
    stages = [stage for stage in STAGES if (folder / stage / "evaluation.json").exists()]

    numbers = {
        "recipe": recipe,
        "seed": seed,
        "command": (
            f"bash scripts/laptop/run.sh {recipe} --seed {seed} --out runs/laptop/{folder.name}"
        ),
        "ranks": run["world_size"],
        "training": {
            name: _cost(part) for name, part in parts.items() if (part / "run.json").exists()
        },
        "held_out": _held_out(folder, recipe, stages),
        "examples": _examples(folder, recipe, stages),
        "versions": {name: run["versions"][name] for name in VERSIONS},
    }

    if mismatches := [
        row["engine/logprob_mismatch"] for row in steps if "engine/logprob_mismatch" in row
    ]:
        largest = max(row["engine/logprob_mismatch_max"] for row in steps)
        numbers["mismatch"] = {
            "mean": _short(statistics.fmean(mismatches)),
            "largest": _short(largest),
        }

    return numbers, [{name: _short(row[name]) for name in METRICS if name in row} for row in steps]


def _cost(folder: Path) -> Json:
    """Return steps, minutes and peak memory of a training.

    If it was continued, run.json has the seconds of its last part only, and the steps together take
    longer.
    """
    run = json.loads((folder / "run.json").read_text())
    steps = _rows(folder / "metrics.jsonl")
    seconds = max(run["seconds"], sum(row["time/step"] * row["perf/steps"] for row in steps))
    peak = max(row["memory/peak_gb"] for row in steps)
    return {"steps": run["steps"], "minutes": round(seconds / 60, 1), "peak_gb": round(peak, 2)}


def _held_out(folder: Path, recipe: str, stages: Sequence[str]) -> Json:
    """Return set -> stage -> value, mean words, and share of truncated responses.

    The value has an interval of 95 %. It is the accuracy of the evaluation, or for brevity the rate
    of wins; the model before has none.
    """
    responses = {stage: _responses(folder / stage) for stage in stages}
    found: Json = {}
    for name in responses["before"]:
        found[name] = {}
        for stage in stages:
            rows = responses[stage][name].values()
            truncated = [row["finish_reason"] == "length" for row in rows]
            found[name][stage] = {
                "words": _short(statistics.fmean(len(row["response"].split()) for row in rows)),
                "truncated": _short(statistics.fmean(truncated)),
            }

            if recipe == "brevity" and stage == "before":
                continue
            if recipe == "brevity":
                value = win_rate(responses[stage][name], responses["before"][name])
            else:
                evaluation = json.loads((folder / stage / "evaluation.json").read_text())
                value = [evaluation[f"{name}/accuracy{end}"] for end in ("", "_low", "_high")]
            found[name][stage] |= dict(
                zip(("value", "low", "high"), map(_short, value), strict=True)
            )
    return found


def win_rate(responses: dict[int, Json], others: dict[int, Json]) -> tuple[float, float, float]:
    """Return the share of questions with a briefer response than the other one's; a tie is half.

    It comes with the interval of 95 %. Both have the responses by the row of their question.
    scripts/laptop/rewards.py defines brevity.
    """
    wins = []
    for row, response in responses.items():
        own, other = (
            brevity(each["response"], each["finish_reason"] == "length")
            for each in (response, others[row])
        )
        wins.append(0.5 if own == other else float(own > other))
    return tuple(estimate(wins))


def _examples(folder: Path, recipe: str, stages: Sequence[str]) -> list[Json]:
    """Return the first new rows of each outcome: made right by training, and still wrong.

    For brevity, return the first two rows.
    """
    inputs = [row["input"] for row in _rows(folder / f"data/{NEW}.jsonl")]
    responses = {stage: _responses(folder / stage)[NEW] for stage in stages}
    rows = sorted(responses["before"])

    if recipe == "brevity":
        chosen = rows[:2]
    else:
        outcome = {
            row: tuple(responses[stage][row]["reward"] == 1 for stage in ("before", "after"))
            for row in rows
        }
        improved = [row for row in rows if outcome[row] == (False, True)]
        chosen = improved[:2] + [row for row in rows if not outcome[row][1]][:1]

    for row in chosen:
        if inputs[row] not in responses["before"][row]["prompt"]:
            raise ValueError(
                f"{folder}: row {row} of data/{NEW}.jsonl is not the prompt that was evaluated"
            )

    return [
        {"input": inputs[row]} | {stage: responses[stage][row]["response"] for stage in stages}
        for row in chosen
    ]


def _responses(folder: Path) -> dict[str, dict[int, Json]]:
    """Return the greedy responses of an evaluation: set -> row -> response."""
    found: dict[str, dict[int, Json]] = {}
    for row in _rows(folder / "responses.jsonl"):
        if row["sample"] == "greedy":
            found.setdefault(row.get("set", NEW), {})[row["row"]] = row
    return found


def _rows(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def doctor() -> str:
    """Return the tables of `lightrft doctor` about the model of the recipes.

    They compare engine and trainer.
    """
    flags = [
        "--model",
        str(ROOT / "runs/laptop/model"),
        "--engine_type",
        "vllm",
        "--fsdp",
        "--engine_kv_cache_gb",
        "0.2",
    ]
    command = [sys.executable, "-m", "lightrft", "doctor", *flags]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    lines = [line.rstrip() for line in output.splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("Log-probs of"))

    return "\n".join(lines[start:]) + "\n"


def _short(value: float) -> float:
    """Return a number with four significant digits."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


# -- from records to pages


def read_records() -> list[tuple[Json, list[Json]]]:
    """Return the published runs of docs/results in the order of the recipes and seeds."""
    found = [
        (json.loads(path.read_text()), _rows(path.with_suffix(".jsonl")))
        for path in RECORDS.glob("*.json")
    ]
    return sorted(found, key=lambda each: (list(RECIPES).index(each[0]["recipe"]), each[0]["seed"]))


def generated(records: Sequence[tuple[Json, list[Json]]]) -> dict[Path, str]:
    """Return the contents of each page and figure that show these runs."""
    files = {}
    page = PAGE.read_text()
    readme = README.read_text()
    for name in RECIPES:
        runs = [run for run in records if run[0]["recipe"] == name]
        page = between_marks(
            page, name, recipe_text([numbers for numbers, _ in runs]) if runs else ""
        )
        if runs:
            files[ROOT / f"docs/figures/results-{name}.svg"] = picture(runs)

    if DOCTOR.exists():
        page = between_marks(page, "doctor", f"```text\n{DOCTOR.read_text()}```\n")
    readme = between_marks(
        readme, "results", summary_table([numbers for numbers, _ in records]) if records else ""
    )
    return files | {PAGE: page, README: readme}


def summary_table(runs: Sequence[Json]) -> str:
    """Return a row for each recipe: held-out values before and at the end, for each seed."""
    rows = []
    for name, recipe in RECIPES.items():
        of_recipe = [run for run in runs if run["recipe"] == name]
        if not of_recipe:
            continue

        new = [run["held_out"][NEW] for run in of_recipe]
        before = ", ".join(
            "50%" if name == "brevity" else f"{each['before']['value']:.0%}" for each in new
        )
        end = ", ".join(f"{each['after']['value']:.0%}" for each in new)
        minutes = ", ".join(
            str(sum(round(part["minutes"]) for part in run["training"].values()))
            for run in of_recipe
        )
        link = f"[{recipe.title}](docs/results.md#{recipe.title.lower().replace(' ', '-')})"
        rows.append([link, recipe.method, recipe.measure, before, end, minutes])

    return _table(["Recipe", "Learns by", "Held out", "Before", "At the end", "Minutes"], rows)


def recipe_text(runs: Sequence[Json]) -> str:
    """Return the tables, the figure and the examples of a recipe."""
    name = runs[0]["recipe"]
    first = runs[0]
    stages = list(first["held_out"][NEW])
    titles = [STAGES[stage] for stage in stages]

    values = [
        [
            f"[{run['seed']}](results/{name}-seed{run['seed']}.json)",
            kind,
            *map(_value, scores.values()),
        ]
        for run in runs
        for kind, scores in run["held_out"].items()
    ]

    examples = [
        [_cell(example[key]) for key in ("input", *stages)] for example in first["examples"]
    ]
    versions = ", ".join(f"{package} {version}" for package, version in first["versions"].items())

    parts = (
        (
            f"Share of {RECIPES[name].measure} with its interval of 95 %, mean words, and share of"
            " responses that were cut off:\n"
        ),
        _table(["Seed", "Set", *titles], values),
        _table(
            ["Seed", "Steps", "Minutes", "Peak memory of a rank", "Log-prob gap: mean, largest"],
            map(_costs, runs),
        ),
        f"The training had {first['ranks']} ranks on two cores; {versions}.\n",
        f"![Curves of the recipe](figures/results-{name}.svg)\n",
        f"Greedy responses of seed {first['seed']} to new prompts, {_choice(name)}:\n",
        _table(["Prompt", *titles], examples),
    )

    return "\n".join(parts)


def _costs(run: Json) -> list[str]:
    """Return what a run took.

    That is steps and minutes of each training, memory, and the difference between engine and
    trainer.
    """
    training = run["training"]
    return [
        str(run["seed"]),
        ", ".join(f"{part['steps']} of {name.upper()}" for name, part in training.items()),
        ", ".join(f"{part['minutes']:.0f}" for part in training.values()),
        f"{max(part['peak_gb'] for part in training.values()):.1f} GB",
        (
            f"{run['mismatch']['mean']:.1e}, {run['mismatch']['largest']:.1e}"
            if "mismatch" in run
            else "no engine"
        ),
    ]


def _choice(name: str) -> str:
    """Return the rule that _examples() chooses by."""
    return (
        "the first two"
        if name == "brevity"
        else "the first two that training made right and the first that stayed wrong"
    )


def picture(runs: Sequence[tuple[Json, list[Json]]]) -> str:
    """Return an SVG with the curves of the seeds of a recipe."""
    if runs[0][0]["recipe"] == "brevity":
        return figure(
            [
                _panel(runs, "DPO loss", "train/loss", "{:.2g}"),
                _panel(runs, "Pairs in the right order", "train/accuracy", "{:.0%}", highest=1.0),
                _panel(runs, "Margin of the implicit reward", "train/margin", "{:.2g}"),
            ],
            columns=3,
        )

    return figure(
        [
            _panel(runs, "Reward, mean of a step", "rollout/reward", "{:g}", highest=1.0),
            _accuracy_panel(runs, "Held out: known kinds", "known"),
            _accuracy_panel(runs, "Held out: new kinds", NEW),
            _panel(runs, "Engine and trainer, log-prob gap", "engine/logprob_mismatch", "{:.1e}"),
        ],
        columns=2,
    )


def _panel(
    runs: Sequence[tuple[Json, list[Json]]],
    title: str,
    metric: str,
    form: str,
    highest: float | None = None,
) -> Panel:
    """Return the panel of a metric.

    Without `highest`, the axis ends a quarter above the largest value.
    """
    points = [[(row["step"], row[metric]) for row in steps if metric in row] for _, steps in runs]
    values = [value for each in points for _, value in each]
    top = 1.25 * max(values) if highest is None else highest
    curves = [_curve(numbers, each) for (numbers, _), each in zip(runs, points, strict=True)]
    return Panel(title, curves, (min(0.0, *values), top), form)


def _accuracy_panel(runs: Sequence[tuple[Json, list[Json]]], title: str, kind: str) -> Panel:
    """Return the panel of a held-out set.

    It shows the evaluation of the model that GRPO starts from, the ones on the way, and the last.
    """
    curves = []
    for numbers, steps in runs:
        values = numbers["held_out"][kind]
        metric = f"eval/{kind}/accuracy"
        start = values.get("after_sft", values["before"])["value"]
        on_the_way = [(row["step"], row[metric]) for row in steps[:-1] if metric in row]
        points = [(0, start), *on_the_way, (steps[-1]["step"], values["after"]["value"])]
        curves.append(_curve(numbers, points, marked=(0, -1)))
    return Panel(title, curves, (0.0, 1.0), "{:.0%}")


def _curve(numbers: Json, points: Points, marked: tuple[int, ...] = (-1,)) -> Curve:
    return Curve(points, f"seed {numbers['seed']}", COLOURS[numbers["seed"] % len(COLOURS)], marked)


def _value(score: Json) -> str:
    interval = (
        f"**{score['value']:.0%}** ({score['low']:.0%} to {score['high']:.0%}), "
        if "value" in score
        else ""
    )
    return f"{interval}{score['words']:.0f} words, {score['truncated']:.0%} cut off"


def _cell(text: str) -> str:
    """Return a response as a cell of a table.

    It is on one line, of bounded length, without characters that mean something there.
    """
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 2].rstrip() + " …"
    return re.sub(r"[\\`*_\[\]|<>&$#~]", lambda found: f"&#{ord(found[0])};", line)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="*",
        help="runs named RECIPE-seedN (default: runs/laptop/RECIPE-seed0 and 1)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and fail if a page is not what docs/results says",
    )

    arguments = parser.parse_args()

    if arguments.check:
        if differing := [
            path
            for path, text in generated(read_records()).items()
            if not path.exists() or path.read_text() != text
        ]:
            sys.exit("run python scripts/laptop/results.py: " + ", ".join(map(str, differing)))
        return

    published = [ROOT / f"runs/laptop/{recipe}-seed{seed}" for recipe in RECIPES for seed in (0, 1)]
    RECORDS.mkdir(exist_ok=True)
    for folder in arguments.folders or published:
        numbers, steps = record(folder)
        (RECORDS / f"{folder.name}.json").write_text(
            json.dumps(numbers, indent=1, ensure_ascii=False) + "\n"
        )
        (RECORDS / f"{folder.name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in steps)
        )

    DOCTOR.write_text(doctor())
    for path, text in generated(read_records()).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
