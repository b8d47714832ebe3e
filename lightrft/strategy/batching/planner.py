"""Assign sequences to ranks and micro-batches.

A plan is a pure function of the lengths and prompts of all sequences, so every rank computes the
same plan without communication. Batches are always flat, without padding. The three batching modes
only decide which sequences share a micro-batch.

The packed plan fills bins of equal cost: several heuristics are tried, and the cheapest result is
kept. Ranks wait for each other at every micro-batch, so a plan takes the sum over micro-batches of
the most expensive bin among the ranks.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np

from lightrft.strategy.batching.local_search import Limits, LocalSearch

Batching = Literal["packed", "dynamic", "plain"]
Prompts = Sequence[tuple[int, int, int]] | np.ndarray
"""Prompt of each row: (identifier, number of tokens, cost of the media in tokens).

Rows with equal entries begin with the same tokens and media."""

MIN_SAVING = 1 / 32
"""Smallest saving that justifies a separate call of attention, as a fraction of the tokens after
the prefix."""

PROMPT_SPLITS = (1, 2, 4)
"""How many units the rows of a prompt are split into. Few units share more work, and many units are
easier to balance."""
MAX_UNIT = 256
"""Most rows of a prompt that are kept together."""
MANY_PROMPTS = 512
"""With more prompts than this, balance is good enough without splitting a prompt's rows."""

ATTENTION_SCALE = 6 * 4096
"""A sequence of so many tokens, six times the hidden size, spends as much on attention as on matrix
products."""

GOOD_ENOUGH = 1.005
"""Ratio to perfect balance that is good enough for many sequences to try no further heuristics."""

FEW = 2048
"""Most sequences for all heuristics and a local search. Only a few sequences are difficult to
balance."""

MOST_BINS = 2**24
"""More bins than any step has."""

