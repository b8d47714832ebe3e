"""Name what goes wrong in a run: entropy collapse, dead groups, growing length, clipping, and
others, each with the numbers that show it and the flag to change.

lightrft diagnose runs/quickstart

If the run had --measure_noise, it also says which batch the noise of the gradient suggests.
"""

import sys

from rich.console import Console
from rich.markup import escape

from lightrft.app.cli import command_parser
from lightrft.app.observe.curves import read_history
from lightrft.app.observe.symptoms import SYMPTOM_STEPS, find_symptoms
from lightrft.app.run.logs import set_up_logging
from lightrft.extras.tune.advice import batches


def main(argv: list[str] | None = None) -> None:
    commands = command_parser("diagnose", __doc__)
    folder = commands.parse_args(argv).folder
    set_up_logging()

    history = read_history(folder / "metrics.jsonl")
    num_steps = len(history.get("rollout/reward", ()))
    if num_steps < SYMPTOM_STEPS:
        commands.error(f"{folder} has {num_steps} steps of train_ppo; {SYMPTOM_STEPS} are needed")

    symptoms = find_symptoms(history)
    console = Console(highlight=False, soft_wrap=True)
    for symptom in symptoms:
        console.print(f"[red]{symptom.name}[/red]: {escape(symptom.evidence)}")
        console.print(f"    {escape(symptom.advice)}")
    if not symptoms:
        console.print(f"{folder}: no symptom in {num_steps} steps")
    if "noise/signal_to_noise" in history:
        for sentence in batches(folder):
            console.print(escape(sentence))
    sys.exit(int(bool(symptoms)))
