"""The public batches of roles: a mapping of right-padded [B, S] tensors, checked and turned into a flat batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lightrft.parallel.collectives import Axis
from lightrft.types import Batch, Experience, unpadded

IDS, LENGTHS, TOKEN_MASK, SAMPLE_MASK = "input_ids", "input_lengths", "token_mask", "sample_mask"
MADE_HERE = ("lengths", "rows", "loss_mask")
PER = {f.name: f.metadata["per"] for f in fields(Experience) if f.metadata["per"] in ("token", "sequence")}
TAKEN = tuple(f.name for f in fields(Experience) if f.metadata["per"] not in ("token", "sequence"))
SHAPES = {"token": "[B, S]", "sequence": "[B]"}


@dataclass(frozen=True, slots=True)
class FlattenedBatch:
    """The batch that this rank's caller passed, flattened."""

    batch: Batch
    width: int
    """Largest S of all ranks, the least width of results."""
    owners: list[list[int]]
    """[rank]: the rows that this rank's caller holds, counted over all ranks."""


def flatten(given: Mapping[str, Any], axis: Axis, *, required: Sequence[str] = (), columns: bool = False) -> FlattenedBatch:
    """Concatenate the rows of `given`. Without `columns` every token but the first of a row is learned.

    With `columns` the masks select the learned tokens, and every other tensor is carried along under its name: [B, S] per token,
    [B] per row. Raises ValueError on all ranks when any rank's batch is invalid; ranks may have any number of rows, including
    none, but need the same columns.
    """
    masks = [name for name in (TOKEN_MASK, SAMPLE_MASK) if columns and name in given]
    others = sorted(set(given) - {IDS, LENGTHS, TOKEN_MASK, SAMPLE_MASK}) if columns else []
    problem = _problem(given, [IDS, LENGTHS, *required], [*masks, *others])
    counts, width = _agree(axis, problem, others, (0, 0) if problem else tuple(given[IDS].shape))
    ids, lengths = given[IDS].cpu(), given[LENGTHS].cpu().long()
    first = sum(counts[: axis.rank])
    parts = {name: _column(given[name], lengths, name) for name in others}
    batch = Experience(
        lengths=lengths,
        input_ids=unpadded(ids, lengths).long(),
        loss_mask=unpadded(_learned(given, masks, ids.shape), lengths),
        rows=torch.arange(first, first + len(ids)),
        **{name: value for name, value in parts.items() if name in PER},
        extra_columns={name: value for name, value in parts.items() if name not in PER},
        extra_per_token=frozenset(name for name in others if name not in PER and _per(name, given[name]) == "token"),
    )
    starts = [sum(counts[:rank]) for rank in range(axis.size)]
    owners = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    return FlattenedBatch(batch, width, owners)


def _agree(axis: Axis, problem: str, columns: list[str], shape: tuple[int, int]) -> tuple[list[int], int]:
    """Return the number of rows of every rank, and the largest width.

    Raises the same ValueError on all ranks when one batch is invalid, so that no rank waits for another.
    """
    everyone = axis.gather((problem, columns, shape))
    for rank, (found, names, _) in enumerate(everyone):
        if not found and names != everyone[0][1]:
            found = f"its columns are {', '.join(names) or 'none'}, those of rank 0 {', '.join(everyone[0][1]) or 'none'}"
        if found:
            raise ValueError(found if axis.size == 1 else f"batch of rank {rank}: {found}")
    return [rows for _, _, (rows, _) in everyone], max(width for _, _, (_, width) in everyone)


def _problem(given: Mapping[str, Any], required: list[str], optional: list[str]) -> str:
    """Return the reason why this batch cannot be used; an empty string when it can."""
    missing = [name for name in required if name not in given]
    if missing:
        return f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(given)) or 'nothing'}"
    used = [IDS, LENGTHS, *optional]
    strange = [name for name in used if not isinstance(given[name], Tensor)]
    if strange:
        return f"{', '.join(strange)} must be a tensor"
    if given[IDS].ndim != 2:
        return f"{IDS} must be [B, S], not {list(given[IDS].shape)}"
    if made := [name for name in optional if name in MADE_HERE]:
        return f"{', '.join(made)} is computed from {LENGTHS} and the masks; rename the column"
    if taken := [name for name in optional if name in TAKEN]:
        return f"{', '.join(taken)} is a name of the batch itself; rename the column"
    return _wrong_shapes(given, used) or _wrong_lengths(given[LENGTHS], given[IDS].shape[1])


def _wrong_shapes(given: Mapping[str, Any], names: list[str]) -> str:
    rows, width = given[IDS].shape
    shapes = {"token": [rows, width], "sequence": [rows]}
    wrong = []
    for name in names:
        expected = shapes[_per(name, given[name])]
        if list(given[name].shape) != expected:
            wrong.append(f"{name} must be {SHAPES[_per(name, given[name])]} = {expected}, not {list(given[name].shape)}")
    return "; ".join(wrong)


def _wrong_lengths(lengths: Tensor, width: int) -> str:
    outside = ((lengths < 1) | (lengths > width)).nonzero()[:, 0].tolist()
    return f"{LENGTHS} of row {outside[0]} is {int(lengths[outside[0]])}, not between 1 and S = {width}" if outside else ""


def _per(name: str, value: Tensor) -> str:
    """Return "token" or "sequence", the unit that a column has values for: known by its name, or by its dims."""
    known = {IDS: "token", TOKEN_MASK: "token", LENGTHS: "sequence", SAMPLE_MASK: "sequence"} | PER
    return known.get(name, "sequence" if value.ndim == 1 else "token")


def _learned(given: Mapping[str, Any], masks: list[str], shape: torch.Size) -> Tensor:
    """Return the mask of learned tokens, [B, S] bool."""
    learned = torch.ones(shape, dtype=torch.bool)
    learned[:, :1] = False
    if TOKEN_MASK in masks:
        learned &= given[TOKEN_MASK].cpu().bool()
    if SAMPLE_MASK in masks:
        learned &= given[SAMPLE_MASK].cpu().bool()[:, None]
    return learned


def _column(value: Tensor, lengths: Tensor, name: str) -> Tensor:
    value = value.cpu()
    return unpadded(value, lengths) if _per(name, value) == "token" else value
