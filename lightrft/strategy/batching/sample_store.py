"""Keep the samples of a step as columns under ids, and move them between ranks.

Rows have different lengths, and nothing is padded: a column has one value for each token or one for
each sample, end to end. The ranks of one data replica compute the same samples. Only the first of
them, the leader, writes and moves; it sends what it has received to the others in one buffer.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.core.batch import token_index
from lightrft.models.parallel.collectives import Axis

BUFFER_ALIGNMENT = 8
"""Each piece of a buffer begins at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Facts about all ranks' rows: enough to plan and select without the values."""

    ids: Tensor  # [N] int64
    lengths: Tensor  # [N] int64, tokens
    ranks: Tensor  # [N] int64, data rank that holds the row
    tags: Mapping[str, Tensor] = field(default_factory=dict)  # [N, ...] int64 each

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, indices: Tensor | Sequence[int] | slice) -> Self:
        """Return the rows at these indices, in this order. A mask [N] bool selects too."""
        if isinstance(indices, Sequence):
            indices = torch.tensor(indices, dtype=torch.int64)
        tags = {name: values[indices] for name, values in self.tags.items()}
        return type(self)(self.ids[indices], self.lengths[indices], self.ranks[indices], tags)

    def held_by(self, owners: Sequence[Sequence[int]]) -> Self:
        """Return the rows after a move, in the order of the lists of ids."""
        index_of = {row: index for index, row in enumerate(self.ids.tolist())}
        rows = self.select([index_of[row] for ids in owners for row in ids])
        counts = torch.tensor([len(ids) for ids in owners])
        return replace(rows, ranks=torch.repeat_interleave(counts))


@dataclass(slots=True)
class Column:
    """Values of some rows, end to end: one for each token, or one for each row."""

    per_token: bool
    ids: Tensor  # [n] int64
    lengths: Tensor  # [n] int64, values of each row: 1 if not per token
    values: Tensor  # [sum of lengths, ...]

    @classmethod
    def of_rows(cls, ids: Tensor, values: Tensor) -> Self:
        """Build a column with one value for each row."""
        return cls(False, ids, torch.ones_like(ids), values)

    def select(self, ids: Tensor) -> "Column":
        """Return the rows with these ids, in this order; raises KeyError with an absent id."""
        if torch.equal(ids, self.ids):
            return self

        # Sorting once finds all rows without a Python loop over the rows.
        order = self.ids.argsort()
        found = torch.searchsorted(self.ids[order], ids).clamp(max=max(len(order) - 1, 0))
        rows = order[found] if len(order) else found

        absent = ids[self.ids[rows] != ids] if len(order) else ids
        if len(absent):
            raise KeyError(int(absent[0]))

        offsets = F.pad(self.lengths.cumsum(0), (1, 0))
        return Column(
            self.per_token, ids, self.lengths[rows], self.values[token_index(offsets, rows)]
        )

    def without(self, ids: Tensor) -> "Column":
        """Return the rows with other ids."""
        remaining = self.ids[~torch.isin(self.ids, ids)]
        if len(remaining):
            return self.select(remaining)
        return Column(self.per_token, remaining, self.lengths[:0], self.values[:0])

    def merge(self, other: "Column") -> "Column":
        """Return the rows of both; where ids agree, `other` wins."""
        before = self.without(other.ids) if len(self.ids) else self
        if not len(before.ids):
            return other
        return _concatenate([before, other])


