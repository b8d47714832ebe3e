"""Locate the weights of a Hugging Face model in the layers of vLLM and SGLang.

These fuse, split, repeat, pad and pack them. Both engines describe the layers with the same
attributes. On a CPU SGLang pads layers with zeros to make them divisible.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightrft.models.weight_sync.expert_layout import (
    ATTRIBUTES,
    ROUTED,
    Index,
    expert_addresses,
    expert_blocks,
    expert_tensor,
    is_a,
    is_experts,
    is_filled_up,
    local_experts,
)
from lightrft.models.weight_sync.names import PublishedNames
from lightrft.models.weight_sync.verify import PRODUCT_ROUNDS, Fingerprints, signs

FUSED_LAYERS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Fused layer -> layers of the Hugging Face model that it combines."""
SHARD_IDS = {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)}
"""Layer of the Hugging Face model -> its shards of a fused layer, where these are not one for each.

Queries, keys and values of gated delta networks are one layer there, but ranks split each of them.
"""
MAMBA = "MambaMixer2"
"""Layer of Mamba 2 in both engines."""
DELTA_NET_LAYERS = ("QwenGatedDeltaNetAttention", "Qwen3_5GatedDeltaNet")
"""Gated delta networks of vLLM and of SGLang."""
CONVOLUTION_VIEW = "conv_weights"
"""Buffer of vLLM's layer of Mamba 2: a view of the convolution, or a copy where vLLM packs it."""
SCALE_NAME = "weight_scale"
"""Parameter of an INT8 or FP8 layer with the scale of each row of the weight."""
CODES = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of the codes that such a layer loads."""
UNPACKED = "_cpu_unpacked_conv_weight"
"""Attribute with the weight of a convolution as it was loaded, where vLLM packs it on a CPU.

vLLM sets it together with the packed weight, and packs again in each reload.
"""


def decays(logarithms: Tensor) -> Tensor:
    """Compute the decays of Mamba 2 as vLLM stores them, -exp(A_log) in float32."""
    return -torch.exp(logarithms.float())


def engine_names(names: PublishedNames) -> dict[str, str]:
    """Return the engine's name of each weight before fusing.

    Experts are published separately, and stacked there.
    """
    return {
        name: names.renamed.get(name) or _of_pieces(name, names.pieces(name))
        for name in names.shapes
    }


def _of_pieces(name: str, pieces: list[str]) -> str:
    last = name.rpartition(".")[2]
    return f"{os.path.commonprefix(pieces).rpartition('.')[0]}.{ATTRIBUTES.get(last, last)}"


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Slice of a layer's parameter that holds a slice of the full tensor `name`.

    In the full tensor it starts at `row` and `column`.
    """

    name: str
    layer: nn.Module
    attribute: str
    index: Index
    row: int = 0
    column: int = 0

    @property
    def tensor(self) -> Tensor:
        stored = torch.atleast_1d(getattr(self.layer, self.attribute))
        # INT8 and FP8 kernels take [columns, rows], and some fill up both; other forms are packed.
        if self.attribute == "weight" and SCALE_NAME in self.layer._parameters:
            stored = stored.t()[:, : self.layer.input_size_per_partition]
        return stored[self.index]

    def within(self, shape: torch.Size) -> Tensor:
        """Return `tensor` without the padding beyond the full tensor of this shape."""
        tensor = self.tensor
        if tensor.dim() != len(shape):  # stored with other dimensions, and whole
            return tensor
        rows = tensor[: max(shape[0] - self.row, 0)]
        return rows[..., : max(shape[-1] - self.column, 0)] if len(shape) > 1 else rows


