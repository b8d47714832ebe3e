"""Locate the sequences of a flat batch, and decide which tokens each of them attends to.

Shapes: T tokens of all sequences, U of them computed (all of them, or each shared prefix once), t
computed by this rank: ranks that split a batch split the computed tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.core.batch import SharedPrefix, to_device
from lightrft.models.parallel.sequence_parallel import NO_SEQUENCE_PARALLEL, SequenceParallel

LONG_SEQUENCE = 64
"""Sequences above this length share a block only with sequences of the same length.

For them a call costs less than padding.
"""

CALL_WORK = 2**19
"""Work that takes a CPU as long as one more call: query-key pairs x elements of a query.

It counts the forward and the backward pass, and all that a call needs. Measured on one core for 1
to 4 prefixes of 9 to 512 tokens and 128 elements: 0.47 ns for each, 0.25 ms for a call.
"""


BIDIRECTIONAL = ("gemma3",)
"""Model types whose image tokens attend to all tokens of the image.

Text attends to earlier tokens only.
"""


def bidirectional_token(config: PretrainedConfig) -> int | None:
    """Return the token id that images with attention in both directions consist of.

    None if all attention of the model is causal.
    """
    return config.image_token_id if config.model_type in BIDIRECTIONAL else None


@dataclass(frozen=True)
class Blocks:
    """Concatenated blocks of sequences; the sequences of a block are padded to one width."""

    shapes: list[tuple[int, int]]
    """(number of sequences, width) of each block."""
    source: Tensor | None
    """[P] int64: the token at each position of the blocks; padding repeats the last token.

    None if the blocks are the flat batch itself.
    """
    positions: Tensor | None
    """[T] int64: the position of each token in the blocks."""


class Selection:
    """Selected rows of a tensor: a view if they are consecutive, else a copy."""

    def __init__(self, index: np.ndarray, device: torch.device):
        """Select the rows `index` [n] int64, on the host. A row may occur several times."""
        self.consecutive = len(index) > 0 and bool((np.diff(index) == 1).all())
        self.rows: slice | Tensor
        """Selected rows of the tensor."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Entries and rows to add one after another: in each pair a row occurs once."""

        if self.consecutive:
            self.rows = slice(int(index[0]), int(index[-1]) + 1)
            return

        self.rows = to_device(torch.from_numpy(index), device)
        copy = _copy_numbers(index)
        for number in range(int(copy.max(initial=0)) + 1 if copy.any() else 0):
            entries = (copy == number).nonzero()[0]
            positions = to_device(torch.from_numpy(entries), device)
            rows = to_device(torch.from_numpy(index[entries]), device)
            self._copies.append((positions, rows))

    def of(self, values: Tensor) -> Tensor:
        """Return the selected rows: [n, ...]."""
        return values[self.rows] if self.consecutive else values.index_select(0, self.rows)

    def spread(self, values: Tensor, total: Tensor) -> Tensor:
        """Return the sum of values [n, ...] for every row, in float32 and the shape of `total`.

        The result may be `values` itself.
        """
        if self.consecutive and len(values) == len(total):
            return values.float()
        sums = torch.zeros_like(total, dtype=torch.float32)
        self.add_to(sums, values)
        return sums

    def add_to(self, total: Tensor, values: Tensor) -> None:
        """Add values [n, ...] to the selected rows of `total`, in place.

        A row that occurs several times gets the sum of all. No two values are added to one row at
        the same time, so the sum is deterministic.
        """
        if self.consecutive:
            total[self.rows] += values
        for entries, rows in self._copies:
            total.index_add_(0, rows, values.index_select(0, entries).to(total.dtype))
        if not self.consecutive and not self._copies:
            total.index_add_(0, self.rows, values.to(total.dtype))


def _copy_numbers(index: np.ndarray) -> np.ndarray:
    """Return for each entry the number of equal entries before it: [n] int64."""
    order = index.argsort(kind="stable")
    first = np.r_[True, np.diff(index[order]) != 0]
    starts = np.maximum.accumulate(np.where(first, np.arange(len(index)), 0))
    numbers = np.empty_like(index)
    numbers[order] = np.arange(len(index)) - starts
    return numbers


