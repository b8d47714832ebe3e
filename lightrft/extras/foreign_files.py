"""Read scripts and configurations of other tools: which tool it is, and the values that it sets."""

import ast
import json
import re
import shlex
import symtable
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from lightrft.config.command_line import group_flags
from lightrft.config.errors import ConfigError
from lightrft.extras.compat.counterparts import NO_COUNTERPART, SETTING_KEY, settings, table, typed
from lightrft.rewards.functions import ELSEWHERE, rewards

KNOWN_TOOLS = "TRL, Unsloth, verl, OpenRLHF, ms-swift and axolotl"
COMMAND_OF: dict[str, str] = table("scripts")["commands"]
"""What other tools call a method -> the command here."""
CLASS = re.compile(r"(GRPO|RLOO|PPO|SFT|DPO|KTO|Reward|PRM)(Config|Trainer)")
"""Classes of TRL that name a method."""
SHELL_ARRAY = re.compile(r"^[ \t]*(\w+)=\((.*?)\)[ \t]*$", re.DOTALL | re.MULTILINE)
"""Array of a shell script, perhaps over several lines."""
HASH = "\x00"
IMPORTED = re.compile(r"^(\w[\w.]*)\.(\w+)$")
"""Function that TRL's script imports, such as package.module.function."""
POSITIONS: dict[str, list[str]] = table("scripts")["positions"]
"""End of what is called -> names of its first arguments."""
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
    text = _text(path)
    if path.suffix == ".ipynb":
        text = _code_of_cells(text, path)
    if path.suffix in (".py", ".ipynb"):
        return _of_python(text, path)

    is_yaml = path.suffix in (".yaml", ".yml", ".json")
    found = _of_yaml(_keys(text, path), path) if is_yaml else _of_shell(text, path)
    if given := found.values.get("reward_funcs"):
        names = given if isinstance(given, list) else [given]
        ours = [ELSEWHERE.get(name) or IMPORTED.sub(r"\1:\2", str(name)) for name in names]
        found.values["reward_funcs"] = ours
        if unknown := [name for name in ours if ":" not in name and name not in rewards]:
            found.notes["reward_funcs"] = f"write --reward FILE:FUNCTION for {', '.join(unknown)}"

    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _keys(text: str, path: Path) -> dict[str, Any]:
    """Return the keys of a YAML file, or of JSON."""
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the file has no keys. Known are files of {KNOWN_TOOLS}")
    return content


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
    matches = [CLASS.fullmatch(name.rpartition(".")[2]) for name, _ in calls]
    methods = list(dict.fromkeys(match[1] for match in matches if match))
    if not methods:
        raise ConfigError(f"{path}: the script calls no trainer of TRL. Known are {KNOWN_TOOLS}")
    if len(methods) > 1:
        several = " and ".join(methods)
        raise ConfigError(f"{path}: the script trains by {several}: leave one of them in a copy")

    is_unsloth = any(name.partition(".")[0] in UNSLOTH for name, _ in calls)
    found = ForeignFile("unsloth" if is_unsloth else "trl", COMMAND_OF[methods[0].lower()])
    for name, call in calls:
        order = next((names for end, names in POSITIONS.items() if name.endswith(end)), ())
        call.keywords += map(ast.keyword, order, call.args)
    for name, call in calls:
        _read_call(name, call, constants, found)
    _read_attributes(tree, constants, found)
    symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    _read_rewards(tree, {each.get_name() for each in symbols if each.is_local()}, found, path)

    return found


def _read_attributes(tree: ast.Module, constants: Mapping[str, Any], found: ForeignFile) -> None:
    """Read what a script assigns to the fields of a configuration, after it has made one."""
    configs = set()
    for node in [each for each in ast.walk(tree) if isinstance(each, ast.Assign)]:
        target = node.targets[0]
        called = ast.unparse(node.value).partition("(")[0]
        if CLASS.fullmatch(called.rpartition(".")[2]):
            configs.add(ast.unparse(target))
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in configs:
            found.values |= _values({target.attr: node.value}, constants, found)


def _read_rewards(tree: ast.Module, names: set[str], found: ForeignFile, path: Path) -> None:
    """Read the rewards of a trainer; `names` are what another file could import from the script."""
    nodes = list(ast.walk(tree))
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)
    }
    keywords = [each for each in nodes if isinstance(each, ast.keyword)]
    given = [each.value for each in keywords if each.arg == "reward_funcs"]

    for node in (item for each in given for item in _items(each, assigned)):
        written = ast.unparse(node)
        if isinstance(node, ast.Constant):
            found.values.setdefault("reward_model_path", []).append(node.value)
        elif written in names:
            found.values.setdefault("reward_funcs", []).append(f"{path}:{written}")
            found.notes["reward_funcs"] = "the file is imported: use one that does not train"
        else:
            found.notes[written] = "another file cannot import it: write --reward FILE:FUNCTION"