@dataclass(frozen=True, slots=True)
class ExpertSlice(WeightSlice):
    """The same of a layer with the stacked experts of a mixture."""

    @property
    def tensor(self) -> Tensor:
        return expert_tensor(self.layer, self.attribute, self.index)

    def within(self, shape: torch.Size) -> Tensor:
        tensor = self.tensor
        if tensor.dim() != len(shape):  # one expert
            return tensor
        return tensor[..., : max(shape[-1] - self.column, 0)]


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Memory of a layer's parameter that receives a slice of a full tensor.

    In the full tensor it starts at `row` and `column`.
    """

    memory: Tensor
    """View of the memory: [groups, blocks, rows of a block, columns]."""
    row: int
    column: int
    experts: slice | None = None
    """Experts of the full tensor that the layer holds, in a stacked tensor of experts."""

    @classmethod
    def of(cls, pieces: list[WeightSlice]) -> list[Self]:
        """Return the copy targets of a whole tensor, given the pieces.

        They are in the current memory of the parameters.
        """
        if is_experts(pieces[0].layer):
            blocks, first = expert_blocks(pieces[0].layer, pieces[0].attribute)
            down = pieces[0].attribute == "w2_weight"
            row, column = (0, first) if down else (first, 0)
            return [cls(blocks.detach(), row, column, local_experts(pieces[0].layer))]
        return [
            cls(_rows(piece.tensor.detach())[None, :, None], piece.row, piece.column)
            for piece in pieces
        ]

    def copy(self, tensor: Tensor) -> None:
        """Copy from the full tensor; from one that ranks divide, all that this rank has."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        elif self.experts is not None:
            tensor = tensor[self.experts]
        groups, blocks, size, columns = self.memory.shape
        rows = _rows(tensor.detach()).unflatten(0, (groups, -1))
        shard = rows[:, self.row : self.row + blocks * size, self.column : self.column + columns]
        self.memory.copy_(shard.unflatten(1, (blocks, size)))


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor as [rows, columns]; a vector has one column."""
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.reshape(-1, 1)


class FusedWeights:
    """Weights of one rank's shard of a model, as its layers keep them.

    Some are stored as loaded; with others, layers multiply in another form. `names` has the
    engine's name, before fusing, of each weight that the engine loads, `shapes` the full shapes.
    `packs` returns True for a layer that computes with another form of its weights; `keeps` returns
    True for a piece, of another layer, that stays as it was loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, str | None],
        shapes: Mapping[str, torch.Size],
        *,
        fused_layers: Mapping[str, list[str]] = FUSED_LAYERS,
        packs: Callable[[nn.Module], bool] = lambda _: False,
        keeps: Callable[[WeightSlice], bool] = lambda _: False,
    ):
        self.shapes = shapes
        self.raw: list[WeightSlice] = []
        self.packed: list[WeightSlice] = []
        self.unknown: list[str] = []
        """Names of weights whose location is not known."""

        # A layer with slots for adapters wraps the one that has the weights.
        modules = model.named_modules(remove_duplicate=False)
        layers = {name.removesuffix(".base_layer"): layer for name, layer in modules}
        users: dict[nn.Parameter, list[nn.Module]] = {}
        for layer in layers.values():
            for parameter in layer._parameters.values():
                if parameter is not None:
                    users.setdefault(parameter, []).append(layer)

        slices_of: dict[str, list[WeightSlice]] = {}
        for name, renamed in names.items():
            slices_of[name] = slices = list(
                _pieces(name, renamed, fused_layers, layers, shapes[name])
            )
            self.unknown += [] if slices else [name]
            for piece in slices:
                self._add(piece, users.get(getattr(piece.layer, piece.attribute), []), packs)

        unknown_paths = {
            renamed.rpartition(".")[0] for name in self.unknown if (renamed := names[name])
        }
        excluded = _neighbours(unknown_paths, layers) | {
            layer
            for its_users in users.values()
            if any(map(packs, its_users))
            for layer in its_users
        }
        self.direct = _direct_copies(
            slices_of, shapes, lambda piece: piece.layer not in excluded and keeps(piece)
        )
        """Weights that can be copied in place: they fill whole layers. No other weight fills
        these, not even an unknown one, and no kernel repacks them."""

    def copy_targets(self) -> dict[str, list[CopyTarget]]:
        """Return the copy targets of each `direct` weight, in the current memory of the layers."""
        with torch.no_grad():
            return {name: CopyTarget.of(pieces) for name, pieces in self.direct.items()}

    @property
    def divides_experts(self) -> bool:
        """Return True if all experts can be copied in place, and this rank holds some of them."""
        stacked = {piece.name for piece in self.raw if is_experts(piece.layer)}
        return bool(stacked) and all(
            name in self.direct
            and local_experts(self.direct[name][0].layer) != slice(0, self.shapes[name][0])
            for name in stacked
        )

    def direct_layers(self) -> set[nn.Module]:
        return {piece.layer for pieces in self.direct.values() for piece in pieces}

    def fingerprints(self, dtype: torch.dtype, round: int | None) -> Fingerprints:
        """Return empty fingerprints for the weights that this rank can compare in this round."""
        bits, products = (
            {piece.name: None for piece in pieces}
            for pieces in (self.raw, self._pieces_of_round(round))
        )
        forms = {
            piece.name: decays
            for piece in self.raw
            if piece.attribute == "A" and is_a(piece.layer, MAMBA)
        }
        return Fingerprints(
            self.shapes, dtype, bits=bits, products=products, forms=forms, round=round
        )

    @torch.inference_mode()
    def add_to(self, prints: Fingerprints) -> None:
        """Add this rank's weights to the fingerprints."""
        for piece in self.raw:
            if (tensor := piece.within(self.shapes[piece.name])).numel():
                prints.add(piece.name, tensor, row=piece.row, column=piece.column)

        results: dict[nn.Module, Tensor] = {}
        for piece in self._pieces_of_round(prints.round):
            # A layer that every rank has whole does not say how many columns it has.
            whole = prints.shapes[piece.name][1]
            columns = getattr(piece.layer, "input_size_per_partition", whole)
            # The layers of a fused one share its product, so it is computed once.
            if piece.layer not in results:
                x = signs(piece.column + columns, piece.layer.weight.device)[piece.column :]
                x = x.to(prints.dtype)
                product = piece.layer.quant_method.apply(piece.layer, x[None], None)
                results[piece.layer] = product[0].double()
            values = results[piece.layer][piece.index]
            if SCALE_NAME in piece.layer._parameters:  # they are compared by themselves
                values = values / piece.layer.weight_scale.double()[piece.index, 0]
            prints.add_product(piece.name, values, len(values) * columns, row=piece.row)

    def _pieces_of_round(self, round: int | None) -> list[WeightSlice]:
        """Return the pieces of the layers that this round multiplies with.

        It is every PRODUCT_ROUNDS-th layer; all for None or 0.
        """
        packed = dict.fromkeys(piece.layer for piece in self.packed)
        order = {layer: index for index, layer in enumerate(packed)}
        return [
            piece
            for piece in self.packed
            if not round or (order[piece.layer] - round) % PRODUCT_ROUNDS == 0
        ]

    def _add(
        self, piece: WeightSlice, users: list[nn.Module], packs: Callable[[nn.Module], bool]
    ) -> None:
        only_packed = SCALE_NAME in piece.layer._parameters and packs(piece.layer)
        if piece.attribute != "weight" or not only_packed:
            self.raw += [piece] if piece.tensor.numel() else []
        if piece.attribute == "weight":
            layers = [
                layer
                for layer in dict.fromkeys(users)
                if _multiplies(layer, users.count(layer)) and packs(layer)
            ]
            self.packed += [replace(piece, layer=layer) for layer in layers]


