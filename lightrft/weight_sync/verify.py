"""Verification of a weight sync: fingerprints of what was streamed and of what the engine computes with are compared.

There are two kinds. One sums the raw bits of a weight, modulo 2^64, each block of them mixed and weighted by its place: any one
changed element, and anything that lies elsewhere, changes it. It needs the weight itself. Where an engine keeps nothing but a
form that its kernels like, W x is compared instead, with x of random signs, up to what rounding explains.
Fingerprints of slices add up, so it does not matter how an engine fuses, cuts and repeats weights.

The first verification of an engine is whole, and so is the one after a sync that failed. That reads all weights at both ends,
which takes longer than to copy them. Each later one is therefore a round, which covers a part; ROUNDS of them cover everything.

- A round probes a run of rows of every weight that the engine keeps as it came; all of a vector, or of fewer rows than ROUNDS.
  So a weight that did not arrive, or arrived under another's name, is found at once, unless it differs in other rows only. One
  wrong element is found if its row is probed, and so within ROUNDS syncs if it stays wrong. Runs of consecutive rounds lie far
  apart: if an n-th of the rows, next to each other, stays wrong (the part of one rank, one expert), about 2 n syncs find it.
- A round multiplies with every PRODUCT_ROUNDS-th of the layers that have another form of their weights. A wrong weight of another
  layer is found within PRODUCT_ROUNDS syncs if it stays wrong.

A weight that is wrong where no verification looked, and is right after the next sync, is never found.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

WORDS = 64
"""Of 8 bytes: the most of one row whose order does not count."""
CHUNK_BYTES = 32 * 2**20
"""Of a weight at a time, so that what is computed on the way stays small."""
ROUNDS = 128
"""Verifications that together cover everything."""
PRODUCT_ROUNDS = 64
"""Verifications that together multiply with every layer."""
STEP = 79
"""The distance of one round's run from the next: odd, about ROUNDS over the golden ratio, so that rounds soon were everywhere."""
AT_ONCE = 2**16
"""Blocks, of however many tensors, that are summed up at once: that takes as many calls for one tensor as for a hundred."""
STEPS = 64
"""Rounding in a sum of K signed terms is a random walk of about sqrt(K) 2^-24 |W x|: so many times that is allowed."""
OF_VECTOR = 8
"""Elements of a vector that are one row, if ranks can cut it between them; pieces of vectors begin and end at heads or so."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd, with bits that look random: what is multiplied with them spreads to the left."""


