"""Check the public batches of roles, and flatten them.

A public batch is a mapping of right-padded [B, S] tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightrft.core.batch import Batch, Experience, unpadded
from lightrft.models.parallel.collectives import Axis

IDS = "input_ids"
LENGTHS = "input_lengths"
TOKEN_MASK = "token_mask"
SAMPLE_MASK = "sample_mask"
COMPUTED_COLUMNS = ("lengths", "rows", "loss_mask")
SHAPES = {"token": "[B, S]", "sequence": "[B]"}
UNITS = {f.name: f.metadata["per"] for f in fields(Experience)}
PER = {name: unit for name, unit in UNITS.items() if unit in SHAPES}
RESERVED_COLUMNS = UNITS.keys() - PER.keys()


@dataclass(frozen=True, slots=True)
class FlattenedBatch:
    """The batch that this rank's caller passed, flattened."""

    batch: Batch
    width: int
    """Largest S of all ranks; results are at least as wide."""
    owners: list[list[int]]
    """[rank]: the rows that this rank's caller holds, counted over all ranks."""


def flatten_padded(
    rows: Mapping[str, Any], axis: Axis, *, required: Sequence[str] = (), columns: bool = False
) -> FlattenedBatch:
    """Concatenate right-padded rows [B, S].

    Without `columns` every token but the first of a row is learned. With `columns` the masks select
    the learned tokens, and every other tensor is carried along under the name: [B, S] per token,
    [B] per row. Raises ValueError on all ranks when any rank's batch is invalid; ranks may have any
    number of rows, including none, but need the same columns.
    """
    masks = [name for name in (TOKEN_MASK, SAMPLE_MASK) if columns and name in rows]
    extra = sorted(set(rows) - {IDS, LENGTHS, TOKEN_MASK, SAMPLE_MASK}) if columns else []
    problem = _problem(rows, [IDS, LENGTHS, *required], [*masks, *extra])
    # Every rank must get here, also with an invalid batch: the others wait for it.
    counts, width = _agree(axis, problem, extra, (0, 0) if problem else tuple(rows[IDS].shape))

    ids = rows[IDS].cpu()
    lengths = rows[LENGTHS].cpu().long()
    owners = rows_of_ranks(counts)
    flat = {name: _column(rows[name], lengths, name) for name in extra}
    batch = Experience(
        lengths=lengths,
        input_ids=unpadded(ids, lengths).long(),
        loss_mask=unpadded(_learned_mask(rows, masks, ids.shape), lengths),
        rows=torch.tensor(owners[axis.rank], dtype=torch.int64),
        **{name: value for name, value in flat.items() if name in PER},
        extra_columns={name: value for name, value in flat.items() if name not in PER},
        extra_per_token=frozenset(
            name for name in extra if name not in PER and _unit(name, rows[name]) == "token"
        ),
    )
    return FlattenedBatch(batch, width, owners)


def rows_of_ranks(counts: Sequence[int]) -> list[list[int]]:
    """Number the rows of all ranks, of which rank r has `counts[r]`: [r] has rank r's numbers."""
    numbers = iter(range(sum(counts)))
    return [list(islice(numbers, count)) for count in counts]


def _agree(
    axis: Axis, problem: str, columns: list[str], shape: tuple[int, int]
) -> tuple[list[int], int]:
    """Return the number of rows of every rank, and the largest width.

    Raises the same ValueError on all ranks when one batch is invalid, so that no rank waits for
    another.
    """
    by_rank = axis.gather((problem, columns, shape))
    for rank, (message, names, _) in enumerate(by_rank):
        if not message and names != by_rank[0][1]:
            message = (
                f"its columns are {', '.join(names) or 'none'}, those of rank 0"
                f" {', '.join(by_rank[0][1]) or 'none'}"
            )
        if message:
            raise ValueError(message if axis.size == 1 else f"batch of rank {rank}: {message}")
    return [rows for _, _, (rows, _) in by_rank], max(width for _, _, (_, width) in by_rank)


def _problem(batch: Mapping[str, Any], required: list[str], optional: list[str]) -> str:
    """Return why this batch cannot be used; empty if it can."""
    missing = [name for name in required if name not in batch]
    if missing:
        return (
            f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(batch)) or 'nothing'}"
        )

    used = [IDS, LENGTHS, *optional]
    not_tensors = [name for name in used if not isinstance(batch[name], Tensor)]
    if not_tensors:
        return f"{', '.join(not_tensors)} must be a tensor"
    if batch[IDS].ndim != 2:
        return f"{IDS} must be [B, S], not {list(batch[IDS].shape)}"

    if computed := [name for name in optional if name in COMPUTED_COLUMNS]:
        return f"{', '.join(computed)} is computed from {LENGTHS} and the masks; rename the column"
    if reserved := [name for name in optional if name in RESERVED_COLUMNS]:
        return f"{', '.join(reserved)} is a name of the batch itself; rename the column"
    return _wrong_shapes(batch, used) or _wrong_lengths(batch[LENGTHS], batch[IDS].shape[1])


def _wrong_shapes(batch: Mapping[str, Any], names: list[str]) -> str:
    rows, width = batch[IDS].shape
    shapes = {"token": [rows, width], "sequence": [rows]}
    wrong = []
    for name in names:
        expected = shapes[_unit(name, batch[name])]
        if list(batch[name].shape) != expected:
            wrong.append(
                f"{name} must be {SHAPES[_unit(name, batch[name])]} = {expected}, not"
                f" {list(batch[name].shape)}"
            )

    return "; ".join(wrong)


def _wrong_lengths(lengths: Tensor, width: int) -> str:
    outside = ((lengths < 1) | (lengths > width)).nonzero()[:, 0].tolist()
    if not outside:
        return ""
    length = int(lengths[outside[0]])
    return f"{LENGTHS} of row {outside[0]} is {length}, not between 1 and S = {width}"


def _unit(name: str, value: Tensor) -> str:
    """Return "token" or "sequence": what a column has a value for.

    It is known by the column's name, or else by the dims.
    """
    units = {IDS: "token", TOKEN_MASK: "token", LENGTHS: "sequence", SAMPLE_MASK: "sequence"} | PER
    return units.get(name, "sequence" if value.ndim == 1 else "token")


def _learned_mask(batch: Mapping[str, Any], masks: list[str], shape: torch.Size) -> Tensor:
    """Return the mask of learned tokens, [B, S] bool."""
    learned = torch.ones(shape, dtype=torch.bool)
    learned[:, :1] = False
    if TOKEN_MASK in masks:
        learned &= batch[TOKEN_MASK].cpu().bool()
    if SAMPLE_MASK in masks:
        learned &= batch[SAMPLE_MASK].cpu().bool()[:, None]
    return learned


def _column(value: Tensor, lengths: Tensor, name: str) -> Tensor:
    value = value.detach().cpu()
    return unpadded(value, lengths) if _unit(name, value) == "token" else value
