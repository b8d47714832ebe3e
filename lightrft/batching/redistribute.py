"""Redistribute samples over the ranks, once all of them know the lengths.

Each value is sent to a new owner only once.
"""

from typing import TypeVar

import torch
from torch import Tensor

from lightrft.batching.micro_batches import prompts
from lightrft.batching.planner import Batching, plan
from lightrft.batching.sample_store import SampleStore
from lightrft.parallel.collectives import Axis
from lightrft.types import Batch

B = TypeVar("B", bound=Batch)


def share(axis: Axis, values: Tensor) -> Tensor:
    """Concatenate the values [n] of every rank in rank order: [N]."""
    return torch.cat(axis.gather(values))


def put_batch(store: SampleStore, batch: Batch) -> None:
    """Write all columns of a batch under the batch's rows."""
    sequences = {
        name: value
        for name, value in batch.columns("sequence").items()
        if name not in ("rows", "lengths")
    }
    objects = {} if batch.media is None else {"media": batch.media}
    store.put(
        batch.rows,
        batch.lengths,
        tokens=batch.columns("token"),
        sequences=sequences,
        objects=objects,
    )


def get_batch(store: SampleStore, ids: list[int], like: B) -> B:
    """Read rows with the columns of the batch `like`."""
    names = [
        *like.columns("token"),
        *like.columns("sequence"),
        *([] if like.media is None else ["media"]),
    ]
    columns = store.get(ids, [name for name in names if name not in ("rows", "lengths")])
    return like.with_columns(columns | {"rows": torch.tensor(ids, dtype=torch.int64)})


def redistribute(
    store: SampleStore | None,
    batch: B,
    *,
    minibatch_size: int | None = None,
    max_tokens: int,
    max_sequences: int | None = None,
    batching: Batching = "packed",
    units: Tensor | None = None,
) -> tuple[B, list[list[list[int]]]]:
    """Plan the sequences of all ranks, and send each to the rank that computes it.

    `store` carries them; None: this rank is the only one, so its own sequences are all.
    `batch.rows` are different on all data ranks, and rows are planned in their order. A
    `minibatch_size` of None means one step for all rows. See planner.plan for the limits, and for
    `units`, [N] int64 of this rank's rows. Return this rank's new part, and [k][m]: the rows of
    micro-batch m of optimizer step k. All ranks have equal numbers of steps and micro-batches.
    """
    ids = batch.rows
    lengths = batch.lengths
    tags = {"prompts": prompts(batch, units)} | ({} if units is None else {"units": units})
    if store is not None:
        # Only metadata is gathered for the plan; the values move once, afterwards.
        put_batch(store, batch)
        rows = store.rows(tags)
        ids = rows.ids
        lengths = rows.lengths
        tags = rows.tags

    order = ids.argsort()
    schedule = plan(
        lengths[order].tolist(),
        num_ranks=1 if store is None else store.data.size,
        minibatch_size=minibatch_size or max(len(ids), 1),
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        batching=batching,
        prompts=tags["prompts"][order].numpy(),
        units=None if units is None else tags["units"][order].numpy(),
    )
    if store is None:
        return batch.select(order[schedule.rows(0)]), schedule.local(0)

    ids = ids[order]
    owners = [ids[schedule.rows(rank)].tolist() for rank in range(store.data.size)]
    store.move(owners)

    return get_batch(store, owners[store.data.rank], batch), schedule.local(store.data.rank)


def regroup(axis: Axis, batch: Batch, *, max_tokens: int, batching: Batching) -> list[list[int]]:
    """Plan micro-batches of this rank's sequences without moving any; every rank gets equally many.

    Return [m]: the rows of micro-batch m, as positions in the batch.
    """
    schedule = plan(
        batch.lengths.tolist(),
        num_ranks=1,
        minibatch_size=max(len(batch), 1),
        max_tokens=max_tokens,
        batching=batching,
        prompts=prompts(batch).numpy(),
    )
    rows = [members for minibatch in schedule.minibatches for members in minibatch[0]]
    # Empty micro-batches keep the ranks together in collectives.
    return rows + [[] for _ in range(max(axis.gather(len(rows))) - len(rows))]
