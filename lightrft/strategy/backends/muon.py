"""Muon: train the matrices of the blocks with orthogonalised momentum, and the rest with AdamW.

The momentum is divided over ranks like the parameter, but only a whole matrix can be
orthogonalised. Ranks that divide a matrix therefore share the work: each becomes the owner of some
matrices, receives the pieces of these from the others, and sends back what they need. A step takes
two all-to-alls for each bucket and each axis that divides matrices. Ranks with equal parts, as the
replicas of --dp_replicate, compute the same. GPUs compute and send in bfloat16 like
`torch.optim.Muon`, CPUs in float32.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.device import current_device, has_bf16, local_tensor
from lightrft.models.parallel.dtensor_slices import ShardSlice, shard_slices
from lightrft.models.parallel.expert_parallel import expert_layers
from lightrft.strategy.backends.optim import create_adamw, step

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7
"""These four are the published values (https://kellerjordan.github.io/posts/muon)."""
RMS = 0.2
"""Root mean square of an update of AdamW, which updates here are scaled to (arXiv 2502.16982)."""
MUON_BUCKET = 2**25
"""Elements of whole matrices that a rank orthogonalises at a time, unless one matrix has more."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts; AdamW trains them."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """This rank's piece of a matrix [1, a, b], or of some experts of a layer [n, a, b].

    `shards` divide each matrix, the last applied one first. Their dims are counted from the end.
    """

    weights: Tensor
    gradient: Tensor
    momentum: Tensor
    shards: list[ShardSlice]
    numel: int
    """Elements of the whole matrices."""
    scale: float
    """Factor of the learning rate."""


class Muon(Optimizer):
    r"""Muon for whole matrices, with AdamW for all other parameters.

    For a gradient $G$ of a matrix $W$ of $A \times B$, with momentum $\mu$, learning rate $\eta$
    and weight decay $\lambda$ (Nesterov's form, as in `torch.optim.Muon`):

    $M \leftarrow \mu M + (1 - \mu) G$

    $W \leftarrow (1 - \eta \lambda) W - 0.2 \eta \sqrt{\max(A, B)}\; O(\mu M + (1 - \mu) G)$

    where $O(U S V^T) \approx U V^T$, see newton_schulz(). With the factor of Moonlight (arXiv
    2502.16982) the updates are about as large as AdamW's, for equal rates and decays.
    """

    def __init__(self, matrices: list[nn.Parameter], adamw: AdamW, weight_decay: float):
        """Train `matrices` at the rate of `adamw`, and whatever else `adamw` has as it does."""
        chosen = set(matrices)
        for group in adamw.param_groups:
            group["params"] = [each for each in group["params"] if each not in chosen]
        others = [group for group in adamw.param_groups if group["params"]]

        # Only groups of matrices have the key "momentum".
        muon_group = {"params": matrices, "momentum": MOMENTUM, "weight_decay": weight_decay}
        super().__init__([muon_group, *others], {"lr": adamw.defaults["lr"]})
        self._adamw = adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if "momentum" in group:
                self._step_matrices(group)

        # Loading a state replaces these objects.
        self._adamw.state = self.state
        self._adamw.param_groups = [each for each in self.param_groups if "momentum" not in each]
        step(self._adamw)

    def _step_matrices(self, group: dict) -> None:
        by_groups: dict[tuple[str, ...], list[Matrices]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            for matrices in _matrices(parameter, state["momentum_buffer"]):
                names = tuple(shard.group.group_name for shard in matrices.shards)
                by_groups[names].append(matrices)

        for alike in by_groups.values():
            for bucket in _buckets(alike):
                self._step_bucket(bucket, group["lr"], group["weight_decay"], group["momentum"])

    def _step_bucket(
        self, bucket: list[Matrices], lr: float, weight_decay: float, momentum: float
    ) -> None:
        gradients = [matrices.gradient for matrices in bucket]
        buffers = [matrices.momentum for matrices in bucket]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)

        # Parameters may be in host memory; the device multiplies and sends.
        device = current_device()
        dtype = torch.bfloat16 if has_bf16() else torch.float32
        pieces = [
            gradient.lerp(buffer, momentum).to(device, dtype)
            for gradient, buffer in zip(gradients, buffers, strict=True)
        ]
        shards = [matrices.shards for matrices in bucket]
        updates = orthogonalize(pieces, shards, [matrices.numel for matrices in bucket])

        torch._foreach_mul_([matrices.weights for matrices in bucket], 1 - lr * weight_decay)
        for matrices, update in zip(bucket, updates, strict=True):
            update = update.to(matrices.weights.device)
            matrices.weights.add_(update, alpha=-lr * matrices.scale)


def create_muon(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    *,
    blocks: Collection[nn.Module],
) -> Muon:
    """Build Muon for the matrices of a model's `blocks`; `betas` and `eps` are AdamW's.

    These are the weights of linear layers, also adapters, and stacked experts. Raises ValueError if
    none of them is trained.
    """
    matrices = block_matrices(blocks)
    if not matrices:
        raise ValueError(
            f"--optimizer muon: no matrix in a block of {type(model).__name__} is trained; use"
            " adamw"
        )
    return Muon(matrices, create_adamw(model, lr, betas, weight_decay, eps), weight_decay)


def block_matrices(blocks: Collection[nn.Module]) -> list[nn.Parameter]:
    """Return the trained matrices of linear layers and experts in the blocks, without routers."""
    linear = [
        layer.weight
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] not in ROUTERS
    ]
    stacked = [
        parameter
        for block in blocks
        for experts in expert_layers(block)
        for parameter in experts.parameters(recurse=False)
        if parameter.ndim == 3
    ]
    return [each for each in dict.fromkeys([*linear, *stacked]) if each.requires_grad]


def newton_schulz(matrices: Tensor) -> Tensor:
    r"""Return nearly orthogonal matrices with the singular vectors of `matrices`: [n, A, B].

    Five times, starting from $X = G / |G|$: $X \leftarrow a X + b (X X^T) X + c (X X^T)^2 X$.
    Singular values end between about 0.7 and 1.2, unless they were tiny.
    """
    a, b, c = COEFFICIENTS
    # X^T X would have the larger side of a tall matrix.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    result = matrices.mT if is_tall else matrices
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = result @ result.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.baddbmm(result, polynomial, result, beta=a)
    return result.mT if is_tall else result


def orthogonalize(
    pieces: list[Tensor], shards: list[list[ShardSlice]], sizes: list[int]
) -> list[Tensor]:
    """Return this rank's pieces of orthogonalised matrices from its pieces [n, a, b] of them.

    All matrices are divided over the same groups, and `sizes` are their elements. All ranks of
    these groups must call this with the same matrices.
    """
    if not pieces or not shards[0]:
        return _orthogonalize_whole(pieces)

    route = Route(pieces, [each[0] for each in shards], sizes)
    whole = route.to_owners(pieces)
    # Another axis may divide what is whole on this one.
    outer = [shards[index][1:] for index in route.local]
    return route.to_shards(orthogonalize(whole, outer, [sizes[index] for index in route.local]))


class Route:
    """Ways of divided matrices to the ranks that orthogonalise them, and back."""

    def __init__(self, pieces: list[Tensor], shards: list[ShardSlice], sizes: list[int]):
        """Choose the owner of each matrix by `sizes`, so that owners have about as much to do."""
        self.axis = Axis.of("muon", shards[0].group)
        num_ranks = self.axis.size
        self.nothing = pieces[0].new_empty(0)
        self.shapes = [piece.shape for piece in pieces]
        self.dims = [shard.dim for shard in shards]
        self.counts = [shard.counts for shard in shards]

        owners = _owners(sizes, num_ranks)
        self.order = sorted(range(len(pieces)), key=owners.__getitem__)
        self.local = [index for index in self.order if owners[index] == self.axis.rank]
        """Indices of the matrices of this rank."""
        self.sent = [0] * num_ranks
        for piece, owner in zip(pieces, owners, strict=True):
            self.sent[owner] += piece.numel()
        self.received = [
            sum(self._shape(index, rank).numel() for index in self.local)
            for rank in range(num_ranks)
        ]

    def to_owners(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the matrices that this rank owns, whole."""
        flat = torch.cat([shards[index].flatten() for index in self.order])
        arrived = self.axis.all_to_all(flat, self.sent, self.received).split(self.received)
        pieces = []
        for rank, sent in enumerate(arrived):
            shapes = [self._shape(index, rank) for index in self.local]
            split = sent.split([shape.numel() for shape in shapes])
            pieces.append([piece.view(shape) for piece, shape in zip(split, shapes, strict=True)])

        return [
            torch.cat(divided, self.dims[index])
            for index, divided in zip(self.local, zip(*pieces, strict=True), strict=True)
        ]

    def to_shards(self, whole: list[Tensor]) -> list[Tensor]:
        """Return this rank's pieces of all matrices, from the whole ones of their owners."""
        divided = [
            matrix.split(self.counts[index], self.dims[index])
            for index, matrix in zip(self.local, whole, strict=True)
        ]
        pieces = [pieces[rank].flatten() for rank in range(self.axis.size) for pieces in divided]
        # A rank that owns nothing sends nothing.
        flat = torch.cat(pieces) if pieces else self.nothing
        arrived = self.axis.all_to_all(flat, self.received, self.sent)
        numels = [self.shapes[index].numel() for index in self.order]
        shards = dict(zip(self.order, arrived.split(numels), strict=True))
        return [shards[index].view(shape) for index, shape in enumerate(self.shapes)]

    def _shape(self, index: int, rank: int) -> torch.Size:
        """Return the shape of a rank's piece of a matrix."""
        shape = list(self.shapes[index])
        shape[self.dims[index]] = self.counts[index][rank]
        return torch.Size(shape)


def _matrices(parameter: nn.Parameter, momentum: Tensor) -> Iterator[Matrices]:
    """Yield the matrix of a parameter, or its experts, some of them at a time."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    tensors = [local_tensor(each) for each in (parameter, gradient, momentum)]
    stacks = tensors if parameter.ndim == 3 else [each[None] for each in tensors]

    height, width = parameter.shape[-2:]
    shards = [
        replace(shard, dim=shard.dim - parameter.ndim)
        for shard in shard_slices(parameter)
        # Different experts on different ranks are whole matrices there.
        if shard.dim >= parameter.ndim - 2
    ]
    # Divided experts have different owners, and no bucket has to be larger than others.
    of_owner = math.ceil(len(stacks[0]) / _num_ranks(shards))
    count = max(1, min(of_owner, MUON_BUCKET // (height * width)))
    scale = RMS * math.sqrt(max(height, width))
    for stacked in zip(*(stack.split(count) for stack in stacks), strict=True):
        yield Matrices(*stacked, shards, len(stacked[0]) * height * width, scale)


def _buckets(alike: list[Matrices]) -> Iterator[list[Matrices]]:
    """Yield matrices of the same shards, the largest ones first, so that owners have equal work.

    An owner gets about MUON_BUCKET elements of a bucket, or one larger matrix.
    """
    num_ranks = _num_ranks(alike[0].shards)
    bucket: list[Matrices] = []
    size = 0
    for matrices in sorted(alike, key=lambda matrices: matrices.numel, reverse=True):
        if bucket and size + matrices.numel > num_ranks * max(MUON_BUCKET, bucket[0].numel):
            yield bucket
            bucket = []
            size = 0
        bucket.append(matrices)
        size += matrices.numel
    yield bucket


def _owners(sizes: list[int], num_ranks: int) -> list[int]:
    """Return the owner of each matrix: the rank with the least so far."""
    loads = [0] * num_ranks
    owners = []
    for size in sizes:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += size
    return owners


def _orthogonalize_whole(stacks: list[Tensor]) -> list[Tensor]:
    """Orthogonalise whole matrices, stacks [n, A, B] of them; equal shapes share each product."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, stack in enumerate(stacks):
        by_shape[stack.shape[1:]].append(index)

    results: dict[int, Tensor] = {}
    for members in by_shape.values():
        chosen = [stacks[index] for index in members]
        done = newton_schulz(torch.cat(chosen)).split([len(stack) for stack in chosen])
        results.update(zip(members, done, strict=True))
    return [results[index] for index in range(len(stacks))]


def _num_ranks(shards: list[ShardSlice]) -> int:
    """Return the number of ranks that divide a matrix."""
    return math.prod(shard.pieces for shard in shards)
