"""Find where two runs begin to differ, and what differs around them.

The digests of a run say in which step and phase. Recorded samples (--dump_rollouts) say in which
sample and token, and checkpoints in which tensor and element.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightrft.app.observe.sinks import read_rows
from lightrft.app.run.digests import FILE, OF_SEQUENCES, PHASES, read_digests
from lightrft.app.run.resume_check import NO_EFFECT_ON_NUMBERS
from lightrft.app.run.run_folder import DESCRIPTION, checkpoints_of
from lightrft.config.tables import table
from lightrft.config.values import read_object
from lightrft.extras.tools.comparison import read_settings
from lightrft.strategy.checkpoint.manifest import checkpoints
from lightrft.strategy.checkpoint.reader import CheckpointReader

COMPARED = table("extras/recorder/compared")
MEANINGS: dict[str, str] = COMPARED["phases"]
LAYOUT_SETTINGS: list[str] = COMPARED["layout"]
"""Settings, beside the number of ranks, of what a rank has of the models and the sequences."""
MISMATCH_METRIC = "engine/logprob_mismatch"
STEP_NAME = re.compile(r"step(\d+)")
"""Name of the checkpoint of a step."""
FAR = 10.0
LEAST_MISMATCH = 1e-2
"""A mean mismatch that is so many times the other run's, and at least so large, is no rounding."""


@dataclass
class Difference:
    """First difference of two runs, and what may be the reason."""

    steps: int
    """Number of steps that both runs have."""
    step: int | None = None
    """First step that differs; None if all digests are equal."""
    phase: str = ""
    update: int = 0
    """Number of the optimizer step, from 1, if the phase belongs to one."""
    modules: list[str] = field(default_factory=list)
    """Modules of the model whose gradient or weights differ."""
    locations: list[str] = field(default_factory=list)
    """Sentences about the first sample, tensor and element that differ."""
    causes: list[str] = field(default_factory=list)
    """Sentences about settings, data, versions and machines that differ."""
    other_layout: bool = False
    """Whether ranks have other shares of models and sequences. The phases of OF_SEQUENCES alone can
    be compared then."""


def find_difference(one: Path, other: Path) -> Difference:
    """Compare the runs in two folders.

    Raises FileNotFoundError for a run without digests.
    """
    folders = one, other
    for folder in folders:
        if not (folder / FILE).is_file():
            raise FileNotFoundError(
                f"{folder} has no {FILE}: it is not the folder of a run, or the run had"
                " --no_digests"
            )

    digests = [read_digests(folder) for folder in folders]
    steps = sorted(digests[0].keys() & digests[1].keys())
    found = Difference(len(steps) - (0 in steps), other_layout=_has_other_layout(folders))
    compared = OF_SEQUENCES if found.other_layout else PHASES
    for step in steps:
        rows = [each[step] for each in digests]
        phase = next((each for each in compared if rows[0].get(each) != rows[1].get(each)), None)
        if phase is not None:
            found.step = step
            found.phase, found.update = _in_updates(phase, *rows)
            first, second = (row.get(found.phase) for row in rows)
            if isinstance(first, dict) and isinstance(second, dict):  # by module
                found.modules = [name for name, *_ in _differing(first, second)]
            break

    found.causes = [*_settings(folders), *_descriptions(folders), *_data(folders)]
    if found.step is not None:
        found.locations = list(_locations(folders, found))
        found.causes += _measured(folders, found)
    return found


def _has_other_layout(folders: Sequence[Path]) -> bool:
    layouts = []
    for folder in folders:
        ranks = map(_description(folder).get, ("world_size", "rollout_ranks"))
        layouts.append([*ranks, *map(read_settings(folder).get, LAYOUT_SETTINGS)])
    return layouts[0] != layouts[1]


