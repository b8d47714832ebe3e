"""Which tokens of a micro-batch have the same past: samples of one prompt have, up to where they part.

What a causal model says after a token depends on nothing but the tokens up to it. So it is computed once for all sequences that
begin alike, and their gradients add up there: less work, and less memory, by nearly the prompt's share of the tokens.
"""

from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightrft.types import Batch, Features, Shared


def shared_pasts(input_ids: Tensor, lengths: Tensor, media: list[Features] | None = None) -> Shared | None:
    """Of the sequences end to end in input_ids [T], on the host; None where all begin differently.

    Sequences with images share their pasts where they have one prompt, and so the same object in `media`. In the order of their
    tokens (any order of single tokens will do) each sequence shares most with the one before it.
    """
    tokens, stops = input_ids.numpy(), lengths.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    rows = [tokens[start:stop] for start, stop in zip(starts, stops, strict=True)]
    seen = [id(each) if each else 0 for each in media] if media else [0] * len(rows)
    order = sorted(range(len(rows)), key=lambda row: (seen[row], rows[row].tobytes()))
    same = np.arange(len(tokens))
    for before, row in zip(order, order[1:], strict=False):
        count = common(rows[before], rows[row]) if seen[before] == seen[row] else 0
        same[starts[row] : starts[row] + count] = same[starts[before] : starts[before] + count]
    computed = same == np.arange(len(tokens))
    if computed.all():
        return None
    return Shared(torch.from_numpy(computed.nonzero()[0]), torch.from_numpy((computed.cumsum() - 1)[same]))


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
