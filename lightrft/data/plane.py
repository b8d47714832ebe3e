"""Moving samples between ranks: numbers are known to everyone, tensors go to their new owner, once."""

from collections import Counter
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from lightrft.data.packing import Batching, plan
from lightrft.data.pasts import prompts
from lightrft.parallel.collectives import Axis
from lightrft.types import Batch

B = TypeVar("B", bound=Batch)


def share(axis: Axis, values: Tensor) -> Tensor:
    """The [n] values of every rank, end to end in rank order: [N]."""
    return torch.cat(axis.gather(values))


def deal(
    axis: Axis,
    batch: B,
    *,
    minibatch_size: int | None = None,
    max_tokens: int,
    max_sequences: int | None = None,
    batching: Batching = "packed",
) -> tuple[B, list[list[list[int]]]]:
    """Plan the sequences of all ranks and move each to the rank that computes it.

    `batch.rows` counts over all ranks, in rank order. Returns this rank's new part, and [k][m]: its rows in micro-batch m
    of optimizer step k; None is one step for all. Every rank has the same k and m. See packing.plan for the limits.
    """
    known = share(axis, torch.column_stack([batch.lengths, prompts(batch)]))
    lengths, alike = known[:, 0].tolist(), [tuple(prompt) for prompt in known[:, 1:].tolist()]
    schedule = plan(
        lengths,
        num_ranks=axis.size,
        minibatch_size=minibatch_size or max(len(lengths), 1),
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        batching=batching,
        prompts=alike,
    )
    mine = move(axis, batch, [schedule.rows(rank) for rank in range(axis.size)])
    return mine, schedule.local(axis.rank)


def regroup(axis: Axis, batch: Batch, *, max_tokens: int, batching: Batching) -> list[list[int]]:
    """Plan micro-batches of the sequences that this rank has, as many on every rank; nothing moves.

    [m]: rows of micro-batch m, as positions in the batch.
    """
    known = [tuple(prompt) for prompt in prompts(batch).tolist()]
    schedule = plan(
        batch.lengths.tolist(), num_ranks=1, minibatch_size=max(len(batch), 1), max_tokens=max_tokens, batching=batching,
        prompts=known,
    )  # fmt: skip
    rows = [members for minibatch in schedule.minibatches for members in minibatch[0]]
    return rows + [[] for _ in range(max(axis.gather(len(rows))) - len(rows))]


def move(axis: Axis, batch: B, owners: list[list[int]]) -> B:
    """Send every sequence to the rank whose list names its row; returns this rank's, in the order of its list.

    `owners[r]` holds rows of the whole batch, each row in one list. ValueError on all ranks unless the lists name every row
    that a rank holds once, and no other.
    """
    held, named = Counter(share(axis, batch.rows).tolist()), Counter(row for rows in owners for row in rows)
    wrong = sorted(row for row in held | named if not held[row] == named[row] == 1)
    if wrong:
        times = f"is held {held[wrong[0]]} times and named {named[wrong[0]]} times in the lists of owners"
        raise ValueError(f"row {wrong[0]} {times}: it must be held by one rank and go to one")
    place = {row: index for index, row in enumerate(batch.rows.tolist())}
    parts = [batch.select([place[row] for row in rows if row in place]) for rows in owners]
    received = replace(batch, **{name: _exchange(axis, parts, name) for name in _present(batch)})
    if batch.media is not None:
        received.media = [each for part in axis.exchange_objects([part.media for part in parts]) for each in part]
    arrived = {row: index for index, row in enumerate(received.rows.tolist())}
    return received.select([arrived[row] for row in owners[axis.rank]])


def _present(batch: Batch) -> list[str]:
    return [f.name for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)]


def _exchange(axis: Axis, parts: list[Batch], name: str) -> Tensor:
    return torch.cat(axis.exchange([getattr(part, name) for part in parts]))