def _pieces(
    name: str,
    renamed: str | None,
    fused_layers: Mapping[str, list[str]],
    layers: Mapping[str, nn.Module],
    shape: torch.Size,
) -> Iterator[WeightSlice]:
    """Yield the slices of a weight in the engine's layers; none if the engine has no such layer."""
    path, _, attribute = (renamed or "").rpartition(".")
    layer_name = name.split(".")[-2]
    inside = path.rpartition(".")[0]
    owners = [name for name, combined in fused_layers.items() if layer_name in combined]
    fused = next((name for name in owners if f"{inside}.{name}" in layers), layer_name)
    shard_ids = None
    if fused != layer_name:
        shard_ids = SHARD_IDS.get(layer_name, (fused_layers[fused].index(layer_name),))
        path = f"{inside}.{fused}"

    layer = layers.get(f"{path}.{ROUTED}", layers.get(path))
    # Not every model of vLLM has a table of names. In SGLang the decays are not verified.
    if attribute == "A_log" and is_a(layer, MAMBA) and CONVOLUTION_VIEW in layer._buffers:
        attribute = "A"
    if layer is None or getattr(layer, attribute, None) is None:
        return
    # A kernel that stores other codes has changed the scales and biases as well.
    if SCALE_NAME in layer._parameters and layer.weight.dtype not in CODES:
        return
    if layer_name == "conv1d" and any(is_a(layers[inside], kind) for kind in DELTA_NET_LAYERS):
        regions = _of_delta_rule(layers[inside], layer)
    elif layer_name in ("in_proj", "conv1d") and is_a(layers[inside], MAMBA):
        regions = _of_mamba(layers[inside], layer_name)
    else:
        regions = _addresses(layer, attribute, shard_ids, shape)
    stored = attribute
    if layer_name == "conv1d" and attribute == "weight":
        if CONVOLUTION_VIEW in layers[inside]._buffers:
            layer = layers[inside]
            stored = CONVOLUTION_VIEW
        elif UNPACKED in vars(layer):
            stored = UNPACKED
    kind = ExpertSlice if is_experts(layer) else WeightSlice
    for region, row, column in regions:
        yield kind(name, layer, stored, region, row, column)


