"""Search learning rate, batch and other options by runs that are paused and continued.

    lightrft tune configs/quickstart.yaml --over learning_rate=1e-5..1e-2:log \\
        n_samples_per_prompt=4,8,16 --metric eval/accuracy --budget 30m --ranks 2
    lightrft tune train_sft configs/quickstart_sft.yaml --over learning_rate=1e-4..1e-2:log
    lightrft tune train_sft --pretrain some/model --lora_rank 16 --advice

The command has all other flags of the run. NAME=LOW..HIGH is a range, with :log even over its
logarithms, and NAME=ONE,OTHER are choices. Each trial is a run in --out. After Ctrl-C the same
command continues. At the end --out has best.yaml, tune.html, and study.db for Optuna's tools.
"""

import math
import os
import re
import signal
import sys
from argparse import Namespace
from importlib.util import find_spec

from loguru import logger

from lightrft.app.cli import command_parser, read_arguments, read_command_line, user_errors
from lightrft.config.errors import ConfigError, refuse
from lightrft.config.facts import RunFacts
from lightrft.config.paths import check_paths
from lightrft.config.sections import PPO, Config

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}


def main(argv: list[str] | None = None) -> None:
    usage = "lightrft tune [COMMAND] [CONFIG.yaml] --over NAME=VALUES ... [flags]"
    parser = command_parser("tune", __doc__, usage=usage, allow_abbrev=False)
    options, flags = read_arguments(parser, argv)
    with user_errors(ConfigError):
        config = read_command_line(flags, options.command)
        if options.advice:
            from lightrft.extras.tune.advice import advice

            sys.stdout.write(
                "".join(f"{line}\n" for line in advice(config, options.command, flags))
            )
            return
        _search(options, flags, config)


def _search(options: Namespace, flags: list[str], config: Config) -> None:
    """Check everything at the door, then search, and show what was found."""
    from lightrft.extras.tune import space

    command = options.command
    for name in ("trials", "seeds", "ranks", "parallel"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1")
    started = [int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")]
    if "RANK" in os.environ or max(started) > 1:
        raise ConfigError("start tune in one process: it starts its runs, with --ranks each")

    space.check_flags(config)
    metric = options.metric or default_metric(config, command)
    minimize = space.lower_is_better(metric, command, options.minimize, options.maximize)
    parameters = space.read_parameters(options.over, command)
    flags = [*flags, *evaluations(config, metric)]
    space.check_values(parameters, flags, command, options.ranks)
    check_paths(config, command)
    budget = seconds_of(options.budget)
    if find_spec("optuna") is None:
        raise ConfigError("tune needs optuna, which is not installed: pip install '.[tune]'")

    from lightrft.extras.tune.optuna import Study
    from lightrft.extras.tune.page import Findings
    from lightrft.extras.tune.search import Search
    from lightrft.extras.tune.trials import Launcher, visible_devices

    devices = visible_devices() if options.parallel > 1 else []
    if devices and (needed := options.parallel * options.ranks) > len(devices):
        raise ConfigError(f"--parallel times --ranks is {needed}, for {len(devices)} devices")

    written = space.written_values(config)
    asked = {name: getattr(options, name) for name in ("command", "over", "ranks")}
    question = asked | {"metric": metric, "minimize": minimize} | written
    seed = config.train.seed
    study = Study(options.out, question, parameters, minimize=minimize, seed=seed)
    launcher = Launcher(command, flags, metric, options.ranks, devices)
    counts = (options.trials, options.seeds, options.parallel)
    search = Search(options.out, study, launcher, seed, *counts, budget)
    # A scheduler's signal, and the end of the terminal unless nohup ignores it, pause as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    data, length = config.data.prompt_data, f"{config.train.max_steps or 'all'} steps"
    logger.info(f"{command}: {config.model.pretrain} learns {data} in {length}; {metric} decides")
    try:
        search.run()
    except KeyboardInterrupt:
        logger.warning("the runs are paused: the same command continues")
        raise

    findings = Findings(search)
    findings.print()
    for path in findings.write():
        logger.info(f"written: {path}")


def default_metric(config: Config, command: str) -> str:
    """Return the metric that decides if none is written: of the first set of --eval_data."""
    sets = RunFacts(config, command).eval_sets
    held_out = f"eval/{sets[0].name}".rstrip("/") if sets else "eval"
    return f"{held_out}/reward" if command in PPO else "eval/loss"


def evaluations(config: Config, metric: str) -> list[str]:
    """Return the flags that measure held-out data where trials are compared.

    Raise ConfigError if the metric is not measured, or comes too late.
    """
    from lightrft.extras.tune.trials import SHARES

    train = config.train
    if not metric.startswith("eval/"):
        return []
    if not config.data.eval_data:
        raise ConfigError(f"--metric {metric} needs held-out data: add --eval_data FILE")
    if train.max_steps is not None:
        first = math.ceil(train.max_steps * SHARES[0])
        late = f"trials are first compared after a ninth of --max_steps, so write {first} or less"
        steps = {"eval_steps": train.eval_steps, "logging_steps": config.observe.logging_steps}
        refuse([f"--{name} {each}: {late}" for name, each in steps.items() if each > 2 * first])
        return [] if train.eval_steps > 0 else [f"--eval_steps={first}"]
    if train.eval_steps < 1:
        raise ConfigError(f"--metric {metric} needs evaluations: add --eval_steps or --max_steps")
    return []


def seconds_of(text: str) -> float:
    """Return the seconds of `90s`, `30m` or `1.5h`, and infinity of an empty text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if text and (found is None or float(found[1]) == 0):
        raise ConfigError(f"--budget {text}: write a time, such as 90s, 30m or 1.5h")
    return float(found[1]) * UNIT_SECONDS[found[2]] if found else float("inf")
