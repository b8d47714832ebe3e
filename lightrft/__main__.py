"""Run a command: `lightrft train_ppo --config file.yaml`.

`python -m lightrft` is the same as `lightrft`.
"""

import argparse
import sys
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from lightrft import __version__
from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.extras import MODULES, extra

SUMMARIES = {
    "quickstart": "watch a tiny model learn by GRPO on this machine, in a few minutes",
    "train_ppo": "train a policy against a reward",
    "train_sft": "train a model on answers (supervised fine-tuning)",
    "train_rm": "train a reward model on pairs of answers",
    "train_prm": "train a process reward model on answers whose steps are judged",
    "train_dpo": "train a policy on pairs of answers (direct preference optimisation)",
    "train_kto": "train a policy on single answers that are good or bad (KTO)",
    "serve": "serve a model over HTTP, as agents see it in training",
    "chat": "talk to a model, or to the one of a run, in the terminal",
    "serve_reward": "serve reward models over HTTP",
    "tinker": "train and sample a model at the requests of Tinker clients",
    "evaluate": "evaluate a model, a run or a checkpoint on held-out prompts and benchmarks",
    "migrate": "translate a script or a configuration of another tool into one of this program",
    "check": "check the data, the rewards and the plan of a run before it starts",
    "export": "write a checkpoint or an adapter as a Hugging Face folder",
    "bench": "run ten steps of train_ppo, and say how fast they are and what limits them",
    "plan": "plan a run: memory, seconds and layout on any number of devices, without weights",
    "report": "write the report of a run, or compare runs",
    "bisect": "find the first step and phase in which two runs differ",
    "bundle": "write what one step of a run needs into one file",
    "replay": "repeat the step of a bundle without an engine, and explain its samples",
    "diagnose": "name what goes wrong in a run, with the flag to change",
    "forecast": "forecast the reward of a run, and the hours and the cost to a target",
    "test_rewards": "test a reward function on rows of data before it is trained against",
    "doctor": "check this machine, and compare engine and trainer on a model",
    "selfcheck": "the same, with a model: lightrft selfcheck MODEL --config FILE",
}


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
        _module(chosen.command).main(chosen.arguments)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted by SIGINT\n")


def _module(command: str) -> ModuleType:
    option = f"lightrft {command}"
    try:
        return extra(option) if option in MODULES else import_module(f"lightrft.app.cli.{command}")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(USER_ERROR) from None


if __name__ == "__main__":
    main()
