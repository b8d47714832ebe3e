"""Measure the steps of a run: metrics, and the time and the memory of each phase.

Metrics are collected on the device, and reduced once over all ranks:

metrics.mean("train/kl", kl, weight=batch.loss_mask)     # per micro-batch, no host sync
metrics.max("engine/logprob_mismatch_max", gap, mask=batch.loss_mask)
row = metrics.reduce(mesh.data)  # once per row; the same dictionary on every rank
"""

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

GB = 1e9
"""Bytes of a gigabyte, in every message and metric."""
Number = float | int
Row = tuple[float, float, float]
"""Values of one metric on one rank: weight, value, spread. See `_fold` for what they mean."""


class Gathers(Protocol):
    """The collectives of a mesh axis that metrics need."""

    def gather(self, value: Any) -> list[Any]: ...


class Metrics:
    """Collects metrics that are the same for any division into ranks and micro-batches.

    Elements of weight 0 contribute nothing, whatever their value. A metric of total weight 0 is
    left out of the result. Each call keeps three numbers on the values' device. They are summed in
    the values' precision (at least float32) within a call, and in float64 over calls and ranks.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def mean(
        self, name: str, values: Tensor | Number, weight: Tensor | Number | None = None
    ) -> None:
        """Add to the weighted mean of all elements.

        `values` may have any shape; `weight` has the same shape (bool for a mask) or is a number.
        """
        if not isinstance(values, Tensor) and not isinstance(weight, Tensor):
            total = 1.0 if weight is None else float(weight)
            self._append("mean", name, total, float(values) * total if total else 0.0)
            return
        values, weight = _weigh(name, values, weight)
        self._append("mean", name, weight.sum(), (values * weight).sum())

    def std(
        self, name: str, values: Tensor | Number, weight: Tensor | Number | None = None
    ) -> None:
        """Add to the standard deviation of a population: divided by the weight, not by one less."""
        values, weight = _weigh(name, values, weight)
        total = weight.sum()
        value = (values * weight).sum()
        center = value / total.clamp_min(torch.finfo(weight.dtype).tiny)
        self._append("std", name, total, value, ((values - center).square() * weight).sum())

    def sum(self, name: str, values: Tensor | Number) -> None:
        """Add to the sum of all elements; an empty sum is 0."""
        if not isinstance(values, Tensor):
            self._append("sum", name, 1.0, float(values))
            return
        values = _tensor(values)
        self._append("sum", name, values.new_ones(()), values.sum())

    def max(self, name: str, values: Tensor | Number, mask: Tensor | None = None) -> None:
        """Take the largest element where the bool `mask` of the same shape is set."""
        self._extreme("max", name, values, mask, empty=-math.inf)

    def min(self, name: str, values: Tensor | Number, mask: Tensor | None = None) -> None:
        """Take the smallest element where the bool `mask` of the same shape is set."""
        self._extreme("min", name, values, mask, empty=math.inf)

    def reduce(self, axis: Gathers) -> dict[str, float]:
        """Return the metrics over all ranks of the axis, and clear them for the next step.

        Every rank of the axis must call it; ranks may have different metrics. It takes one transfer
        from the device and one gather, whatever the number of metrics.
        """
        gathered = axis.gather(self._local())
        self.clear()

        kinds: dict[str, str] = {}
        rows: dict[str, list[Row]] = {}
        # A name with two kinds would give a number that means nothing.
        for rank, local in enumerate(gathered):
            for name, (kind, row) in local.items():
                if kinds.setdefault(name, kind) != kind:
                    raise ValueError(
                        f"metric {name!r} is a {kinds[name]} on some ranks and a {kind} on rank"
                        f" {rank}"
                    )
                rows.setdefault(name, []).append(row)

        folded = {name: _fold(kinds[name], rows[name]) for name in rows}
        return {name: _result(kinds[name], row) for name, row in folded.items() if row[0] > 0}

    def clear(self) -> None:
        self._kinds = {}
        self._rows = {}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's numbers on the host, each as it was added.

        Sums are thereby the same to the last bit after a resumption.
        """
        rows = {name: [row.to("cpu") for row in values] for name, values in self._rows.items()}
        return {"kinds": dict(self._kinds), "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add numbers of another time or rank to the present ones."""
        for name, rows in state["rows"].items():
            self._kinds[name] = state["kinds"][name]
            self._rows.setdefault(name, []).extend(rows)

    def _local(self) -> dict[str, tuple[str, Row]]:
        """Return this rank's share, folded to one row per metric."""
        if not self._rows:
            return {}

        devices = {row.device for rows in self._rows.values() for row in rows}
        host = {}
        for device in devices:  # one transfer each: numbers can be on the accelerator or the host
            rows = [row for values in self._rows.values() for row in values if row.device == device]
            host[device] = iter(torch.stack(rows).to("cpu", torch.float64).tolist())

        return {
            name: (kind, _fold(kind, [next(host[row.device]) for row in self._rows[name]]))
            for name, kind in self._kinds.items()
        }

    def _extreme(
        self, kind: str, name: str, values: Tensor | Number, mask: Tensor | None, empty: float
    ) -> None:
        if mask is None and not isinstance(values, Tensor):
            self._append(kind, name, 1.0, float(values))
            return
        values = _tensor(values)
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        assert mask.shape == values.shape, (
            f"metric {name!r}: mask {tuple(mask.shape)} for values {tuple(values.shape)}"
        )
        if values.numel():
            values = values.where(mask, empty)
            self._append(kind, name, mask.any(), values.amax() if kind == "max" else values.amin())

    def _append(
        self,
        kind: str,
        name: str,
        weight: Tensor | float,
        value: Tensor | float,
        spread: Tensor | None = None,
    ) -> None:
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"metric {name!r} is a {self._kinds[name]} and cannot be a {kind} too")
        # Most metrics of a step are numbers, and each call of torch takes microseconds.
        if isinstance(value, Tensor):
            spread = value.new_zeros(()) if spread is None else spread
            row = torch.stack([torch.as_tensor(weight, dtype=value.dtype), value, spread])
        else:
            row = torch.tensor([weight, value, 0.0], dtype=torch.float64)
        self._rows.setdefault(name, []).append(row)


