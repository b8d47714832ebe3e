"""Run a command: `lightrft train_ppo --config file.yaml`."""

import argparse
import importlib

from lightrft import __version__

COMMANDS = {
    "train_ppo": "train a policy against a reward",
    "train_sft": "train a model on answers (supervised fine-tuning)",
    "evaluate": "evaluate a model, a run or a checkpoint on held-out prompts and benchmarks",
    "export": "write a checkpoint or an adapter as a Hugging Face folder",
    "report": "write the report of a run",
    "doctor": "check this machine, and compare engine and trainer on a model",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="lightrft",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Reinforcement fine-tuning. For several processes: torchrun --nproc-per-node N -m lightrft.cli.COMMAND ...",
        epilog="\n".join(f"  {command:<10} {meaning}" for command, meaning in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"lightrft {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="lightrft COMMAND --help lists them")
    chosen = parser.parse_args(argv)
    importlib.import_module(f"lightrft.cli.{chosen.command}").main(chosen.arguments)
