"""Call a reward function by its own convention: ours, TRL's, OpenRLHF's, verl's or EasyR1's.

It is recognised by the signature.

| | recognised by | called with |
|---|---|---|
| here | anything else | `samples`, and the columns by name |
| TRL | `completions` | `prompts`, `completions`, `completion_ids`, and the columns by name |
| OpenRLHF | `queries`, `prompts`, `labels` | these; a dictionary's `rewards` count |
| verl | `solution_str`, `ground_truth` | these, `data_source`, `extra_info`, for each response; |
| | | a dictionary's `score` counts |
| verl | `solution_strs`, `ground_truths` | the same in lists, `data_sources`, `extra_infos` |
| EasyR1 | `reward_inputs`, or `reward_input` for each | `response`, `response_length`, |
| | | `ground_truth`; `overall` counts |
"""

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from lightrft.config.errors import ConfigError
from lightrft.core.samples import Prompt, Sample
from lightrft.data.rendering.messages import Message, as_messages
from lightrft.rewards.functions import readers

Columns = dict[str, list]
"""A list for each column of the data, with an entry for each sample."""
LABEL_ARGUMENTS = ("label", "labels", "ground_truth", "ground_truths")
"""Arguments that must not be null if a function requires them."""


@dataclass(frozen=True)
class Convention:
    """One way to call a reward function."""

    recognised_by: frozenset[str]
    arguments: Callable[[list[Sample], Columns, bool], dict[str, Any]]
    """Function that returns the arguments by name.

    It gets samples, columns, and True if prompts are chats, and raises KeyError for a missing
    column.
    """
    single: bool = False
    """True if a call is for one response; arguments are then lists with the values of each call."""
    result: str = ""
    """Key of the reward in a returned dictionary."""


