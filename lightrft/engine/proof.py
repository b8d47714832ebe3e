"""Proof of delivery: fingerprints of what was streamed and of what the engine computes with, compared after every stream.

There are two kinds. One sums the raw bits of a weight, modulo 2^64, each block of them mixed and weighted by its place: any one
changed element, and anything that lies elsewhere, changes it. It needs the weight itself. Where an engine keeps nothing but a
form that its kernels like, W x is compared instead, with x of random signs, up to what rounding explains.
Fingerprints of pieces add up, so it does not matter how an engine fuses, cuts and repeats weights.

The first proof of an engine is whole, and so is the one after a sync that failed. That reads all weights at both ends, which
takes longer than to copy them. Later proofs are therefore of a part, in turns: TURNS of them look at everything once.

- Of every weight that the engine keeps as it came they look at a run of rows; at all of a vector, or of fewer rows than TURNS.
  So a weight that did not arrive, or arrived under another's name, is found at once, unless it differs in other rows only. One
  wrong element is found if its row is looked at, and so within TURNS syncs if it stays wrong.
- Of layers with another form of their weights they multiply with those whose turn it is. Whatever is wrong with another one is
  found within TURNS syncs if it stays wrong.

What was wrong where no proof looked, and is right after the next sync, is never found.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

WORDS = 64
"""Of 8 bytes: the most of one row whose order does not count."""
CHUNK_BYTES = 32 * 2**20
"""Of a weight at a time, so that what is computed on the way stays small."""
TURNS = 32
"""Proofs that together look at everything."""
AT_ONCE = 2**16
"""Blocks, of however many tensors, that are summed up at once: that takes as many calls for one tensor as for a hundred."""
STEPS = 64
"""Rounding in a sum of K signed terms is a random walk of about sqrt(K) 2^-24 |W x|: so many times that is allowed."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd, with bits that look random: what is multiplied with them spreads to the left."""


