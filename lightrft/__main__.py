"""Run a command: `lightrft train_ppo --config file.yaml`.

`python -m lightrft` is the same as `lightrft`.
"""

import argparse
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from lightrft import __version__
from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.extras import MODULES, extra
from lightrft.config.tables import table

SUMMARIES: dict[str, str] = table("commands")["summaries"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="lightrft",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Reinforcement fine-tuning. For several processes: torchrun --nproc-per-node N -m"
            " lightrft COMMAND ..."
        ),
        epilog="\n".join(f"  {command:<12} {meaning}" for command, meaning in SUMMARIES.items()),
    )
    parser.add_argument("--version", action="version", version=f"lightrft {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="lightrft COMMAND --help lists them",
    )

    chosen = parser.parse_args(argv)
    if chosen.command is None:
        parser.print_help()
        return

    chosen.command = chosen.command.replace("-", "_")
    if chosen.command not in SUMMARIES:
        near = "".join(
            f"; did you mean {name}" for name in get_close_matches(chosen.command, SUMMARIES, n=1)
        )
        parser.error(f"there is no command {chosen.command!r}{near}. All commands: lightrft --help")

    try:
        _main_of(chosen.command)(chosen.arguments)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted by SIGINT\n")


def _main_of(command: str) -> Callable[[list[str]], None]:
    from lightrft.app.cli import MAINS

    if command in MAINS:
        return MAINS[command]
    option = f"lightrft {command}"
    try:
        module = (
            extra(option) if option in MODULES else import_module(f"lightrft.app.cli.{command}")
        )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(USER_ERROR) from None
    return module.main


if __name__ == "__main__":
    main()