def _tensor(values: Tensor | Number) -> Tensor:
    """Convert to a tensor: numbers are float64 on the host, and tensors at least float32."""
    if isinstance(values, Tensor):
        return values.detach().to(torch.promote_types(values.dtype, torch.float32))
    return torch.tensor(float(values), dtype=torch.float64)


def _weigh(
    name: str, values: Tensor | Number, weight: Tensor | Number | None
) -> tuple[Tensor, Tensor]:
    """Return values and weights of one shape.

    Elements without weight become 0, so that a masked infinity cannot turn into NaN.
    """
    # This is for a number whose weight, such as a count, is on the device.
    if isinstance(weight, Tensor) and not isinstance(values, Tensor):
        values = torch.full((), values, dtype=torch.float32, device=weight.device)
    values = _tensor(values)
    if not isinstance(weight, Tensor):
        weight = torch.full_like(values, 1.0 if weight is None else weight)
    weight = weight.detach().to(values.dtype)
    assert weight.shape == values.shape, (
        f"metric {name!r}: weight {tuple(weight.shape)} for values {tuple(values.shape)}"
    )
    return values.where(weight != 0, 0.0), weight


def _fold(kind: str, rows: Iterable[Sequence[float]]) -> Row:
    """Fold many rows into one.

    mean, std: sum of weights, sum of weighted values, weighted squared distance from the row's own
    mean. sum, max, min: 1 if there is any value, the value, unused.
    """
    rows = [row for row in rows if row[0] > 0]
    if not rows:
        return 0.0, 0.0, 0.0

    weights, values, spreads = zip(*rows, strict=True)
    if kind in ("max", "min"):
        extreme = max(values) if kind == "max" else min(values)
        return 1.0, math.nan if any(map(math.isnan, values)) else extreme, 0.0

    weight = sum(weights)
    value = sum(values)
    spread = sum(spreads)
    # Chan's formula is exact, where E[x^2] - E[x]^2 loses all digits of a small spread.
    if kind == "std":
        spread += sum(w * (v / w - value / weight) ** 2 for w, v, _ in rows)

    return weight, value, spread


def _result(kind: str, row: Row) -> float:
    weight, value, spread = row
    if kind == "std":
        return math.sqrt(spread / weight)
    return value / weight if kind == "mean" else value


# -- the time and the memory of a step


