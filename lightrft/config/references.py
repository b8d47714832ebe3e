"""Parse what flags refer to: addresses of servers, and lists of weighted names of rewards, models
and data sets.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from lightrft.config.tables import table
from lightrft.config.values import nearest

REWARD_MODELS = ("reward_pretrain", "process_reward_pretrain")
"""Fields that name reward models."""
GGUF = ".gguf"
"""End of the name of a model in one file."""
REWARD_KEY = "REWARD_API_KEY"
"""Environment variable with the key of servers of rewards."""
MODEL_KEY = "MODEL_API_KEY"
"""Environment variable with the key that clients of `lightrft serve` need."""
JUDGE = "judge"
"""Name of the reward that a language model at --judge_url gives."""
ENGINE = "engine"
"""Value of --judge_url: the trained model judges its own responses."""
JUDGE_KEY = "JUDGE_API_KEY"
"""Environment variable with the key of that server."""
DATA_FILES = (".jsonl", ".json", ".parquet")
"""Ends of the names of files with data."""
REASONING_GYM = "reasoning_gym:"
"""Beginning of the name of a data set that is a task of the package reasoning-gym."""
VERIFIERS = "verifiers:"
"""Beginning of the name of a data set that is an environment of the package verifiers."""
HARBOR = "harbor:"
"""Beginning of the name of a data set that is a folder with tasks of Harbor."""
SERVER = ("http://", "https://")
"""Beginnings of the address of a server."""
LABELLED_REFERENCE = re.compile(r"(?:(?P<label>[A-Za-z_]\w*)=)?(?P<reference>.+)")
WEIGHTED = re.compile(r"(?P<name>.+):(?P<weight>-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)")
SEPARATOR = re.compile(r",(?![^\[]*\])")
"""Comma between two data sets; one inside of brackets belongs to an option of a task."""
ADDRESS = re.compile(r"(?P<name>https?://[^/:]+(?::\d+)?(?:/[^:]*)?)(?::(?P<weight>[^:/]+))?")


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One of the rewards of --reward, in the form `LABEL=NAME:WEIGHT`."""

    label: str
    """Name of the metric, and of the term in the column --reward_key."""
    name: str
    """A registered name, module:function, file.py:function, or the address of a server."""
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.label}={self.name}:{self.weight!r}"


def reward_terms(text: str) -> list[RewardTerm]:
    """Return the terms of --reward, separated by commas:
    `math_verify:0.8,short=lengths.py:short:0.2`.

    Without a label a term has the name of the function, without a weight the weight 1. The number
    after the host of an address is a port. Raises ValueError for an empty term, or for two terms
    with one label.
    """
    terms = [_reward_term(term.strip()) for term in text.split(",")]
    labels = [term.label for term in terms]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(
            f"--reward {text}: two rewards are called {min(repeated)}; give them labels:"
            " LABEL=NAME:WEIGHT"
        )
    return terms


def teacher_terms(text: str) -> list[tuple[str, str]]:
    """Return (label, path) for the teachers of --teacher_pretrain: PATH, or LABEL=PATH,LABEL=PATH.

    A single one needs no label. Raises ValueError for an empty entry, for several without labels,
    or for two with one label.
    """
    entries = [entry.strip() for entry in text.split(",")] if text else []
    matches = [LABELLED_REFERENCE.fullmatch(entry) for entry in entries]
    if not all(matches):
        raise ValueError(f"--teacher_pretrain {text} has an empty entry")

    terms = [(match["label"] or "", match["reference"]) for match in matches]
    labels = [label for label, _ in terms]
    if len(terms) > 1 and ("" in labels or len(set(labels)) < len(labels)):
        raise ValueError(
            f"--teacher_pretrain {text}: each of several teachers needs a label of its own:"
            " LABEL=PATH,LABEL=PATH"
        )
    return terms


class NamedRewardModels(Protocol):
    """The fields of ModelSection that name reward models."""

    reward_pretrain: list[str]
    process_reward_pretrain: list[str]


def reward_model_terms(section: NamedRewardModels) -> list[tuple[str, RewardTerm]]:
    """Return (flag, reward model) for the entries of both flags, each in the form PATH, PATH:WEIGHT
    or LABEL=PATH:WEIGHT.

    Without a label a model has the name of the folder; a number tells equal names apart.
    Raises ValueError for an empty entry, or for two models with one label.
    """
    terms: list[tuple[str, RewardTerm]] = []
    for flag, value in [
        (name, value) for name in REWARD_MODELS for value in getattr(section, name)
    ]:
        if not (found := _labelled(value.strip())):
            raise ValueError(
                f"--{flag} has an empty entry: name reward models as PATH, PATH:WEIGHT or"
                " LABEL=PATH:WEIGHT"
            )

        chosen, path, weight = found
        labels = {term.label for _, term in terms}
        if chosen in labels:
            raise ValueError(f"--{flag}: two reward models are called {chosen}")

        name = os.path.basename(path.rstrip("/"))
        label = chosen or (f"{name}_{len(terms)}" if name in labels else name)
        terms.append((flag, RewardTerm(label, path, float(weight or 1))))

    return terms


