"""Say what names and values of other tools are here, from the tables in `tables/`.

One table for each tool answers its flags on the command line, takes its objects in Python, and
translates its files in `lightrft migrate`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from lightrft.config import tables

Entry = str | dict[str, Any]
NO_COUNTERPART = "no flag has this meaning"
Numbers = dict[str, Any]
"""Their numbers that decide several flags here together: name in the tables -> value."""


@cache
def table(tool: str) -> dict[str, Any]:
    """Return the table of a tool; `names` holds those of the tool that it is like, too."""
    content = tables.table(f"extras/compat/tables/{tool}")
    if like := content.get("like"):
        content = table(like) | content | {"names": table(like)["names"] | content["names"]}
    return content


def names(tool: str, command: str = "") -> dict[str, Entry]:
    """Return name -> entry; a command of ours may read some names differently."""
    return table(tool)["names"] | table(tool).get(command, {})


@dataclass(frozen=True)
class Counterpart:
    """Holds what one name and its value of another tool are here."""

    flags: dict[str, Any] = field(default_factory=dict)
    """Flags to write, with values."""
    sentence: str = ""
    """What to do instead, where no flag means the same."""


def counterpart(entry: Entry, value: Any) -> Counterpart:
    """Return what an entry of a table makes of a value; see tables/trl.yaml for its forms."""
    if isinstance(entry, str):
        return Counterpart(sentence=entry) if " " in entry else Counterpart({entry: value})

    values = entry.get("values", {})
    if isinstance(value, list | tuple) and "flag" in entry and str(value) not in values:
        kept = [values.get(_word(each), each) for each in value]
        value = ",".join(str(each) for each in kept if each is not None)
        found: Any = value or None
    elif _word(value) in values:
        found = values[_word(value)]
    elif "flag" in entry:
        found = value
    else:
        return Counterpart(sentence="" if entry.get("ignored") else entry.get("say", ""))

    if isinstance(found, dict):
        return Counterpart(found)
    if isinstance(found, str) and " " in found:
        return Counterpart(sentence=found)
    return Counterpart({} if found is None or "flag" not in entry else {entry["flag"]: found})


def _word(value: Any) -> str:
    """Return the form that tables have of a value, whether it was an object or a text."""
    value = getattr(value, "value", value)  # TRL's enumerations
    return str(value).lower() if str(value) in ("True", "False", "true", "false") else str(value)


def answer(entry: Entry, value: Any = None) -> str:
    """Return what to write instead of a name, or of a name with its value."""
    if isinstance(entry, str) and (" " in entry or value is None):
        return entry if " " in entry else f"write --{entry}"
    if value is not None:
        found = counterpart(entry, value)
        if found.flags:
            pairs = (f"--{name} {_text(each)}" for name, each in found.flags.items())
            return "write " + " ".join(pairs)
        if found.sentence:
            return found.sentence
        if _word(value) in entry.get("values", {}):
            return entry.get("say", "leave it out: it means the same")
    return entry.get("say") or (f"write --{entry['flag']}" if "flag" in entry else "leave it out")


@dataclass
class Translation:
    """A configuration of another tool in the flags of this program."""

    flags: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Flag -> the names of theirs that it follows from."""
    notes: dict[str, str] = field(default_factory=dict)
    """Their name -> what to do about it, where no flag means the same."""

    def add(self, name: str, found: Counterpart) -> None:
        for flag, value in found.flags.items():
            self.flags[flag] = value
            self.sources.setdefault(flag, []).append(name)
        if found.sentence:
            self.notes[name] = found.sentence


def translate(
    tool: str, values: Mapping[str, Any], command: str, *, ranks: int = 1, rows: str = "names"
) -> Translation:
    """Translate a tool's names and values for a run of `command` on `ranks` processes.

    `rows` names the section of the table to look into.
    """
    known = names(tool, command) if rows == "names" else table(tool)[rows]
    result = Translation()
    numbers: Numbers = {}
    sources: dict[str, str] = {}

    for name, value in values.items():
        entry = known.get(name)
        if name not in known:
            result.notes[name] = NO_COUNTERPART
        elif isinstance(entry, dict) and "batch" in entry and value is not None:
            numbers[entry["batch"]] = value
            sources[entry["batch"]] = name
        else:
            result.add(name, counterpart(entry, value))

    used: set[str] = set()
    try:
        followed = _from_numbers(numbers, result.flags, command, ranks)
    except (TypeError, ValueError):  # one is no number, such as a variable of a script
        followed = {}
    for flag, (value, origins) in followed.items():
        used |= set(origins)
        result.add(" and ".join(sources[each] for each in origins), Counterpart({flag: value}))
    for number in numbers.keys() - used:
        result.notes[sources[number]] = answer(known[sources[number]])

    return result


