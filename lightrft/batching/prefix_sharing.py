"""Compute each prompt prefix once per micro-batch and share its keys and values between samples.

The output of a causal model after a token depends only on the tokens up to it. So it is computed once for all sequences that
begin alike, and their gradients add up there: less work, and less memory, by nearly the prompt's share of the tokens.
"""

from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightrft.types import Batch, Features, SharedPrefix

MIN_SAVING = 1 / 32
"""A prefix that saves no more than this share of the tokens behind it is not worth a call of attention in which they read it."""


def find_shared_prefixes(
    input_ids: Tensor, lengths: Tensor, media: list[Features] | None = None, *, min_saving: float = 0.0
) -> SharedPrefix | None:
    """Find what the sequences in input_ids [T], end to end on the host, begin with in common; None where nothing is shared.

    Each prefix is computed in the first sequence that has it. One that saves no more than the share `min_saving` of the tokens
    behind it is computed in all of them.

    Sequences with images share prefixes where they have one prompt, and so the same object in `media`. In the order of their
    tokens (any order of single tokens will do) each sequence shares most with the one before it.
    """
    tokens, stops = input_ids.numpy(), lengths.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    rows = [tokens[start:stop] for start, stop in zip(starts, stops, strict=True)]
    seen = [id(each) if each else 0 for each in media] if media else [0] * len(rows)
    order = sorted(range(len(rows)), key=lambda row: (seen[row], rows[row].tobytes()))
    pairs = list(zip(order, order[1:], strict=False))
    counts = np.array([common(rows[one], rows[two]) if seen[one] == seen[two] else 0 for one, two in pairs], dtype=np.int64)
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
    return SharedPrefix(torch.from_numpy(computed.nonzero()[0]), torch.from_numpy((computed.cumsum() - 1)[same]))


def _drop(counts: np.ndarray, lengths: np.ndarray, min_saving: float) -> None:
    """Shorten `counts`, the tokens that each sequence shares with the next, where a prefix saves too little.

    Sequences between which at least d tokens are shared all begin with the same d tokens.
    """
    groups = [(0, len(counts), 0)] if len(counts) else []  # counts from first to stop, and what is shared among more than these
    while groups:
        first, stop, known = groups.pop()
        shared = int(counts[first:stop].min())
        parted = first + (counts[first:stop] == shared).nonzero()[0]
        behind = (lengths[first : stop + 1] - shared).sum() - (counts[first:stop] - shared).sum()
        if known < shared and (shared - known) * len(parted) <= min_saving * behind:
            counts[parted] = shared = known
        edges = [first - 1, *parted.tolist(), stop]
        groups += [(one + 1, two, shared) for one, two in zip(edges, edges[1:], strict=False) if one + 1 < two]


def prompts(batch: Batch) -> Tensor:
    """[N, 2] int64: of each sequence a checksum of the tokens before the first that is learned, and their number."""
    firsts = batch.lengths.scatter_reduce(0, batch.sequence_ids[batch.loss_mask], batch.position_ids[batch.loss_mask], "amin")
    starts, tokens = batch.offsets.tolist(), batch.input_ids.numpy()
    seen = {id(each): _checksum(each) for each in batch.media or ()}
    before = [seen[id(each)] for each in batch.media] if batch.media else [0] * len(batch)
    ends = zip(starts, firsts.tolist(), before, strict=False)
    sums = [crc32(tokens[start : start + count].tobytes(), images) for start, count, images in ends]
    return torch.stack([torch.tensor(sums, dtype=torch.int64), firsts], dim=1)


def _checksum(features: Features) -> int:
    found = 0
    for tensor in features.values():
        found = crc32(tensor.contiguous().numpy(), found)
    return found


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    parted = (one[:size] != other[:size]).nonzero()[0]
    return int(parted[0]) if len(parted) else size
