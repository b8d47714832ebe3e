"""Read scripts and configurations of other tools: which tool it is, and the values that it sets."""

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightrft.config.command_line import group_flags
from lightrft.config.errors import ConfigError
from lightrft.extras.compat.counterparts import NO_COUNTERPART, SETTING_KEY, settings

KNOWN_TOOLS = "TRL, Unsloth, verl, OpenRLHF, ms-swift and axolotl"
COMMAND_OF = {
    **{method: f"train_{method}" for method in ("sft", "dpo", "kto", "rm", "prm")},
    **dict.fromkeys(("grpo", "rloo", "ppo"), "train_ppo"),
    "reward": "train_rm",
}
"""What other tools call a method -> the command here."""
CLASS = re.compile(r"(GRPO|RLOO|PPO|SFT|DPO|KTO|Reward|PRM)(Config|Trainer)")
"""Classes of TRL that name a method."""
SHELL_ARRAY = re.compile(r"^[ \t]*(\w+)=\((.*?)\)[ \t]*$", re.DOTALL | re.MULTILINE)
"""Array of a shell script, perhaps over several lines."""
OTHER_LANGUAGE = re.compile(r"\s*%%(?!capture|time)")
"""Beginning of a cell that is not Python."""
COMMAND_OF_IPYTHON = re.compile(r"^([ \t]*)[!%](?:.*\\\n)*.*", re.MULTILINE)
UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")


@dataclass
class ForeignFile:
    """Holds what a file of another tool says."""

    tool: str
    command: str
    """The command here that does the same."""
    values: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    """Arguments of peft's LoraConfig."""
    notes: dict[str, str] = field(default_factory=dict)
    """Name -> what could not be read, or what to do about it."""


def read(path: Path) -> ForeignFile:
    """Read a Python script, a notebook, a shell script or a YAML file.

    Raises ConfigError if no tool is recognised, and for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error

    if path.suffix == ".ipynb":
        text = _code_of_cells(text, path)
    if path.suffix in (".py", ".ipynb"):
        return _of_python(text, path)
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(text, path)
    return _of_shell(text, path)


# -- Python scripts and notebooks


def _code_of_cells(text: str, path: Path) -> str:
    """Return the Python code of a notebook, with `pass` for the commands of IPython."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a notebook: {error!r}") from error

    python = [each for each in sources if not OTHER_LANGUAGE.match(each)]
    return "\n".join(COMMAND_OF_IPYTHON.sub(r"\1pass", each) for each in python)


def _of_python(text: str, path: Path) -> ForeignFile:
    """Read the calls of TRL, peft and Unsloth in a script, without running it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a Python file: {error}") from error

    constants = dict(_constants(tree))
    calls = [(ast.unparse(node.func), node) for node in ast.walk(tree) if type(node) is ast.Call]
    methods = [match for name, _ in calls if (match := CLASS.fullmatch(name.rpartition(".")[2]))]
    if not methods:
        raise ConfigError(f"{path}: the script calls no trainer of TRL. Known are {KNOWN_TOOLS}")

    is_unsloth = any(name.partition(".")[0] in UNSLOTH for name, _ in calls)
    found = ForeignFile("unsloth" if is_unsloth else "trl", COMMAND_OF[methods[0][1].lower()])
    for name, call in calls:
        _read_call(name, call, constants, found, path)

    return found


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except ValueError:
                continue


def _read_call(
    name: str, call: ast.Call, constants: Mapping[str, Any], found: ForeignFile, path: Path
) -> None:
    """Add the arguments of one call, if it is one that sets something."""
    last = name.rpartition(".")[2]
    arguments = {}
    for each in call.keywords:
        unpacked = constants.get(ast.unparse(each.value)) if each.arg is None else None
        if isinstance(unpacked, dict):
            arguments |= {name: ast.Constant(value) for name, value in unpacked.items()}
        else:
            arguments[each.arg or f"**{ast.unparse(each.value)}"] = each.value
    if name.endswith("AutoModelForCausalLM.from_pretrained") and call.args:
        arguments = {"model_name_or_path": call.args[0]}
    elif last == "load_dataset":
        _read_data_set(call, arguments, constants, found)
        return
    elif last == "LoraConfig":
        found.lora |= _values(arguments, constants, found)
        return
    elif name.partition(".")[0] in UNSLOTH:
        pass
    elif CLASS.fullmatch(last):
        arguments = _of_trainer(arguments, constants, found, path)
    else:
        return

    found.values |= _values(arguments, constants, found)


def _of_trainer(
    arguments: dict[str, ast.expr], constants: Mapping[str, Any], found: ForeignFile, path: Path
) -> dict[str, ast.expr]:
    """Return what is left of a trainer's arguments without its objects, which are read elsewhere."""
    rewards = arguments.pop("reward_funcs", None)
    if rewards is not None:
        functions = rewards.elts if isinstance(rewards, ast.List) else [rewards]
        models = [each.value for each in functions if isinstance(each, ast.Constant)]
        own = [
            f"{path}:{ast.unparse(each)}" for each in functions if type(each) is not ast.Constant
        ]
        if own:
            found.values["reward_funcs"] = own
            found.notes["reward_funcs"] = (
                "the file is imported for its functions: move them into one that does not train"
            )
        if models:
            found.values["reward_model_path"] = models
    if isinstance(model := arguments.pop("model", None), ast.Constant):
        found.values["model_name_or_path"] = model.value
    elif isinstance(model, ast.Name) and model.id in constants:
        found.values["model_name_or_path"] = constants[model.id]

    objects = "args train_dataset eval_dataset processing_class tokenizer peft_config".split()
    return {name: node for name, node in arguments.items() if name not in objects}


