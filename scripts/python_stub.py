"""Write lightrft/__init__.pyi, by which editors complete and check the flags of calls from Python.

    python scripts/python_stub.py

A test compares the file with what this script writes.
"""

import sys
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightrft.config import SECTIONS  # noqa: E402  after its folder
from lightrft.config.command_line import field_docs  # noqa: E402
from lightrft.config.sections import field_types, fields_read, section_of_field  # noqa: E402
from lightrft.config.values import CommaSeparated, JSONObject, Verbatim  # noqa: E402

STUB = ROOT / "lightrft" / "__init__.pyi"
COMMANDS = ("train_ppo", "train_sft", "train_rm", "train_prm", "train_dpo", "train_kto", "evaluate")
DATA = ("prompt_data", "eval_data", "pretrain_data")
FUNCTIONS = ("reward", "advantage_estimator", "policy_loss", "rollout_correction")
ARGUMENTS = {
    "model": "Model | None",
    "tokenizer": "PreTrainedTokenizerBase | None",
    "prompt_data": "Rows | None",
    "eval_data": "Rows | None",
    "reward": "Reward | None",
}
"""Arguments of functions that have names of their own -> types."""
OWN = {
    "train_ppo": ("model", "tokenizer", "prompt_data", "reward"),
    "evaluate": ("model", "tokenizer", "eval_data", "reward"),
}
OF_TRL = {
    "train_dataset": "Rows",
    "eval_dataset": "Rows",
    "reward_funcs": "Reward",
    "args": "Any",
    "peft_config": "Any",
    "processing_class": "Any",
}
"""Arguments of TRL's trainers that are taken as they are -> types."""
HEAD = '''"""Types of the public names, for editors and type checkers. Written by scripts/python_stub.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from transformers import PreTrainedTokenizerBase

from lightrft.config.errors import ConfigError as ConfigError
from lightrft.config.errors import DataError as DataError
from lightrft.config.sections import Config as Config
from lightrft.app.trainer.python import ConfigOrFile, Model, Reward, Rows
from lightrft.app.trainer.python import TrainedRun as TrainedRun

__version__: str
'''


def stub() -> str:
    """Return the content of the file."""
    parts = [HEAD]
    for command in COMMANDS:
        name = f"{''.join(word.title() for word in command.split('_'))}Flags"
        own = OWN.get(command, ())
        fields = {
            flag: (_type(flag), _meaning(flag))
            for section in SECTIONS
            for flag in _flags_of(section)
            if flag in fields_read(command) and flag not in own
        }
        if "model" not in own:
            fields |= {"model": ("Model", ""), "tokenizer": ("PreTrainedTokenizerBase", "")}
        if command != "evaluate":
            fields |= {flag: (of, "") for flag, of in OF_TRL.items()}

        lines = [f"class {name}(TypedDict, total=False):"]
        for flag, (of, meaning) in fields.items():
            lines.append(f"    {flag}: {of}")
            lines += [f'    """{meaning}"""'] if meaning else []
        parts.append("\n".join(lines) + "\n")

        arguments = [f"    {each}: {ARGUMENTS[each]} = ...," for each in own]
        result = "dict[str, float]" if command == "evaluate" else "TrainedRun"
        signature = [f"def {command}(", "    config: ConfigOrFile = ...,"]
        signature += ["    *,", *arguments] if own else []
        signature += [f"    **values: Unpack[{name}],", f") -> {result}: ..."]
        parts.append("\n".join(signature) + "\n")

    return "\n".join(parts)


def _flags_of(section: str) -> list[str]:
    return [flag for flag, owner in section_of_field().items() if owner == section]


def _meaning(flag: str) -> str:
    text = " ".join(field_docs(SECTIONS[section_of_field()[flag]])[flag].split())
    return text.replace("\\", "\\\\").replace('"', "'")


def _type(flag: str) -> str:
    if flag in DATA:
        return "Rows"
    if flag in FUNCTIONS:
        return "Reward" if flag == "reward" else "str | Callable[..., Any] | None"
    text = _text(field_types()[flag])
    return text.replace("str", "str | Path", 1) if text in ("str", "str | None") else text


def _text(kind: Any) -> str:
    if kind is CommaSeparated:
        return "str | list[str]"
    if kind is JSONObject:
        return "str | dict[str, Any]"
    if kind is Verbatim:
        return "str"
    if kind is type(None):
        return "None"
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    if get_origin(kind) is list:
        return f"list[{_text(get_args(kind)[0])}] | str"
    if get_origin(kind) is Union or get_args(kind):
        return " | ".join(_text(arm) for arm in get_args(kind))
    return kind.__name__


if __name__ == "__main__":
    STUB.write_text(stub())