def _of_delta_rule(mixer: nn.Module, layer: nn.Module) -> Iterator[tuple[slice, int, int]]:
    """Return the addresses of a convolution over queries, keys and values.

    The engines' layers do not say that ranks split each of the three.
    """
    parts = [(size, True) for size in (mixer.key_dim, mixer.key_dim, mixer.value_dim)]
    return _of_parts(parts, layer.tp_rank, layer.tp_size)


def _of_mamba(mixer: nn.Module, layer_name: str) -> Iterator[tuple[slice, int, int]]:
    """Return the addresses of a projection or convolution of Mamba 2.

    Ranks split heads and groups. If they share one group, each has a copy of it. What they split
    comes as often as there are copies then, since every element has to count equally often.
    """
    shared = mixer.in_proj.output_partition_sizes[1:] == []
    channels = (mixer.intermediate_size, True)
    group = (mixer.groups_ssm_state_size, not shared)
    heads = (mixer.num_heads, True)
    parts = {
        "in_proj": [channels, channels, group, group, heads],
        "conv1d": [channels, group, group],
    }
    copies = mixer.tp_size if shared else 1
    return _of_parts(parts[layer_name], mixer.out_proj.tp_rank, mixer.tp_size, copies=copies)


def _of_parts(
    parts: list[tuple[int, bool]], rank: int, num_ranks: int, *, copies: int = 1
) -> Iterator[tuple[slice, int, int]]:
    """Yield the addresses of parts end to end, given their sizes and whether ranks split them.

    Each rank has a part of `size` / ranks rows. A part that is split comes `copies` times.
    """
    start = 0
    full = 0
    for size, is_split in parts:
        length = size // num_ranks
        for _ in range(copies if is_split else 1):
            yield slice(start, start + length), full + rank * length * is_split, 0
        start = start + length
        full = full + (size if is_split else length)