def reward_weights(reward: str, models: NamedRewardModels, coefficient: float) -> dict[str, float]:
    """Return the weight of each reward function and reward model by label.

    `coefficient` is --reward_model_coef.
    """
    weights = {term.label: term.weight for term in reward_terms(reward)}
    return weights | {
        term.label: coefficient * term.weight for _, term in reward_model_terms(models)
    }


def chosen_labels(columns: Mapping[str, Any], key: str | None, everything: set[str]) -> set[str]:
    """Return the labels of the rewards that score a row: the ones in column `key`, or `everything`
    if `key` is None.
    """
    if key is None:
        return everything
    value = columns.get(key)
    return set(value) if isinstance(value, list | tuple) else {value} - {None}


def _reward_term(text: str) -> RewardTerm:
    if not (found := _labelled(text)):
        raise ValueError(
            "--reward has an empty term: name rewards as NAME or NAME:WEIGHT, separated by commas"
        )
    label, name, weight = found
    try:
        number = float(weight or 1)
    except ValueError:
        raise ValueError(f"--reward {text}: the weight {weight!r} is not a number") from None
    default = "server" if name.startswith(SERVER) else name.rpartition(":")[2]
    return RewardTerm(label or default, name, number)


def _labelled(text: str) -> tuple[str, str, str] | None:
    """Return the label, the name and the weight of `LABEL=NAME:WEIGHT`; None for an empty text.

    Label and weight are empty where they are not written.
    """
    if not (labelled := LABELLED_REFERENCE.fullmatch(text)):
        return None
    reference = labelled["reference"]
    match = (ADDRESS if reference.startswith(SERVER) else WEIGHTED).fullmatch(reference)
    name, weight = (match["name"], match["weight"]) if match else (reference, "")
    return labelled["label"] or "", name, weight or ""


@dataclass(frozen=True, slots=True)
class DataSource:
    """One of the data sets of --prompt_data, in the form `NAME:PROBABILITY`."""

    name: str
    """A file, folder, hub name with or without a subset, task, module:object or file.py:object."""
    weight: float | None = None
    """Probability, up to a common factor."""


