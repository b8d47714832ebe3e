"""Verify a weight sync: compare fingerprints of the streamed weights with the engine's weights.

There are two kinds of fingerprints. One sums the raw bits of a weight modulo 2^64, where each block
is mixed and weighted by the position: any single changed element, and any element at another
position, changes the sum. It needs the weight itself. If an engine keeps weights only in a packed
form for the kernels, the products W x with random signs x are compared instead, up to rounding
errors. Fingerprints of slices add up, so it does not matter how an engine fuses, splits and repeats
weights.

The first verification of an engine covers all weights, and so does the one after a failed sync. It
reads all weights at both ends, which takes longer than copying them. Each later verification is
therefore a round that covers a part; ROUNDS rounds cover everything.

- A round probes a run of rows of every weight that the engine keeps as loaded; vectors and weights
  with fewer rows than ROUNDS are probed completely. So a weight that did not arrive, or arrived
  under another name, is found at once, unless it differs in other rows only. One wrong element is
  found if the row is probed, thus within ROUNDS syncs if it stays wrong. Runs of consecutive rounds
  are far apart: if a contiguous fraction 1/n of the rows stays wrong (the part of one rank, one
  expert), it is found within about 2 n syncs.
- A round computes the products of every PRODUCT_ROUNDS-th layer with packed weights. A wrong weight
  of another such layer is found within PRODUCT_ROUNDS syncs if it stays wrong.

A weight that is wrong where no verification probed, and is correct after the next sync, is never
found.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

WORDS = 64
"""Maximum number of 8-byte words of a row in one block.

The order of the words in a block does not change the fingerprint.
"""
CHUNK_BYTES = 32 * 2**20
"""Bytes of a weight that are processed at a time, to limit the size of temporary tensors."""
ROUNDS = 128
"""Number of rounds that together cover everything."""
PRODUCT_ROUNDS = 64
"""Number of rounds that together compute the products of every layer."""
STEP = 79
"""Distance between the runs of consecutive rounds.

It is odd, and about ROUNDS over the golden ratio, so the runs spread quickly.
"""
MAX_PENDING_BLOCKS = 2**16
"""Number of blocks, of any number of tensors, to sum at once.

One tensor takes as many calls as a hundred.
"""
WALK_FACTOR = 64
"""Factor of the tolerance.

Rounding in a sum of K signed terms is a random walk of about sqrt(K) 2^-24 |W x|.
"""
VECTOR_ROW = 8
"""Number of elements of a vector that form one row if ranks can split it there.

