"""Keep samples in a TransferQueue, an external table on a Ray cluster (arXiv 2507.01663).

It is for pipelines where other programs read or write a step's samples too. Ranks that move samples
only among themselves need no such service: MemoryStore sends each value once.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import count
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightrft.models.parallel.collectives import Axis
from lightrft.strategy.batching.sample_store import (
    Column,
    MemoryStore,
    SampleRows,
    check_owners,
    pack_columns,
    packed_size,
    unpack_columns,
)

_numbers = count()
"""Numbers of the stores. All ranks build them together, so they count alike."""


class TransferQueueStore(MemoryStore):
    """Store that keeps the values in the queue.

    A move only changes who reads the values, and only leaders read and write. Each store is a
    partition of the queue, with the ids as keys.
    """

    is_outside = True

    def __init__(self, data: Axis, replica: Axis, world: Axis):
        """Connect to the queue; if there is none, `world`'s rank 0 starts one at the first call."""
        super().__init__(data, replica)
        self._queue, run = _start(world)
        self._partition = f"lightrft/{run}/{next(_numbers)}"
        self._local_ids: dict[str, set[int]] = {}

    def put(
        self, ids: Tensor, lengths: Tensor, **columns: Mapping[str, Tensor | list[Any]] | None
    ) -> None:
        super().put(ids, lengths, **columns)
        names = [name for named in columns.values() for name in named or ()]
        written = {name: self._columns[name] for name in names if name not in self._objects}
        if self.leads and len(ids):
            from tensordict import TensorDict

            fields = {name: _field(column.select(ids)) for name, column in written.items()}
            keys = [str(row) for row in ids.tolist()]
            self._queue.kv_batch_put(keys, self._partition, TensorDict(fields, batch_size=len(ids)))
        # The values are in the queue now; only the types stay here.
        for name, column in written.items():
            self._columns[name] = column.select(ids[:0])
            self._local_ids.setdefault(name, set()).update(ids.tolist() if self.leads else ())

    def move(
        self, owners: Sequence[Sequence[int]], fields: Sequence[str] | None = None
    ) -> SampleRows:
        if self._known is None:
            raise RuntimeError("move() needs the metadata of all rows: call rows() first")

        check_owners(self._known.ids, owners)
        after = self._known = self._known.held_by(owners)
        self.data.barrier()  # nobody may read before everybody has put
        for name in [name for name in self._objects if fields is None or name in fields]:
            self._objects[name] = self._exchanged_objects(self._objects[name], after)
        local = after.select(after.ranks == self.data.rank)
        self._lengths = Column.of_rows(local.ids, local.lengths)
        for name in [name for name in self._local_ids if fields is None or name in fields]:
            self._local_ids[name] = set(local.ids.tolist())

        return after

    def get(
        self, ids: Sequence[int] | Tensor, fields: Sequence[str] | None = None
    ) -> dict[str, Any]:
        ids = torch.as_tensor(ids, dtype=torch.int64)
        names = [*self._columns, *self._objects] if fields is None else list(fields)
        types = {name: self._columns[name] for name in names if name in self._columns}
        for name in names:
            if absent := set(ids.tolist()) - self.produced_ids(name):
                raise LookupError(f"sample {min(absent)} has no {name!r} on this rank")
        rows = SampleRows(ids, self._values("lengths", ids), torch.zeros_like(ids))
        objects = {name: self._values(name, ids) for name in names if name in self._objects}
        return objects | self._read(types, rows) | {"lengths": rows.lengths}

    def _read(self, types: dict[str, Column], rows: SampleRows) -> dict[str, Tensor]:
        """Read fields on the leader, and send them to the rest of the replica in one buffer."""
        order = dict(sorted(types.items(), key=lambda item: -item[1].values.itemsize))
        if not len(rows) or not order:
            return {name: column.values[:0] for name, column in types.items()}

        if self.leads:
            keys = [str(row) for row in rows.ids.tolist()]
            table = self._queue.kv_batch_get(keys, self._partition, list(order))
            values = [
                torch.cat(list(table[name].unbind())) if like.per_token else table[name]
                for name, like in order.items()
            ]
            columns = [
                Column(like.per_token, rows.ids, rows.lengths, tensor.to(like.values.dtype))
                for tensor, like in zip(values, order.values(), strict=True)
            ]
            flat = pack_columns(columns)
        else:
            flat = torch.empty(packed_size(list(order.values()), rows), dtype=torch.uint8)

        columns = unpack_columns(self.replica.broadcast_tensor(flat), order, rows)
        return {name: column.values for name, column in columns.items()}

    def produced_ids(self, name: str) -> set[int]:
        return self._local_ids[name] if name in self._local_ids else super().produced_ids(name)

    def clear(self, ids: Collection[int]) -> None:
        if self.leads and ids:
            self._queue.kv_clear([str(row) for row in ids], self._partition)
        super().clear(ids)
        for local_ids in self._local_ids.values():
            local_ids -= set(ids)


def _field(column: Column) -> Tensor:
    """Return a jagged tensor, or a plain one with a value for each row."""
    if not column.per_token:
        return column.values
    return torch.nested.as_nested_tensor(
        list(column.values.split(column.lengths.tolist())), layout=torch.jagged
    )


@cache
def _start(world: Axis) -> tuple[ModuleType, str]:
    """Connect this process to Ray and the queue; return the queue's module and a name of this run.

    RAY_ADDRESS names a cluster. Without it rank 0 starts one on its node, and all ranks must be
    able to reach that node.
    """
    address = os.environ.get("RAY_ADDRESS")
    run, token = world.broadcast(
        # All ranks need the same token, or the cluster refuses them.
        (os.urandom(8).hex(), os.environ.get("RAY_AUTH_TOKEN") or os.urandom(32).hex())
    )
    if not address:  # Ray reads these at its import
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        # Otherwise Ray makes the queue's processes yield to the ranks, which wait for them.
        os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    import transfer_queue

    options = {"log_to_driver": False, "configure_logging": False}
    if world.rank == 0:
        new = (
            {} if address else {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, 8)}
        )
        address = ray.init(address=address, **options, **new).address_info["gcs_address"]
        transfer_queue.init()
    address = world.broadcast(address)
    if world.rank != 0:
        ray.init(address=address, **options)
        transfer_queue.init()
    return transfer_queue, run
