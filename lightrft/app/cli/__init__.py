"""Commands of the program, and the entry point of all: read the configuration, run it, and exit
with a code.

The configuration is read before anything heavy is imported, so that a misspelt flag or path is
reported at once. The process id of the launcher is read before any import, during which it may die.
"""

import os

STARTED_BY = os.getppid()

import argparse  # noqa: E402
import atexit  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from loguru import logger  # noqa: E402

from lightrft.app.run.logs import set_up_logging  # noqa: E402
from lightrft.config.command_line import answer_word, parse  # noqa: E402
from lightrft.config.errors import USER_ERROR, ConfigError  # noqa: E402
from lightrft.config.extras import extra, installed  # noqa: E402
from lightrft.config.paths import check_paths  # noqa: E402
from lightrft.config.sections import TRAINING, Config  # noqa: E402
from lightrft.config.tables import table  # noqa: E402

TYPES = {"int": int, "float": float, "path": Path}
"""Names of types in arguments.yaml."""
LONGEST_MESSAGE = 20_000
"""Number of characters of an error that are logged."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, 128 + SIGINT."""
SWITCH_INTERVAL = 5e-4
"""Seconds after which a thread that computes in Python gives the interpreter to another that waits
for it.

After each operation of torch an engine waits that long beside such a thread; Python's default is 5
ms.
"""


def command_parser(name: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser for `lightrft NAME` that prints the description as it is written.

    It has the arguments of arguments.yaml.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"lightrft {name}", description=description, formatter_class=form, **options
    )
    for argument, details in table("app/cli/arguments")[name].items():
        kind = {"type": TYPES[details["type"]]} if "type" in details else {}
        parser.add_argument(argument, **details | kind)
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Set up the log, and return the arguments of a command about a run, and the flags of the run.

    The command line may begin with the command of the run, and then the file of its configuration.
    """
    answer_word(argv, "train_ppo")
    options, flags = parser.parse_known_args(argv)
    if flags and flags[0] in TRAINING:
        options.command = flags.pop(0)
    if flags and not flags[0].startswith("-"):
        flags.insert(0, "--config")
    set_up_logging()
    return options, flags


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Print an error of these kinds, and exit with the code for what the user can correct."""
    try:
        yield
    except kinds as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(USER_ERROR) from None


def read_command_line(
    argv: Sequence[str] | None = None, command: str = "train_ppo", description: str = ""
) -> Config:
    """Return the configuration of a command line, not yet resolved.

    Flags of other programs are translated, or answered with the ones to write instead.
    """
    other = {"read_flags": extra("flags of other programs").translate} if installed() else {}
    return parse(argv, command, description, **other)


def run_command(command: str, description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0, 2 for errors that the user can correct, 128 + signal when
    interrupted, 1 otherwise.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable()
    set_up_logging()
    try:
        config = read_command_line(argv, command, description or "")
        if not config.train.dry_run:  # its plan is printed all the same
            check_paths(config, command)
        sys.exit(_run(command, config))
    except KeyboardInterrupt:  # before a run listens for signals, or the second one
        _log_once("interrupted by SIGINT")
        sys.exit(INTERRUPTED)
    except ConfigError as error:
        _log_once(str(error))
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from lightrft.models.launch.rendezvous import tell_launcher

            tell_launcher(str(error))
        sys.exit(USER_ERROR)


def _run(command: str, config: Config) -> int:
    """Run the command and return its exit code. All heavy imports begin here.

    No garbage collection scans the imported objects, during the imports or later: there is nothing
    to find among them. They are unfrozen at exit, so that libraries that look for leaks then report
    none.
    """
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL)
    # vLLM's extension warns that it binds to the nodes of memory; torch reads this at its import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from lightrft.app.run.interruption import Interrupted
    from lightrft.app.trainer.run import run
    from lightrft.models.launch.rendezvous import end_with_launcher, tell_launcher

    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    end_with_launcher(STARTED_BY)

    try:
        if config.train.dry_run:
            return extra("--dry_run").dry_run(config, command)
        run(command, config)
    except (ConfigError, Interrupted) as error:
        _log_once(str(error))
        tell_launcher(str(error))
        return error.exit_code
    except Exception:
        tell_launcher(traceback.format_exc())
        raise

    return 0


def _log_once(message: str) -> None:
    """Log an error that occurs on every rank on one rank of each machine."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        cut = f" ... ({len(message)} characters)" if len(message) > LONGEST_MESSAGE else ""
        logger.error(message[:LONGEST_MESSAGE] + cut)


MAINS: dict[str, Callable[..., None]] = {
    name: partial(run_command, name, text) for name, text in table("app/cli/descriptions").items()
}
"""Command that reads a configuration -> function of a command line that runs it."""
