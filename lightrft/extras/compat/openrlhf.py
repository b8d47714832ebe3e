"""Translate the launch scripts of opendilab/LightRFT and OpenRLHF to the flags of this program.

docs/migrating.md has the tables for readers.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.config.command_line import Flags, group_flags
from lightrft.config.errors import ConfigError
from lightrft.extras.compat.counterparts import table

TABLE = table("openrlhf")
DOTTED: dict[str, str] = TABLE["dotted"] | {
    f"fsdp.{name.removeprefix('ds.')}": flag
    for name, flag in TABLE["dotted"].items()
    if name.startswith("ds.")
}
"""OpenRLHF's flags of 2026 -> earlier names there, or flags of this program."""
IGNORED: dict[str, str] = {
    name: reason for reason, names in TABLE["ignored"].items() for name in names
}
"""Flags of other tools that are ignored -> the reason."""
REFUSED_FLAGS: dict[str, str] = TABLE["refused"]
NAMES: dict[str, str] = TABLE["names"]
EQUIVALENT_FLAGS: dict[str, list[str]] = TABLE["switches"]
VALUES: dict[str, dict[str, list[str]]] = TABLE["values"]
"""Flag -> value with another name here -> the equivalent flags."""
BEGINNINGS = tuple(TABLE["beginnings"])
TRACKER_SWITCHES = {"use_tensorboard": "tensorboard", "use_wandb": "wandb"}
"""Switch -> the destination of metrics that it adds to the others, or removes."""
BOOLEAN = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass
class TranslatedFlags:
    """A command line in the flags of this program."""

    flags: Flags = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    """Sentences about flags that were translated or ignored."""
    refused: list[str] = field(default_factory=list)
    """Sentences about flags without an equivalent."""


def translate(written: Flags) -> TranslatedFlags:
    """Translate flags of other tools' scripts; all others stay as they are.

    A flag of this program takes precedence over the translation of a switch.
    """
    from_openrlhf = any(name in DOTTED or name.startswith(BEGINNINGS) for name in written)
    written = {DOTTED.get(name, name): words for name, words in written.items()}
    result = TranslatedFlags()
    switched: Flags = {}
    understood: list[str] = []
    if has_tracker_switch(written):
        written = _with_destinations(written)
        understood.append(f"the switches of trackers are --report_to {written['report_to'][0]}")

    for name, words in written.items():
        if name in REFUSED_FLAGS:
            result.refused.append(f"--{name}: {REFUSED_FLAGS[name]}")
        elif name in IGNORED or _means_nothing(name, words):
            continue
        elif name in NAMES:
            result.flags[NAMES[name]] = words
            understood.append(f"--{name} is --{NAMES[name]}")
        elif name in EQUIVALENT_FLAGS or name in SPECIAL:
            try:
                tokens = _tokens(name, words, written)
            except ConfigError as error:
                result.refused.append(f"--{name}{error}")
                continue
            switched |= group_flags(tokens)
            if name == "max_len" and not tokens:
                result.notices.append("--max_len is ignored: write --prompt_max_len")
            if tokens and name not in (tokens[0][2:], "remote_rm_url"):
                understood.append(f"--{name} is {' '.join(tokens)}")
        elif " ".join(words) in VALUES.get(name, {}):
            switched |= group_flags(VALUES[name][" ".join(words)])
        else:
            result.flags[name] = words

    result.flags = switched | result.flags
    if understood:
        result.notices.append(f"translated flags of other tools: {'; '.join(understood)}")
    result.notices += _ignored(written)
    if from_openrlhf:
        result.notices += _other_defaults(result.flags)

    return result


def _tokens(name: str, words: list[str], written: Flags) -> list[str]:
    """Return the translation of a flag. Raises ConfigError with the rest of a sentence that begins
    with the flag.
    """
    if name in SPECIAL:
        try:
            return SPECIAL[name](words, written)
        except ConfigError as error:
            raise ConfigError(f": {error}") from error
    if words and words[0].lower() not in ("true", "false"):
        raise ConfigError(f" {words[0]}: the flag takes no value, or true or false")
    return [] if words[:1] == ["false"] else EQUIVALENT_FLAGS[name]


def _means_nothing(name: str, words: list[str]) -> bool:
    """Return whether leaving the flag out means the same."""
    if name not in TABLE["off"]:
        return False
    meaningless = TABLE["off"][name]
    return len(words) == 1 and words[0] in meaningless if meaningless else not words


def _ignored(written: Flags) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name in written:
        if name in IGNORED:
            reasons.setdefault(IGNORED[name], []).append(f"--{name}")
    left_out = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return [f"ignored flags: {'; '.join(left_out)}"] if left_out else []


def _other_defaults(written: Flags) -> list[str]:
    """Return a sentence about the flags that a script leaves out and that have another default in
    OpenRLHF.
    """
    left_out = [
        f"--{name} ({value})" for name, value in TABLE["defaults"].items() if name not in written
    ]
    start = "flags that are not set and have another default in OpenRLHF (theirs): "
    return [start + ", ".join(left_out)] if left_out else []


