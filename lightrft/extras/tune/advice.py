"""Where a search can start: learning rate and batch by rules of the literature, with their sources."""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightrft.app.observe.curves import read_history
from lightrft.app.observe.text import short
from lightrft.config.presets import COMMAND_DEFAULTS, RATE_OF_ADAPTERS
from lightrft.config.sections import PPO, Config
from lightrft.config.tables import table

LITERATURE: dict[str, Any] = table("extras/tune/advice")
SENTENCES: dict[str, str] = LITERATURE["texts"]
AROUND = math.sqrt(10)
"""Factor below and above a start that a search covers: ten times in all."""
RECENT_MEASURES = 10


def advice(config: Config, command: str, flags: Sequence[str]) -> Iterator[str]:
    """Yield sentences about the learning rate and the batch of a run with these flags."""
    starts = rates(config, command)
    yield from (f"--learning_rate {rate:.2g}: {rule}" for rate, rule in starts)
    low, high = (starts[-1][0] * factor for factor in (1 / AROUND, AROUND))
    yield SENTENCES["start"]
    words = shlex.join(["lightrft", "tune", command, *flags])
    yield f"    {words} --over learning_rate={low:.1e}..{high:.1e}:log"
    if command in PPO:  # the others do not measure it
        yield from batches(Path(config.train.save_path))


def rates(config: Config, command: str) -> list[tuple[float, str]]:
    """Return learning rates, each with the rule that it follows from."""
    factor = RATE_OF_ADAPTERS if config.model.lora_rank > 0 else 1.0
    adapters = SENTENCES["adapters"].format(factor=factor) if factor > 1 else ""
    base = COMMAND_DEFAULTS.get(command, {}).get("learning_rate", Config().optim.learning_rate)
    source = LITERATURE["sources"][command]
    rule = SENTENCES["default"].format(base=base, source=source, adapters=adapters)
    found = [(base * factor, rule)]

    described = model_config(config.model.pretrain)
    name = described.get("model_type", "").lower()
    size = described.get("hidden_size") or described.get("text_config", {}).get("hidden_size")
    exponents = [value for family, value in LITERATURE["families"].items() if family in name]
    if command == "train_sft" and exponents and size:
        scaled = LITERATURE["rate"] * factor * (LITERATURE["reference_size"] / size) ** exponents[0]
        numbers = {"size": size, "exponent": exponents[0], "adapters": adapters}
        found.append((scaled, SENTENCES["size"].format(**LITERATURE, **numbers)))
    return found


def batches(folder: Path) -> Iterator[str]:
    """Yield what the noise of the gradient says about the batch, if the run in a folder measured it."""
    history = read_history(folder / "metrics.jsonl")
    noise = {}
    for name in ("signal_to_noise", "scale", "prompts", "samples"):
        values = [value for _, value in history.get(f"noise/{name}", ()) if value is not None]
        noise[name] = median(values[-RECENT_MEASURES:]) if values else 0.0
    if min(noise["signal_to_noise"], noise["scale"]) <= 0:
        yield SENTENCES["unseen" if "noise/signal_to_noise" in history else "unmeasured"]
        return

    shown = {name: short(value) for name, value in noise.items()}
    yield SENTENCES["batch"].format(batch=2 ** max(0, round(math.log2(noise["scale"]))), **shown)
    if min(noise["prompts"], noise["samples"]) > 0:
        most = short(noise["samples"] / noise["prompts"])
        yield SENTENCES["division"].format(most=most, **shown)


def model_config(model: str) -> dict[str, Any]:
    """Return config.json of a model's folder, or of a model that is in the hub's cache."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model, local_files_only=True)[0]
    except (OSError, ValueError):
        return {}