def _addresses(
    layer: nn.Module, attribute: str, shard_ids: tuple[int, ...] | None, shape: torch.Size
) -> Iterator[tuple[Index, int, int]]:
    """Yield (index in the layer's parameter, row, column of the full tensor).

    They cover some shards of a fused layer, or all shards.
    """
    if attribute in ATTRIBUTES.values():
        yield from expert_addresses(layer, attribute, shape)
    elif is_a(layer, "VocabParallelEmbedding"):
        shard = layer.shard_indices
        first = shard.org_vocab_start_index
        yield slice(shard.org_vocab_end_index - first), first, 0
    elif is_a(layer, "ColumnParallelLinear"):
        start = 0
        full = 0
        regions = []
        for index, size in enumerate(layer.output_partition_sizes):
            repeated = (
                layer.num_kv_head_replicas if is_a(layer, "QKVParallelLinear") and index > 0 else 1
            )
            if shard_ids is None or index in shard_ids:
                regions.append(
                    (slice(start, start + size), full + layer.tp_rank // repeated * size, 0)
                )
                full = full + size * layer.tp_size // repeated

            start = start + size

        # A layer that is fused in the folder and padded in the engine has an unknown layout.
        yield from regions if len(regions) == 1 or full == shape[0] else []
    elif is_a(layer, MAMBA):
        # Decay, time step and skip of each head.
        yield slice(None), layer.out_proj.tp_rank * len(getattr(layer, attribute)), 0
    elif is_a(layer, "Qwen3_5GatedDeltaNet"):
        yield slice(None), layer.attn_tp_rank * len(getattr(layer, attribute)), 0
    elif is_a(layer, "Mixer2RMSNormGated") or is_a(layer, "GatedDeltaNetAttention"):
        # A norm, or decay and time step of each head. vLLM keeps decays in float32 and time steps
        # in the model's dtype; it gets both as the trainer computes with them, rounded under
        # --bf16, so the two agree.
        yield slice(None), layer.tp_rank * len(getattr(layer, attribute)), 0
    else:
        cut = is_a(layer, "RowParallelLinear") and attribute == "weight"
        yield slice(None), 0, layer.tp_rank * layer.input_size_per_partition if cut else 0


def _neighbours(paths: Set[str], layers: Mapping[str, nn.Module]) -> set[nn.Module]:
    """Return the layers that may hold weights of other layers: all in the same modules.

    A fused layer, for example, is beside the layers of the Hugging Face model that it combines.
    """
    modules = paths | {path.rpartition(".")[0] for path in paths}
    return {layer for path, layer in layers.items() if path.rpartition(".")[0] in modules}


def _direct_copies(
    slices: dict[str, list[WeightSlice]],
    shapes: Mapping[str, torch.Size],
    keeps: Callable[[WeightSlice], bool],
) -> dict[str, list[WeightSlice]]:
    """Return the weights of layers that they fill completely.

    A layer has a matrix, and none of the weights is left out.
    """
    of: dict[nn.Module, list[WeightSlice]] = defaultdict(list)
    for pieces in slices.values():
        for piece in pieces:
            of[piece.layer].append(piece)

    layers = {
        layer
        for layer, pieces in of.items()
        if all(map(keeps, pieces)) and _is_filled(layer, pieces, shapes)
    }
    # A weight that leaves takes its layers along, and these may take others.
    while True:
        whole_names = {
            name: pieces
            for name, pieces in slices.items()
            if pieces and all(piece.layer in layers for piece in pieces)
        }
        remaining = {
            layer for layer in layers if all(piece.name in whole_names for piece in of[layer])
        }
        if remaining == layers:
            return whole_names
        layers = remaining


def _is_filled(
    layer: nn.Module, pieces: list[WeightSlice], shapes: Mapping[str, torch.Size]
) -> bool:
    """Return True if the pieces fill all parameters of the layer, and one of these is a matrix."""
    parameters = {
        name: parameter for name, parameter in layer._parameters.items() if parameter is not None
    }
    if {piece.attribute for piece in pieces} != parameters.keys() or max(
        shapes_here.ndim for shapes_here in parameters.values()
    ) < 2:
        return False

    # Ranks may pad their experts, and then the full tensor does not fill the layer.
    if is_experts(layer):
        shapes_here = {piece.attribute: shapes[piece.name] for piece in pieces}
        alone = len({piece.name for piece in pieces}) == len(shapes_here)
        return alone and not any(
            is_filled_up(layer, attribute, shape) for attribute, shape in shapes_here.items()
        )

    filled: dict[str, int] = defaultdict(int)
    for piece in pieces:
        filled[piece.attribute] += piece.within(shapes[piece.name]).numel()
    return all(filled[name] == parameter.numel() > 0 for name, parameter in parameters.items())


def _multiplies(layer: nn.Module, uses: int) -> bool:
    """Return False for a pure embedding.

    A tied head is another layer with the same weight, or the same under another name.
    """
    return not is_a(layer, "VocabParallelEmbedding") or is_a(layer, "ParallelLMHead") or uses > 1