@dataclass(frozen=True, slots=True)
class Scoring:
    """How queries and keys become weights of values."""

    scaling: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all up to itself."""
    dropout: float = 0.0
    softcap: float | None = None
    """c replaces a score s by c tanh(s / c)."""
    sinks: Tensor | None = None
    """Scores of one more key for each head, without a value: [H]."""


@dataclass(eq=False)
class AttentionCall:
    """One call of attention: concatenated runs of queries, each with a run of keys.

    causal: a run has as many keys as queries, and each query attends to the keys up to its own.
    window: the last query of a run is aligned with the last key, and each query attends to
    `window` keys up to its own.
    Neither: every query of a run attends to all keys of the run.
    """

    queries: Selection
    keys: Selection
    """Queries among this rank's t tokens, and keys among the U tokens of all ranks."""
    query_lengths: list[int]
    key_lengths: list[int]
    device: torch.device
    causal: bool = False
    window: int | None = None

    @cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """Return the offsets of the queries and of the keys of each run, on the device.

        [runs + 1] int32 each.
        """
        return offsets(torch.tensor(self.query_lengths), self.device), offsets(
            torch.tensor(self.key_lengths), self.device
        )

    @cached_property
    def blocks(self) -> Blocks:
        """Return the runs of a causal call as blocks on the device."""
        return blocks(torch.tensor(self.query_lengths), self.device)