def _from_numbers(
    numbers: Numbers, flags: Mapping[str, Any], command: str, ranks: int
) -> dict[str, tuple[Any, list[str]]]:
    """Return flag -> its value, and the numbers of theirs that it follows from.

    Their batches count what one device computes at once; ours count the samples of all devices.
    """
    found: dict[str, tuple[Any, list[str]]] = {}
    samples = int(flags.get("n_samples_per_prompt", 1))

    if "per_device" in numbers:
        used = [name for name in ("per_device", "accumulation") if name in numbers]
        at_once = int(numbers["per_device"]) * ranks
        update = at_once * int(numbers.get("accumulation", 1))
        found["train_batch_size"] = (update, used)

        if command == "train_ppo":
            generated = numbers.get("generation")
            if generated is None and "steps_per_generation" in numbers:
                generated = at_once * int(numbers["steps_per_generation"])
            more = [name for name in ("generation", "steps_per_generation") if name in numbers]
            prompts = int(generated or update) // samples
            found["rollout_batch_size"] = (max(prompts, 1), [*used, *more])
    if "beta" in numbers:
        found["init_kl_coef"] = (numbers["beta"], ["beta"])
        found["use_kl_loss"] = (float(numbers["beta"]) > 0, ["beta"])
    if "kl_in_loss" in numbers or "kl_in_reward" in numbers:
        found |= _penalty_of_verl(numbers)
    if "prompts" in numbers:
        found["train_batch_size"] = (int(numbers["prompts"]) * samples, ["prompts"])

    warmup = float(numbers.get("warmup_steps", 0))
    if "warmup_steps" in numbers and warmup < 1:
        found["lr_warmup_ratio"] = (max(warmup, 0.0), ["warmup_steps"])
    elif warmup and int(flags.get("max_steps") or 0) > 0:
        ratio = round(warmup / int(flags["max_steps"]), 4)
        found["lr_warmup_ratio"] = (ratio, ["warmup_steps"])
    if "beta1" in numbers or "beta2" in numbers:
        betas = [float(numbers.get("beta1", 0.9)), float(numbers.get("beta2", 0.999))]
        found["adam_betas"] = (betas, [name for name in ("beta1", "beta2") if name in numbers])
    if "reward_file" in numbers:
        used = [name for name in ("reward_file", "reward_name") if name in numbers]
        function = f"{numbers['reward_file']}:{numbers.get('reward_name', 'compute_score')}"
        found["reward"] = (function, used)

    return found


def _penalty_of_verl(numbers: Numbers) -> dict[str, tuple[Any, list[str]]]:
    """Return the flags of verl's two switches for a penalty, each with a coefficient of its own."""
    in_loss = _word(numbers.get("kl_in_loss")) == "true"
    in_reward = _word(numbers.get("kl_in_reward")) == "true"
    coefficient = "kl_loss_coef" if in_loss else "kl_reward_coef"
    used = [name for name in ("kl_in_loss", "kl_in_reward") if name in numbers]
    if not in_loss and not in_reward:
        off = [name for name in ("kl_loss_coef", "kl_reward_coef") if name in numbers]
        return {"init_kl_coef": (0.0, used + off)}

    with_coefficient = used + [name for name in (coefficient,) if name in numbers]
    return {
        "use_kl_loss": (in_loss, used),
        "init_kl_coef": (numbers.get(coefficient, 0.001), with_coefficient),
    }


def defaults(tool: str, command: str) -> dict[str, Any]:
    """Return what a tool takes for the names that are not written."""
    known = table(tool).get("defaults", {})
    return known.get("all", {}) | known.get(command, {})


# -- command lines

SETTING_KEY = re.compile(
    r"\+{0,2}~?((?:data|actor_rollout_ref|critic|reward_model|reward|algorithm|trainer"
    r"|custom_reward_function|global_profiler|ray_kwargs)\.[\w.]+)=(.*)",
    re.DOTALL,
)
"""An override of verl, such as `data.train_batch_size=1024`."""


def typed(text: str) -> Any:
    """Return a number, a switch, a list or an object of a command line; other texts stay."""
    try:
        value = yaml.safe_load(text) if text else text
    except yaml.YAMLError:
        return text
    is_text = isinstance(value, str) or (isinstance(value, dict) and text[0] != "{")
    return text if is_text else value


def settings(tokens: list[str]) -> dict[str, Any]:
    """Return key -> value of verl's overrides among the words of a command line."""
    return {match[1]: typed(match[2]) for match in map(SETTING_KEY.fullmatch, tokens) if match}


def verl_problems(tokens: list[str]) -> list[str]:
    """Return what to write instead of each override of verl, and where its defaults differ."""
    written = settings(tokens)
    known = names("verl")
    answers = [
        f"{key}: " + (answer(known[key], value) if key in known else NO_COUNTERPART)
        for key, value in written.items()
    ]

    return answers + other_defaults("verl", written, "train_ppo") if written else []


def other_defaults(tool: str, written: Mapping[str, Any], command: str) -> list[str]:
    """Return a sentence with the flags of what a tool takes where nothing is written."""
    left_out = {
        name: value for name, value in defaults(tool, command).items() if name not in written
    }
    # A batch follows from several numbers, of which some may be written.
    found = translate(tool, left_out, command)
    flags = " ".join(f"--{name} {_text(value)}" for name, value in found.flags.items())
    return [f"where nothing is written, {tool} has {flags}"] if flags else []


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