Int = TypeVar("Int", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of all micro-batches: minibatches[k][rank][m] is micro-batch m of optimizer step k.

    Every rank has the same number of micro-batches in an optimizer step. Some are empty if there
    are fewer rows than ranks; they take part in the collectives with weight zero.
    """

    minibatches: list[list[list[list[int]]]]

    def rows(self, rank: int) -> list[int]:
        """Return all rows of a rank, in the order of computation."""
        return [row for minibatch in self.minibatches for rows in minibatch[rank] for row in rows]

    def local(self, rank: int) -> list[list[list[int]]]:
        """Return [k][m]: the rows of the rank's micro-batches, as positions in `rows(rank)`."""
        position = {row: index for index, row in enumerate(self.rows(rank))}
        return [
            [[position[row] for row in rows] for rows in minibatch[rank]]
            for minibatch in self.minibatches
        ]


def plan(
    lengths: list[int],
    *,
    num_ranks: int,
    minibatch_size: int,
    max_tokens: int,
    max_sequences: int | None = None,
    batching: Batching = "packed",
    prompts: Prompts | None = None,
    units: Sequence[int] | np.ndarray | None = None,
) -> Plan:
    """Divide rows 0..N-1 into optimizer steps, and each step into ranks and micro-batches.

    An optimizer step has `minibatch_size` consecutive rows. With `units`, ascending numbers from 0
    for each row, a step has `minibatch_size` units, and the rows of a unit stay together.

    packed: any sequences up to max_tokens, so that all ranks finish together. Rows with equal
    `prompts` share a micro-batch if that makes the plan shorter; it computes the prompt once.
    dynamic: sequences of similar length; their number times the longest length is at most
    max_tokens. plain: max_sequences rows in the given order, or fewer if they exceed max_tokens.
    Raises ValueError for a sequence that is empty or longer than max_tokens.
    """
    _check(lengths, max_tokens)
    limits = Limits(max_tokens, max_sequences or max(len(lengths), 1))
    if prompts is None:
        # Without prompts every row is a prompt of its own, of no tokens.
        prompts = np.column_stack([np.arange(len(lengths)), *[np.zeros_like(lengths)] * 2])
    prompts = np.asarray(prompts)
    split = {
        "packed": partial(_shortest, prompts),
        "dynamic": _dynamic,
        "plain": _consecutive_rows,
    }[batching]

    if units is None:
        starts = range(0, len(lengths), minibatch_size)
    else:
        starts = _starts(np.asarray(units), minibatch_size)
    steps = [range(start, stop) for start, stop in pairwise([*starts, len(lengths)])]
    return Plan([split(lengths, rows, num_ranks, limits) for rows in steps])


def _starts(units: np.ndarray, size: int) -> list[int]:
    """Return the first row of each optimizer step of `size` units."""
    steps = units // size
    return [0, *(1 + np.flatnonzero(steps[1:] != steps[:-1]))] if len(units) else []


def _check(lengths: list[int], max_tokens: int) -> None:
    longest = max(lengths, default=1)
    shortest = min(lengths, default=1)
    if longest > max_tokens:
        limit = (
            f"a micro-batch of {max_tokens} (--max_tokens_per_microbatch, or"
            " --max_tokens_per_logprob_microbatch if set)"
        )
        raise ValueError(
            f"a sequence of {longest} tokens does not fit into {limit}; it is row"
            f" {lengths.index(longest)}"
        )

    if shortest < 1:
        raise ValueError(f"row {lengths.index(shortest)} has no tokens")


def _shortest(
    prompts: np.ndarray, lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m], the shortest of several plans, most expensive micro-batches first.

    `prompts` [N, 3]: see Prompts. Rows of a prompt are packed alone, and together in units.
    """
    step = _Step(np.array(lengths[rows.start : rows.stop]), prompts[rows.start : rows.stop])
    plans = []
    for unit in step.units(limits):
        sizes = np.bincount(unit, step.lengths).astype(np.int64)
        most = Limits(limits.tokens, limits.sequences // int(np.bincount(unit).max()))
        bins = pack(sizes, step.costs(unit), num_ranks, most)[unit]
        costs = step.costs(bins)
        plans.append((_time(costs, num_ranks), bins, costs))

    _, bins, costs = min(plans, key=lambda each: each[0])
    ordinal = np.empty(len(costs), np.int64)
    ordinal[np.argsort(-costs, kind="stable")] = np.arange(len(costs))
    ordinal = ordinal[bins]
    count = num_ranks * -(-int(ordinal.max() + 1) // num_ranks)
    ends = np.bincount(ordinal, minlength=count).cumsum().tolist()

    ordered = (rows.start + np.argsort(ordinal, kind="stable")).tolist()
    micro_batches = [ordered[start:end] for start, end in pairwise([0, *ends])]
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]


class _Step:
    """Rows of one optimizer step, and which of them share a prompt."""

    def __init__(self, lengths: np.ndarray, prompts: np.ndarray):
        self.lengths = lengths
        self.prompts = prompts
        self.by_prompt = np.lexsort(prompts.T[::-1])
        """Rows [N]; all rows of a prompt come one after the other."""
        self.first = np.append(True, (np.diff(prompts[self.by_prompt], axis=0) != 0).any(1))
        """True [N] for the first row of each prompt, in the order of `by_prompt`."""
        self.prompt_of = np.empty_like(self.by_prompt)
        """Number of each row's prompt, [N]."""
        self.prompt_of[self.by_prompt] = self.first.cumsum() - 1
        self.works = work(lengths, prompts[:, 2])

    def costs(self, bins: np.ndarray) -> np.ndarray:
        """Return the cost of each bin, where the bin of each row is given, [N].

        A bin computes each prompt once.
        """
        costs = np.bincount(bins, self.works)
        if not self.first.all():
            order = np.lexsort((self.prompt_of, bins))
            again = (np.diff(bins[order]) == 0) & (np.diff(self.prompt_of[order]) == 0)
            repeated = order[1:][again]
            spared = work(self.prompts[repeated, 1], self.prompts[repeated, 2])
            costs -= np.bincount(bins[repeated], spared, minlength=len(costs))
        return costs.astype(np.int64)

    def units(self, limits: Limits) -> Iterator[np.ndarray]:
        """Yield ways to keep rows together, as the number of each row's unit, [N].

        At first all are alone. Rows of a prompt are together unless that saves little.
        """
        yield np.arange(len(self.lengths))
        tokens = self.prompts[:, 1:].sum(1)
        saved = tokens.sum() - tokens[self.by_prompt[self.first]].sum()
        if saved > MIN_SAVING * self.lengths.sum():
            for count in PROMPT_SPLITS if self.first.sum() <= MANY_PROMPTS else PROMPT_SPLITS[:1]:
                yield self._together(count, limits)

    def _together(self, num_units: int, limits: Limits) -> np.ndarray:
        """Split the rows of each prompt into `num_units`, or more, so that each unit fits a bin."""
        starts = self.first.nonzero()[0]
        number = self.first.cumsum() - 1
        counts = np.diff(np.append(starts, len(number)))[number]
        most = np.minimum(-(-counts // num_units), min(MAX_UNIT, limits.sequences))
        ordinal = (np.arange(len(number)) - starts[number]) % most

        # All units grow by their next row at the same time. A row without room begins another.
        begins = ordinal == 0
        tokens = self.lengths[self.by_prompt]
        for index in range(1, int(ordinal.max()) + 1):
            members = (ordinal == index).nonzero()[0]
            together = tokens[members - 1] + tokens[members]
            fits = together <= limits.tokens
            begins[members] = ~fits
            tokens[members[fits]] = together[fits]

        unit = np.empty_like(number)
        unit[self.by_prompt] = begins.cumsum() - 1
        return unit


def work(length: Int, media: Int | int = 0) -> Int:
    """Return the cost of one sequence as an integer, or of several as an array.

    Matrix products grow linearly with the length, and attention grows quadratically. `media` is the
    cost of the sequence's media in tokens.
    """
    return (length + media) * ATTENTION_SCALE + length * length


def _time(costs: np.ndarray, num_ranks: int) -> int:
    """Return the time of micro-batches: ranks wait for the most expensive one of each turn."""
    return np.sort(costs)[::-1][::num_ranks].sum()


def pack(sizes: np.ndarray, works: np.ndarray, num_ranks: int, limits: Limits) -> np.ndarray:
    """Return the bin of each item, [N]; bins are numbered from 0, and some may be empty.

    `sizes` [N] are tokens, and `works` [N] are costs. The result is the cheapest one of several
    heuristics; a local search improves it if there are few items.
    """
    order = np.argsort(-sizes, kind="stable")
    packer = Packer(sizes[order], works[order], num_ranks, limits)
    few = len(sizes) <= FEW

    # Many sequences balance almost perfectly, so the heuristics for special cases are left out.
    ways = [packer.even, packer.staggered, *([packer.roomy, packer.tight] if few else [])]
    enough = works.sum() / num_ranks * (1 if few else GOOD_ENOUGH)
    plans = []
    for way in ways:
        bins = way(np.arange(len(sizes)))
        plans.append((_time(np.bincount(bins, packer.works), num_ranks), bins))
        if plans[-1][0] <= enough:
            break

    time, best = min(plans, key=lambda each: each[0])
    if few and time > enough:
        best = packer.improved(best)

    bin_of = np.empty(len(order), np.int64)
    bin_of[order] = best
    return bin_of


@dataclass(frozen=True, slots=True)
class Packer:
    """Heuristics for filling bins.

    Sequences are indices of `sizes`: the lengths, longest first. A heuristic returns the bin of
    each sequence that it gets.
    """

    sizes: np.ndarray
    works: np.ndarray
    num_ranks: int
    limits: Limits

    def even(self, rows: np.ndarray) -> np.ndarray:
        """Fill all bins to nearly equal cost.

        This is best if no sequence is more expensive than an average bin.
        """
        return self._fill(rows, self.num_ranks * self._fewest(rows))

    def roomy(self, rows: np.ndarray) -> np.ndarray:
        """Fill one bin more per rank than even(), so that long sequences need not share a bin."""
        return self._fill(rows, self.num_ranks * (self._fewest(rows) + 1))

    def staggered(self, rows: np.ndarray) -> np.ndarray:
        """Fill one bin per rank up to the cost of the longest sequence, as long as that is needed.

        Once the longest sequence fits an average bin, even() does the rest.
        """
        bin_of = np.empty(len(rows), np.int64)
        left = self.works[rows].sum()
        first = 0
        while len(rows) and self.works[rows[0]] * self.num_ranks * self._fewest(rows) > left:
            bins = self._fill(rows, self.num_ranks, max_work=int(self.works[rows[0]]))
            inside = bins >= 0
            bin_of[rows[inside]] = first + bins[inside]
            left -= self.works[rows[inside]].sum()
            rows = rows[~inside]
            first += self.num_ranks
        bin_of[rows] = first + self.even(rows)
        return bin_of

    def tight(self, rows: np.ndarray) -> np.ndarray:
        """Use few bins: put each sequence into the fullest bin with enough space.

        This is best if few combinations of sequences fill a bin, such as halves and thirds.
        """
        bin_of = []
        free_rows: list[int] = []
        free_bins: list[tuple[int, int]] = []  # (free tokens, bin), ascending
        for size in self.sizes[rows].tolist():
            found = bisect_left(free_bins, (size, -1))
            if found == len(free_bins):
                free = self.limits.tokens
                index = len(free_rows)
                free_rows.append(self.limits.sequences)
            else:
                free, index = free_bins.pop(found)

            bin_of.append(index)
            free_rows[index] -= 1
            if free_rows[index]:
                insort(free_bins, (free - size, index))

        return np.array(bin_of, np.int64)

    def improved(self, bin_of: np.ndarray) -> np.ndarray:
        """Move and swap sequences out of the bins that other ranks wait for."""
        search = LocalSearch(self.works, self.sizes, bin_of, self.num_ranks, self.limits)
        while search.round():
            pass

        return search.bins()

    def _fewest(self, rows: np.ndarray) -> int:
        """Return a lower bound on the bins per rank that the rows need."""
        sizes = self.sizes[rows]
        by_tokens = -(-int(sizes.sum()) // self.limits.tokens)
        by_sequences = -(-len(rows) // self.limits.sequences)
        # No two of these sequences fit into one bin.
        alone = int((2 * sizes > self.limits.tokens).sum())
        return -(-max(by_tokens, by_sequences, alone) // self.num_ranks)

    def _fill(self, rows: np.ndarray, count: int, *, max_work: int | None = None) -> np.ndarray:
        """Put each row, longest first, into the cheapest of `count` bins that has room.

        If no bin has room, one more per rank is opened. With `max_work`, the largest cost of a bin,
        none is opened, and the bin of a row that is left is -1.
        """
        tokens = self.limits.tokens
        sizes = self.sizes[rows]
        costs = self.works[rows] * MOST_BINS
        # The first rows get a bin each: an empty bin has room, and is cheaper than all others.
        begun = min(count, len(rows)) if max_work is None and self.limits.sequences > 1 else 0
        bin_of = list(range(begun))
        used = [*sizes[:begun].tolist(), *[0] * (count - begun)]
        free_rows = [self.limits.sequences - (bin_ < begun) for bin_ in range(count)]

        # Heap of bins, cheapest first: load times MOST_BINS, plus the bin. Plain integers are
        # compared faster than tuples, and no garbage collection follows them.
        entries = np.arange(count)
        entries[:begun] += costs[:begun]
        open_ = np.sort(entries).tolist()
        entry_of = entries.tolist()

        # Heap of bins that were too full for some row, emptiest first: shorter rows may fit. Here
        # an integer is the used tokens times MOST_BINS, plus the bin.
        parked: list[int] = []
        for size, cost in zip(sizes[begun:].tolist(), costs[begun:].tolist(), strict=True):
            while parked and parked[0] < (tokens - size + 1) * MOST_BINS:
                heapq.heappush(open_, entry_of[heapq.heappop(parked) % MOST_BINS])

            while open_ and used[open_[0] % MOST_BINS] + size > tokens:
                entry = heapq.heappop(open_)
                bin_ = entry % MOST_BINS
                entry_of[bin_] = entry
                heapq.heappush(parked, used[bin_] * MOST_BINS + bin_)

            if not open_ and max_work is None:
                open_ = list(range(len(used), len(used) + self.num_ranks))
                used += [0] * self.num_ranks
                free_rows += [self.limits.sequences] * self.num_ranks
                entry_of += open_

            if max_work is not None and (
                not open_ or open_[0] + cost >= (max_work + 1) * MOST_BINS
            ):
                bin_of.append(-1)
                continue

            index = open_[0] % MOST_BINS
            bin_of.append(index)
            used[index] += size
            free_rows[index] -= 1

            if free_rows[index]:
                heapq.heapreplace(open_, open_[0] + cost)
            else:
                heapq.heappop(open_)

        return np.array(bin_of, np.int64)


def _dynamic(
    lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m]: rows sorted by length, longest first, dealt to the ranks in turn.

    All ranks split at the same indices.
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    shares = [ordered[rank::num_ranks] for rank in range(num_ranks)]
    cuts = [0]
    # Rank 0 has the longest row of every turn, so what fits there fits everywhere.
    while cuts[-1] < len(shares[0]):
        fitting = limits.tokens // lengths[shares[0][cuts[-1]]]
        cuts.append(cuts[-1] + min(fitting, limits.sequences))
    return [
        [share[start:end] for start, end in zip(cuts, cuts[1:], strict=False)] for share in shares
    ]


def _consecutive_rows(
    lengths: list[int], rows: range, num_ranks: int, limits: Limits
) -> list[list[list[int]]]:
    """Return [rank][m]: consecutive rows for every rank and in every micro-batch."""
    ends = [len(rows) * (rank + 1) // num_ranks for rank in range(num_ranks)]
    edges = pairwise([0, *ends])
    by_rank = [_in_order(lengths, rows[start:end], limits) for start, end in edges]
    count = max(map(len, by_rank))
    # Ranks take part in every collective, so short ones get empty micro-batches.
    return [
        [*micro_batches, *([] for _ in range(count - len(micro_batches)))]
        for micro_batches in by_rank
    ]


def _in_order(lengths: list[int], rows: Sequence[int], limits: Limits) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    free = 0
    for row in rows:
        if lengths[row] > free or len(micro_batches[-1]) == limits.sequences:
            micro_batches.append([])
            free = limits.tokens
        micro_batches[-1].append(row)
        free -= lengths[row]
    return micro_batches
