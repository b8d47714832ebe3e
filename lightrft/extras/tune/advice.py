"""Where a search can start: learning rate and batch by rules of the literature, with their sources."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from lightrft.app.observe.curves import read_history
from lightrft.app.observe.text import short
from lightrft.config.presets import COMMAND_DEFAULTS, RATE_OF_ADAPTERS
from lightrft.config.sections import Config
from lightrft.config.tables import table

LORA = "Schulman et al., LoRA Without Regret, 2025"
CRITICAL_BATCH = "McCandlish et al., arXiv 1812.06162"
AROUND = math.sqrt(10)
"""Factor below and above a start that a search covers: ten times in all."""
RECENT_MEASURES = 10


def advice(config: Config, command: str) -> Iterator[str]:
    """Yield sentences about the learning rate and the batch of a run."""
    starts = rates(config, command)
    yield from (f"--learning_rate {rate:.2g}: {rule}" for rate, rule in starts)
    low, high = (starts[-1][0] * factor for factor in (1 / AROUND, AROUND))
    yield "These are starts, not results. To search around the last one:"
    yield f"    --over learning_rate={low:.1e}..{high:.1e}:log"
    yield from batches(config, command)


def rates(config: Config, command: str) -> list[tuple[float, str]]:
    """Return learning rates, each with the rule that it follows from."""
    rules: dict[str, Any] = table("extras/tune/advice")
    lora = config.model.lora_rank > 0
    factor = RATE_OF_ADAPTERS if lora else 1.0
    adapters = f", times {RATE_OF_ADAPTERS:g} for adapters ({LORA})" if lora else ""
    base = COMMAND_DEFAULTS.get(command, {}).get("learning_rate", Config().optim.learning_rate)
    found = [(base * factor, f"{base:g} ({rules['sources'][command]}){adapters}")]

    described = model_config(config.model.pretrain)
    name = f"{described.get('model_type', '')} {config.model.pretrain}".lower()
    size = described.get("hidden_size") or described.get("text_config", {}).get("hidden_size")
    exponents = [value for family, value in rules["families"].items() if family in name]
    if command == "train_sft" and exponents and size:
        rate, reference = rules["rate"], rules["reference_size"]
        scaled = rate * factor * (reference / size) ** exponents[0]
        rule = f"{rate:g} x ({reference} / {size})^{exponents[0]}{adapters}"
        found.append((scaled, f"{rule}, for this hidden size ({rules['source']})"))
    return found


def batches(config: Config, command: str) -> Iterator[str]:
    """Yield what the noise of the gradient says, if the run in --save_path measured it."""
    history = read_history(Path(config.train.save_path) / "metrics.jsonl")
    noise = {
        name.removeprefix("noise/"): fmean(values[-RECENT_MEASURES:])
        for name, points in history.items()
        if name.startswith("noise/")
        and (values := [value for _, value in points if value is not None])
    }
    scale = noise.get("scale", 0.0)
    if scale <= 0:
        yield (
            "--train_batch_size: the critical batch is the noise scale of the gradient"
            f" ({CRITICAL_BATCH}), which no rule knows, because it depends on the task. A run with"
            " --measure_noise 10 measures it: then ask again with --save_path and its folder"
        )
        return

    yield (
        f"--train_batch_size {2 ** max(0, round(math.log2(scale)))}: the noise scale was"
        f" {short(scale)} samples. With a batch of this size a run takes twice the fewest steps and"
        " twice the fewest samples; a smaller one saves samples, a larger one steps"
        f" ({CRITICAL_BATCH})"
    )
    if command == "train_ppo" and {"prompts", "samples"} <= noise.keys():
        names = ["--rollout_batch_size", "--n_samples_per_prompt"]
        more, fewer = names if noise["prompts"] > noise["samples"] else reversed(names)
        yield (
            f"of the noise, {short(noise['prompts'])} is between prompts and"
            f" {short(noise['samples'])} between the samples of one: with equal batches, a larger"
            f" {more} and a smaller {fewer} give less"
        )


def model_config(model: str) -> dict[str, Any]:
    """Return config.json of a model's folder, or of a model that is in the hub's cache."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model, local_files_only=True)[0]
    except (OSError, ValueError, json.JSONDecodeError):
        return {}
