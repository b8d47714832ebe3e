"""Form micro-batches over all ranks, and find the prefixes that their sequences share.

Once all ranks know the lengths of all sequences, each makes the same plan (planner.py), and a value
is sent to its new owner only once (sample_store.py).

What a causal model computes at a token depends only on the tokens up to it. Sequences of a
micro-batch with a common prefix therefore compute it only once, and the gradients add up there.
Work and memory shrink by nearly the prompts' share of the tokens.
"""

from itertools import pairwise
from typing import TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightrft.core.batch import Batch, Features, Rows, SharedPrefix
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.planner import Batching, plan
from lightrft.strategy.batching.sample_store import MemoryStore

B = TypeVar("B", bound=Batch)


# -- from the rows of all ranks to the micro-batches of this one


def redistribute(
    store: MemoryStore | None,
    batch: B,
    *,
    minibatch_size: int | None = None,
    max_tokens: int,
    max_sequences: int | None = None,
    batching: Batching = "packed",
    units: Tensor | None = None,
) -> tuple[B, list[Rows]]:
    """Plan the sequences of all ranks, and send each to the rank that computes it.

    `store` carries them; None: this rank is the only one, so its own sequences are all.
    `batch.rows` are different on all data ranks, and rows are planned in their order. A
    `minibatch_size` of None means one step for all rows. See planner.plan for the limits, and for
    `units`, [N] int64 of this rank's rows. Return the batch of this rank, and [k][m]: the rows of
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


def regroup(axis: Axis, batch: Batch, *, max_tokens: int, batching: Batching) -> Rows:
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


def prompts(batch: Batch, units: Tensor | None = None) -> Tensor:
    """Return checksum, tokens, and cost of media in text tokens of each prompt: [N, 3] int64.

    The prompt ends before the first loss token. Sequences with the same number in `units`,
    ascending, are branches of the first one, and count no more prompt tokens than it does.
    """
    lengths = batch.lengths.scatter_reduce(
        0, batch.sequence_ids[batch.loss_mask], batch.position_ids[batch.loss_mask], "amin"
    )
    if units is not None:
        _, inverse, counts = units.unique_consecutive(return_inverse=True, return_counts=True)
        lengths = torch.minimum(lengths, lengths[(counts.cumsum(0) - counts)[inverse]])

    starts = batch.offsets.tolist()
    tokens = batch.input_ids.numpy()
    checksums = {id(each): _checksum(each) for each in batch.media or ()}
    # Checksums are per object, because the sequences of a prompt share one object.
    before = [checksums[id(each)] for each in batch.media] if batch.media else [0] * len(batch)
    ends = zip(starts, lengths.tolist(), before, strict=False)
    sums = [crc32(tokens[start : start + count].tobytes(), images) for start, count, images in ends]
    towers = torch.zeros_like(lengths) if batch.tower_tokens is None else batch.tower_tokens

    return torch.stack([torch.tensor(sums, dtype=torch.int64), lengths, towers], dim=1)


def _checksum(features: Features) -> int:
    checksum = 0
    for tensor in features.values():
        checksum = crc32(tensor.contiguous().numpy(), checksum)
    return checksum


def put_batch(store: MemoryStore, batch: Batch) -> None:
    """Write all columns of a batch under the batch's rows."""
    sequences = batch.columns("sequence")
    del sequences["rows"], sequences["lengths"]
    objects = {} if batch.media is None else {"media": batch.media}
    columns = {"tokens": batch.columns("token"), "sequences": sequences, "objects": objects}
    store.put(batch.rows, batch.lengths, **columns)


def get_batch(store: MemoryStore, ids: list[int], like: B) -> B:
    """Read rows with the columns of the batch `like`."""
    names = [
        *like.columns("token"),
        *like.columns("sequence"),
        *([] if like.media is None else ["media"]),
    ]
    columns = store.get(ids, [name for name in names if name not in ("rows", "lengths")])
    return like.with_columns(columns | {"rows": torch.tensor(ids, dtype=torch.int64)})


def share(axis: Axis, values: Tensor) -> Tensor:
    """Concatenate the values [n] of every rank in rank order: [N]."""
    return torch.cat(axis.gather(values))


# -- prefixes that sequences share


def find_shared_prefixes(
    input_ids: Tensor,
    lengths: Tensor,
    media: list[Features] | None = None,
    *,
    min_saving: float = 0.0,
) -> SharedPrefix | None:
    """Find the common prefixes of the sequences in input_ids [T], on the host; None without any.

    Each prefix is computed in the first sequence that has it. If it saves no more than the fraction
    `min_saving` of the tokens after it, all sequences compute it.

    Sequences with images share prefixes if they have the same prompt, and thus the same object in
    `media`.
    """
    tokens = input_ids.numpy()
    stops = lengths.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    rows = [tokens[start:stop] for start, stop in zip(starts, stops, strict=True)]
    images = [id(each) if each else 0 for each in media] if media else [0] * len(rows)
    # In lexicographic order, by any order of single tokens, neighbours share the most.
    order = sorted(range(len(rows)), key=lambda row: (images[row], rows[row].tobytes()))
    pairs = list(zip(order, order[1:], strict=False))
    counts = np.array(
        [common(rows[one], rows[two]) if images[one] == images[two] else 0 for one, two in pairs],
        dtype=np.int64,
    )
    _drop(counts, lengths.numpy()[order], min_saving)
    same = np.arange(len(tokens))
    for (before, row), count in zip(pairs, counts.tolist(), strict=True):
        same[starts[row] : starts[row] + count] = same[starts[before] : starts[before] + count]
    first = np.full(len(tokens), len(tokens))
    np.minimum.at(first, same, np.arange(len(tokens)))
    same = first[same]

    computed = same == np.arange(len(tokens))
    if computed.all():
        return None

    return SharedPrefix(
        torch.from_numpy(computed.nonzero()[0]), torch.from_numpy((computed.cumsum() - 1)[same])
    )


def _drop(counts: np.ndarray, lengths: np.ndarray, min_saving: float) -> None:
    """Lower `counts`, the tokens that each sequence shares with the next, where that saves little.

    If neighbours share at least d tokens throughout a range, all of them begin with the same d.
    """
    # Entries: first and stop in counts, and the length that more sequences share.
    groups = [(0, len(counts), 0)] if len(counts) else []
    while groups:
        first, stop, shared_by_more = groups.pop()
        shared = int(counts[first:stop].min())

        splits = first + (counts[first:stop] == shared).nonzero()[0]
        num_after = (lengths[first : stop + 1] - shared).sum() - (counts[first:stop] - shared).sum()
        if (
            shared_by_more < shared
            and (shared - shared_by_more) * len(splits) <= min_saving * num_after
        ):
            counts[splits] = shared = shared_by_more

        edges = [first - 1, *splits.tolist(), stop]
        between = pairwise(edges)
        groups += [(one + 1, two, shared) for one, two in between if one + 1 < two]


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many elements both have in common at the start."""
    size = min(len(one), len(other))
    differences = (one[:size] != other[:size]).nonzero()[0]
    return int(differences[0]) if len(differences) else size
