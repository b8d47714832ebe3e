"""Compute each prompt prefix once per micro-batch and share its keys and values between samples.

The output of a causal model at a token depends only on the tokens up to it. So it is computed once
for all sequences with the same prefix, and their gradients add up there: work and memory shrink by
nearly the prompts' share of the tokens.
"""

from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightrft.types import Batch, Features, SharedPrefix

MIN_SAVING = 1 / 32
"""Minimum saving of a prefix, as a fraction of the tokens after it, that justifies a separate call
of attention."""


def find_shared_prefixes(
    input_ids: Tensor,
    lengths: Tensor,
    media: list[Features] | None = None,
    *,
    min_saving: float = 0.0,
) -> SharedPrefix | None:
    """Find the common prefixes of the sequences in input_ids [T], concatenated on the host; return
    None if nothing is shared.

    Each prefix is computed in the first sequence that has it. A prefix that saves no more than the
    fraction `min_saving` of the tokens after it is computed in all of them.

    Sequences with images share prefixes if they have the same prompt, and thus the same object in
    `media`. Sequences are sorted lexicographically (by any order of single tokens), so that each
    shares most with the one before it.
    """
    tokens = input_ids.numpy()
    stops = lengths.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    rows = [tokens[start:stop] for start, stop in zip(starts, stops, strict=True)]
    images = [id(each) if each else 0 for each in media] if media else [0] * len(rows)
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
    """Reduce `counts`, the numbers of tokens that each sequence shares with the next, for prefixes
    that save too little.

    Sequences between which at least d tokens are shared all begin with the same d tokens.
    """
    # (first, stop) of counts, and the length that more sequences share
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
        groups += [
            (one + 1, two, shared)
            for one, two in zip(edges, edges[1:], strict=False)
            if one + 1 < two
        ]


def prompts(batch: Batch, units: Tensor | None = None) -> Tensor:
    """Return for each sequence a checksum of the tokens before its first loss token, their number,
    and the cost of their media in text tokens: [N, 3] int64.

    Sequences with the same number in `units`, ascending, are branches of the first of them: they
    count as many tokens as it does, at most.
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


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of both."""
    size = min(len(one), len(other))
    differences = (one[:size] != other[:size]).nonzero()[0]
    return int(differences[0]) if len(differences) else size