def _in_updates(phase: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, int]:
    """Return the first phase and optimizer step that differ, if `phase` belongs to those."""
    kinds = PHASES[PHASES.index("loss") :]
    if phase in kinds:
        pairs = zip(one.get("updates", ()), other.get("updates", ()), strict=False)
        for number, pair in enumerate(pairs, start=1):
            for index, kind in enumerate(kinds):
                first, second = (each[8 * index : 8 * index + 8] for each in pair)
                if first != second:
                    return kind, number
    return phase, 0


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], absent: str | None = None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names with different values, and both values."""
    for name in {**one, **other}:
        first = one.get(name, absent)
        second = other.get(name, absent)
        if first != second:
            yield name, first, second


# -- what differs around the numbers


def _settings(folders: Sequence[Path]) -> Iterator[str]:
    for name, one, other in _differing(*map(read_settings, folders)):
        if name not in NO_EFFECT_ON_NUMBERS:
            yield f"--{name}: {one!r} and {other!r}"


def _descriptions(folders: Sequence[Path]) -> Iterator[str]:
    one, other = map(_description, folders)
    for name in COMPARED["of_run"]:
        if one.get(name) != other.get(name):
            yield f"{name.replace('_', ' ')}: {one.get(name)!r} and {other.get(name)!r}"
    for title, key in (("version of", "versions"), ("machine:", "machine")):
        for name, before, after in _differing(one.get(key, {}), other.get(key, {}), "none"):
            yield f"{title} {name}: {before} and {after}"


def _description(folder: Path) -> dict[str, Any]:
    return read_object(folder / DESCRIPTION)


def _data(folders: Sequence[Path]) -> Iterator[str]:
    """Compare files of data and code that both runs name, if these are files still."""
    configs = [*map(read_settings, folders)]
    for name in ("prompt_data", "eval_data", "pretrain_data", "reward"):
        paths = [
            Path(str(config.get(name) or "").rpartition(":")[0] or str(config.get(name)))
            for config in configs
        ]
        paths = [path.expanduser() for path in paths]
        if paths[0] == paths[1] or not all(path.is_file() for path in paths):
            continue

        lines = [path.read_bytes().splitlines() for path in paths]
        pairs = zip_longest(*lines, fillvalue=b"")  # empty lines at the end are no difference
        for number, pair in enumerate(pairs, start=1):
            if pair[0] != pair[1]:
                texts = [line.decode(errors="replace")[:200] for line in pair]
                yield f"--{name}: line {number} is {texts[0]!r} and {texts[1]!r}"
                break


def _measured(folders: Sequence[Path], found: Difference) -> Iterator[str]:
    """Say what metrics of the step tell about the reason."""
    rows = [metrics_of(folder, found.step) for folder in folders]
    gaps = [row.get(MISMATCH_METRIC) for row in rows]
    if found.phase in ("samples", "logprobs") and None not in gaps:
        for name, gap, usual in (("first", *gaps), ("second", *reversed(gaps))):
            if gap > max(FAR * usual, LEAST_MISMATCH):
                yield (
                    f"in the {name} run the engine's log-probs differ from the trainer's by"
                    f" {gap:.2g}, in the other by {usual:.2g}: its engine has other weights than"
                    " are trained, such as stale ones"
                )

    rates = [row.get("train/learning_rate") for row in rows]
    if found.phase == "weights" and rates[0] != rates[1]:
        yield f"the learning rate is {rates[0]} and {rates[1]}"
    # The mean over a step's updates: what differs in one is in the last digits of the next ones.
    norms = [row.get("train/grad_norm", math.nan) for row in rows]
    if found.phase == "gradient" and math.isclose(*norms, rel_tol=1e-6):
        yield "the norm before clipping is equal: gradients are clipped differently, or one rounds"


def metrics_of(folder: Path, step: int) -> dict[str, Any]:
    """Return the last metrics of a step of a run; none if there are none."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] == step]
    return rows[-1] if rows else {}


# -- the sample, the tensor and the element


def _locations(folders: Sequence[Path], found: Difference) -> Iterator[str]:
    if found.phase in OF_SEQUENCES:
        yield from _of_samples(folders, found)
    elif found.phase == "weights":
        yield from _of_checkpoints(folders, found.step)