def _items(node: ast.expr, assigned: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """Yield the items of a list, through the names that hold them."""
    if isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            yield from _items(item, assigned)
    elif isinstance(node, ast.Starred):
        yield from _items(node.value, assigned)
    elif isinstance(
        assigned.get(ast.unparse(node)), ast.List | ast.Tuple | ast.Name | ast.Constant
    ):
        # A name that holds itself is taken as it is the second time.
        yield from _items(assigned.pop(ast.unparse(node)), assigned)
    else:
        yield node


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            try:
                yield ast.unparse(target), ast.literal_eval(node.value)
            except ValueError:
                continue


def _read_call(name: str, call: ast.Call, constants: Mapping[str, Any], found: ForeignFile) -> None:
    """Add the arguments of one call, if it is one that sets something."""
    last = name.rpartition(".")[2]
    arguments = {}
    for keyword in call.keywords:
        unpacked = constants.get(ast.unparse(keyword.value)) if keyword.arg is None else None
        if isinstance(unpacked, dict):
            arguments |= {name: ast.Constant(value) for name, value in unpacked.items()}
        else:
            arguments[keyword.arg or f"**{ast.unparse(keyword.value)}"] = keyword.value
    if name.endswith("AutoModelForCausalLM.from_pretrained"):
        arguments = {key: arguments[key] for key in arguments if key == "model_name_or_path"}
    elif last == "load_dataset":
        _read_data_set(call, arguments, constants, found)
        return
    elif last == "LoraConfig":
        found.lora |= _values(arguments, constants, found)
        return
    elif CLASS.fullmatch(last):
        arguments = _of_trainer(arguments, constants)
    elif name.partition(".")[0] not in UNSLOTH:
        return

    found.values |= _values(arguments, constants, found)


def _of_trainer(
    arguments: dict[str, ast.expr], constants: Mapping[str, Any]
) -> dict[str, ast.expr]:
    """Return what is left of a trainer's arguments without its objects, which are read elsewhere."""
    model = arguments.get("model")
    if isinstance(model, ast.Constant) or isinstance(model, ast.Name) and model.id in constants:
        arguments = {"model_name_or_path": model} | arguments

    objects = "model args train_dataset eval_dataset processing_class tokenizer peft_config"
    others = [*objects.split(), "reward_funcs"]
    return {name: node for name, node in arguments.items() if name not in others}


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


def _of_yaml(content: dict[str, Any], path: Path) -> ForeignFile:
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
            sets = sets if isinstance(sets, list) else [sets]
            paths = [each.get("path") if isinstance(each, dict) else each for each in sets]
            found.values[ours] = paths
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
        newer = _of_words(words, path.parent)
        if newer and found:
            newer.notes["earlier commands"] = f"there is one of {found.command}, left out"
        found = newer or found
        if found:
            unknown = [word for word in words if word.startswith("$")]
            found.notes |= dict.fromkeys(unknown, "only running the script would tell its value")

    if found is None:
        raise ConfigError(f"{path}: the script starts no trainer of {KNOWN_TOOLS}")
    return found


def _commands(text: str) -> Iterator[list[str]]:
    joined = re.sub(r"\\\n", " ", text)
    for line in joined.splitlines():
        # For shlex a # in the middle of a word begins a comment, too.
        words = shlex.shlex(re.sub(r"(?<=\S)#", HASH, line), posix=True, punctuation_chars=";&|")
        words.whitespace_split = True
        try:
            unquoted = [word.replace(HASH, "#") for word in words]
        except ValueError:
            continue
        for ends, command in groupby(unquoted, lambda word: not word.strip(";&|")):
            if not ends:
                yield [word for word in command if word != "export"]


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    return re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, word)


def _of_words(words: list[str], folder: Path) -> ForeignFile | None:
    line = " ".join(words)
    if any(SETTING_KEY.fullmatch(word) for word in words) and "sft_trainer" not in line:
        others = [word for word in words if re.match(r"[+~]*\w+(\.\w+)+=", word)]
        notes = {word: NO_COUNTERPART for word in others if not SETTING_KEY.fullmatch(word)}
        return ForeignFile("verl", "train_ppo", settings(words), notes=notes)

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
            file = folder / str(values.pop("config"))
            values = _keys(_text(file), file) | values
        return ForeignFile("trl", COMMAND_OF[match[1]], values)
    if match := re.search(r"(?:\b|_)(grpo|rloo|sft|dpo|kto)\w*\.py\b", line):
        if "--model_name_or_path" in words:
            return ForeignFile("trl", COMMAND_OF[match[1]], _flags(words))
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
    start = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    end = next((index for index, word in enumerate(words) if re.match(r"\d?>", word)), None)
    read = {}
    for name, values in group_flags(words[start:end]).items():
        parsed = [typed(value) for value in values] or [True]
        read[name] = parsed if len(parsed) > 1 else parsed[0]
    return read
