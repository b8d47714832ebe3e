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

COMPARED_SETTINGS = (
    "bf16 trust_remote_code exact engine_type engine_mem_util engine_kv_cache_gb".split()
)
"""Settings of a run that the comparison has, too."""


def main(argv: list[str] | None = None) -> None:
    arguments = command_parser("doctor", __doc__).parse_args(argv)
    with user_errors(ConfigError):
        config = _configuration(arguments)

    from lightrft.extras.commands.debug.examination import examine

    set_up_logging()
    sys.exit(0 if examine(config, arguments.engine_model) else 1)


def _configuration(arguments: argparse.Namespace) -> Config:
    """Return a configuration of one rank, with an engine in eager mode.

    The settings of --config hold where the command line has none.
    """
    recipe = load(arguments.config) if arguments.config else Config()
    return Config.of(
        pretrain=arguments.model or arguments.name or recipe.model.pretrain,
        strategy=arguments.strategy or strategy_name(recipe.strategy),
        prompt_max_len=128,
        generate_max_len=64,
        engine_enforce_eager=True,
        **{name: getattr(arguments, name) or getattr(recipe, name) for name in COMPARED_SETTINGS},
    )