def _read_data_set(
    call: ast.Call, arguments: dict[str, ast.expr], constants: Mapping[str, Any], found: ForeignFile
) -> None:
    names = {"path": call.args[0]} if call.args else {}
    known = _values(names | arguments, constants, found)
    split = str(known.get("split", "train"))
    source = known.get("data_files") or known.get("path")
    if not isinstance(source, str | list):
        found.notes["load_dataset"] = f"write --prompt_data for {ast.unparse(call)}"
    elif split.startswith("train"):
        found.values |= {"dataset_name": source, "dataset_train_split": split}
        found.notes["load_dataset"] = (
            "changes of the rows, such as .map(), and other arguments are not translated"
        )
    else:
        found.values |= {"eval_dataset": source, "dataset_test_split": split}


def _values(
    arguments: Mapping[str, ast.expr], constants: Mapping[str, Any], found: ForeignFile
) -> dict[str, Any]:
    """Return the values of arguments, and note those that only running the script would tell."""
    values = {}
    for name, node in arguments.items():
        text = ast.unparse(node)
        if isinstance(node, ast.Name) and node.id in constants:
            values[name] = constants[node.id]
        elif text.startswith("torch."):
            values[name] = text.removeprefix("torch.")
        else:
            try:
                values[name] = ast.literal_eval(node)
            except ValueError:
                found.notes[name] = f"{text}: only running the script would tell its value"

    return values


# -- YAML files


def _of_yaml(text: str, path: Path) -> ForeignFile:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the file has no keys. Known are files of {KNOWN_TOOLS}")

    if "base_model" in content:
        return _of_axolotl(content)
    if "actor_rollout_ref" in content:
        flat = dict(_flat(content))
        return ForeignFile("verl", "train_ppo", flat)
    if {"rlhf_type", "train_type", "tuner_type"} & content.keys():
        return _of_swift(content, "rlhf" if "rlhf_type" in content else "sft")
    if "model_name_or_path" in content and not {"stage", "finetuning_type"} & content.keys():
        return ForeignFile("trl", _trl_command(content), dict(content))

    raise ConfigError(f"{path}: the keys are of no tool that is known; known are {KNOWN_TOOLS}")


def _trl_command(values: Mapping[str, Any]) -> str:
    """Guess the method of a configuration of TRL from the names that only one has."""
    if {"num_generations", "max_completion_length", "reward_funcs"} & values.keys():
        return "train_ppo"
    if "desirable_weight" in values:
        return "train_kto"
    return "train_dpo" if "beta" in values else "train_sft"