def has_tracker_switch(written: Flags) -> bool:
    """Return whether a command line has --use_wandb or the like; an empty value means nothing."""
    return any(
        f"no_{switch}" in written or (switch in written and written[switch] != [""])
        for switch in TRACKER_SWITCHES
    )


def _with_destinations(written: Flags) -> Flags:
    """Replace the switches of trackers by --report_to.

    --use_wandb may have a key in place of true or false; it is put into WANDB_API_KEY, and into no
    file. --use_tensorboard may have a folder.
    """
    names = ",".join(written.get("report_to", ["tensorboard"])).split(",")
    for switch, name in TRACKER_SWITCHES.items():
        word = "".join(written.get(switch, ["true"])).lower()
        enabled = f"no_{switch}" not in written and word not in ("false", "no", "off", "0")
        if switch not in written and enabled:
            continue
        if switch == "use_wandb" and word and word not in BOOLEAN:
            os.environ.setdefault("WANDB_API_KEY", written[switch][0])

        if enabled != (name in names):
            rest = [each for each in names if each != name]
            names = [*rest, name] if enabled else rest or ["jsonl"]

    switches = {*TRACKER_SWITCHES, *(f"no_{switch}" for switch in TRACKER_SWITCHES)}
    kept = {name: words for name, words in written.items() if name not in switches}
    return kept | {"report_to": [",".join(names)]}


def _reward_pretrain(values: list[str], flags: Flags) -> list[str]:
    """Accept a JSON object of names and folders, or folders joined by commas."""
    if len(values) == 1 and values[0].startswith("{"):
        try:
            values = [str(folder) for folder in json.loads(values[0]).values()]
        except (json.JSONDecodeError, AttributeError) as error:
            raise ConfigError(f"{values[0]} is not a JSON object of names and folders") from error
    return ["--reward_pretrain", *(each for value in values for each in value.split(","))]


def _max_len(values: list[str], flags: Flags) -> list[str]:
    """Bound prompt and response together: the prompt gets the rest of the length after the
    response.
    """
    response = (flags.get("generate_max_len") or flags.get("max_new_tokens") or [""])[0]
    if (
        "prompt_max_len" in flags
        or not response.isdecimal()
        or not values
        or not values[0].isdecimal()
    ):
        return []
    return [f"--prompt_max_len={max(int(values[0]) - int(response), 1)}"]


def _eps_clip_low_high(values: list[str], flags: Flags) -> list[str]:
    if len(values) != 2:
        raise ConfigError(f"expected two numbers, not {' '.join(values) or 'nothing'}")
    return [f"--eps_clip_low={values[0]}", f"--eps_clip_high={values[1]}"]


def _overlong_penalty_factor(values: list[str], flags: Flags) -> list[str]:
    return ["--overlong_buffer", "--overlong_buffer_penalty_factor", *values]


def _reward_clip_range(values: list[str], flags: Flags) -> list[str]:
    try:
        low, high = map(float, values)
    except ValueError:
        raise ConfigError(f"expected two numbers, not {' '.join(values) or 'nothing'}") from None
    if low != -high:
        raise ConfigError(
            "the two bounds must be -C and C, because --reward_clip C clips to [-C, C]"
        )
    return [f"--reward_clip={values[1]}"]


def _system_prompt_path(values: list[str], flags: Flags) -> list[str]:
    try:
        return [f"--system_prompt={Path(values[0]).read_text(encoding='utf-8').strip()}"]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise ConfigError(f"{' '.join(values)}: {error}") from error


def _param_dtype(values: list[str], flags: Flags) -> list[str]:
    if values not in (["bf16"], ["fp32"]):
        raise ConfigError(
            "expected bf16 or fp32: models compute in bfloat16 with --bf16, otherwise in float32"
        )
    return ["--bf16"] if values == ["bf16"] else []


def _remote_rm_url(values: list[str], flags: Flags) -> list[str]:
    """Take the teacher of on-policy distillation, an SGLang server, or else a reward."""
    if flags.get("advantage_estimator") == ["on_policy_distillation"] and values:
        return [f"--teacher_url={values[0].removesuffix('/generate').rstrip('/')}/v1"]
    return ["--reward", *values]


SPECIAL: dict[str, Callable[[list[str], Flags], list[str]]] = {
    "reward_pretrain": _reward_pretrain,
    "max_len": _max_len,
    "eps_clip_low_high": _eps_clip_low_high,
    "reward_clip_range": _reward_clip_range,
    "overlong_penalty_factor": _overlong_penalty_factor,
    "system_prompt_path": _system_prompt_path,
    "param_dtype": _param_dtype,
    "remote_rm_url": _remote_rm_url,
}
"""Flags with another form of values in other tools -> a function of the values, and of all flags.
"""