class MemoryStore:
    """Columns of samples under ids, in the memory of the ranks.

    They are where they were put, or where a move has sent them. All ranks call every method, and
    the ranks of a replica pass the same arguments. A value counts as produced once it has been put.
    """

    is_outside = False
    """True if the values are outside of this program, where others may read them."""

    def __init__(self, data: Axis, replica: Axis):
        """Build an empty store.

        `replica` are the ranks that compute the same samples; only rank 0 among them writes.
        """
        self.data = data
        self.replica = replica
        self._columns: dict[str, Column] = {}
        self._objects: dict[str, dict[int, Any]] = {}
        self._lengths = Column.of_rows(*torch.zeros(2, 0, dtype=torch.int64))
        self._cleared: set[int] = set()
        self._known: SampleRows | None = None

    @property
    def leads(self) -> bool:
        """Return True on the rank that reads and writes for the whole replica."""
        return self.replica.rank == 0

    def put(
        self,
        ids: Tensor,
        lengths: Tensor,
        *,
        tokens: Mapping[str, Tensor] | None = None,
        sequences: Mapping[str, Tensor] | None = None,
        objects: Mapping[str, list[Any]] | None = None,
    ) -> None:
        """Write columns of rows `ids` [n] with `lengths` [n] that sum up to T.

        `tokens` are [T, ...] and `sequences` [n, ...]. `objects` are picklable, one for each row.
        Only the leader's values are written. Raises ValueError for columns of another size. After
        rows(), results can only be written back to rows that this rank holds. Raises LookupError
        for the id of another row then, and ValueError for another length.
        """
        columns = checked_columns(ids, lengths, tokens=tokens or {}, sequences=sequences or {})
        self._check_held(ids, lengths)
        if not self.leads:  # it will receive the values, and only keeps the types of the columns
            columns = {name: column.select(ids[:0]) for name, column in columns.items()}
            ids = ids[:0]
            lengths = lengths[:0]

        self._cleared -= set(ids.tolist())
        for name, values in (objects or {}).items():
            self._objects.setdefault(name, {}).update(zip(ids.tolist(), values, strict=False))
        self._lengths = self._lengths.merge(Column.of_rows(ids, lengths))

        for name, column in columns.items():
            self._columns[name] = (
                self._columns[name].merge(column) if name in self._columns else column
            )

    def _check_held(self, ids: Tensor, lengths: Tensor) -> None:
        """Raise an error for values of rows that this rank does not hold, or of another length."""
        if self._known is None:
            return

        local_rows = self._known.select(self._known.ranks == self.data.rank)
        try:
            expected = Column.of_rows(local_rows.ids, local_rows.lengths).select(ids).values
        except KeyError as error:
            raise LookupError(
                f"sample {error.args[0]} is not held by this rank, so nothing can be written back"
                " to it"
            ) from None

        if len(wrong := (expected != lengths).nonzero()[:, 0]):
            row = int(wrong[0])
            raise ValueError(
                f"sample {int(ids[row])} has {int(expected[row])} tokens, not {int(lengths[row])}"
            )

    def rows(self, tags: Mapping[str, Tensor] | None = None) -> SampleRows:
        """Return the metadata of all ranks' rows, with `tags` [n, ...] int64 of this rank's rows.

        It takes one collective over the data ranks and one broadcast in a replica. Raises
        ValueError on all ranks if the columns differ between them.
        """
        tags = tags or {}
        if self.leads:
            columns = [self._lengths.ids, self._lengths.values, *tags.values()]
            columns = [each.reshape(len(each), math.prod(each.shape[1:])) for each in columns]
            # The digest travels with the rows, so that disagreement costs no extra collective.
            digest = _digest(self._types())
            gathered, notes = self.data.gather_rows(torch.cat(columns, 1), note=digest)
            counts = torch.tensor([len(rows) for rows in gathered])
            table = torch.cat(gathered)
            problem = self._disagreement() if len(set(notes)) > 1 else ""
        else:
            counts = table = None
            problem = ""

        counts, table, problem = self.replica.broadcast((counts, table, problem))
        if problem:
            raise ValueError(problem)

        widths = [math.prod(values.shape[1:]) for values in tags.values()]
        columns = table[:, 2:].split(widths, 1) if tags else ()
        named = zip(tags, columns, strict=True)
        values = {name: values.reshape(-1, *tags[name].shape[1:]) for name, values in named}
        self._known = SampleRows(table[:, 0], table[:, 1], torch.repeat_interleave(counts), values)

        return self._known

    def _types(self) -> dict[str, str]:
        """Return, for each column, what must be the same on all ranks so that values can travel."""
        columns = {
            name: (
                f"{'token' if column.per_token else 'sample'}"
                f" {str(column.values.dtype).removeprefix('torch.')}"
                f" {list(column.values.shape[1:])}"
            )
            for name, column in sorted(self._columns.items())
        }
        return columns | dict.fromkeys(sorted(self._objects), "object")

    def _disagreement(self) -> str:
        """Describe the first column that differs between ranks; all ranks describe the same."""
        types_of_ranks = self.data.gather(self._types())
        for name in sorted(set().union(*types_of_ranks)):
            kinds = [types.get(name, "absent") for types in types_of_ranks]
            if len(set(kinds)) > 1:
                found = ", ".join(f"{kind} on data rank {rank}" for rank, kind in enumerate(kinds))
                return f"the ranks have different columns {name!r}: {found}"
        return "the ranks have different columns"

    def move(
        self, owners: Sequence[Sequence[int]], fields: Sequence[str] | None = None
    ) -> SampleRows:
        """Give each row to the data rank whose list has the id; return the new metadata.

        With `fields`, only these move. It takes one collective over the data ranks, for any number
        of fields, and one broadcast in a replica; objects take more. Raises ValueError on all ranks
        unless the lists contain every row exactly once.
        """
        if self._known is None:
            raise RuntimeError("move() needs the metadata of all rows: call rows() first")

        rows = self._known
        check_owners(rows.ids, owners)
        after = self._known = rows.held_by(owners)
        names = [name for name in self._columns if fields is None or name in fields]
        # Wide elements come first, so that each column in the buffer is aligned.
        names.sort(key=lambda name: -self._columns[name].values.itemsize)
        local_rows = after.select(after.ranks == self.data.rank)
        types = {name: self._columns[name] for name in names}
        columns = types
        if self.leads and self.data.size > 1:
            columns = self._exchange(rows, after, names)
        if self.replica.size > 1:
            columns = self._share(local_rows, types, columns)
        for name in [name for name in self._objects if fields is None or name in fields]:
            self._objects[name] = self._exchanged_objects(self._objects[name], after)
        for name in names:
            self._columns[name] = columns[name].select(local_rows.ids)

        self._lengths = Column.of_rows(local_rows.ids, local_rows.lengths)
        return after

    def _exchange(self, rows: SampleRows, after: SampleRows, names: list[str]) -> dict[str, Column]:
        """Send each row to the new rank; return the columns of the rows that arrive."""
        rank = self.data.rank
        size = self.data.size
        # All ranks know all rows, so they know the size of every share without asking.
        index_of = {row: index for index, row in enumerate(rows.ids.tolist())}
        source = rows.ranks[[index_of[row] for row in after.ids.tolist()]]
        sent = _split_by_rank(after.select(source == rank), after.ranks[source == rank], size)
        local = after.ranks == rank
        coming = _split_by_rank(after.select(local), source[local], size)
        types = {name: self._columns[name] for name in names}
        flat = torch.cat(
            [pack_columns([each.select(share.ids) for each in types.values()]) for share in sent]
        )
        sizes = [
            [packed_size(list(types.values()), share) for share in shares]
            for shares in (sent, coming)
        ]
        received = self.data.all_to_all(flat, sizes[0], sizes[1])
        buffers = zip(received.split(sizes[1]), coming, strict=True)
        arrived = [unpack_columns(buffer, types, share) for buffer, share in buffers]

        return {name: _concatenate([each[name] for each in arrived]) for name in names}

    def _share(
        self, rows: SampleRows, types: dict[str, Column], columns: dict[str, Column]
    ) -> dict[str, Column]:
        """Send the leader's rows to the rest of the replica, in one buffer of known size."""
        if self.leads:
            flat = pack_columns([column.select(rows.ids) for column in columns.values()])
        else:
            flat = torch.empty(packed_size(list(types.values()), rows), dtype=torch.uint8)
        return unpack_columns(self.replica.broadcast_tensor(flat), types, rows)

    def _exchanged_objects(self, values: dict[int, Any], after: SampleRows) -> dict[int, Any]:
        shares = [rows.ids.tolist() for rows in _split_by_rank(after, after.ranks, self.data.size)]
        if self.leads:
            sent = [{row: values[row] for row in share if row in values} for share in shares]
            values = {
                row: value
                for share in self.data.exchange_objects(sent)
                for row, value in share.items()
            }
        return self.replica.broadcast_tensors(values)

    def get(
        self, ids: Sequence[int] | Tensor, fields: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return columns of this rank's rows, in the order of `ids`, and the column `lengths`.

        Raises LookupError, with the field's name and the id, for a value that has not been produced
        or was cleared.
        """
        ids = torch.as_tensor(ids, dtype=torch.int64)
        names = [*self._columns, *self._objects] if fields is None else fields
        return {name: self._values(name, ids) for name in (*names, "lengths")}

    def _values(self, name: str, ids: Tensor) -> Any:
        try:
            if name in self._objects:
                return [self._objects[name][row] for row in ids.tolist()]
            column = self._lengths if name == "lengths" else self._columns[name]
            return column.select(ids).values
        except KeyError as error:
            if name in self._columns or name in self._objects or name == "lengths":
                missing = error.args[0]
            else:
                missing = int(ids[0])
            state = "was cleared" if missing in self._cleared else f"has no {name!r} on this rank"
            raise LookupError(f"sample {missing} {state}") from None

    def produced_ids(self, name: str) -> set[int]:
        """Return the ids of this rank's rows that have a value of this field."""
        if name in self._columns:
            return set(self._columns[name].ids.tolist())
        return set(self._objects.get(name, ()))

    def clear(self, ids: Collection[int]) -> None:
        """Forget rows; others may be written then, and rows() must come before the next move."""
        gone = torch.tensor(sorted(ids), dtype=torch.int64)
        self._lengths = self._lengths.without(gone)
        self._columns = {name: column.without(gone) for name, column in self._columns.items()}
        for values in self._objects.values():
            for row in ids:
                values.pop(row, None)
        self._cleared |= set(ids)
        self._known = None


def checked_columns(
    ids: Tensor, lengths: Tensor, *, tokens: Mapping[str, Tensor], sequences: Mapping[str, Tensor]
) -> dict[str, Column]:
    """Return columns of these rows; raises ValueError for repeated ids and for wrong sizes."""
    if len(lengths) != len(ids) or len(set(ids.tolist())) != len(ids):
        raise ValueError(
            f"{len(ids)} ids, {len(set(ids.tolist()))} of them different, come with {len(lengths)}"
            " lengths"
        )

    total = int(lengths.sum())
    # The store lives on the host, where moves and packing do not compete for device memory.
    columns = {}
    for name, values in tokens.items():
        if len(values) != total:
            raise ValueError(
                f"{name!r} has {len(values)} values for {total} tokens of {len(ids)} samples"
            )
        columns[name] = Column(True, ids, lengths, values.detach().cpu())

    for name, values in sequences.items():
        if len(values) != len(ids):
            raise ValueError(f"{name!r} has {len(values)} values for {len(ids)} samples")
        columns[name] = Column.of_rows(ids, values.detach().cpu())

    return columns


def _digest(types: Mapping[str, str]) -> int:
    """Hash the columns and the types of each to 63 bits, because an int64 travels."""
    digest = hashlib.blake2b(repr(sorted(types.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def check_owners(ids: Tensor, owners: Sequence[Sequence[int]]) -> None:
    """Raise ValueError, the same on all ranks, unless the lists contain every id exactly once."""
    named = [row for rows in owners for row in rows]
    if sorted(named) == sorted(ids.tolist()) and len(set(named)) == len(named):
        return
    holds = Counter(ids.tolist())
    names = Counter(named)
    row = min(row for row in holds | names if not holds[row] == names[row] == 1)
    times = f"is held {holds[row]} times and named {names[row]} times in the lists of owners"
    raise ValueError(f"row {row} {times}: it must be held by one rank and sent to one")


def pack_columns(columns: list[Column]) -> Tensor:
    """Pack columns, widest elements first, into [bytes] uint8, a multiple of BUFFER_ALIGNMENT."""
    flattened = [column.values.contiguous().flatten().view(torch.uint8) for column in columns]
    flat = torch.cat(flattened) if flattened else torch.empty(0, dtype=torch.uint8)
    return F.pad(flat, (0, -len(flat) % BUFFER_ALIGNMENT))


def packed_size(columns: list[Column], rows: SampleRows) -> int:
    """Return how many bytes these rows take in such columns."""
    num = {True: int(rows.lengths.sum()), False: len(rows)}
    size = sum(
        num[column.per_token] * math.prod(column.values.shape[1:]) * column.values.itemsize
        for column in columns
    )
    return size + -size % BUFFER_ALIGNMENT


def unpack_columns(
    flat: Tensor, types: Mapping[str, Column], rows: SampleRows
) -> dict[str, Column]:
    """Return the columns of these rows from pack_columns()."""
    start = 0
    columns = {}
    for name, like in types.items():
        lengths = rows.lengths if like.per_token else torch.ones_like(rows.lengths)
        shape = int(lengths.sum()), *like.values.shape[1:]
        size = math.prod(shape) * like.values.itemsize
        values = flat[start : start + size].view(like.values.dtype).view(shape)
        columns[name] = Column(like.per_token, rows.ids, lengths, values)
        start += size
    return columns


def _split_by_rank(rows: SampleRows, ranks: Tensor, size: int) -> list[SampleRows]:
    """Split rows by rank, keeping the order; `ranks` [n] has the rank of each row."""
    order = ranks.argsort(stable=True)
    counts = ranks.bincount(minlength=size)
    return [rows.select(indices) for indices in order.split(counts.tolist())]


def _concatenate(columns: list[Column]) -> Column:
    names = ("ids", "lengths", "values")
    joined = (torch.cat([getattr(each, name) for each in columns]) for name in names)
    return Column(columns[0].per_token, *joined)