class Layout:
    """Positions of the sequences in a flat batch; built once per micro-batch, used by every layer.

    It is built from lengths on the host, so that the host does not wait for the device. It is no
    dataclass: in mixed precision FSDP copies dataclasses for every layer, and the cached values
    would be recomputed.
    """

    def __init__(
        self,
        lengths: Tensor,
        device: torch.device,
        sequence: SequenceParallel = NO_SEQUENCE_PARALLEL,
        shared: SharedPrefix | None = None,
        bidirectional: Tensor | None = None,
    ):
        self.lengths = lengths.cpu()
        """Lengths of the sequences, [N] int64 on the host."""
        self.device = device
        """Device of the batch."""
        self.sequence = sequence
        """Split of the computed tokens over ranks."""
        self.shared = shared
        """Shared prefixes; each is computed once. None if all tokens are computed."""
        self.bidirectional = bidirectional
        """Tokens that also attend to later tokens of the same run, like the tokens of an image in
        Gemma 3: [T] bool on the host. A shared prefix contains whole runs. None if all attention
        is causal."""

        self.num_computed = len(shared.computed) if shared else int(self.lengths.sum())
        self.queries = sequence.queries(self.num_computed)
        """Start and end of the runs of computed tokens whose queries this rank has."""
        self.queries_are_split = self.queries != [(0, self.num_computed)]
        """True if this rank has only some of the queries."""
        self.needs_several_calls = (
            shared is not None or bidirectional is not None or self.queries_are_split
        )
        """True if one causal call over this rank's own tokens is not enough."""
        self.starts: np.ndarray = (self.lengths.cumsum(0) - self.lengths).numpy()
        """Start of each sequence among the T tokens: [N]."""
        self.computed_index = shared.indices.numpy() if shared else np.arange(self.num_computed)
        """Index of each token among the computed ones: [T]."""
        self._computed = shared.computed.numpy() if shared else np.arange(self.num_computed)
        # index of each computed token among all tokens: [U]
        self._calls: dict[int | None, list[AttentionCall]] = {}
        self.derived: dict[object, Any] = {}
        """What layers without attention compute from the layout, once for all of them."""

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def offsets(self) -> Tensor:
        """Return the start of each sequence, [N + 1] int32 on the device; the last entry is T."""
        return offsets(self.lengths, self.device)

    @cached_property
    def blocks(self) -> Blocks:
        """Return the sequences as blocks on the device.

        Each sequence has a copy of the shared prefix.
        """
        full = blocks(self.lengths, self.device)
        if self.shared is None:
            return full

        copied = to_device(self.shared.indices, self.device)
        computed = to_device(self.shared.computed, self.device)
        source = copied if full.source is None else copied.index_select(0, full.source)

        return Blocks(
            full.shapes,
            source,
            computed if full.positions is None else full.positions.index_select(0, computed),
        )

    def copies_are_faster(self, width: int) -> bool:
        """Return True if copying prefixes takes a CPU less time than several calls.

        `width` is the number of elements of a query, of all heads.
        """
        return self._copied_pairs_per_call * width < CALL_WORK

    @cached_property
    def _copied_pairs_per_call(self) -> float:
        """Return how many query-key pairs copies compute for each call that they save.

        A copy repeats the attention within the prefix. Without copies there is one call for each
        prefix, and merging takes as long as another. Return infinity if there are no prefixes, if
        ranks split the queries, or if attention is not causal.
        """
        if self.shared is None or self.bidirectional is not None or self.queries_are_split:
            return math.inf
        depth = self.pieces.depth
        last = self.starts[self.pieces.row] + depth - 1
        prefixes = np.unique(self.computed_index[last][depth > 0])
        return float((depth**2).sum()) / 2 / (len(prefixes) + 1)

    def calls(self, window: int | None) -> list[AttentionCall]:
        """Return the calls that together compute the attention of this rank's queries.

        The first call has each query once. Without a window it is causal attention within the
        consecutive tokens of each sequence. Then come the prefixes before them, level by level:
        first those at the start of sequences, then the ones that follow them, and so on. All
        sequences with the same prefix form one run of queries, so the keys occur once.

        With a window there is one call. In it each sequence has copies of the keys before its own
        tokens that its first queries attend to. In both cases, bidirectional tokens have one more
        call.
        """
        if window not in self._calls:
            calls = (
                [self._own(), *self._prefixes()] if window is None else [self.with_copies(window)]
            )
            self._calls[window] = calls if self.bidirectional is None else calls + self._following
        return self._calls[window]

    def with_copies(self, window: int) -> AttentionCall:
        """Return one call with a window. Keys that several sequences attend to are copied."""
        first = self.starts[self.pieces.row]
        starts = first + np.maximum(self.pieces.depth - window + 1, 0)
        ends = first + self.pieces.depth
        before = ends - starts
        sizes = self.pieces.sizes
        index = np.empty(int((before + sizes).sum()), dtype=np.int64)
        at = _steps(before + sizes)
        is_before = at < before.repeat(before + sizes)
        index[is_before] = self.computed_index[ranges(starts, before)]
        index[~is_before] = ranges(self.pieces.begins, sizes)
        queries = Selection(np.arange(int(sizes.sum())), self.device)

        keys = Selection(index, self.device)
        lengths = sizes.tolist(), (before + sizes).tolist()
        return AttentionCall(queries, keys, *lengths, self.device, window=window)

    def _own(self) -> AttentionCall:
        sizes = self.pieces.sizes
        queries = Selection(np.arange(int(sizes.sum())), self.device)
        keys = Selection(ranges(self.pieces.begins, sizes), self.device)
        lengths = sizes.tolist()
        return AttentionCall(queries, keys, lengths, lengths, self.device, causal=True)

    def _prefixes(self) -> Iterator[AttentionCall]:
        """Yield a call for each level of the prefix tree.

        A node ends where the sequences that share it diverge.
        """
        pieces = self.pieces
        piece = np.arange(len(pieces.sizes)).repeat(pieces.depth)
        read = self.computed_index[ranges(self.starts[pieces.row], pieces.depth)]
        if not len(read):
            return

        readers = np.bincount(read, minlength=self.num_computed)
        starts = np.r_[
            True, (np.diff(piece) != 0) | (np.diff(read) != 1) | (np.diff(readers[read]) != 0)
        ].nonzero()[0]
        piece = piece[starts]
        begins = read[starts]
        sizes = np.diff(np.r_[starts, len(read)])

        level = _copy_numbers(piece)
        local = pieces.sizes.cumsum() - pieces.sizes
        for number in range(int(level.max()) + 1):
            at_level = (level == number).nonzero()[0]
            at_level = at_level[begins[at_level].argsort(kind="stable")]
            # first reader of each node
            first = np.r_[True, np.diff(begins[at_level]) != 0].nonzero()[0]
            readers_at_level = piece[at_level]
            query_lengths = np.add.reduceat(pieces.sizes[readers_at_level], first).tolist()
            queries = Selection(
                ranges(local[readers_at_level], pieces.sizes[readers_at_level]), self.device
            )
            nodes = at_level[first]
            keys = Selection(ranges(begins[nodes], sizes[nodes]), self.device)
            yield AttentionCall(queries, keys, query_lengths, sizes[nodes].tolist(), self.device)

    @cached_property
    def _following(self) -> list[AttentionCall]:
        """Return the attention call that lets image tokens look ahead within an image.

        It is missing if there are none. Queries and keys of a run are in reverse order: with the
        keys one token later than the queries, this is causal attention. Where ranks split a run,
        the keys begin with the tokens that other ranks have.
        """
        starts, ends = self._runs
        queries = []
        keys = []
        query_lengths = []

        key_lengths = []
        before = 0
        for first, stop in self.queries:
            begins = np.maximum(starts, first)  # nothing follows the last token of a run
            stops = np.minimum(ends - 1, stop)
            some = begins < stops
            begins = begins[some]
            stops = stops[some]
            lasts = ends[some] - 1
            queries.append(ranges(stops - 1, stops - begins, step=-1) + before - first)
            keys.append(ranges(lasts, lasts - begins, step=-1))
            query_lengths.append(stops - begins)
            key_lengths.append(lasts - begins)
            before += stop - first

        sizes = np.concatenate(query_lengths)
        key_sizes = np.concatenate(key_lengths)
        if not len(sizes):
            return []

        if np.array_equal(sizes, key_sizes):
            kind = {"causal": True}
        else:
            kind = {"window": int(key_sizes.max())}
        selections = (Selection(np.concatenate(index), self.device) for index in (queries, keys))
        lengths = sizes.tolist(), key_sizes.tolist()
        return [AttentionCall(*selections, *lengths, self.device, **kind)]

    @cached_property
    def run_ids(self) -> Tensor:
        """Return which run of bidirectional tokens each computed token belongs to: [U] int64.

        Causal tokens have -1. The result is on the device.
        """
        numbers = np.full(self.num_computed, -1)
        for number, (start, end) in enumerate(zip(*self._runs, strict=True)):
            numbers[start:end] = number
        return to_device(torch.from_numpy(numbers), self.device)

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end of each run of bidirectional tokens among the computed tokens.

        A run belongs to one sequence. [runs] each.
        """
        is_in = self.bidirectional.numpy()[self._computed]
        edges = np.zeros(self.num_computed + 1, dtype=bool)  # between a token and the one before it
        edges[1:-1] = is_in[1:] != is_in[:-1]
        edges[np.searchsorted(self._computed, self.starts)] = True  # where sequences begin
        edges[-1] = True
        borders = edges.nonzero()[0]
        inside = is_in[borders[:-1]]

        return borders[:-1][inside], borders[1:][inside]

    @cached_property
    def pieces(self) -> "TokenRuns":
        """Return the runs of this rank's computed tokens that are consecutive in a sequence.

        The computed tokens of a sequence are its last ones, because only a prefix can be shared.
        """
        lengths = self.lengths.numpy()
        # A sequence may lie in several of this rank's ranges, and then has a piece in each.
        first = np.searchsorted(self._computed, self.starts)

        stop = np.searchsorted(self._computed, self.starts + lengths)
        runs = []
        for start, end in self.queries:
            begins = np.maximum(first, start)
            stops = np.minimum(stop, end)
            row = (begins < stops).nonzero()[0]
            depth = lengths[row] - (stop[row] - begins[row])
            runs.append((row, begins[row], stops[row] - begins[row], depth))

        return TokenRuns(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


@dataclass(frozen=True)
class TokenRuns:
    """Runs of consecutive computed tokens, each of one sequence; int64 [pieces]."""

    row: np.ndarray
    """Index of the sequence."""
    begins: np.ndarray
    """Index of the first token among the computed ones."""
    sizes: np.ndarray
    depth: np.ndarray
    """Number of tokens of the sequence before the piece."""


def offsets(lengths: Tensor, device: torch.device) -> Tensor:
    """Return the start of each sequence on the device, [N + 1] int32; the last entry is the sum.

    The lengths [N] are on the host.
    """
    return to_device(F.pad(lengths.cumsum(0), (1, 0)).int(), device)


def blocks(lengths: Tensor, device: torch.device) -> Blocks:
    """Group long sequences by equal length and short ones by the next power of two.

    So less than half of a block is padding.
    """
    if bool((lengths == lengths[0]).all()):
        return Blocks([(len(lengths), int(lengths[0]))], None, None)

    similar = lengths.double().log2().ceil().long()
    kinds, kind = lengths.unique(return_inverse=True)
    first = torch.full_like(kinds, len(lengths)).scatter_reduce(
        0, kind, torch.arange(len(lengths)), "amin"
    )
    # Long sequences of one length are a block, named by its first one, above every exponent.
    similar[lengths > LONG_SEQUENCE] = 64 + first[kind][lengths > LONG_SEQUENCE]
    _, block, sizes = similar.unique(return_inverse=True, return_counts=True)
    widths = torch.zeros_like(sizes).scatter_reduce(0, block, lengths, "amax")
    shapes = list(zip(sizes.tolist(), widths.tolist(), strict=True))
    order = block.argsort(stable=True)
    width = widths[block]
    starts = lengths.cumsum(0) - lengths
    begins = torch.empty_like(starts)
    begins[order] = width[order].cumsum(0) - width[order]
    steps = torch.from_numpy(_steps(width[order].numpy()))
    source = starts[order].repeat_interleave(width[order]) + torch.minimum(
        steps, (lengths[order] - 1).repeat_interleave(width[order])
    )

    positions = begins.repeat_interleave(lengths) + torch.from_numpy(_steps(lengths.numpy()))
    if torch.equal(source, torch.arange(len(positions))):
        return Blocks(shapes, None, None)
    return Blocks(shapes, to_device(source, device), to_device(positions, device))


def _steps(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... up to each length, concatenated."""
    return np.arange(int(lengths.sum())) - (lengths.cumsum() - lengths).repeat(lengths)


def ranges(starts: np.ndarray, lengths: np.ndarray, step: int = 1) -> np.ndarray:
    """Return start, start + step, ... for each start and length, concatenated."""
    return starts.repeat(lengths) + step * _steps(lengths)
