"""Plan a run without weights and without a device: problems, layout, bytes of a rank in each phase,
seconds, and advice.

    lightrft plan configs/grpo_gsm8k_qwen2.5_7b.yaml --ranks 1024 --device h100
    lightrft plan --command train_sft --pretrain Qwen/Qwen3-8B --prompt_data d.jsonl --ranks 8

The command has all other flags. Bytes are those of tensors with a shape and no memory in
FSDP2's own operations; seconds follow from the data sheet of the device, with the shares of its
peaks that are printed.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightrft.app.cli import (
    USER_ERROR,
    command_parser,
    read_arguments,
    read_command_line,
    user_errors,
)
from lightrft.config.errors import ConfigError
from lightrft.config.facts import RunFacts
from lightrft.config.paths import missing
from lightrft.config.references import JUDGE, SERVER, data_sources
from lightrft.config.resolve import resolve
from lightrft.config.sections import TRAINING, Config
from lightrft.models.parallel.peaks import DEVICES, known_device

if TYPE_CHECKING:
    from lightrft.extras.tools.planning import RunPlan


def main(argv: list[str] | None = None) -> None:
    options, flags = read_arguments(_parser(), argv)
    with user_errors(ConfigError):
        if min(options.ranks, options.ranks_per_node) < 1:
            raise ConfigError("--ranks and --ranks_per_node must be at least 1")

        config = read_command_line(flags, options.command)
        code = show_plan(
            config,
            options.command,
            options.ranks,
            options.device,
            ranks_per_node=options.ranks_per_node,
            model_file=options.model_config,
            as_json=options.json,
            elsewhere=True,
        )
        sys.exit(code)


def show_plan(
    config: Config,
    command: str,
    ranks: int,
    device: str,
    *,
    ranks_per_node: int,
    model_file: str = "",
    as_json: bool = False,
    elsewhere: bool = False,
) -> int:
    """Print the plan of a run and return the exit code: 2 if it does not fit, or if this machine
    lacks what the flags name and the run is not planned for `elsewhere`, else 0.

    Raise ConfigError with all problems of the flags.
    """
    from lightrft.app.run.prepare import quiet_libraries
    from lightrft.extras.tools.planning import plan_of
    from lightrft.strategy.checkpoint.model_folders import name_folders

    quiet_libraries()
    warnings.simplefilter("ignore")  # torch's about views, in traces whose results nobody uses
    name_folders(config, local=True)
    lacking = problems_here(config, command)
    try:
        notices = resolve(config, command, world_size=ranks, has_bf16=True)
    except ConfigError as error:
        raise ConfigError("\n  - ".join([str(error), *lacking])) from error

    run_plan = plan_of(
        config, command, ranks, device, ranks_per_node=ranks_per_node, model_file=model_file
    )

    if as_json:
        sys.stdout.write(json.dumps(run_plan.as_json() | {"problems": lacking}) + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
        for line in (*notices, *run_plan.lines):
            console.print(line)
        console.print(_memory(run_plan, device))
        for line in _conclusions(config, run_plan, device):
            console.print(line)
        if lacking and not elsewhere:
            console.print("[red]the run cannot start on this machine[/]")
        else:
            console.print("[green]it fits[/]" if run_plan.fits else "[red]it does not fit[/]")
        for line in (*run_plan.advice, *(f"this machine lacks: {each}" for each in lacking)):
            console.print(f"  - {line}", markup=False)

    return 0 if run_plan.fits and (elsewhere or not lacking) else USER_ERROR


def dry_run(config: Config, command: str) -> int:
    """Print the plan of the processes that have been started, on one of them; see show_plan().

    Without an accelerator whose peaks are known it is an h100. Raise ConfigError for a
    process that no launcher has started as a rank, and that would run alone, and for what
    --eval_generate cannot run.
    """
    from lightrft.models.launch.rendezvous import (
        adopt_slurm,
        check_environment,
        check_launched,
        ranks_per_node,
    )
    from lightrft.models.parallel.device import device_name

    adopt_slurm(os.environ)
    check_environment(os.environ)
    check_launched(os.environ)
    if int(os.environ.get("RANK", 0)):
        return 0

    device = known_device(device_name()) or "h100"
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    code = show_plan(
        config, command, ranks, device, ranks_per_node=ranks_per_node(os.environ) or ranks
    )
    show_data(config, command)
    if config.train.eval_generate:
        from lightrft.app.trainer.build_supervised import generated_evaluation

        generated_evaluation(config)
    return code


def problems_here(config: Config, command: str) -> list[str]:
    """Return what the run needs and this machine does not have: files, packages, logins, and
    functions that the user's code should define.
    """
    from lightrft.app.observe.trackers import check_login
    from lightrft.extras.agents.programs import ADAPTER_MODULES, ProgramSetup, agents, environments
    from lightrft.rewards.functions import rewards

    run = RunFacts(config, command)
    tools = tuple(name for name in run.tools if not name.startswith("mcp:"))
    adapted = run.environment.partition(":")[0] in ADAPTER_MODULES
    looked_up: list[tuple[Callable[[Any], Any], Any]] = [
        *[(check_login, [name]) for name in run.trackers if command in TRAINING],
        *[(rewards.__getitem__, name) for name in run.rewards if not name.startswith(SERVER)],
        (environments.__getitem__, "" if adapted else run.environment),
        (agents.__getitem__, run.agent),
        (lambda names: ProgramSetup("", names).program(), tools),
    ]
    problems = list(missing(config, command))
    for look_up, name in looked_up:
        try:
            if name and name != JUDGE:
                look_up(name)
        except ValueError as error:
            problems.append(str(error))

    return list(dict.fromkeys(problems))


def show_data(config: Config, command: str, source: str = "prompt_data") -> None:
    """Print a row as the model reads it, if model and data are here, and log how rows are read.

    What is learned is green in a terminal, and stands between ⟦ and ⟧ elsewhere. Raise DataError
    for a bad row.
    """
    files = [Path(each.name).expanduser() for each in data_sources(getattr(config.data, source))]
    tokenizer = Path(config.model.pretrain).expanduser() / "tokenizer_config.json"
    if not tokenizer.exists() or not all(file.exists() for file in files):
        sys.stdout.write(f"--{source}: not read, because it or the model is not on this machine\n")
        return

    from lightrft.app.trainer.build_data import shown_data

    _, texts = shown_data(config, command, source=source)
    console = Console(width=None if sys.stdout.isatty() else 130)
    form = "{}" if console.is_terminal else "⟦{}⟧"
    marked = [(form.format(text), "green") if learned else text for text, learned in texts]
    console.print(Text.assemble(*marked))


def _memory(run_plan: "RunPlan", device: str) -> Table:
    title = f"Bytes of a rank in GB; {run_plan.capacity / 1e9:.0f} of {device} can be used"
    columns = "phase", Column("total", justify="right"), "of which"
    table = Table(*columns, title=title, box=box.SIMPLE, title_justify="left")

    for phase, sizes in run_plan.phases.items():
        size = sum(sizes.values())
        colour = "green" if size <= run_plan.capacity else "red"
        of_which = ", ".join(
            f"{name} {num_bytes / 1e9:.1f}" for name, num_bytes in sizes.items() if num_bytes >= 5e7
        )
        table.add_row(phase, f"[{colour}]{size / 1e9:.1f}[/]", of_which)

    return table


def _conclusions(config: Config, run_plan: "RunPlan", device: str) -> Iterator[str]:
    from lightrft.extras.tools.step_time import DECODING, LINK, peak_shares

    dense = run_plan.active_parameters == run_plan.parameters
    active = "" if dense else f", {amount(run_plan.active_parameters)} for a token"
    largest = f"largest --max_tokens_per_microbatch that fits: {run_plan.max_tokens or 'none'}"
    yield f"{amount(run_plan.parameters)} parameters{active}; {largest}"

    if tokens := run_plan.cache_tokens:
        sequences = tokens / (config.data.prompt_max_len + config.rollout.generate_max_len)
        fitting = f"{sequences:,.1f} sequences of full length"
        yield f"an engine's cache: {tokens:,.0f} tokens, {fitting}"

    if run_plan.seconds:
        times = ", ".join(f"{name} {value:.1f}" for name, value in run_plan.seconds.items())
        yield f"about {sum(run_plan.seconds.values()):.1f} s a step: {times}"
        peaks = DEVICES[device]
        shares = peak_shares(dense=dense, recomputed=run_plan.recomputed)
        percent = " and ".join(f"{share:.0%}" for share in sorted(set(shares)))
        compute = f"{percent} of {peaks.flops / 1e12:.0f} TFLOP/s"
        memory = f"{DECODING:.0%} of {peaks.bandwidth / 1e12:.1f} TB/s"
        assumed = f"{compute}, {memory}, {LINK:.0%} of the link"
        yield f"(prompts and responses half as long as allowed; {assumed})"


def amount(number: int) -> str:
    """Return a number of parameters for people: 157,120, 34.5 million or 7.62 billion."""
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.3g} million" if number < 1e9 else f"{number / 1e9:.2f} billion"


def _parser() -> argparse.ArgumentParser:
    usage = "lightrft plan [COMMAND] [CONFIG.yaml] --ranks N [flags]"
    parser = command_parser("plan", __doc__, usage=usage, allow_abbrev=False)
    parser.add_argument("--device", choices=DEVICES, default="h100", help="kind of device")
    return parser
