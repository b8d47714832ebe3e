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
    rate = None
    for rate, sentence in rates(config, command):
        yield sentence
    yield "These are starts, not results. To search around the last one:"
    yield f"    --over learning_rate={rate / AROUND:.1e}..{rate * AROUND:.1e}:log"
    yield from batches(config, command)


def rates(config: Config, command: str) -> Iterator[tuple[float, str]]:
    """Yield learning rates, each with the rule that it follows from."""
    rules: dict[str, Any] = table("extras/tune/advice")
    lora = config.model.lora_rank > 0
    factor = RATE_OF_ADAPTERS if lora else 1.0
    adapters = f", times {RATE_OF_ADAPTERS:g} for adapters ({LORA})" if lora else ""

    base = COMMAND_DEFAULTS.get(command, {}).get("learning_rate", Config().optim.learning_rate)
    rate = base * factor
    yield rate, f"--learning_rate {rate:g}: {base:g} ({rules['sources'][command]}){adapters}"

    described = model_config(config.model.pretrain)
    name = f"{described.get('model_type', '')} {config.model.pretrain}".lower()
    family = next((each for each in rules["families"] if each in name), None)
    size = described.get("hidden_size") or described.get("text_config", {}).get("hidden_size")
    if command == "train_sft" and family and size:
        exponent = rules["families"][family]
        rate = rules["rate"] * factor * (rules["reference_size"] / size) ** exponent
        yield (
            rate,
            f"--learning_rate {rate:.2g}: {rules['rate']:g} x ({rules['reference_size']} /"
            f" {size})^{exponent}{adapters}, the rule of Tinker's cookbook for the hidden size of"
            f" {family.title()} models",
        )


def batches(config: Config, command: str) -> Iterator[str]:
    """Yield what the noise of the gradient, if the run in --save_path measured it, says."""
    history = read_history(Path(config.train.save_path) / "metrics.jsonl")
    recent = {
        name: fmean(values[-RECENT_MEASURES:])
        for name, points in history.items()
        if name.startswith("noise/")
        and (values := [each for _, each in points if each is not None])
    }
    scale = recent.get("noise/scale", 0.0)
    if scale <= 0:
        yield (
            "--train_batch_size: the critical batch is the noise scale of the gradient"
            f" ({CRITICAL_BATCH}), which depends on the task and no rule knows. --measure_noise 10"
            f" in a run measures it; then ask again with its folder: --save_path RUN"
            f" ({config.train.save_path} has no noise/scale)"
        )
        return

    size = 2 ** max(0, round(math.log2(scale)))
    yield (
        f"--train_batch_size {size}: the noise scale was {short(scale)} samples. With a batch of this"
        " size a run takes twice the fewest steps, and twice the fewest samples; a smaller one saves"
        f" samples, a larger one steps ({CRITICAL_BATCH})"
    )
    prompts, samples = recent.get("noise/prompts"), recent.get("noise/samples")
    if command == "train_ppo" and prompts is not None and samples is not None:
        more, fewer = "--rollout_batch_size", "--n_samples_per_prompt"
        if samples > prompts:
            more, fewer = fewer, more
        yield (
            f"of the noise, {short(prompts)} is between prompts and {short(samples)} between the"
            f" samples of one: of two runs with equal batches, the one with a larger {more} and a"
            f" smaller {fewer} has less noise"
        )


def model_config(model: str) -> dict[str, Any]:
    """Return config.json of a model's folder, or of a model that is in the hub's cache."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model, local_files_only=True)[0]
    except (OSError, ValueError, json.JSONDecodeError):
        return {}
