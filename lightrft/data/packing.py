"""The planner: which rank computes which sequences, in which micro-batch.

A pure function of the lengths of all sequences, so every rank makes the same plan and nobody has to send it.
"""

import heapq
from dataclasses import dataclass

ATTENTION_SCALE = 6 * 4096
"""Tokens at which a sequence's attention costs as much as its matrix products: six times the hidden size."""


@dataclass(frozen=True, slots=True)
class Plan:
    """minibatches[k][rank][m]: the rows of micro-batch m that `rank` computes for optimizer step k.

    Every rank has the same number of micro-batches in an optimizer step. One can be empty, when there are fewer rows
    than ranks; it takes part in the collectives with no weight.
    """

    minibatches: list[list[list[list[int]]]]

    def rows(self, rank: int) -> list[int]:
        """All rows of a rank, in the order in which it computes them."""
        return [row for minibatch in self.minibatches for rows in minibatch[rank] for row in rows]

    def local(self, rank: int) -> list[list[list[int]]]:
        """[k][m]: rows of the rank's micro-batches as positions in `rows(rank)`."""
        position = {row: place for place, row in enumerate(self.rows(rank))}
        return [[[position[row] for row in rows] for rows in minibatch[rank]] for minibatch in self.minibatches]


def plan(
    lengths: list[int], *, num_ranks: int, minibatch_size: int, max_tokens: int, max_sequences: int | None = None
) -> Plan:
    """Split rows 0..N-1 into consecutive optimizer steps of `minibatch_size`, each balanced over ranks and micro-batches.

    max_tokens and max_sequences bound one micro-batch. ValueError when one sequence is longer than max_tokens.
    """
    too_long = next((length for length in lengths if length > max_tokens), None)
    if too_long is not None:
        raise ValueError(f"a sequence of {too_long} tokens does not fit into a micro-batch of {max_tokens} (--max_tokens_per_microbatch)")
    limit = max_sequences or len(lengths)
    steps = [range(start, min(start + minibatch_size, len(lengths))) for start in range(0, len(lengths), minibatch_size)]
    return Plan([_deal(_bins(lengths, rows, num_ranks, max_tokens, limit), lengths, num_ranks) for rows in steps])


def cost(length: int) -> float:
    """Work of one sequence, in tokens: its matrix products grow with its length, its attention with the square."""
    return length + length * length / ATTENTION_SCALE


def _bins(lengths: list[int], rows: range, num_ranks: int, max_tokens: int, max_sequences: int) -> list[list[int]]:
    """Micro-batches for the rows: as few as fit, a multiple of the ranks, of nearly equal cost."""
    fewest = max(-(-sum(lengths[row] for row in rows) // max_tokens), -(-len(rows) // max_sequences), 1)
    count = -(-fewest // num_ranks) * num_ranks
    while (bins := _longest_first(lengths, rows, count, max_tokens, max_sequences)) is None:
        count += num_ranks
    return bins


def _longest_first(
    lengths: list[int], rows: range, count: int, max_tokens: int, max_sequences: int
) -> list[list[int]] | None:
    """Longest sequence first into the cheapest bin that has room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, index) for index in range(count)]
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        passed = []
        while heap and (tokens[heap[0][1]] + lengths[row] > max_tokens or len(bins[heap[0][1]]) >= max_sequences):
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        spent, index = heap[0]
        bins[index].append(row)
        tokens[index] += lengths[row]
        heapq.heapreplace(heap, (spent + cost(lengths[row]), index))
        for item in passed:
            heapq.heappush(heap, item)
    return bins


def _deal(bins: list[list[int]], lengths: list[int], num_ranks: int) -> list[list[list[int]]]:
    """[rank][m]: bins of similar cost run at the same time on different ranks; the dearest first."""
    ordered = sorted(bins, key=lambda rows: (-sum(cost(lengths[row]) for row in rows), rows))
    return [ordered[rank::num_ranks] for rank in range(num_ranks)]
