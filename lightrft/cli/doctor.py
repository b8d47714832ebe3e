"""Check this machine, and compare engine and trainer on a model: token by token, then layer by
layer.

lightrft doctor --model Qwen/Qwen2.5-0.5B-Instruct --bf16
"""

import argparse
import os
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightrft.checkpoint.model_folders import converted_folder
from lightrft.config.sections import (
    Config,
    DataSection,
    EngineSection,
    ModelSection,
    RolloutSection,
    StrategySection,
    TrainSection,
)
from lightrft.engine.probe import MISMATCH
from lightrft.models.load import load_tokenizer
from lightrft.run.logs import set_up_logging
from lightrft.run.prepare import quiet_libraries
from lightrft.strategy import get_strategy
from lightrft.tools.checkup import Check, checkup
from lightrft.tools.diagnosis import Diagnosis, diagnose

SHOWN = 8
"""Number of parts of the model to show, around the first that differs."""


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    set_up_logging()
    quiet_libraries()
    console = Console(width=None if sys.stdout.isatty() else 130)
    checks = checkup(Path())
    console.print(_checks(checks))
    healthy = not any(check.fatal for check in checks)
    if arguments.model and healthy:
        healthy = _examine(arguments, console)
    console.print("[green]all checks passed[/]" if healthy else "[red]problems found: see above[/]")
    sys.exit(0 if healthy else 1)


def _examine(arguments: argparse.Namespace, console: Console) -> bool:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit("lightrft doctor checks a model in one process: start it without torchrun")

    config = _config(arguments)
    strategy = get_strategy(config)
    try:
        config.model.pretrain = converted_folder(arguments.model, "--model")
        engine_model = converted_folder(arguments.engine_model, "--engine_model")
        strategy.setup_distributed()
        diagnosis = diagnose(config, strategy, load_tokenizer(config.model), engine_model)
    except Exception as error:  # any error is a result of the diagnosis
        console.print(
            f"[red]{escape(arguments.model)} cannot be examined[/]: {type(error).__name__}:"
            f" {escape(str(error))}"
        )
        return False
    finally:
        strategy.close()

    console.print(_gaps(diagnosis, type(strategy).__name__))
    if diagnosis.parts:
        console.print(_parts(diagnosis))
    if diagnosis.advice:
        console.print(f"[bold]Check[/] {escape(diagnosis.advice)}")

    return diagnosis.healthy


def _config(arguments: argparse.Namespace) -> Config:
    """Return a configuration of one rank with the strategy that a run with these flags has, and an
    engine in eager mode.
    """
    strategy = StrategySection(fsdp=True) if arguments.fsdp else StrategySection()
    return Config(
        model=ModelSection(
            pretrain=arguments.model,
            bf16=arguments.bf16,
            trust_remote_code=arguments.trust_remote_code,
        ),
        data=DataSection(prompt_max_len=128),
        strategy=strategy,
        engine=EngineSection(
            engine_type=arguments.engine_type,
            engine_enforce_eager=True,
            engine_mem_util=arguments.engine_mem_util,
            engine_kv_cache_gb=arguments.engine_kv_cache_gb,
        ),
        rollout=RolloutSection(generate_max_len=64),
        train=TrainSection(),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="",
        help="folder, GGUF file or hub name; without it, only the machine is checked",
    )
    parser.add_argument(
        "--engine_model",
        default="",
        help="another folder for the engine, such as an export of the model",
    )
    parser.add_argument("--engine_type", default="auto", help="auto, vllm, sglang or hf")
    fsdp = "train with FSDP2, as with --fsdp in a run; without it DeepSpeed where it is installed"
    parser.add_argument("--fsdp", action="store_true", help=fsdp)

    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16, as with --bf16 in a run"
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run Python code that comes with the model"
    )
    parser.add_argument(
        "--engine_mem_util",
        type=float,
        default=EngineSection.engine_mem_util,
        help="share of an accelerator's memory for the engine",
    )
    parser.add_argument(
        "--engine_kv_cache_gb",
        type=float,
        default=EngineSection.engine_kv_cache_gb,
        help="size of the engine's key-value cache on a CPU, in GB",
    )

    return parser


def _checks(checks: list[Check]) -> Table:
    table = Table("", "Found", "To do", title="This machine", box=box.SIMPLE, title_justify="left")
    for check in checks:
        colour = "green" if not check.problem else "red" if check.fatal else "yellow"
        table.add_row(f"[{colour}]{check.name}[/]", check.finding, check.problem)
    return table


def _gaps(diagnosis: Diagnosis, strategy: str) -> Table:
    title = (
        f"Log-probs of {diagnosis.engine} and trainer ({strategy}),"
        f" {str(diagnosis.dtype).removeprefix('torch.')}"
    )
    table = Table(
        "Responses",
        "Tokens",
        "Mean gap",
        "Largest",
        "Mean of exp",
        "At",
        title=title,
        box=box.SIMPLE,
        title_justify="left",
    )

    for name, gap in diagnosis.gaps.items():
        colour = "green" if gap.mean <= MISMATCH[diagnosis.dtype] else "red"
        mean = f"[{colour}]{gap.mean:.1e}[/]"
        table.add_row(
            name,
            str(gap.tokens),
            mean,
            f"{gap.largest:.1e}",
            f"{gap.mean_exp:.4f}",
            escape(gap.worst),
        )

    return table


def _parts(diagnosis: Diagnosis) -> Table:
    """Return the table of the first part that differs and those around it; of the last ones if none
    differs.
    """
    first = diagnosis.parts.index(diagnosis.first) if diagnosis.first else len(diagnosis.parts) - 1
    start = max(0, first - SHOWN // 2)
    title = (
        f"Parts of the model, {start + 1} to {min(start + SHOWN, len(diagnosis.parts))} of"
        f" {len(diagnosis.parts)}"
    )
    table = Table(
        "Part",
        "Relative difference",
        "Explained by rounding",
        title=title,
        box=box.SIMPLE,
        title_justify="left",
    )

    for part in diagnosis.parts[start : start + SHOWN]:
        mark = " [bold red]<- first difference[/]" if part is diagnosis.first else ""
        colour = "red" if part.differs else "green"
        table.add_row(part.name + mark, f"[{colour}]{part.relative:.1e}[/]", f"{part.allowed:.1e}")

    return table


if __name__ == "__main__":
    main()
