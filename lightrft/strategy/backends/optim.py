"""Build optimizers and learning-rate schedules, clip gradients by one norm, and take steps.

BitSums also records what a step has read and written, so that two runs can be compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightrft.config.sections import OptimSection
from lightrft.models.parallel.device import current_device, local_tensor
from lightrft.models.parallel.dtensor_slices import divided_dims
from lightrft.models.weight_sync.verify import random_odd_numbers

Axes = frozenset[str]
"""Names of the process groups that shard a tensor; empty if every rank has the whole tensor."""

FUSED_ON = ("cpu", "cuda", "xpu")
"""Devices with a fused AdamW; on others torch chooses the implementation."""

LONG_NAMES = {"cosine": "cosine_with_min_lr", "wsd": "warmup_stable_decay"}
"""Names of schedules in transformers, where they are other ones."""

SUM_BLOCK = 2**21
"""Words that sum_of_bits() multiplies at a time."""

SHORT = 2**14
"""Elements of a tensor that is joined with others to be summed."""

MIXING_FACTOR = 0x2545F4914F6CDD1D
"""Factor between blocks of words."""


# -- optimizers and schedules


def create_adamw(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, eps: float
) -> Optimizer:
    """Build AdamW over the trainable parameters; only matrices decay."""
    groups = decay_groups(model, weight_decay)
    # Empty parameters will be materialized on the current device.
    trainable = chain.from_iterable(group["params"] for group in groups)
    devices = {current_device() if p.is_meta else p.device for p in trainable}
    fused = all(device.type in FUSED_ON for device in devices)
    return AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=fused or None)


def create_sgd(model: nn.Module, lr: float, _: Any, weight_decay: float, *__: Any) -> Optimizer:
    """Build SGD without momentum over the trainable parameters; only matrices decay."""
    return SGD(decay_groups(model, weight_decay), lr)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of the trainable parameters: matrices, and what does not decay.

    Those are norms and biases (fewer than two dims). Raises ValueError if nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        name = type(model).__name__
        raise ValueError(f"create_optimizer: no parameter of {name} requires a gradient")

    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_lr_scheduler(
    optimizer: Optimizer, kind: str, warmup_steps: int, total_steps: int, section: OptimSection
) -> LambdaLR:
    """Build a schedule: linear warm-up to the optimizer's rate, then what transformers computes.

    `section` has --lr_min_ratio, --lr_decay_ratio and --lr_power. The first step's rate is
    1 / warmup_steps of the peak, not 0. The rate after `total_steps` is the last one. Raises
    ValueError for other kinds or numbers of steps.
    """
    # It takes a second to import.
    from transformers.optimization import get_scheduler

    decay_steps = round(section.lr_decay_ratio * total_steps)
    least = section.lr_min_ratio
    wsd = {"min_lr_ratio": least, "num_decay_steps": min(decay_steps, total_steps - warmup_steps)}
    settings = {
        "cosine": {"min_lr_rate": least},
        "constant": {},
        "linear": {},
        "wsd": wsd,
        "inverse_sqrt": {},
        "polynomial": {"lr_end": least, "power": section.lr_power},
    }
    if kind not in settings:
        raise ValueError(f"unknown lr_scheduler {kind!r}; known: {', '.join(settings)}")
    if warmup_steps < 0 or total_steps < 1:
        raise ValueError(
            f"a schedule needs warmup_steps >= 0 and total_steps >= 1, not {warmup_steps} and"
            f" {total_steps}"
        )

    # Its rates are the factors.
    unit = SGD([nn.Parameter(torch.empty(0))], lr=1.0)
    name = LONG_NAMES.get(kind, kind)
    given = get_scheduler(name, unit, warmup_steps, total_steps, settings[kind])
    (after_warmup,) = given.lr_lambdas

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return after_warmup(min(step, total_steps))

    return LambdaLR(optimizer, factor)


@contextmanager
def kept_settings(optimizer: Optimizer, scheduler: LRScheduler | None) -> Iterator[None]:
    """Keep learning rate, betas and weight decay while a state is loaded inside.

    Moments and progress are loaded. A schedule that is not a LambdaLR, as create_lr_scheduler()
    builds it, keeps the learning rate that it loads.
    """
    renewed = isinstance(scheduler, LambdaLR)
    loaded = {"params"} if renewed or scheduler is None else {"params", "lr", "initial_lr"}
    settings = [
        {name: value for name, value in group.items() if name not in loaded}
        for group in optimizer.param_groups
    ]
    peaks = list(scheduler.base_lrs) if renewed else []
    yield
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)

    if renewed:
        # The loaded progress counts, with this run's peak: rates are computed anew from both.
        scheduler.base_lrs = peaks
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [peak * factor for peak, factor in zip(peaks, factors, strict=True)]
        scheduler._last_lr = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def parameter_names(module: nn.Module, optimizer: Optimizer | None) -> list[list[str]]:
    """Return the names in `module` of each parameter group's parameters.

    Raises ValueError for an optimizer that has stepped or that trains parameters outside of
    `module`.
    """
    if optimizer is None:
        return []
    if optimizer.state:
        raise ValueError("prepare() takes an optimizer that has not stepped yet")

    # Distributing a module replaces parameters, so the optimizer finds them again by name.
    names = {parameter: name for name, parameter in module.named_parameters()}
    try:
        return [
            [names[parameter] for parameter in group["params"]] for group in optimizer.param_groups
        ]
    except KeyError:
        raise ValueError(
            f"prepare(): the optimizer trains parameters that are not in {type(module).__name__}"
        ) from None


def follow(module: nn.Module, optimizer: Optimizer | None, names: list[list[str]]) -> None:
    """Point the optimizer at replaced parameters by name.

    The optimizer, and schedulers that hold it, stay the same objects.
    """
    parameters = dict(module.named_parameters())
    for group, group_names in zip(optimizer.param_groups if optimizer else (), names, strict=True):
        group["params"] = [parameters[name] for name in group_names]


# -- a step


def global_grad_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Return the norm of all gradients over all shards: [] float32 on `device`.

    It is equal on all ranks. The placements of the gradient itself count: it may be whole although
    the parameter is sharded, and a partial one is summed first. Local shards are summed over the
    axes that shard them, never over axes that replicate them. There is one collective per axis,
    whatever the number of meshes. Axes come in the order that the parameters meet them, because the
    groups of one axis have other names on other ranks. A parameter without a gradient counts as 0;
    plain gradients are assumed to be equal on all ranks. All ranks must call this with the same
    parameters.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [_summed(each) if isinstance(each, DTensor) else each for each in gradients]
    sharded = [each for each in chain(parameters, gradients) if isinstance(each, DTensor)]
    groups = dict(chain.from_iterable(map(_sharding_groups, sharded)))

    by_axes: dict[Axes, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            axes = frozenset(name for name, _ in _sharding_groups(gradient))
            by_axes[axes].append(gradient.to_local())
        else:
            by_axes[frozenset()].append(gradient)

    # All subsets of the axes, in the same order on every rank.
    subsets: list[Axes] = [frozenset()]
    for name in groups:
        subsets += [subset | {name} for subset in subsets]
    totals = torch.stack([_sum_of_squares(by_axes.get(subset, []), device) for subset in subsets])
    # Only the sums that this axis shards are reduced over it.
    for name in groups:
        cut = [index for index, subset in enumerate(subsets) if name in subset]
        reduced = totals[cut]
        dist.all_reduce(reduced, group=groups[name])
        totals[cut] = reduced

    return totals.sum() ** 0.5


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(gradients, 2.0, torch.float32)
    return torch.stack([norm.to(device) for norm in norms]).pow(2.0).sum()


def _sharding_groups(tensor: DTensor) -> list[tuple[str, dist.ProcessGroup]]:
    """Return names and groups that shard a tensor; groups of one rank do not count."""
    groups = map(tensor.device_mesh.get_group, divided_dims(tensor))
    return [(group.group_name, group) for group in groups]


def _summed(gradient: DTensor) -> DTensor:
    """Return the gradient, summed over the ranks that each have a part of the sum."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
    return gradient.redistribute(placements=whole)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by max_norm / norm if that is below 1.

    `norm` comes from global_grad_norm().
    """
    gradients = [local_tensor(each.grad) for each in parameters if each.grad is not None]
    if gradients:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def step(optimizer: Optimizer) -> None:
    """Take one step, one mesh at a time, because multi-tensor kernels cannot mix meshes."""
    groups = optimizer.param_groups
    of_mesh: dict[DeviceMesh | None, list[list[nn.Parameter]]] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            of_mesh.setdefault(mesh, [[] for _ in groups])[index].append(parameter)
    if len(of_mesh) == 1:
        optimizer.step()
        return

    try:
        for of_groups in of_mesh.values():
            both = zip(groups, of_groups, strict=True)
            optimizer.param_groups = [group | {"params": members} for group, members in both]
            optimizer.step()
    finally:
        optimizer.param_groups = groups


# -- sums of bits, which show where two runs begin to differ


@dataclass(eq=False)
class BitSums:
    """Sums of the bits of gradients and weights at each step of an optimizer, on the device."""

    optimizer: InitVar[Optimizer]
    device: InitVar[torch.device | str]
    labels: Mapping[Tensor, str]
    """Names of the parameters that are summed together; each label has one sum."""
    others: str
    """Label of the parameters without one."""

    def __post_init__(self, optimizer: Optimizer, device: torch.device | str) -> None:
        """Follow an optimizer whose parameters are on `device` while it steps."""
        self._sums: dict[str, list[tuple[int, str, Tensor]]] = {}
        self._update = 0
        self._stepped: set[Tensor] = set()
        """Parameters of this update so far: step() takes one mesh at a time."""
        self._factors = random_odd_numbers(SUM_BLOCK, 0, torch.device(device))
        optimizer.register_step_pre_hook(partial(self._add, "gradient"))
        optimizer.register_step_post_hook(partial(self._add, "weights"))

    def take(self, kind: str) -> list[tuple[int, str, Tensor]]:
        """Return the sums since the last call: optimizer step, label, and sum [] int64.

        `kind` is gradient, weights (after a step), or before: the weights before the first step.
        """
        return self._sums.pop(kind, [])

    @torch.no_grad()
    def _add(self, kind: str, optimizer: Optimizer, *_: Any) -> None:
        if kind == "gradient":
            parameters = {each for group in optimizer.param_groups for each in group["params"]}
            if parameters & self._stepped:
                self._update += 1
                self._stepped.clear()
            self._stepped |= parameters
            if not self._update:
                self._add("before", optimizer)

        tensors: dict[str, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensor = parameter.grad if kind == "gradient" else parameter
                if tensor is not None:
                    label = self.labels.get(parameter, self.others)
                    tensors.setdefault(label, []).append(tensor)

        sums = self._sums.setdefault(kind, [])
        for label, members in tensors.items():
            # Parameters may be in host memory, all of them.
            self._factors = self._factors.to(members[0].device)
            sums.append((self._update, label, sum_of_bits(members, self._factors)))


def sum_of_bits(tensors: Sequence[Tensor], factors: Tensor) -> Tensor:
    """Return a sum [] int64 of the bits of this rank's shards of the tensors, on their device.

    The bits are read as words of 8 bytes. Each word is multiplied by an odd number for its index,
    modulo 2^64, so a change of one element always changes the sum, and an exchange of two nearly
    always.
    """
    short: dict[torch.dtype, list[Tensor]] = {}
    flat = []
    for tensor in tensors:
        local = local_tensor(tensor).detach().reshape(-1)
        if local.numel() > SHORT:
            flat.append(local)
        else:
            short.setdefault(local.dtype, []).append(local)
    # A call of torch takes longer than reading a short tensor.
    flat += [torch.cat(few) for few in short.values()]

    total = None
    for piece in flat:
        octets = piece.view(torch.uint8)
        missing = -octets.numel() % 8
        # Words begin at a multiple of 8 bytes, which a view into a larger tensor may not.
        if missing or octets.storage_offset() % 8:
            octets = torch.cat([octets, octets.new_zeros(missing)])
        for words in octets.view(torch.int64).split(factors.numel()):
            odd = factors[: words.numel()]
            # CUDA has no inner product of integers.
            product = words.dot(odd) if words.is_cpu else (words * odd).sum()
            total = product if total is None else total * MIXING_FACTOR + product

    return torch.zeros((), dtype=torch.int64, device=factors.device) if total is None else total
