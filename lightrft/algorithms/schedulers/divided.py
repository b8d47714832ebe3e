"""Move the responses of groups that several ranks have generated to one rank each."""

from collections.abc import Mapping
from itertools import chain

import torch

from lightrft.core.engine import ABORTED
from lightrft.core.samples import Completion, Drafts, Sample
from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.sample_store import MemoryStore

REASONS = (None, "stop", "length")


WIDTH = 1 << 20
"""More responses than any prompt has, so that (group, slot) fits in one number."""


def move_responses(
    samples: Mapping[tuple[int, int], Sample],
    group_ranks: Mapping[int, int],
    data: Axis,
    replica: Axis,
) -> dict[tuple[int, int], Completion]:
    """Return the responses that others generated for this rank's groups, by (group, slot).

    `samples`: responses that this rank generated for others. `group_ranks`: group -> data rank.
    All ranks call it together, and the ranks of a replica pass the same arguments. It takes two
    collectives, whatever the number of responses.
    """
    store = MemoryStore(data, replica)
    rows = list(samples.values())
    lengths = torch.tensor([len(sample.token_ids) for sample in rows], dtype=torch.int64)
    dtypes = {"token_ids": torch.int32, "weight_versions": torch.int32, "logprobs": torch.float64}
    tokens = {}
    for name, dtype in dtypes.items():
        values = [*chain.from_iterable(getattr(sample, name) for sample in rows)]
        tokens[name] = torch.tensor(values, dtype=dtype)
    facts = [(REASONS.index(sample.finish_reason), *sample.drafts) for sample in rows]
    sequences = {"facts": torch.tensor(facts, dtype=torch.int32).view(-1, 4)}
    ids = torch.tensor([group * WIDTH + slot for group, slot in samples], dtype=torch.int64)
    store.put(ids, lengths, tokens=tokens, sequences=sequences)
    # Every rank knows all rows of the store, so all of them find the same owners.
    owners: list[list[int]] = [[] for _ in range(data.size)]
    for row in store.rows().ids.tolist():
        owners[group_ranks[row // WIDTH]].append(row)
    store.move(owners)
    columns = store.get(owners[data.rank])
    pieces = [columns[name].split(columns["lengths"].tolist()) for name in tokens]

    return {
        divmod(row, WIDTH): Completion(
            token_ids.tolist(),
            logprobs.tolist(),
            REASONS[reason] or ABORTED,
            drafts=Drafts(*drafts),
            weight_versions=versions.tolist(),
        )
        for row, token_ids, versions, logprobs, (reason, *drafts) in zip(
            owners[data.rank], *pieces, columns["facts"].tolist(), strict=True
        )
    }
