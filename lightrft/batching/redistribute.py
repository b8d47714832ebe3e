"""Redistribution of samples over ranks: all ranks know the lengths, and each tensor is sent to its new owner once."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.batching.planner import Batching, plan
from lightrft.batching.prefix_sharing import prompts
from lightrft.parallel.collectives import Axis
from lightrft.types import Batch

B = TypeVar("B", bound=Batch)


def share(axis: Axis, values: Tensor) -> Tensor:
    """Return the values [n] of every rank, concatenated in rank order: [N]."""
    return torch.cat(axis.gather(values))


def redistribute(
    axis: Axis,
    batch: B,
    *,
    minibatch_size: int | None = None,
    max_tokens: int,
    max_sequences: int | None = None,
    batching: Batching = "packed",
) -> tuple[B, list[list[list[int]]]]:
    """Plan the sequences of all ranks and send each to the rank that computes it.

    `batch.rows` counts over all ranks, in rank order. Return this rank's new part, and [k][m]: its rows in micro-batch m of
    optimizer step k. A `minibatch_size` of None means one step for all rows. All ranks have equal numbers of steps and
    micro-batches. See planner.plan for the limits.
    """
    known = share(axis, torch.column_stack([batch.lengths, prompts(batch)]))
    lengths, alike = known[:, 0].tolist(), known[:, 1:].numpy()
    schedule = plan(
        lengths,
        num_ranks=axis.size,
        minibatch_size=minibatch_size or max(len(lengths), 1),
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        batching=batching,
        prompts=alike,
    )
    part = all_to_all(axis, batch, [schedule.rows(rank) for rank in range(axis.size)])
    return part, schedule.local(axis.rank)


def regroup(axis: Axis, batch: Batch, *, max_tokens: int, batching: Batching) -> list[list[int]]:
    """Plan micro-batches of this rank's sequences, equally many on every rank, without moving any sequence.

    Return [m]: the rows of micro-batch m, as positions in the batch.
    """
    schedule = plan(
        batch.lengths.tolist(), num_ranks=1, minibatch_size=max(len(batch), 1), max_tokens=max_tokens, batching=batching,
        prompts=prompts(batch).numpy(),
    )  # fmt: skip
    rows = [members for minibatch in schedule.minibatches for members in minibatch[0]]
    return rows + [[] for _ in range(max(axis.gather(len(rows))) - len(rows))]


def all_to_all(axis: Axis, batch: B, owners: list[list[int]]) -> B:
    """Send every sequence to the rank whose list contains its row; return this rank's sequences in the order of its list.

    `owners[r]` holds rows of the whole batch, each row in one list. Raise ValueError on all ranks unless the lists contain every
    row that a rank holds exactly once, and no other row.
    """
    named = torch.tensor([row for rows in owners for row in rows], dtype=torch.int64)
    _check_owners(share(axis, batch.rows), named)
    owner = torch.repeat_interleave(torch.tensor([len(rows) for rows in owners]))[named.argsort()]
    to = owner[torch.searchsorted(named.sort().values, batch.rows)]
    leaving = batch.select(to.argsort(stable=True))
    counts = torch.bincount(to, minlength=axis.size).tolist()
    ends = list(itertools.accumulate(counts))
    parts = [leaving.select(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
    received = _concatenated(batch, [_unpacked(part, batch) for part in axis.exchange([_packed(part) for part in parts])])
    if batch.media is not None:
        received.media = [each for part in axis.exchange_objects([part.media for part in parts]) for each in part]
    arrived = {row: index for index, row in enumerate(received.rows.tolist())}
    return received.select([arrived[row] for row in owners[axis.rank]])


def _check_owners(held: Tensor, named: Tensor) -> None:
    if held.unique().shape == held.shape and torch.equal(held.sort().values, named.sort().values):
        return
    holds, names = Counter(held.tolist()), Counter(named.tolist())
    row = min(row for row in holds | names if not holds[row] == names[row] == 1)
    times = f"is held {holds[row]} times and named {names[row]} times in the lists of owners"
    raise ValueError(f"row {row} {times}: it must be held by one rank and sent to one")


def _columns(batch: Batch) -> list[tuple[str, Tensor]]:
    """Return all columns except the lengths, wide elements first, so that each is aligned in the buffer of _packed()."""
    columns = batch.columns("sequence") | batch.columns("token")
    return sorted(((name, value) for name, value in columns.items() if name != "lengths"), key=lambda item: -item[1].itemsize)


def _packed(part: Batch) -> Tensor:
    """Pack the number of sequences, their lengths and all columns into [bytes] uint8, a multiple of 8."""
    if not len(part):
        return torch.empty(0, dtype=torch.uint8)
    columns = [torch.tensor([len(part)]), part.lengths, *(value for _, value in _columns(part))]
    flat = torch.cat([column.flatten().view(torch.uint8) for column in columns])
    return F.pad(flat, (0, -len(flat) % 8))


def _unpacked(packed: Tensor, like: B) -> B:
    if not len(packed):
        return like.select([])
    words = packed.view(torch.int64)
    lengths = words[1 : 1 + int(words[0])]
    num, place, columns = {"sequence": len(lengths), "token": int(lengths.sum())}, 8 * (1 + len(lengths)), {}
    per_token = like.columns("token")
    for name, column in _columns(like):
        shape = num["token" if name in per_token else "sequence"], *column.shape[1:]
        size = math.prod(shape) * column.itemsize
        columns[name] = packed[place : place + size].view(column.dtype).view(shape)
        place += size
    return replace(like, lengths=lengths, **columns)


def _concatenated(like: B, parts: list[B]) -> B:
    names = ["lengths", *(name for name, _ in _columns(like))]
    return replace(like, **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
