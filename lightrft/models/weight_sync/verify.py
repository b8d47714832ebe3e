"""Verify a weight sync: compare fingerprints of the streamed weights with the engine's weights.

Fingerprints of pieces add up, so it does not matter how an engine fuses, splits and repeats
weights. There are two verifications:

- A full one follows the first sync of an engine, every FULL_EVERY-th one, and one after a failed
  sync. It sums words of four bytes of each weight, multiplied by a random odd number for the row
  and one for the position in the row, modulo 2^64. A single changed bit always changes the sum.
  Anything else does too, except with a chance of about 2^-32: a weight that is missing, stale or
  another one, and rows, columns or elements that lie elsewhere. It reads all weights at both ends,
  and takes longer than copying them.
- A sample follows each other sync. It sums the bits of every FULL_EVERY-th row, and the next round
  begins one row later. Vectors, and weights with fewer rows, are summed completely. It finds at
  once a weight that is missing or stale, or that arrived under another name. It also finds at once
  a slice of a weight, such as the shard of a rank, that is so and has at least FULL_EVERY rows. One
  wrong element is found if the row is in the sample, thus within FULL_EVERY syncs if it stays
  wrong. What was moved within the sample is left to the next full verification.

If an engine keeps weights only in a packed form for the kernels, the products W x with random signs
x are compared instead, up to rounding errors. A full verification computes them for all layers, and
a sample for every PRODUCT_ROUNDS-th layer, so an error there is found within PRODUCT_ROUNDS syncs
if it stays. A weight that is wrong where no verification looked, and is correct after the next
sync, is never found.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.dtensor_slices import shard_slices
from lightrft.models.weight_sync.names import SCALE

CHUNK_BYTES = 4 * 2**20
"""Bytes of temporary tensors that are made of a weight at a time."""
FULL_EVERY = 128
"""Number of syncs of which one is verified fully; the samples of the others cover all rows."""
PRODUCT_ROUNDS = 64
"""Number of samples that together compute the products of every layer."""
WALK_FACTOR = 64
"""Factor of the tolerance.

