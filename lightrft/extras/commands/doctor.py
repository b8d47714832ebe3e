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
from lightrft.config.sections import Config


def main(argv: list[str] | None = None) -> None:
    arguments = command_parser("doctor", __doc__).parse_args(argv)
    with user_errors(ConfigError):
        _read_recipe(arguments)

    from lightrft.extras.commands.debug.examination import examine

    set_up_logging()
    sys.exit(0 if examine(arguments) else 1)


def _read_recipe(arguments: argparse.Namespace) -> None:
    """Let the settings of --config hold where the command line has none, and MODEL be --model."""
    recipe = load(arguments.config) if arguments.config else Config()
    arguments.model = arguments.model or arguments.name or recipe.model.pretrain
    arguments.bf16 = arguments.bf16 or recipe.model.bf16
    arguments.trust_remote_code = arguments.trust_remote_code or recipe.model.trust_remote_code
    arguments.strategy = arguments.strategy or strategy_name(recipe.strategy)
    arguments.exact = arguments.exact or recipe.engine.exact
    for name in ("engine_type", "engine_mem_util", "engine_kv_cache_gb"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(recipe.engine, name))
