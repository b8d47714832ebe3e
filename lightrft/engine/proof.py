"""Proof of delivery: fingerprints of what was streamed and of what the engine computes with, compared after every stream.

There are two kinds. One sums the raw bits of a weight, modulo 2^64, each block of them mixed and weighted by its place: any one
changed element, and anything that lies elsewhere, changes it. It needs the weight itself. Where an engine keeps nothing but a
form that its kernels like, W x is compared instead, with x of random signs, up to what rounding explains.
Fingerprints of pieces add up, so it does not matter how an engine fuses, cuts and repeats weights.
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
STEPS = 64
"""Rounding in a sum of K signed terms is a random walk of about sqrt(K) 2^-24 |W x|: so many times that is allowed."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd, with bits that look random: what is multiplied with them spreads to the left."""


class Fingerprints:
    """Of tensors by name, in the dtype in which they are compared: of whole ones, or of pieces, which add up to copies of them.

    `slices` is the number of ranks that cut a row. Names in `products` are compared by W x, those in `bits` (None: all) by
    their bits, some by both: an embedding in which an engine looks up, and with which, tied, it multiplies in another form.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, *, slices: int = 1,
        bits: Collection[str] | None = None, products: Collection[str] = (),
    ):  # fmt: skip
        self.shapes, self.dtype, self.slices = shapes, dtype, slices
        self.bits: dict[str, list[Tensor]] = {name: [] for name in (shapes if bits is None else bits)}
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
        columns = self.shapes[name][-1] if len(self.shapes[name]) > 1 else 1
        rows = piece.reshape(-1, piece.shape[-1]) if len(self.shapes[name]) > 1 else piece.reshape(-1, 1)
        self.bits[name].append(bits(rows, self.dtype, place=(row, column), columns=columns, slices=self.slices))
        self.num_elements[name] += piece.numel()

    def add_product(self, name: str, values: Tensor, num_elements: int, *, row: int = 0) -> None:
        """values [R]: R rows of W x from `row` on, or the part of them to which `num_elements` of W contribute."""
        self.products[name].append((row, values))
        self.num_multiplied[name] += num_elements

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of it as [names, 2] int64 of sum and number of elements, and [rows] float64: those of several ranks add up."""
        zero = torch.zeros((), dtype=torch.int64, device=device)
        sums = [sum(parts, zero) for parts in self.bits.values()] + [zero] * len(self.products)
        counts = [*self.num_elements.values(), *self.num_multiplied.values()]
        whole = []
        for name, parts in self.products.items():
            whole.append(torch.zeros(self.shapes[name][0], dtype=torch.float64, device=device))
            for row, values in parts:
                whole[-1][row : row + len(values)] += values
        table = torch.stack([torch.stack(sums), torch.tensor(counts, device=device)], dim=1)
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


@torch.no_grad()
def bits(rows: Tensor, dtype: torch.dtype, *, place: tuple[int, int], columns: int, slices: int) -> Tensor:
    """Of `rows` [R, C], which begin at `place` of a tensor with `columns` columns, cut into `slices` or not: [] int64."""
    size = dtype.itemsize
    word = 8 if columns * size % (8 * slices) == 0 else size
    in_row = columns * size // word
    block = math.gcd(in_row // slices, WORDS) if in_row % slices == 0 else 1
    of_blocks = weights(place[1] * size // word // block, rows.shape[1] * size // word // block, rows.device, salt=1)
    of_rows = weights(place[0], len(rows), rows.device)
    total, done = torch.zeros((), dtype=torch.int64, device=rows.device), 0
    for chunk in rows.split(max(1, CHUNK_BYTES // (columns * size))):
        sums = _words(chunk.to(dtype), word).view(len(chunk), len(of_blocks), block).sum(-1) * FIRST
        sums ^= (sums >> 32) & 0xFFFFFFFF
        total += (sums.mul_(of_blocks).sum(1) * of_rows[done : done + len(chunk)]).sum()
        done += len(chunk)
    return total


@torch.no_grad()
def product(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """matrix [R, K], cast to `dtype`, times the signs of its columns, in float32: [R] float64."""
    x = signs(0, matrix.shape[1], matrix.device)
    chunks = matrix.split(max(1, CHUNK_BYTES // (matrix.shape[1] * matrix.itemsize)))
    return torch.cat([chunk.to(dtype).float() @ x for chunk in chunks]).double()


def signs(start: int, count: int, device: torch.device) -> Tensor:
    """The x of W x from column `start` on: [count] float32 of 1 and -1."""
    return 1 - 2 * ((weights(start, count, device, salt=2) >> 40) & 1).float()


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
