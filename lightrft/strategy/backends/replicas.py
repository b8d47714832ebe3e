"""Sum gradients over ranks that each have the whole model."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.models.parallel.collectives import Axis

GRADIENT_BUCKET = 32 * 2**20
"""Bytes of gradients that are summed together."""


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients are summed in one collective."""

    parameters: list[nn.Parameter]
    missing: set[nn.Parameter] = field(default_factory=set)
    """Parameters without a gradient so far."""
    flat: Tensor | None = None
    """[n + P] float32: all n elements of the gradients, and 1 or 0 for each of the P parameters
    that has a gradient or has none."""
    work: dist.Work | None = None

    def launch(self, axis: Axis) -> None:
        """Start the sum. A parameter without a gradient on this rank counts as zeros."""
        present = torch.ones(len(self.parameters), device=self.parameters[0].device)
        if self.missing:
            flags = [float(parameter not in self.missing) for parameter in self.parameters]
            present.copy_(torch.tensor(flags))
        gradients = [
            torch.zeros_like(parameter) if parameter in self.missing else parameter.grad
            for parameter in self.parameters
        ]
        self.flat = torch.cat([*(gradient.flatten() for gradient in gradients), present])
        self.work = dist.all_reduce(self.flat, group=axis.group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, and make each gradient a view of it.

        A parameter that has no gradient on any rank still has none.
        """
        self.work.wait()
        sizes = [each.numel() for each in self.parameters]
        *sums, present = self.flat.split([*sizes, len(sizes)])
        # Only a rank that lacks a gradient has to ask, and to wait for the device.
        nowhere = set()
        if self.missing:
            counts = zip(self.parameters, present.tolist(), strict=True)
            nowhere = {parameter for parameter, count in counts if count == 0}

        for parameter, total in zip(self.parameters, sums, strict=True):
            if parameter not in nowhere:
                parameter.grad = total.view_as(parameter)

        self.flat = self.work = None


class Replicas:
    """Sums the gradients of a module over the ranks of `axis` while the backward pass still runs.

    This is the scheme of DistributedDataParallel (arXiv 2006.15704): gradients are summed in
    buckets, in the reverse order of the parameters, because the last layers are done first. All
    ranks start the sums in the same order.
    """

    def __init__(self, module: nn.Module, axis: Axis, bucket: int = GRADIENT_BUCKET):
        """Assign the trained parameters to buckets of about `bucket` bytes."""
        self.axis = axis
        self.buckets: list[Bucket] = []
        self._of_parameter: dict[nn.Parameter, Bucket] = {}
        self._num_launched: int | None = None
        """Number of buckets whose sums have begun; None unless the last micro-batch runs."""

        size = bucket
        for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
            if size >= bucket:
                self.buckets.append(Bucket([]))
                size = 0
            self.buckets[-1].parameters.append(parameter)
            self._of_parameter[parameter] = self.buckets[-1]
            size += parameter.nbytes
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a micro-batch; with the last one, sum them over all ranks."""
        if not last:
            loss.backward()
            return

        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
        self._num_launched = 0
        loss.backward()

        # A parameter may have gradients of earlier micro-batches alone.
        for bucket in self.buckets:
            bucket.missing = {each for each in bucket.parameters if each.grad is None}
        self._launch(len(self.buckets))
        self._num_launched = None
        for bucket in self.buckets:
            bucket.finish()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._num_launched is None:
            return
        self._of_parameter[parameter].missing.discard(parameter)
        ready = self._num_launched
        while ready < len(self.buckets) and not self.buckets[ready].missing:
            ready += 1
        self._launch(ready)

    def _launch(self, end: int) -> None:
        for bucket in self.buckets[self._num_launched : end]:
            bucket.launch(self.axis)
        self._num_launched = max(end, self._num_launched)