def _of_axolotl(content: dict[str, Any]) -> ForeignFile:
    method = content.pop("rl", None) or "sft"
    command = COMMAND_OF.get(method, "train_dpo")
    found = ForeignFile("axolotl", command)
    if method not in COMMAND_OF:
        found.notes["rl"] = f"{method} has no counterpart; train_dpo has --dpo_loss"

    for theirs, ours in (("datasets", "prompt_data"), ("test_datasets", "eval_data")):
        sets = content.pop(theirs, None) or []
        if sets:
            found.values[ours] = [each.get("path") for each in sets if isinstance(each, dict)]
        others = {f"{theirs}.{key}" for each in sets if isinstance(each, dict) for key in each}
        for name in sorted(others - {f"{theirs}.path"}):
            found.notes[name] = "check with --dry_run which columns and split are read"
    trl = content.pop("trl", None)
    found.values |= content | (trl if isinstance(trl, dict) else {})

    return found


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not (isinstance(value, str) and "${" in value):
            yield f"{prefix}{name}", value


# -- shell scripts


def _of_shell(text: str, path: Path) -> ForeignFile:
    """Read the last command of a script that starts a trainer of a known tool."""
    variables: dict[str, str] = {}
    found = None
    for name, body in SHELL_ARRAY.findall(text):
        words = re.sub(r"(?m)(^|\s)#.*$|\n", " ", body)
        text = re.sub(rf'"?\$\{{{name}\[[@*]\]\}}"?', words.replace("\\", r"\\"), text)
    for words in _commands(SHELL_ARRAY.sub("", text)):
        words = [_expanded(word, variables) for word in words]
        for word in words:
            name, equals, value = word.partition("=")
            if equals and name.isidentifier():
                variables[name] = value
        found = _of_words(words, path.parent) or found
        if found:
            unknown = [word for word in words if word.startswith("$")]
            found.notes |= dict.fromkeys(unknown, "only running the script would tell its value")

    if found is None:
        raise ConfigError(f"{path}: the script starts no trainer of {KNOWN_TOOLS}")
    return found


def _commands(text: str) -> Iterator[list[str]]:
    joined = re.sub(r"\\\n", " ", text)
    for line in joined.splitlines():
        try:
            if words := shlex.split(line.removeprefix("export "), comments=True):
                yield words
        except ValueError:
            continue


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    return re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, word)


def _of_words(words: list[str], folder: Path) -> ForeignFile | None:
    line = " ".join(words)
    if any(SETTING_KEY.fullmatch(word) for word in words):
        others = [word for word in words if re.match(r"[+~]*\w+(\.\w+)+=", word)]
        notes = {word: NO_COUNTERPART for word in others if not SETTING_KEY.fullmatch(word)}
        return ForeignFile("verl", "train_ppo", settings(words), notes=notes)

    start = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    if match := re.search(r"openrlhf\.cli\.train_(\w+?)(?:_ray)?\b", line):
        begin = words.index(next(word for word in words if "openrlhf.cli" in word)) + 1
        return ForeignFile("openrlhf", COMMAND_OF.get(match[1], "train_ppo"), _flags(words[begin:]))
    if match := re.search(r"\bswift (sft|rlhf|pt)\b", line):
        begin = words.index(match[1]) + 1
        return _of_swift(_flags(words[begin:]), match[1])
    if match := re.search(r"\btrl (grpo|rloo|sft|dpo|kto|reward)\b", line):
        begin = words.index(match[1]) + 1
        values = _flags(words[begin:])
        if "config" in values:
            values = _of_yaml((folder / values.pop("config")).read_text(), folder).values | values
        return ForeignFile("trl", COMMAND_OF[match[1]], values)
    if match := re.search(r"\b(grpo|rloo|sft|dpo|kto)\w*\.py\b", line):
        if "--model_name_or_path" in words:
            return ForeignFile("trl", COMMAND_OF[match[1]], _flags(words[start:]))
    return None


def _of_swift(values: dict[str, Any], method: str) -> ForeignFile:
    if method == "rlhf":
        method = str(values.get("rlhf_type", "dpo"))
    found = ForeignFile("swift", COMMAND_OF.get(method, "train_sft"), values)
    if method not in COMMAND_OF:
        found.notes["rlhf_type"] = f"{method} has no counterpart"
    return found


def _flags(words: list[str]) -> dict[str, Any]:
    """Return flag -> value as YAML would read it; a switch is True, several words are a list."""
    start = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    end = next((place for place, word in enumerate(words) if word in ("|", "2>&1", ">")), None)
    read = {}
    for name, values in group_flags(words[start:end]).items():
        parsed = [yaml.safe_load(value) if value else value for value in values]
        read[name] = parsed if len(parsed) > 1 else parsed[0] if parsed else True
    return read
