"""Collect the metrics of each micro-batch."""

import torch
from torch import Tensor

from lightrft.core.losses import Report, Weighted
from lightrft.models.parallel.collectives import Axis


class MicroBatchReports:
    """One number per micro-batch and metric, on the device until they are gathered."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Tensor]] = []

    def add(self, report: Report, weight: Tensor) -> None:
        """Add the reports of a micro-batch, and the sum of `weight` as `tokens`.

        Values are averaged over `weight`; for names in `_max` and `_min` the extreme counts.
        """
        total = weight.sum(dtype=torch.float32)
        row = {"tokens": total}
        for name, entry in report.items():
            values, weights = entry if isinstance(entry, Weighted) else (entry, weight)
            values = values.detach().float()
            if name.endswith("_max"):
                row[name] = values.masked_fill(weights == 0, -torch.inf).amax()
            elif name.endswith("_min"):
                row[name] = values.masked_fill(weights == 0, torch.inf).amin()
            else:
                row[name] = values.masked_fill(weights == 0, 0.0).mul(weights).sum() / weights.sum(
                    dtype=torch.float32
                )

        self._rows.append(row)

    def gather(self, axis: Axis) -> dict[str, list[float]]:
        """Return name -> the numbers of all ranks' micro-batches, in rank order.

        Micro-batches without a learned token are left out.
        """
        names = list(self._rows[0])
        rows = torch.stack(
            [torch.stack([row[name] for name in names]) for row in self._rows]
        ).tolist()
        all_rows = [
            row for rank in axis.gather([row for row in rows if row[0] > 0]) for row in rank
        ]
        return {name: [row[column] for row in all_rows] for column, name in enumerate(names)}