class Span(NamedTuple):
    """Phase of a rank from one time to another, both in seconds since the epoch."""

    name: str
    began: float
    ended: float
    idle: bool = False
    """True if the device had nothing to do."""
    track: str = ""
    """Track of the timeline for the span, beside the phases of the rank. Spans of a track may
    overlap."""


class Untraced:
    """A trace that measures nothing, for objects without a trainer."""

    def phase(self, name: str, *, idle: bool = False) -> AbstractContextManager[None]:
        """Return a context for the enclosed code."""
        return nullcontext()

    def record(self, track: str, name: str, began: float) -> None:
        """Ignore what ends now."""


@dataclass(eq=False, kw_only=True)
class Trace(Untraced):
    """Measures the wall-clock seconds of each phase of a step, and the memory.

        trace = Trace(peak_memory=..., memory_in_use=..., synchronize=...)
        with trace.phase("generate"):
            with trace.phase("weight_sync"): ...  # time/generate/weight_sync, in time/generate too
        for name, value in trace.step().items():
            metrics.mean(name, value)

    A nested phase is named by the path to it, and the outer phase contains the time. The phases
    without a further slash add up to at most `time/step`. `time/idle_share` is the share of the
    step in phases that leave the device idle.
    """

    peak_memory: Callable[[], int]
    """Returns the largest number of bytes so far."""
    memory_in_use: Callable[[], int]
    """Returns the present number of bytes."""
    synchronize: Callable[[], None] = lambda: None
    """Waits for the device, so that a phase includes the kernels that it launched."""
    on_phase: Sequence[Callable[[str], None]] = ()
    """Functions that get the path of each phase that begins, or "" between phases."""

    def __post_init__(self) -> None:
        self.current = ""
        """Path of the current phase, such as `generate/weight_sync`, or ""."""
        self.began = time.perf_counter()
        """When the newest phase began."""
        self.failed = ""
        """Path of the innermost phase that an exception left; empty if there was none."""
        self._seconds: dict[str, float] = {}
        self._idle_seconds = 0.0
        self._spans: list[Span] = []
        self._step_began = time.perf_counter()
        self._epoch = time.time() - self._step_began

    @contextmanager
    def phase(self, name: str, *, idle: bool = False) -> Generator[None]:
        """Measure the enclosed code as this phase; repeated phases of a step add up.

        `idle`: the device has nothing to do meanwhile. An idle phase contains no other one.
        """
        outer = self.current
        path = self.current = f"{outer}/{name}" if outer else name
        for callback in self.on_phase:
            callback(path)

        began = self.began = time.perf_counter()
        try:
            yield
            self.synchronize()
        except BaseException:
            # The innermost phase gets here first, and that is the one to report.
            self.failed = self.failed or path
            raise
        finally:
            ended = time.perf_counter()
            self._seconds[path] = self._seconds.get(path, 0.0) + ended - began
            self._idle_seconds += idle * (ended - began)
            self._spans.append(Span(path, self._epoch + began, self._epoch + ended, idle))
            self.current = outer

        for callback in self.on_phase:
            callback(outer)

    def record(self, track: str, name: str, began: float) -> None:
        """Add what ends now to another track; any thread may call it.

        `began` is in seconds of time.perf_counter().
        """
        self._spans.append(
            Span(name, self._epoch + began, self._epoch + time.perf_counter(), track=track)
        )

    def take_spans(self) -> list[Span]:
        """Return what was recorded since the last call."""
        spans = self._spans
        self._spans = []
        return spans

    def step(self) -> dict[str, float]:
        """Return times and memory since the last call.

        The row has `time/<phase>` and `time/step` in seconds, `time/idle_share`, and
        `memory/peak_gb` and `memory/now_gb` in 1e9 bytes.
        """
        assert not self.current, f"a step ended within the phase {self.current!r}"
        now = time.perf_counter()
        row = {f"time/{path}": seconds for path, seconds in self._seconds.items()}
        row["time/step"] = now - self._step_began
        row["time/idle_share"] = self._idle_seconds / row["time/step"]
        row["memory/peak_gb"] = self.peak_memory() / GB
        row["memory/now_gb"] = self.memory_in_use() / GB
        self._seconds = {}
        self._idle_seconds = 0.0
        self._step_began = now

        return row
