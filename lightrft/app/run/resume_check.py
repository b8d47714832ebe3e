"""Compare a checkpoint with the run that resumes from it.

Both need the same data, model and core settings.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from transformers import PretrainedConfig

from lightrft.config.errors import ConfigError
from lightrft.config.sections import SECTIONS, Config
from lightrft.config.tables import table
from lightrft.data.digests import NUM_PIECES
from lightrft.data.loader import share_of
from lightrft.data.prompt_set import PromptSet
from lightrft.models.weight_files import NOT_THE_MODEL
from lightrft.strategy.checkpoints import NOTHING

SETTINGS: dict[str, list[str]] = table("app/run/settings")
FIXED = SETTINGS["fixed"]
FIXED_WITH_FROZEN = SETTINGS["fixed_with_frozen"]
TOWERS = ("vision_config", "audio_config")
"""Sections of a model's configuration that describe modules which are not trained."""
NO_EFFECT_ON_NUMBERS = {
    *SETTINGS["no_effect_on_numbers"],
    *(field.name for field in fields(SECTIONS["observe"])),
}


def identity(
    config: Config,
    model: PretrainedConfig,
    rows: PromptSet,
    weights: Mapping[str, str] = NOTHING,
    *,
    probabilities: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the identity of a run, in JSON's types.

    `rows` are the training data after templates, tokenizer and limits. `weights`: name of a model
    -> fingerprint of the weights that it was built from. `probabilities` belong to the data sets
    that rows are drawn from.
    """
    values = {
        "rows": len(rows),
        "probabilities": probabilities,
        "pieces": rows.digests,
        "model": {
            name: value for name, value in model.to_dict().items() if name not in NOT_THE_MODEL
        },
        "weights": dict(weights),
        "command": config.command,
        "settings": {
            name: value for section in asdict(config).values() for name, value in section.items()
        },
    }
    # A checkpoint gives back what JSON made of these values, so both sides go through it.
    return json.loads(json.dumps(values, default=str))


def changed_settings(
    before: dict[str, Any], now: dict[str, Any], *, fork: bool = False
) -> list[str]:
    """Return the changes that are allowed; raise ConfigError with all that are not."""
    settings = _changes(before["settings"], now["settings"])
    freezing = ("lora_rank", "freeze_prefix")
    partly = any(run["settings"].get(name) for run in (before, now) for name in freezing)
    partly |= any(name in now["model"] for name in TOWERS)
    fixed = (*FIXED, *FIXED_WITH_FROZEN) if partly else FIXED
    fixed = set(fixed).difference(SETTINGS["free_in_fork"] if fork else ())
    problems = [f"--{name} {change}" for name, change in settings.items() if name in fixed]
    model = _changes(before["model"], now["model"])
    problems += [f"the model's {name} {change}" for name, change in model.items()]
    # A checkpoint lacks frozen parameters, so the resumed run would silently get other ones.
    others = [
        f"the weights of the {name}'s base model have changed, and frozen parameters are not in the"
        " checkpoint"
        for name in _changes(before["weights"], now["weights"])
    ]

    problems += others if partly else []
    if before["probabilities"] != now["probabilities"]:
        problems.append(
            f"the probabilities of the data sets were {before['probabilities']}, are"
            f" {now['probabilities']}"
        )

    if before["rows"] != now["rows"]:
        problems.append(f"the training data had {before['rows']} rows, has {now['rows']}")
    elif other := [n for n in range(NUM_PIECES) if before["pieces"][n] != now["pieces"][n]]:
        piece = share_of(other[0], NUM_PIECES, now["rows"])
        problems.append(
            f"the training data has changed, first in the rows {piece.start + 1} to {piece.stop} of"
            f" {now['rows']}"
        )

    if problems:
        raise ConfigError("\n".join(f"  - {problem}" for problem in problems))

    notices = [
        f"--{name} {change}"
        for name, change in settings.items()
        if name not in NO_EFFECT_ON_NUMBERS
    ]
    of_reference = now.get("command") in ("train_dpo", "train_kto")
    of_reference |= bool(now["settings"].get("use_kl_loss") or now["settings"].get("init_kl_coef"))

    if others and of_reference:
        notices.append("the weights of --pretrain, the reference of the divergence, have changed")
    return notices


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Compare the keys that both have, because versions of a package differ in keys."""
    return {
        name: f"was {before[name]!r}, is {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name]
    }