class Fingerprints:
    """Of tensors by name, in the dtype in which they are compared: of whole ones, or of pieces, which add up to copies of them.

    `slices` is the number of ranks that cut a row. Names in `products` are compared by W x, those in `bits` (None: all) by
    their bits, some by both: an embedding in which an engine looks up, and with which, tied, it multiplies in another form.
    Bits are those of one `round` of ROUNDS; None: of everything.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, slices: int = 1,
        bits: Collection[str] | None = None, products: Collection[str] = (), round: int | None = None,
    ):  # fmt: skip
        self.shapes, self.dtype, self.slices, self.round = shapes, dtype, slices, round
        self.bits = {name: index for index, name in enumerate(shapes if bits is None else bits)}
        self.summed: list[Tensor] = []
        """At most one: [names in `bits`], without what is in `found` still."""
        self.found: list[tuple[str, WeightProbe, Tensor]] = []
        """Name and probe of what was read, and the sums of its blocks."""
        self.num_blocks = 0
        self.vectors: list[tuple[str, WeightProbe, Tensor]] = []
        """Whose sums are not needed where both ends can be compared: a call for each takes longer than to compare them."""
        self.window: Tensor | None = None
        """Of int64, laid over the memory of one piece after the other: one call less for each than to make views of it."""
        self.products: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in products}
        self.num_elements = dict.fromkeys(self.bits, 0)
        self.num_multiplied = dict.fromkeys(self.products, 0)

    def watch(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream itself; each tensor is looked at before it is passed on."""
        for name, tensor in stream:
            if name in self.bits:
                self.add(name, tensor.clone() if tensor.ndim < 2 else tensor)
            if name in self.products:
                self.add_product(name, product(tensor, self.dtype), tensor.numel())
            yield name, tensor

    def add(self, name: str, piece: Tensor, *, row: int = 0, column: int = 0) -> None:
        """What lies at that place of the full tensor. All dimensions but the last count as rows; of a vector, its only one.

        A number is a vector of one. A vector is read later, and has to stay as it is until then.
        """
        probe = _weight_probe(self.shapes[name], piece.shape, (row, column), self.dtype, self.slices, self.round)
        if probe is None:
            return
        if piece.ndim < 2:
            self.vectors.append((name, probe, piece.to(self.dtype).view(-1)))
            return
        self.found.append((name, probe, self._sums(piece, probe)))
        self.num_blocks += probe.size[0]
        if self.num_blocks > AT_ONCE:
            self._sum_up()

    def _sums(self, piece: Tensor, probe: "WeightProbe") -> Tensor:
        """Of the words of each block: [blocks] int64."""
        size = self.dtype.itemsize
        start, apart = divmod(piece.storage_offset() * size, 8)
        if probe.word == 8 and piece.dtype is self.dtype and not apart and piece.is_contiguous():
            if self.window is None:
                with torch.inference_mode(False):  # for use both within it and outside
                    self.window = torch.empty(0, dtype=torch.int64, device=piece.device)
            return self.window.set_(piece.untyped_storage(), start + probe.start, probe.size, (probe.size[1], 1)).sum(-1)
        chunks = piece.detach().reshape(-1, probe.width)[probe.rows].split(max(1, CHUNK_BYTES // (probe.width * size)))
        words = (chunk.to(self.dtype, copy=True).contiguous().view(INTEGERS[probe.word]) for chunk in chunks)
        return torch.cat([each.view(-1, probe.size[1]).sum(-1) for each in words])

    def same(self, other: Self) -> bool:
        """Whether both are of the same pieces in one order: seen sooner than what is wrong()."""
        own, others = ((len(each.summed), [probe for _, probe, _ in each.found + each.vectors]) for each in (self, other))
        return own == others and all(map(torch.equal, self._all(), other._all()))

    def _all(self) -> list[Tensor]:
        """What was summed, and the vectors, as integers."""
        kinds = [each + [tensor for *_, tensor in found] for each, found in ((self.summed, self.found), ([], self.vectors))]
        return [torch.cat(tensors).view(INTEGERS[tensors[0].itemsize]) for tensors in kinds if tensors]

    def _sum_up(self) -> None:
        """What is in `found` and `vectors`."""
        self.found += [(name, probe, self._sums(vector, probe)) for name, probe, vector in self.vectors]
        self.vectors.clear()
        if self.found:
            names, probes, sums = zip(*self.found, strict=True)
            for name, probe in zip(names, probes, strict=True):
                self.num_elements[name] += probe.place[1] * probe.width
            mixed = torch.cat(sums).mul_(FIRST)
            mixed ^= (mixed >> 32) & 0xFFFFFFFF
            mixed *= torch.cat([_weights_of_blocks(probe.place, mixed.device) for probe in probes])
            ends = _numbers(tuple(accumulate(probe.size[0] for probe in probes)), mixed.device) - 1
            sums = mixed.cumsum(0)[ends].diff(prepend=mixed.new_zeros(1))
            places = _numbers(tuple(self.bits[name] for name in names), mixed.device)
            self.summed = [sum(self.summed, mixed.new_zeros(len(self.bits))).index_add_(0, places, sums)]
            self.found.clear()
            self.num_blocks = 0

    def add_product(self, name: str, values: Tensor, num_elements: int, *, row: int = 0) -> None:
        """values [R]: R rows of W x from `row` on, or the part of them to which `num_elements` of W contribute."""
        self.products[name].append((row, values))
        self.num_multiplied[name] += num_elements

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of it as [names, 2] int64 of sum and number of elements, and [rows] float64: those of several ranks add up."""
        self._sum_up()
        sums = torch.zeros(len(self.bits) + len(self.products), dtype=torch.int64, device=device)
        for summed in self.summed:
            sums[: len(self.bits)] = summed
        counts = _numbers((*self.num_elements.values(), *self.num_multiplied.values()), device)
        whole = []
        for name, parts in self.products.items():
            whole.append(torch.zeros(self.shapes[name][0], dtype=torch.float64, device=device))
            for row, values in parts:
                whole[-1][row : row + len(values)] += values
        table = torch.stack([sums, counts], dim=1)
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
        found += [name for name, times, in_engine, streamed in each
                  if not ((in_engine - times * streamed).abs() <= times * self._tolerance(name, streamed)).all()]
        return list(dict.fromkeys(found))

    def _tolerance(self, name: str, values: Tensor) -> Tensor:
        """Of the kernels' sums in float32, in any order, and of results in the engine's dtype."""
        walk = STEPS * math.sqrt(self.shapes[name][-1]) * 2.0**-24
        return (walk + torch.finfo(self.dtype).eps) * values.abs().max()


@dataclass(frozen=True, slots=True)
class WeightProbe:
    """Some rows of a slice of a weight, of `width` elements, read as blocks of words of so many bytes."""

    rows: slice
    width: int
    word: int
    size: tuple[int, int]
    """[blocks, words in each]."""
    start: int
    """Words before the first block."""
    place: tuple[int, int, int, int]
    """In the full tensor: the first row and how many, the first block of a row and how many."""


@lru_cache(maxsize=4096)
def _weight_probe(
    shape: torch.Size, piece: torch.Size, place: tuple[int, int], dtype: torch.dtype, slices: int, round: int | None
) -> WeightProbe | None:
    """Return the probe, in that round, of a piece that begins at that row and column of a tensor that `slices` ranks may cut."""
    shape, piece = (each or torch.Size([1]) for each in (shape, piece))
    (row, column), columns, width = place, shape[-1], piece[-1]
    if len(shape) == 1:
        columns = width = OF_VECTOR if columns % (OF_VECTOR * slices) == 0 else 1
        row, apart = divmod(row, width)
        if apart or piece[0] % width:
            raise ValueError(f"a vector of {shape[0]} is cut at no multiple of {width}: only --no_verify_weight_sync helps")
    start, stop = _run(shape.numel() // columns, None if len(shape) == 1 else round)
    first, last = max(start - row, 0), min(stop - row, piece.numel() // width)
    if first >= last:
        return None
    size = dtype.itemsize
    word = 8 if columns * size % (8 * slices) == 0 else size
    in_row = columns * size // word
    block = math.gcd(in_row // slices, WORDS) if in_row % slices == 0 else 1
    count = width * size // word // block
    place = row + first, last - first, column * size // word // block, count
    return WeightProbe(slice(first, last), width, word, ((last - first) * count, block), first * count * block, place)


def _run(num_rows: int, round: int | None) -> tuple[int, int]:
    """Return where the rows of a round begin and end."""
    if round is None or num_rows < ROUNDS:
        return 0, num_rows
    run = round * STEP % ROUNDS
    return run * num_rows // ROUNDS, (run + 1) * num_rows // ROUNDS


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


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
def _weights_of_blocks(place: tuple[int, int, int, int], device: torch.device) -> Tensor:
    row, num_rows, first, count = place
    return (weights(row, num_rows, device)[:, None] * weights(first, count, device, salt=1)).flatten()


@lru_cache(maxsize=512)
def weights(start: int, count: int, device: torch.device, salt: int = 0) -> Tensor:
    """Odd numbers that look random, a different one for each place from `start` on: [count] int64."""
    x = (torch.arange(start, start + count, device=device) + (salt << 48)) * FIRST
    x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) * SECOND
    return (x ^ ((x >> 29) & 0x7FFFFFFFF)) | 1
