"""What an option or a command takes from lightrft/extras: the only place that names that folder.

Nothing else outside of it imports it, so it can be deleted; the options in extras.yaml are then refused.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from lightrft.config.errors import ConfigError
from lightrft.config.tables import table

WITH_EPISODES = "--environment, --agent and --tools"
WATCHED = "--canaries and --shadow_reward"
LEDGER_SCHEDULER = "lightrft.extras.ledger.scheduler:DrawsBySignal"
MODULES: dict[str, str] = table("config/extras")
"""What asks for it -> its module."""


def installed() -> bool:
    return (Path(__file__).parents[1] / "extras" / "__init__.py").is_file()


def extra(option: str) -> ModuleType:
    """Import what `option` needs; raise ConfigError if the folder was deleted."""
    if not installed():
        raise ConfigError(f"{option}: not in this installation, which has no lightrft/extras")
    return import_module(f"lightrft.extras.{MODULES[option]}")
