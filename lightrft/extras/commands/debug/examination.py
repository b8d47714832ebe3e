"""Check this machine and a model, and print what was found, for `lightrft doctor`."""

import os
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightrft.app.run.prepare import quiet_libraries
from lightrft.app.trainer import selfcheck
from lightrft.config.sections import Config
from lightrft.engine.probe import MAX_MISMATCH
from lightrft.extras.tools.checkup import Check, checkup
from lightrft.extras.tools.diagnosis import Diagnosis, diagnose
from lightrft.models.load import load_tokenizer
from lightrft.models.qwen_omni import load_config
from lightrft.strategy import get_strategy
from lightrft.strategy.checkpoint.model_folders import converted_folder
from lightrft.strategy.strategy import StrategyBase

OUTPUTS_SHOWN = 8
"""Number of outputs of the model to show, around the first that differs."""


def examine(config: Config, engine_model: str) -> bool:
    """Check the machine, and the model of the configuration if there is one; return True if all is
    well. `engine_model` is another folder for the engine.
    """
    quiet_libraries()
    console = Console(width=None if sys.stdout.isatty() else 130)
    checks = checkup(Path())
    console.print(_checks(checks))
    healthy = not any(check.fatal for check in checks)
    if config.model.pretrain and healthy:
        healthy = _examine_model(config, engine_model, console)
    console.print("[green]all checks passed[/]" if healthy else "[red]problems found: see above[/]")
    return healthy


def _examine_model(config: Config, engine_model: str, console: Console) -> bool:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit("lightrft doctor checks a model in one process: start it without torchrun")

    name = config.model.pretrain
    strategy = get_strategy(config)
    try:
        config.model.pretrain = converted_folder(name, "--model")
        engine_model = converted_folder(engine_model, "--engine_model")
        strategy.setup_distributed()
        well = _check_small_copy(config, strategy, console)
        diagnosis = diagnose(config, strategy, load_tokenizer(config.model), engine_model)
    except Exception as error:  # any error is a result of the diagnosis
        console.print(
            f"[red]{escape(name)} cannot be examined[/]: {type(error).__name__}:"
            f" {escape(str(error))}"
        )
        return False
    finally:
        strategy.close()

    console.print(_gaps(diagnosis, type(strategy).__name__))
    if diagnosis.outputs:
        console.print(_outputs(diagnosis))
    if diagnosis.advice:
        console.print(f"[bold]Check[/] {escape(diagnosis.advice)}")

    return well and diagnosis.healthy


def _check_small_copy(config: Config, strategy: StrategyBase, console: Console) -> bool:
    """Compare a small copy of the model with transformers, and with itself after a stop.

    Return whether they agree; a copy that cannot be built says nothing.
    """
    trust = {"trust_remote_code": config.model.trust_remote_code}
    model_config = load_config(config.model.pretrain, **trust)
    try:
        comparisons = selfcheck.compare_small_copy(model_config, **trust)
    except selfcheck.ImpossibleError:  # loading the model says the same
        return False
    except Exception as error:
        console.print(f"No small copy could be built: {type(error).__name__}: {escape(str(error))}")
        return True

    # Only what is computed correctly is worth resuming.
    well = not any(each.differs for each in comparisons)
    resumed = selfcheck.resumed_gap(model_config, strategy, **trust) if well else None
    console.print(_copies(comparisons, resumed))
    return well and resumed == 0


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, box=box.SIMPLE, title_justify="left")


def _checks(checks: list[Check]) -> Table:
    table = _table("This machine", "", "Found", "To do")
    for check in checks:
        colour = "green" if not check.problem else "red" if check.fatal else "yellow"
        table.add_row(f"[{colour}]{check.name}[/]", check.finding, check.problem)
    return table


def _copies(comparisons: list[selfcheck.Comparison], resumed: float | None) -> Table:
    title = "A small copy with random weights, against transformers and each sequence alone"
    table = _table(title, "Computed", "Log-probs", "Gradients", "First difference")
    for comparison in comparisons:
        table.add_row(
            comparison.name,
            _coloured(comparison.logprobs, selfcheck.LOGPROB_TOLERANCE),
            _coloured(comparison.gradients, selfcheck.GRADIENTS),
            escape(comparison.finding) if comparison.differs else "",
        )

    if resumed is not None:
        finding = f"parameters differ by {resumed:.1e}" if resumed else ""
        table.add_row("resumed after one of two steps", _coloured(resumed, 0.0), "", finding)
    return table


def _coloured(value: float, largest: float) -> str:
    return f"[{'green' if value <= largest else 'red'}]{value:.1e}[/]"


def _gaps(diagnosis: Diagnosis, strategy: str) -> Table:
    width = str(diagnosis.dtype).removeprefix("torch.")
    title = f"Log-probs of {diagnosis.engine} and trainer ({strategy}), {width}"
    table = _table(title, "Responses", "Tokens", "Mean gap", "Largest", "Mean of exp", "At")

    for name, gap in diagnosis.gaps.items():
        allowed = 0.0 if diagnosis.exact else MAX_MISMATCH[diagnosis.dtype]
        numbers = _coloured(gap.mean, allowed), f"{gap.largest:.1e}", f"{gap.mean_exp:.4f}"
        table.add_row(name, str(gap.tokens), *numbers, escape(gap.worst))

    return table


def _outputs(diagnosis: Diagnosis) -> Table:
    """Return the table of the first output that differs and its neighbours.

    It is the table of the last ones if none differs.
    """
    outputs = diagnosis.outputs
    first = outputs.index(diagnosis.first) if diagnosis.first else len(outputs) - 1
    start = max(0, first - OUTPUTS_SHOWN // 2)
    end = min(start + OUTPUTS_SHOWN, len(outputs))
    title = f"Parts of the model, {start + 1} to {end} of {len(outputs)}"
    table = _table(title, "Part", "Relative difference", "Explained by rounding")

    for gap in outputs[start : start + OUTPUTS_SHOWN]:
        mark = " [bold red]<- first difference[/]" if gap is diagnosis.first else ""
        relative = _coloured(gap.relative, gap.allowed)
        table.add_row(gap.name + mark, relative, f"{gap.allowed:.1e}")

    return table
