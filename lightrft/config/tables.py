"""Read the tables of this package: YAML files beside the modules that use them."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def table(name: str) -> Any:
    """Return the content of a file of this package, such as "config/presets" for its presets.yaml."""
    return yaml.safe_load((Path(__file__).parents[1] / f"{name}.yaml").read_text(encoding="utf-8"))