Pieces usually begin and end at heads.
"""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FIRST = 0x1E3779B97F4A7C15
SECOND = 0x3F58476D1CE4E5B9
"""Odd multipliers with random-looking bits; they spread the bits of a product to the left."""


class Fingerprints:
    """Fingerprints of tensors by name, in the dtype of the comparison.

    They are of whole tensors, or of pieces that add up to copies. `slices` is the number of ranks
    that split a row. Names in `products` are compared by W x, names in `bits` (None: all) by their
    bits, some by both: an engine uses a tied embedding for lookups, and in packed form for
    products. Bits cover one `round` of ROUNDS; None covers everything.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        *,
        slices: int = 1,
        bits: Collection[str] | None = None,
        products: Collection[str] = (),
        round: int | None = None,
    ):
        self.shapes = shapes
        self.dtype = dtype
        self.slices = slices
        self.round = round
        self.bits = {name: index for index, name in enumerate(shapes if bits is None else bits)}
        self.summed: list[Tensor] = []
        """At most one tensor [names in `bits`]: the sums without the entries that are still in
        `pending`."""
        self.pending: list[tuple[str, WeightProbe, Tensor]] = []
        """Name, probe and block sums of each piece that was read."""
        self.num_blocks = 0
        self.vectors: list[tuple[str, WeightProbe, Tensor]] = []
        """Vectors that are not summed yet. If both ends are compared directly, that is faster than
        a call for each sum."""
        self.window: Tensor | None = None
        """View of int64 that is moved over the memory of one piece after another. This saves a
        call per piece."""
        self.products: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in products}
        self.num_elements = dict.fromkeys(self.bits, 0)
        self.num_multiplied = dict.fromkeys(self.products, 0)

    def add_sent(self, name: str, tensor: Tensor) -> None:
        """Add a full tensor of the stream. It may be modified afterwards."""
        if name in self.bits:
            self.add(name, tensor.clone() if tensor.ndim < 2 else tensor)
        if name in self.products:
            self.add_product(name, product(tensor, self.dtype), tensor.numel())

    def add(self, name: str, piece: Tensor, *, row: int = 0, column: int = 0) -> None:
        """Add a piece that starts at this position of the full tensor.

        All dimensions but the last count as rows, and so does the only dimension of a vector. A
        scalar is a vector of one element. A vector is read later, and must not be modified before.
        """
        probe = _weight_probe(
            self.shapes[name], piece.shape, (row, column), self.dtype, self.slices, self.round
        )
        if probe is None:
            return
        if piece.ndim < 2:
            self.vectors.append((name, probe, piece.to(self.dtype).view(-1)))
            return

        self.pending.append((name, probe, self._sums(piece, probe)))
        self.num_blocks += probe.size[0]
        if self.num_blocks > MAX_PENDING_BLOCKS:
            self._sum_up()

    def _sums(self, piece: Tensor, probe: "WeightProbe") -> Tensor:
        """Return the sum of the words of each block: [blocks] int64."""
        size = self.dtype.itemsize
        start, offset = divmod(piece.storage_offset() * size, 8)
        if probe.word == 8 and piece.dtype is self.dtype and not offset and piece.is_contiguous():
            if self.window is None:
                with torch.inference_mode(False):  # usable inside and outside of inference mode
                    self.window = torch.empty(0, dtype=torch.int64, device=piece.device)
            return self.window.set_(
                piece.untyped_storage(), start + probe.start, probe.size, (probe.size[1], 1)
            ).sum(-1)

        chunks = (
            piece.detach()
            .reshape(-1, probe.width)[probe.rows]
            .split(max(1, CHUNK_BYTES // (probe.width * size)))
        )
        words = (
            chunk.to(self.dtype, copy=True).contiguous().view(INTEGERS[probe.word])
            for chunk in chunks
        )

        return torch.cat([each.view(-1, probe.size[1]).sum(-1) for each in words])

    def same(self, other: Self) -> bool:
        """Return True if both consist of equal pieces in the same order; faster than wrong()."""
        own, others = (
            (len(each.summed), [probe for _, probe, _ in each.pending + each.vectors])
            for each in (self, other)
        )
        return own == others and all(map(torch.equal, self._all(), other._all()))

    def _all(self) -> list[Tensor]:
        """Return the sums and the vectors as integers."""
        kinds = [
            each + [tensor for *_, tensor in entries]
            for each, entries in ((self.summed, self.pending), ([], self.vectors))
        ]
        return [
            torch.cat(tensors).view(INTEGERS[tensors[0].itemsize]) for tensors in kinds if tensors
        ]

    def _sum_up(self) -> None:
        """Add the entries of `pending` and `vectors` to the sums."""
        self.pending += [
            (name, probe, self._sums(vector, probe)) for name, probe, vector in self.vectors
        ]
        self.vectors.clear()
        if self.pending:
            names, probes, sums = zip(*self.pending, strict=True)
            for name, probe in zip(names, probes, strict=True):
                self.num_elements[name] += probe.place[1] * probe.width
            # All blocks at once, because a call takes longer than its work.
            mixed = torch.cat(sums).mul_(FIRST)
            mixed ^= (mixed >> 32) & 0xFFFFFFFF
            mixed *= torch.cat([_weights_of_blocks(probe.place, mixed.device) for probe in probes])
            ends = _numbers(tuple(accumulate(probe.size[0] for probe in probes)), mixed.device) - 1
            sums = mixed.cumsum(0)[ends].diff(prepend=mixed.new_zeros(1))
            places = _numbers(tuple(self.bits[name] for name in names), mixed.device)
            self.summed = [
                sum(self.summed, mixed.new_zeros(len(self.bits))).index_add_(0, places, sums)
            ]
            self.pending.clear()
            self.num_blocks = 0

    def add_product(self, name: str, values: Tensor, num_elements: int, *, row: int = 0) -> None:
        """Add values [R], R rows of W x from `row` on.

        They may be only the part that `num_elements` elements of W contribute.
        """
        self.products[name].append((row, values))
        self.num_multiplied[name] += num_elements

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sums and numbers of elements, [names, 2] int64, and products, [rows] float64.

        Both add up over ranks.
        """
        self._sum_up()
        sums = torch.zeros(len(self.bits) + len(self.products), dtype=torch.int64, device=device)
        for summed in self.summed:
            sums[: len(self.bits)] = summed
        counts = _numbers((*self.num_elements.values(), *self.num_multiplied.values()), device)

        products = []
        for name, parts in self.products.items():
            products.append(torch.zeros(self.shapes[name][0], dtype=torch.float64, device=device))
            for row, values in parts:
                products[-1][row : row + len(values)] += values

        table = torch.stack([sums, counts], dim=1)
        return table, (
            torch.cat(products) if products else torch.zeros(0, dtype=torch.float64, device=device)
        )

    def wrong(self, engine_numbers: tuple[Tensor, Tensor]) -> list[str]:
        """Return the names whose numbers in the engine differ from the numbers here.

        The engine holds every element equally often.
        """
        table, values = (numbers.cpu() for numbers in engine_numbers)
        sent, expected = (numbers.cpu() for numbers in self.numbers(table.device))
        # An engine repeats heads when it has more ranks than heads, so its sums are a multiple.
        copies = torch.div(table[:, 1], sent[:, 1].clamp(min=1), rounding_mode="floor")
        fits = (copies[:, None] * sent == table).all(1) & ((copies > 0) | (sent[:, 1] == 0))
        names = [
            name
            for name, right in zip([*self.bits, *self.products], fits.tolist(), strict=True)
            if not right
        ]
        lengths = [self.shapes[name][0] for name in self.products]
        each = zip(
            self.products,
            copies[len(self.bits) :],
            values.split(lengths),
            expected.split(lengths),
            strict=True,
        )
        names += [
            name
            for name, times, in_engine, streamed in each
            if not (
                (in_engine - times * streamed).abs() <= times * self._tolerance(name, streamed)
            ).all()
        ]

        return list(dict.fromkeys(names))

    def _tolerance(self, name: str, values: Tensor) -> Tensor:
        """Return the tolerance for sums of kernels in float32, in any order.

        The results are in the engine's dtype.
        """
        walk = WALK_FACTOR * math.sqrt(self.shapes[name][-1]) * 2.0**-24
        return (walk + torch.finfo(self.dtype).eps) * values.abs().max()


@dataclass(frozen=True, slots=True)
class WeightProbe:
    """Rows of a slice of a weight, read as blocks of words.

    A row has `width` elements, and a word `word` bytes.
    """

    rows: slice
    width: int
    word: int
    size: tuple[int, int]
    """Number of blocks, and number of words in each."""
    start: int
    """Number of words before the first block."""
    place: tuple[int, int, int, int]
    """Position in the full tensor: first row, number of rows, first block of a row, number of
    blocks.
    """


@lru_cache(maxsize=4096)
def _weight_probe(
    shape: torch.Size,
    piece: torch.Size,
    place: tuple[int, int],
    dtype: torch.dtype,
    slices: int,
    round: int | None,
) -> WeightProbe | None:
    """Return the probe of a piece in this round.

    The piece starts at `place` (row, column) of a tensor that `slices` ranks may split. Return None
    if the round does not cover the piece. Raise ValueError for a vector that is split inside a row.
    """
    shape, piece = (each or torch.Size([1]) for each in (shape, piece))
    (row, column), columns, width = place, shape[-1], piece[-1]
    if len(shape) == 1:
        columns = width = VECTOR_ROW if columns % (VECTOR_ROW * slices) == 0 else 1
        row, remainder = divmod(row, width)
        if remainder or piece[0] % width:
            raise ValueError(
                f"a vector of {shape[0]} is not split at a multiple of {width}: use"
                " --no_verify_weight_sync"
            )

    start, stop = _run(shape.numel() // columns, None if len(shape) == 1 else round)
    first = max(start - row, 0)
    last = min(stop - row, piece.numel() // width)
    if first >= last:
        return None

    size = dtype.itemsize
    # Long words are faster, but no rank's part may begin inside of one.
    word = 8 if columns * size % (8 * slices) == 0 else size
    in_row = columns * size // word
    block = math.gcd(in_row // slices, WORDS) if in_row % slices == 0 else 1
    count = width * size // word // block
    place = row + first, last - first, column * size // word // block, count

    return WeightProbe(
        slice(first, last),
        width,
        word,
        ((last - first) * count, block),
        first * count * block,
        place,
    )


def _run(num_rows: int, round: int | None) -> tuple[int, int]:
    """Return the start and end of the rows of a round."""
    if round is None or num_rows < ROUNDS:
        return 0, num_rows
    run = round * STEP % ROUNDS
    return run * num_rows // ROUNDS, (run + 1) * num_rows // ROUNDS


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


@torch.no_grad()
def product(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrix [R, K] times the signs of the columns: [R] float64.

    It is cast to `dtype`, and multiplied in float32.
    """
    x = signs(0, matrix.shape[1], matrix.device)
    chunks = matrix.split(max(1, CHUNK_BYTES // (matrix.shape[1] * matrix.itemsize)))
    return torch.cat([chunk.to(dtype).float() @ x for chunk in chunks]).double()


def signs(start: int, count: int, device: torch.device) -> Tensor:
    """Return the entries of x in W x from column `start` on: [count] float32 of 1 and -1."""
    return 1 - 2 * ((weights(start, count, device, salt=2) >> 40) & 1).float()


@lru_cache(maxsize=1024)
def _weights_of_blocks(place: tuple[int, int, int, int], device: torch.device) -> Tensor:
    row, num_rows, first, count = place
    return (
        weights(row, num_rows, device)[:, None] * weights(first, count, device, salt=1)
    ).flatten()


@lru_cache(maxsize=512)
def weights(start: int, count: int, device: torch.device, salt: int = 0) -> Tensor:
    """Return pseudorandom odd numbers, a different one for each position from `start` on.

    [count] int64.
    """
    x = (torch.arange(start, start + count, device=device) + (salt << 48)) * FIRST
    x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) * SECOND
    return (x ^ ((x >> 29) & 0x7FFFFFFFF)) | 1
