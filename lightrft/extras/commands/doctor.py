"""Check this machine, and compare engine and trainer on a model: token by token, then layer by
layer. Before that, a small copy of the model is computed in packed sequences and in each alone, and
its training is stopped and resumed.

lightrft doctor --model Qwen/Qwen2.5-0.5B-Instruct --bf16
lightrft doctor --model Qwen/Qwen2.5-0.5B-Instruct --engine_type hf --fsdp --exact
lightrft selfcheck Qwen/Qwen2.5-0.5B-Instruct --config run.yaml
"""

import argparse
import sys

from lightrft.app.cli import command_parser, user_errors
from lightrft.app.run.logs import set_up_logging
from lightrft.config.command_line import load
from lightrft.config.errors import ConfigError
from lightrft.config.resolve import strategy_name
from lightrft.config.sections import EngineSection


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    with user_errors(ConfigError):
        _read_recipe(arguments)

    from lightrft.extras.commands.debug.examination import examine

    set_up_logging()
    sys.exit(0 if examine(arguments) else 1)


def _read_recipe(arguments: argparse.Namespace) -> None:
    """Let the settings of --config hold where the command line has none, and MODEL be --model."""
    arguments.model = arguments.model or arguments.name
    if not arguments.config:
        return

    recipe = load(arguments.config)
    arguments.model = arguments.model or recipe.model.pretrain
    arguments.bf16 = arguments.bf16 or recipe.model.bf16
    arguments.trust_remote_code = arguments.trust_remote_code or recipe.model.trust_remote_code
    arguments.strategy = arguments.strategy or strategy_name(recipe.strategy)
    arguments.exact = arguments.exact or recipe.engine.exact
    for name in ("engine_type", "engine_mem_util", "engine_kv_cache_gb"):
        if getattr(arguments, name) == _parser().get_default(name):
            setattr(arguments, name, getattr(recipe.engine, name))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", __doc__)
    parser.add_argument("name", nargs="?", default="", metavar="MODEL", help="the same as --model")
    texts = {
        "config": "recipe of a run: its model, precision, strategy, engine, unless given here",
        "model": "folder, GGUF file or hub name; without it, only the machine is checked",
        "engine_model": "another folder for the engine, such as an export of the model",
        "strategy": "as in a run: fsdp, deepspeed or file.py:Class; unset: fsdp",
    }
    for name, meaning in texts.items():
        parser.add_argument(f"--{name}", default="", help=meaning)
    parser.add_argument("--engine_type", default="auto", help="auto, vllm, sglang or hf")

    switches = {
        "exact": "demand bitwise equality, as --exact in a run, and name the first part that differs",
        "bf16": "compute in bfloat16, as with --bf16 in a run",
        "trust_remote_code": "run Python code that comes with the model",
    }
    for name, meaning in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    short = "short for --strategy fsdp"
    parser.add_argument("--fsdp", action="store_const", const="fsdp", dest="strategy", help=short)

    numbers = {
        "engine_mem_util": "share of an accelerator's memory for the engine",
        "engine_kv_cache_gb": "size of the engine's key-value cache on a CPU, in GB",
    }
    for name, meaning in numbers.items():
        default = getattr(EngineSection, name)
        parser.add_argument(f"--{name}", type=float, default=default, help=meaning)

    return parser


if __name__ == "__main__":
    main()