def _trl(samples: list[Sample], columns: Columns, chat: bool) -> dict[str, Any]:
    texts = [sample.text for sample in samples]
    prompts = {"prompts": [sample.prompt.text for sample in samples]}
    if chat:
        # The messages as the data have them: the text of the prompt is the chat template's.
        columns = dict(columns)
        inputs = columns.pop("prompt", None)
        prompts = {} if inputs is None else {"prompts": [*map(_messages, inputs)]}
    return columns | {
        **prompts,
        "completions": (
            [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        ),
        "completion_ids": [sample.token_ids for sample in samples],
    }


def _messages(row_input: Any) -> list[Message]:
    return as_messages(row_input) or [{"role": "user", "content": row_input}]


def _openrlhf(samples: list[Sample], columns: Columns, chat: bool) -> dict[str, Any]:
    prompts = [sample.prompt.text for sample in samples]
    queries = [sample.prompt.text + sample.text for sample in samples]
    return {"queries": queries, "prompts": prompts, "labels": columns["label"]}


def _verl(samples: list[Sample], columns: Columns, chat: bool) -> dict[str, Any]:
    missing = [None] * len(samples)
    return {
        "data_source": columns.get("data_source", missing),
        "solution_str": [sample.text for sample in samples],
        "ground_truth": _ground_truths(columns),
        "extra_info": [_object(value) for value in columns.get("extra_info", missing)],
    }


def _verl_batch(samples: list[Sample], columns: Columns, chat: bool) -> dict[str, Any]:
    return {f"{name}s": values for name, values in _verl(samples, columns, chat).items()}


def _easy_r1(samples: list[Sample], columns: Columns, chat: bool) -> dict[str, Any]:
    answers = _ground_truths(columns)
    if not samples and any(map(_is_null, answers)):
        raise ValueError("the ground truth (--label_key) is null, and the function needs it")

    return {
        "reward_input": [
            {
                "response": sample.text,
                "response_length": len(sample.token_ids),
                "ground_truth": answer,
            }
            # no samples: a row is checked
            for sample, answer in zip(samples, answers, strict=False)
        ]
    }


def _easy_r1_batch(samples: list[Sample], columns: Columns, chat: bool) -> dict[str, Any]:
    return {"reward_inputs": _easy_r1(samples, columns, chat)["reward_input"]}


def _ground_truths(columns: Columns) -> list[Any]:
    """Return the right answers where verl's data have them, or else the labels."""
    if "reward_model" in columns:
        return [_ground_truth(_object(entry)) for entry in columns["reward_model"]]
    return columns["ground_truth"] if "ground_truth" in columns else columns["label"]


def _ground_truth(entry: Any) -> Any:
    if entry is not None and not isinstance(entry, Mapping):
        raise ValueError(
            f"the column reward_model is not an object with a ground_truth: {entry!r:.80}"
        )
    return (entry or {})["ground_truth"]


def _object(value: Any) -> Any:
    """Return the object of a JSON text, or the value as it is.

    Some files have such a text for a struct.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


CONVENTIONS = {
    "TRL": Convention(frozenset({"completions"}), _trl),
    "OpenRLHF": Convention(
        frozenset({"queries", "prompts", "labels"}), _openrlhf, result="rewards"
    ),
    "verl": Convention(
        frozenset({"solution_str", "ground_truth"}), _verl, single=True, result="score"
    ),
    "verl, in batches": Convention(
        frozenset({"solution_strs", "ground_truths"}), _verl_batch, result="score"
    ),
    "EasyR1": Convention(frozenset({"reward_input"}), _easy_r1, single=True, result="overall"),
    "EasyR1, in batches": Convention(
        frozenset({"reward_inputs"}), _easy_r1_batch, result="overall"
    ),
}


class RewardFunction:
    """A reward function of any convention."""

    def __init__(self, function: Callable[..., Any], *, chat: bool = False):
        """Inspect the function.

        `chat`: prompts go through a chat template, so TRL's functions expect messages.
        """
        self.function = function
        self.chat = chat
        self.signature = _signature(function)
        parameters = list(self.signature.parameters.values()) if self.signature else []
        names = {one.name for one in parameters}
        recognised = [
            convention for convention in CONVENTIONS.values() if convention.recognised_by <= names
        ]
        self.convention = recognised[0] if recognised and "samples" not in names else None

        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self.accepted = None if takes_any else names
        """Names of the accepted arguments; None for any."""
        # By our own convention the first is the samples.
        columns = parameters if self.convention else parameters[1:]
        self.needed = {
            one.name
            for one in columns
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        }
        """Names of the arguments, beside the samples, without a default."""
        self._loop: asyncio.Runner | None = None

    def __call__(self, samples: list[Sample], **columns: list) -> Any:
        """Return what the function returns.

        A coroutine function is run to its end, always in the same event loop.
        """
        if self.convention is None:
            returned = self.function(samples, **columns)
            return self._finish([returned])[0] if inspect.isawaitable(returned) else returned

        arguments = self.convention.arguments(samples, columns, self.chat)
        if self.accepted is not None:  # not every function has **kwargs
            arguments = {name: arguments[name] for name in arguments.keys() & self.accepted}
        if self.convention.single:
            calls = [
                {name: values[row] for name, values in arguments.items()}
                for row in range(len(samples))
            ]
            values = self._finish([self.function(**call) for call in calls])
            return list(map(self._reward, values))

        return self._reward(self._finish([self.function(**arguments)])[0])

    def judge(self, samples: list[Sample]) -> Any:
        """Call the function with samples and the columns that all of them have."""
        prompts = [sample.prompt.columns for sample in samples]
        columns = {name: [each[name] for each in prompts] for name in common_columns(samples)}
        return self(samples, **columns)

    @property
    def reads_messages(self) -> bool:
        """Return True if the function gets the messages of the prompt, from the column prompt."""
        is_trl = self.convention is CONVENTIONS["TRL"]
        return self.chat and is_trl and (self.accepted is None or "prompts" in self.accepted)

    @property
    def signatures(self) -> str:
        """Return the signature as text."""
        return str(self.signature)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if the function cannot be called with the columns of these prompts."""
        for names in {frozenset(prompt.columns) for prompt in prompts}:
            if problem := self._problem(set(names)):
                raise ConfigError(f"{problem}. {_present(names, 'data')}")

    def row_problem(self, columns: Mapping[str, Any]) -> str:
        """Return why the function cannot score responses to a row with these columns.

        It is empty if no reason can be seen. Problems that all rows share are found by check().
        """
        if not self.signature:
            return ""
        try:
            arguments, problem = self._bound({name: [value] for name, value in columns.items()})
        except ValueError as error:
            return str(error)
        if problem:
            return f"{problem}. {_present(columns)}"

        for name in LABEL_ARGUMENTS:
            if name in self.needed and _is_null(arguments[name][0]):
                return (
                    f"{name} (--label_key) is {arguments[name][0]}, and the function needs it:"
                    f" {_shown(self.signature)}. A function with a default for it, such as"
                    f" {name}=None, accepts such rows"
                )

        return self._unread(columns)

    def _unread(self, columns: Mapping[str, Any]) -> str:
        """Return the reason why a column of the row has a value that the function cannot use."""
        needed = readers.get(self.function, {}) if inspect.isfunction(self.function) else {}
        try:
            for name in needed.keys() & columns.keys():
                needed[name](columns[name])
        except ValueError as error:
            return str(error)
        return ""

    def _problem(self, columns: set[str]) -> str:
        if not callable(self.function):
            return f"{self.function!r:.80} is not callable"
        if self.signature is None:
            return ""

        if self.convention is None:
            first = next(iter(self.signature.parameters.values()), None)
            if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
                return f"the function has no parameter for samples: {_shown(self.signature)}"

            if self.accepted is not None and (surplus := columns - (self.accepted - {first.name})):
                return (
                    f"the function does not take {', '.join(sorted(surplus))}: add **columns to"
                    f" {_shown(self.signature)}"
                )

        return self._bound({name: [] for name in columns})[1]

    def _bound(self, columns: Columns) -> tuple[Columns, str]:
        """Return the arguments that these columns give, and which the function lacks."""
        shown = _shown(self.signature)
        try:
            if self.convention is not None:
                columns = self.convention.arguments([], columns, self.chat)
        except KeyError as missing:
            return {}, f"the function needs the column {missing}: {shown}"
        absent = sorted(self.needed - set(columns))
        return columns, f"the function needs {', '.join(absent)}: {shown}" if absent else ""

    def _finish(self, returned: list[Any]) -> list[Any]:
        """Return the results of calls; coroutines are awaited together."""
        if not any(inspect.isawaitable(value) for value in returned):
            return returned
        self._loop = self._loop or asyncio.Runner()
        return self._loop.run(_gather(returned))

    def _reward(self, returned: Any) -> Any:
        if self.convention is CONVENTIONS["TRL"] and isinstance(returned, list):
            # None stands for a response that the function has no opinion on.
            return [0.0 if value is None else value for value in returned]
        entry = self.convention.result
        # of a function that is called for several responses
        if entry and isinstance(returned, list):
            return [self._reward(value) for value in returned]
        if entry and isinstance(returned, Mapping) and entry in returned:
            return returned[entry]
        return returned


def common_columns(samples: list[Sample]) -> set[str]:
    """Return the names of the columns that the prompts of all samples have."""
    return set.intersection(*(set(sample.prompt.columns) for sample in samples))


def num_rewards(values: Any) -> int | None:
    """Return the number of values, or None if they are no list.

    The keys of a dictionary, the characters of a text and a set are not rewards.
    """
    if isinstance(values, str | bytes | Mapping | Set):
        return None
    try:
        return len(values)
    except TypeError:
        return None


def as_number(value: Any) -> float:
    """Return a reward as a float; NaN for what is not a number.

    It may come from a tensor or an array with one element.
    """
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # RuntimeError comes from a tensor with several elements
        return math.nan


async def _gather(coroutines: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None if there is none.

    Some built-in functions have none, and objects that are not callable.
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _present(columns: Collection[str], owner: str = "row") -> str:
    hint = "" if "label" in columns else "; --label_key names the column of the label"
    return f"The {owner} has the columns {', '.join(sorted(columns)) or 'none'}{hint}"


def _shown(signature: inspect.Signature) -> str:
    return f"its signature is {signature}"