Rounding in a sum of K signed terms is a random walk of about sqrt(K) 2^-24 |W x|.
"""


class Fingerprints:
    """Fingerprints of tensors by name, in the dtype of the comparison.

    They are of whole tensors, or of pieces that add up to copies. Names in `products` are compared
    by W x, names in `bits` (None: all) by their bits, some by both: an engine uses a tied embedding
    for lookups, and in packed form for products. `forms` has the function of each weight that the
    engine stores as a function of the streamed one: element by element, so that both ends have
    equal bits, and in float32. `round` is the number of the sample; None or 0 verifies everything.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        *,
        bits: Collection[str] | None = None,
        products: Collection[str] = (),
        forms: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
        round: int | None = None,
    ):
        self.shapes = shapes
        self.dtype = dtype
        self.forms = forms
        self.round = round
        self.bits = {name: index for index, name in enumerate(shapes if bits is None else bits)}
        self.sums: list[tuple[str, Tensor]] = []
        """Name and sum, [] int64, of each piece."""
        self.products: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in products}
        self.num_elements = dict.fromkeys(self.bits, 0)
        self.num_multiplied = dict.fromkeys(self.products, 0)
        self.divided: list[str] = []
        """Names that came as shards, one on each rank of the engine."""

    def add_sent(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of the stream: full, or the experts of this rank as a DTensor."""
        if isinstance(tensor, DTensor):
            self.divided.append(name)
            first = shard_slices(tensor)[0].local.start
            self.add(name, tensor.to_local(), row=first * tensor.shape[1])
            return
        if name in self.bits:
            form = self.forms.get(name)
            self.add(name, tensor if form is None else form(tensor))
        if name in self.products:
            self.add_product(name, product(tensor, self.dtype), tensor.numel())

    def add(self, name: str, piece: Tensor, *, row: int = 0, column: int = 0) -> None:
        """Add a piece that starts at this position of the full tensor.

        All dimensions but the last count as rows, and so does the only dimension of a vector.
        """
        if piece.ndim < 2:
            # A vector is one row, and a scalar is a vector of one element.
            rows = piece.detach().reshape(1, -1)
            row, column = 0, row
        else:
            rows = piece.detach().flatten(0, -2)

        shape = self.shapes[name]
        num_columns = shape[-1] if shape else 1
        num_rows = shape[:-1].numel()
        if self.round and num_rows >= FULL_EVERY:
            rows = rows[(self.round - row) % FULL_EVERY :: FULL_EVERY]
        if not rows.numel():
            return

        self.num_elements[name] += rows.numel()
        # Scales and what is computed of a weight are float32 in an engine of any dtype.
        single = name.endswith(SCALE) or name in self.forms
        dtype = torch.float32 if single else self.dtype
        if self.round:
            self.sums.append((name, _words(rows, column, dtype).sum()))
            return

        of_rows = random_odd_numbers(num_rows, 1, rows.device)[row:][: len(rows)]
        per_word = 4 // dtype.itemsize
        of_words = random_odd_numbers(-(-num_columns // per_word), 0, rows.device)
        of_words = of_words[column // per_word :]
        step = max(1, CHUNK_BYTES // (8 * rows.shape[1]))
        for chunk, factors in zip(rows.split(step), of_rows.split(step), strict=True):
            words = _words(chunk, column, dtype).long()
            total = (_weighted_sums(words, of_words[: words.shape[1]]) * factors).sum()
            self.sums.append((name, total))

    def add_product(self, name: str, values: Tensor, num_elements: int, *, row: int = 0) -> None:
        """Add values [R], R rows of W x from `row` on.

        They may be only the summand that `num_elements` elements of W contribute.
        """
        self.products[name].append((row, values))
        self.num_multiplied[name] += num_elements

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sums and numbers of elements, [names, 2] int64, and products, [rows] float64.

        Both add up over ranks.
        """
        sums = torch.zeros(len(self.bits) + len(self.products), dtype=torch.int64, device=device)
        if self.sums:
            names, values = zip(*self.sums, strict=True)
            indices = torch.tensor([self.bits[name] for name in names], device=device)
            sums.index_add_(0, indices, torch.stack(values).to(device))
        counts = [*self.num_elements.values(), *self.num_multiplied.values()]
        table = torch.stack([sums, torch.tensor(counts, dtype=torch.int64, device=device)], dim=1)

        products = [torch.zeros(0, dtype=torch.float64, device=device)]
        for name, pieces in self.products.items():
            products.append(torch.zeros(self.shapes[name][0], dtype=torch.float64, device=device))
            for row, values in pieces:
                products[-1][row : row + len(values)] += values

        return table, torch.cat(products)

    def wrong(self, engine_numbers: Sequence[Tensor], axis: Axis | None = None) -> list[str]:
        """Return the names whose numbers in the engine differ from the numbers here.

        The engine holds every element equally often. If a weight came divided, the ranks of the
        engine, `axis`, call this together.
        """
        sent, expected = self.numbers(engine_numbers[0].device)
        if self.divided:
            indices = [self.bits[name] for name in self.divided]
            sent[indices] = axis.sum(sent[indices])
        sent, expected = sent.cpu(), expected.cpu()
        table, values = (numbers.cpu() for numbers in engine_numbers)
        # An engine repeats heads when it has more ranks than heads, so its sums are a multiple.
        copies = torch.div(table[:, 1], sent[:, 1].clamp(min=1), rounding_mode="floor")
        fits = (copies[:, None] * sent == table).all(1) & ((copies > 0) | (sent[:, 1] == 0))
        judged = zip([*self.bits, *self.products], fits.tolist(), strict=True)
        names = [name for name, right in judged if not right]
        lengths = [self.shapes[name][0] for name in self.products]
        both = values.split(lengths), expected.split(lengths)
        products = zip(self.products, copies[len(self.bits) :], *both, strict=True)
        for name, times, in_engine, streamed in products:
            # Kernels sum in float32, in any order. The results are in the engine's dtype.
            walk = WALK_FACTOR * math.sqrt(self.shapes[name][-1]) * 2.0**-24
            tolerance = (walk + torch.finfo(self.dtype).eps) * streamed.abs().max()
            if not ((in_engine - times * streamed).abs() <= times * tolerance).all():
                names.append(name)

        return list(dict.fromkeys(names))


def _words(chunk: Tensor, column: int, dtype: torch.dtype) -> Tensor:
    """Read the bits of a chunk [R, K], in `dtype`, as words of four bytes.

    A word begins at each column of the full tensor that is a multiple of the elements of a word.
    Elements of a word that other pieces have count as zeros. Returns [R, words] int32. Words of
    eight bytes would lose the highest bit where an engine has an even number of copies.
    """
    per_word = 4 // dtype.itemsize
    before = column % per_word
    after = -(before + chunk.shape[1]) % per_word
    values = chunk.to(dtype)
    if before or after:
        values = F.pad(values, (before, after))
    elif values.storage_offset() % per_word or values.stride(0) % per_word or values.stride(1) != 1:
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.int32)


def _weighted_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each row of words [R, K] times factors [K], modulo 2^64: [R] int64."""
    # CUDA has no product of integer matrices; on a CPU it is several times as fast.
    if words.device.type == "cpu":
        return words.mv(factors)
    return (words * factors).sum(-1)


@torch.no_grad()
def destroy_weights(model: torch.nn.Module) -> None:
    """Write NaN to weights, so that none is used that a stream does not bring.

    One in each row of a matrix makes all of its products NaN.
    """
    for weight in model.parameters():
        if weight.is_floating_point():
            (weight if weight.dim() < 2 else weight[..., :1]).fill_(torch.nan)


def product(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrix [R, K] times the signs of the columns: [R] float64.

    It is cast to `dtype`, and multiplied in float32.
    """
    x = signs(matrix.shape[1], matrix.device)
    chunks = matrix.split(max(1, CHUNK_BYTES // (matrix.shape[1] * matrix.itemsize)))
    return torch.cat([chunk.to(dtype).float() @ x for chunk in chunks]).double()


@lru_cache(maxsize=16)
def signs(count: int, device: torch.device) -> Tensor:
    """Return the first entries of x in W x: [count] float32 of 1 and -1."""
    generator = torch.Generator().manual_seed(2)
    return 1 - 2 * torch.randint(2, (count,), generator=generator).float().to(device)


@lru_cache(maxsize=16)
def random_odd_numbers(count: int, seed: int, device: torch.device) -> Tensor:
    """Return factors for the positions of a full tensor: [count] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**63 - 1, (count,), generator=generator).to(device) | 1