def _of_samples(folders: Sequence[Path], found: Difference) -> Iterator[str]:
    recorded = [read_recorded(folder, found.step) for folder in folders]
    if None in recorded:
        yield "--dump_rollouts in both runs would show the sample and the token"
        return

    # Other numbers of replicas share the groups differently.
    if [row["group"] for row in recorded[0]] != [row["group"] for row in recorded[1]]:
        recorded = [sorted(rows, key=lambda row: row["group"]) for rows in recorded]
    for number, (one, other) in enumerate(zip_longest(*recorded)):
        if one is None or other is None:
            yield f"one run has {len(recorded[0])} samples, the other {len(recorded[1])}"
            return
        sample = f"sample {number} (group {one['group']})"
        if one["prompt"] != other["prompt"]:
            texts = one["prompt"]["text"], other["prompt"]["text"]
            rows = one["prompt"]["index"], other["prompt"]["index"]
            yield (
                f"{sample}: the prompt is row {rows[0]}, {texts[0]!r:.200}, and row {rows[1]},"
                f" {texts[1]!r:.200}"
            )
            return
        for name in COMPARED["fields"].get(found.phase, ()):
            if one.get(name) != other.get(name):
                yield f"{sample}: {_element(name, one.get(name), other.get(name))}"
                return


def _element(name: str, one: Any, other: Any) -> str:
    """Return the first element where two values of a sample differ."""
    if isinstance(one, list) and isinstance(other, list):
        for index, (first, second) in enumerate(zip_longest(one, other)):
            if first != second:
                return f"{name}[{index}] is {first!r} and {second!r}"
    return f"{name} is {one!r:.200} and {other!r:.200}"


def read_recorded(folder: Path, step: int) -> list[dict[str, Any]] | None:
    """Return the recorded samples of all replicas of a step, in rank order; None without any."""
    dump = read_settings(folder).get("dump_rollouts")
    files = sorted(
        (Path(dump).expanduser() / f"step_{step:06d}").glob("replica_*.jsonl") if dump else (),
        key=lambda file: int(file.name.split("_")[1]),
    )
    if not files:
        return None
    return [json.loads(line) for file in files for line in file.read_text().splitlines()[1:]]


def _of_checkpoints(folders: Sequence[Path], step: int) -> Iterator[str]:
    paths = [[path for _, path in checkpoints(checkpoints_of(folder))] for folder in folders]
    saved = [
        {int(tag[1]): path for path in of_run if (tag := STEP_NAME.fullmatch(path.name))}
        for of_run in paths
    ]
    common = [number for number in saved[0].keys() & saved[1].keys() if number >= step]
    if not common:
        yield "--save_steps in both runs would show the tensor and the element"
        return

    first = min(common)
    names, location = _first_element(*(each[first] for each in saved))
    if names:
        name = saved[0][first].name
        yield f"checkpoint {name}: {len(names)} tensors of the models differ; {location}"


def _first_element(one: Path, other: Path) -> tuple[list[str], str]:
    """Return the names of tensors that differ in two checkpoints, and where the first one does."""
    names: list[str] = []
    location = ""
    # One tensor at a time, because models may be large.
    for name, shape, dtype in _tensors(one):
        first, second = (torch.zeros(shape, dtype=dtype) for _ in range(2))
        for tensor, folder in ((first, one), (second, other)):
            dcp.load({name: tensor}, storage_reader=CheckpointReader(folder), no_dist=True)
        if torch.equal(first, second):
            continue

        names.append(name)
        if not location:
            changed = (first != second).flatten().nonzero().flatten()
            index = [int(i) for i in torch.unravel_index(changed[0], shape)]
            values = first.flatten()[changed[0]].item(), second.flatten()[changed[0]].item()
            location = (
                f"{name} in {len(changed)} of {first.numel()} elements, first {index}:"
                f" {values[0]!r} and {values[1]!r}"
            )

    return names, location


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """Yield name, shape and type of each tensor of the models in a checkpoint."""
    entries = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and ".model." in name:
            yield name, entry.size, entry.properties.dtype
