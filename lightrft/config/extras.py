"""What an option or a command takes from lightrft/extras: the only place that names that folder.

Nothing else outside of it imports it, so it can be deleted; the options below are then refused.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from lightrft.config.errors import ConfigError

WITH_EPISODES = "--environment, --agent and --tools"
MODULES = {
    WITH_EPISODES: "build_episodes",
    "--exact": "exact.install",
    "--exact with --engine_type hf": "exact.hf",
    "--exact with --engine_type vllm": "exact.vllm",
    "--dry_run": "commands.plan",
    "a server of models": "build_server",
    "flags of other programs": "compat.command_line",
    "objects of TRL": "compat.trl_objects",
    **{f"lightrft {name}": name for name in ("check", "migrate")},
    **{
        f"lightrft {name}": f"commands.{name}"
        for name in ("agents", "bench", "doctor", "plan", "serve", "serve_reward", "tinker")
    },
    "lightrft selfcheck": "commands.doctor",
    **{
        f"lightrft {name}": f"commands.debug.{name}"
        for name in "bisect bundle chat diagnose forecast replay report test_rewards".split()
    },
}
"""What asks for it -> its module."""


def installed() -> bool:
    return (Path(__file__).parents[1] / "extras" / "__init__.py").is_file()


def extra(option: str) -> ModuleType:
    """Import what `option` needs; raise ConfigError if the folder was deleted."""
    if not installed():
        raise ConfigError(f"{option}: not in this installation, which has no lightrft/extras")
    return import_module(f"lightrft.extras.{MODULES[option]}")