def task_options(reference: str, prefix: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the name and the options of `PREFIX:NAME?option=value&option=value`.

    Values are JSON, or else text.
    """
    name, _, query = reference.removeprefix(prefix).partition("?")
    written = (option.partition("=") for option in query.split("&") if option)
    return name, [(key, _json_or_text(value)) for key, _, value in written]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def data_sources(text: str) -> list[DataSource]:
    """Return the data sets of a flag, separated by commas: `math.jsonl:0.7,chat:0.3`.

    The name of an existing file or folder may contain commas and colons.
    """
    if os.path.exists(os.path.expanduser(text)):
        return [DataSource(text)]
    return [_data_source(source.strip()) for source in SEPARATOR.split(text)]


def _data_source(text: str) -> DataSource:
    match = None if os.path.exists(os.path.expanduser(text)) else WEIGHTED.fullmatch(text)
    return DataSource(match["name"], float(match["weight"])) if match else DataSource(text)


def data_problems(flag: str, text: str, probabilities: list[float]) -> list[str]:
    """Return why the data sets of a flag cannot be drawn from; `probabilities` come from
    --prompt_data_probs.
    """
    sources = data_sources(text)
    weights = [source.weight for source in sources if source.weight is not None]
    problems = []
    if any(not s.name for s in sources):
        problems = [f"--{flag} {text} has an empty name: separate data sets by one comma"]

    if weights and probabilities:
        problems.append(
            f"--{flag} {text} has probabilities of its own, and --prompt_data_probs is set: use one"
            " of them"
        )
    elif weights and len(weights) < len(sources):
        without = next(source.name for source in sources if source.weight is None)
        problems.append(
            f"--{flag}: {without} has no probability, and others have: write {without}:NUMBER"
        )
    elif probabilities and len(probabilities) != len(sources) > 1:
        problems.append(
            f"--prompt_data_probs has {len(probabilities)} numbers, and --{flag} has {len(sources)}"
            " data sets"
        )

    if weights and flag == "eval_data":
        problems.append(
            f"--eval_data {text}: held-out data are evaluated whole and have no probabilities"
        )

    if min(weights + probabilities, default=1.0) <= 0:
        problems.append(
            f"--{flag}: a probability must be above 0: leave out data that are not to be drawn"
        )

    return problems


TRACKERS = ("wandb", "mlflow", "swanlab", "trackio", "comet_ml")
"""Trackers of --report_to; each name is also the package."""
FILE_DESTINATIONS = ("tensorboard", "jsonl", "none")
"""Destinations of --report_to that need no further package; none is jsonl alone."""


def report_names(text: str) -> list[str]:
    """Return the destinations in the text of --report_to.

    Raises ValueError for an unknown or repeated one.
    """
    names = [name.strip() for name in text.split(",")]
    known_names = (*TRACKERS, *FILE_DESTINATIONS)
    if wrong := [name for name in names if name not in known_names]:
        raise ValueError(
            f"--report_to {wrong[0]!r}: unknown{nearest(wrong[0], known_names)} (choices:"
            f" {', '.join(known_names)})"
        )
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--report_to {text}: {repeated[0]} is listed twice")
    return names


BENCHMARKS = tuple(table("data/benchmarks"))
"""Formats of --eval_data that set the columns, the instruction and the verifier."""
NAMED_SET = re.compile(r"(?P<name>[A-Za-z][\w.-]*)(?::(?P<benchmark>\w+))?=(?P<source>.+)")


@dataclass(frozen=True, slots=True)
class EvalSource:
    """One set of --eval_data, in the form `NAME:BENCHMARK=SOURCE`."""

    name: str
    """Name of the metrics; empty for the only set if it has no name."""
    source: str
    benchmark: str = ""
    """One of BENCHMARKS; empty: the columns of --eval_input_key and --eval_label_key, scored by
    --reward."""


def eval_sources(text: str) -> list[EvalSource]:
    """Return the sets of --eval_data: `gsm8k=test.jsonl,aime24:aime=2024.jsonl,own=held_out.jsonl`,
    or one without a name.

    A name that is a benchmark's needs no format. Raises ValueError for an unknown format, and for
    names that not all or several sets have.
    """
    if not text or os.path.exists(os.path.expanduser(text)):
        return [EvalSource("", text)] if text else []

    entries = text.split(",")
    named = [NAMED_SET.fullmatch(entry.strip()) for entry in entries]
    if not any(named):
        return [EvalSource("", text)]
    if not all(named):
        raise ValueError(
            f"--eval_data {entries[named.index(None)]}: name every set, as NAME=SOURCE, or none"
        )

    sources = [
        EvalSource(match["name"], match["source"], _benchmark(match["name"], match["benchmark"]))
        for match in named
        if match
    ]
    names = [each.name for each in sources]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"--eval_data: two sets are called {repeated[0]}; a name may be followed by its format:"
            " NAME:BENCHMARK=SOURCE"
        )

    return sources


def _benchmark(name: str, requested: str | None) -> str:
    if requested is not None and requested not in BENCHMARKS:
        raise ValueError(
            f"--eval_data {name}:{requested}: unknown format{nearest(requested, BENCHMARKS)}"
            f" (choices: {', '.join(BENCHMARKS)})"
        )
    return requested or (name if name in BENCHMARKS else "")


def address_problem(flag: str, url: str, key: str) -> str:
    """Return the reason why `url`, with the key in the environment variable `key`, cannot be used;
    empty if it can.

    The reason contains no secret.
    """
    try:
        pieces = urlsplit(url)
        host = pieces.hostname
        secret = pieces.username or pieces.password
        pieces.port  # noqa: B018  (ValueError for no number)
    except ValueError as error:
        return f"{flag}: the address cannot be read: {error}"

    if secret:
        return (
            f"{flag} {pieces.scheme}://...@{host}: a user or password in an address would be"
            " written to config.yaml, checkpoints and logs. Leave it out, and set"
            f" {key}=user:password in the environment"
        )

    if pieces.query or pieces.fragment:
        return (
            f"{flag} {pieces.scheme}://{host}?...: what follows a question mark, such as a token,"
            f" would be written to config.yaml, checkpoints and logs. Leave it out, and set {key}"
            " in the environment"
        )

    if (
        pieces.scheme not in ("http", "https")
        or not host
        or any(character.isspace() for character in url)
    ):
        return f"{flag} {url!r} is not an address such as http://host:8000/path"

    value = os.environ.get(key, "")
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        return (
            f"the environment variable {key} must not contain line ends, surrounding spaces or"
            " non-ASCII characters"
        )

    return ""