class Fingerprints:
    """Of tensors by name, in the dtype in which they are compared: of whole ones, or of pieces, which add up to copies of them.

    `slices` is the number of ranks that cut a row. Names in `products` are compared by W x, those in `bits` (None: all) by
    their bits, some by both: an embedding in which an engine looks up, and with which, tied, it multiplies in another form.
    Bits are those of one `turn` of TURNS; None: of everything.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, slices: int = 1,
        bits: Collection[str] | None = None, products: Collection[str] = (), turn: int | None = None,
    ):  # fmt: skip
        self.shapes, self.dtype, self.slices, self.turn = shapes, dtype, slices, turn
        self.bits = {name: index for index, name in enumerate(shapes if bits is None else bits)}
        self.sums: Tensor | None = None
        """[names in `bits`], without what is in `blocks` still."""
        self.blocks: list[tuple[int, Tensor, Tensor]] = []
        """Place in `sums`, the bits of blocks, their weights."""
        self.num_blocks = 0
        self.products: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in products}
        self.num_elements = dict.fromkeys(self.bits, 0)
        self.num_multiplied = dict.fromkeys(self.products, 0)

    def watch(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream itself; each tensor is looked at before it is passed on."""
        for name, tensor in stream:
            if name in self.bits:
                self.add(name, tensor)
            if name in self.products:
                self.add_product(name, product(tensor, self.dtype), tensor.numel())
            yield name, tensor

    def add(self, name: str, piece: Tensor, *, row: int = 0, column: int = 0) -> None:
        """What lies at that place of the full tensor. All dimensions but the last count as rows; of a vector, its only one."""
        columns, width = (self.shapes[name][-1], piece.shape[-1]) if len(self.shapes[name]) > 1 else (1, 1)
        start, stop = self._rows(name)
        first = max(start - row, 0)
        rows = piece.detach().reshape(-1, width)[first : max(stop - row, 0)]
        if rows.shape[0]:
            place = (row + first, column)
            found = blocks(rows, self.dtype, place=place, columns=columns, slices=self.slices)
            self.blocks.append((self.bits[name], *found))
            self.num_elements[name] += rows.numel()
            self.num_blocks += found[0].numel()
            if self.num_blocks > AT_ONCE:
                self._sum_up()

    def _sum_up(self) -> None:
        """What is in `blocks`."""
        if self.blocks:
            places, bits, factors = zip(*self.blocks, strict=True)
            mixed = torch.cat(bits) * FIRST
            mixed ^= (mixed >> 32) & 0xFFFFFFFF
            ends = torch.tensor([len(each) for each in bits], device=mixed.device).cumsum(0) - 1
            sums = mixed.mul_(torch.cat(factors)).cumsum(0)[ends].diff(prepend=ends.new_zeros(1))
            so_far = sums.new_zeros(len(self.bits)) if self.sums is None else self.sums
            self.sums = so_far.index_add(0, torch.tensor(places, device=sums.device), sums)
            self.blocks.clear()
            self.num_blocks = 0

    def _rows(self, name: str) -> tuple[int, int]:
        """Of the full tensor, where its rows of this turn begin and end."""
        count = self.shapes[name][:-1].numel()
        if self.turn is None or count < TURNS:
            return 0, self.shapes[name].numel()
        return self.turn * count // TURNS, (self.turn + 1) * count // TURNS

    def add_product(self, name: str, values: Tensor, num_elements: int, *, row: int = 0) -> None:
        """values [R]: R rows of W x from `row` on, or the part of them to which `num_elements` of W contribute."""
        self.products[name].append((row, values))
        self.num_multiplied[name] += num_elements

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of it as [names, 2] int64 of sum and number of elements, and [rows] float64: those of several ranks add up."""
        self._sum_up()
        sums = torch.zeros(len(self.bits) + len(self.products), dtype=torch.int64, device=device)
        if self.sums is not None:
            sums[: len(self.bits)] = self.sums
        counts = [*self.num_elements.values(), *self.num_multiplied.values()]
        whole = []
        for name, parts in self.products.items():
            whole.append(torch.zeros(self.shapes[name][0], dtype=torch.float64, device=device))
            for row, values in parts:
                whole[-1][row : row + len(values)] += values
        table = torch.stack([sums, torch.tensor(counts, device=device)], dim=1)
        return table, torch.cat(whole) if whole else torch.zeros(0, dtype=torch.float64, device=device)

    def wrong(self, held: tuple[Tensor, Tensor]) -> list[str]:
        """Names whose numbers, of an engine that has every element equally often, are not those of the whole tensors here."""
        table, values = (numbers.cpu() for numbers in held)
        sent, expected = (numbers.cpu() for numbers in self.numbers(table.device))
        copies = torch.div(table[:, 1], sent[:, 1].clamp(min=1), rounding_mode="floor")
        fits = (copies[:, None] * sent == table).all(1) & ((copies > 0) | (sent[:, 1] == 0))
        found = [name for name, right in zip([*self.bits, *self.products], fits.tolist(), strict=True) if not right]
        lengths = [self.shapes[name][0] for name in self.products]
        each = zip(self.products, copies[len(self.bits) :], values.split(lengths), expected.split(lengths), strict=True)
        found += [name for name, times, mine, theirs in each
                  if not ((mine - times * theirs).abs() <= times * self._tolerance(name, theirs)).all()]
        return list(dict.fromkeys(found))

    def _tolerance(self, name: str, values: Tensor) -> Tensor:
        """Of the kernels' sums in float32, in any order, and of results in the engine's dtype."""
        walk = STEPS * math.sqrt(self.shapes[name][-1]) * 2.0**-24
        return (walk + torch.finfo(self.dtype).eps) * values.abs().max()


def blocks(
    rows: Tensor, dtype: torch.dtype, *, place: tuple[int, int], columns: int, slices: int
) -> tuple[Tensor, Tensor]:
    """Of `rows` [R, C], which begin at `place` of a tensor with `columns` columns, cut into `slices` or not: the sum of the
    bits of each block, and its weight.
    """
    size = dtype.itemsize
    word = 8 if columns * size % (8 * slices) == 0 else size
    in_row = columns * size // word
    block = math.gcd(in_row // slices, WORDS) if in_row % slices == 0 else 1
    count = rows.shape[1] * size // word // block
    chunks = [rows] if rows.nbytes <= CHUNK_BYTES else rows.split(max(1, CHUNK_BYTES // (columns * size)))
    sums = [_words(chunk.to(dtype), word).view(-1, block).sum(-1) for chunk in chunks]
    of_blocks = _weights_of_blocks(place[0], rows.shape[0], place[1] * size // word // block, count, rows.device)
    return sums[0] if len(sums) == 1 else torch.cat(sums), of_blocks


@torch.no_grad()
def product(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """matrix [R, K], cast to `dtype`, times the signs of its columns, in float32: [R] float64."""
    x = signs(0, matrix.shape[1], matrix.device)
    chunks = matrix.split(max(1, CHUNK_BYTES // (matrix.shape[1] * matrix.itemsize)))
    return torch.cat([chunk.to(dtype).float() @ x for chunk in chunks]).double()


def signs(start: int, count: int, device: torch.device) -> Tensor:
    """The x of W x from column `start` on: [count] float32 of 1 and -1."""
    return 1 - 2 * ((weights(start, count, device, salt=2) >> 40) & 1).float()


@lru_cache(maxsize=1024)
def _weights_of_blocks(row: int, num_rows: int, first: int, count: int, device: torch.device) -> Tensor:
    """[num_rows x count] int64, of `count` blocks from `first` on in each row from `row` on."""
    return (weights(row, num_rows, device)[:, None] * weights(first, count, device, salt=1)).flatten()


@lru_cache(maxsize=512)
def weights(start: int, count: int, device: torch.device, salt: int = 0) -> Tensor:
    """Odd numbers that look random, a different one for each place from `start` on: [count] int64."""
    x = (torch.arange(start, start + count, device=device) + (salt << 48)) * FIRST
    x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) * SECOND
    return (x ^ ((x >> 29) & 0x7FFFFFFFF)) | 1


def _words(rows: Tensor, word: int) -> Tensor:
    """[R, C] as integers of `word` bytes."""
    aligned = rows.is_contiguous() and rows.storage_offset() * rows.itemsize % word == 0
    return (rows if aligned else rows.clone(memory_format=torch.contiguous_format)).view(INTEGERS[word])
