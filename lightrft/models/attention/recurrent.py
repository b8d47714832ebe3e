"""Convolutions, linear attention and state spaces over flat batches.

transformers computes them with functions of the module of a family. On a CPU these ignore where the
sequences of a flat batch begin, and a state would run from one sequence into the next. install()
replaces the functions. For a convolution each sequence follows as many zeros as the kernel reaches
back. For a recurrent layer each sequence has a row of its own, padded on the right, where nothing
that follows changes what came before; kernels for concatenated sequences need no rows.

A shared prefix is computed once. The layers that read earlier tokens of a sequence continue from
it: a convolution reads the last inputs of the prefix, and a recurrent layer begins with the state
at the end of the prefix. Ranks that split the tokens exchange them for channels or heads, as for
attention (Ulysses).

Shapes: t tokens of this rank, U computed tokens of all ranks, C channels, H heads.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.core.batch import to_device
from lightrft.models.attention.layout import Layout, blocks, offsets, ranges
from lightrft.models.parallel.sequence_parallel import gather_summed


@dataclass(frozen=True)
class Scan:
    """Arguments of a function of transformers that carries a state from token to token."""

    tokens: tuple[str, ...]
    """Tensors [1, t, H, ...] with a value for each token and head."""
    values: str
    """The one of them that has the shape of the output."""
    initial: str
    """State [rows, H, ...] before the first token."""
    final: str
    """Flag that asks for the state after the last token."""
    groups: tuple[str, ...] = ()
    """Tensors [1, t, G, ...] with a value for each token and group of heads."""
    heads: tuple[str, ...] = ()
    """Parameters [H] with a value for each head."""
    always_pair: bool = True
    """Whether the function returns a pair also without the flag."""
    kernel: str = ""
    """Kernel that computes concatenated runs, given where they begin; empty if there is none."""


CONVOLUTION_KERNEL = "causal_conv1d_fn"
DELTA_RULE_SCAN = Scan(
    ("query", "key", "value", "g", "beta"),
    "value",
    "initial_state",
    "output_final_state",
    kernel="fla.ops.gated_delta_rule.chunk_gated_delta_rule",
)
SCANS = {
    # gated delta networks, Yang et al., arXiv 2412.06464: Qwen3-Next, Qwen3.5, OLMo Hybrid
    "torch_chunk_gated_delta_rule": DELTA_RULE_SCAN,
    # Kimi Linear, arXiv 2510.26692
    "chunk_kimi_delta_attention": replace(DELTA_RULE_SCAN, kernel="fla.ops.kda.chunk_kda"),
    # Mamba 2, Dao and Gu, arXiv 2405.21060: Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba 2
    "mamba2_chunk_scan": Scan(
        ("hidden_states", "dt"),
        "hidden_states",
        "initial_states",
        "return_final_states",
        groups=("B", "C"),
        heads=("A", "D", "dt_bias"),
        always_pair=False,
    ),
}
FUSED_SCANS = ("mamba2_split_conv1d_scan_combined",)
"""Kernels for convolution and scan at once; a model computes both apart if they return None."""
UNKNOWN = ("mamba_selective_scan",)
"""Functions that carry a state in a form that flat batches do not support."""


def install(model: PreTrainedModel) -> bool:
    """Let the layers of a model's family compute flat batches; return whether they can.

    Other calls of the functions, without a layout, are as before.
    """
    family = sys.modules[type(model.get_decoder()).__module__]
    functions = [
        name for name in (CONVOLUTION_KERNEL, *SCANS, *FUSED_SCANS) if hasattr(family, name)
    ]
    if CONVOLUTION_KERNEL not in functions or any(hasattr(family, name) for name in UNKNOWN):
        return False

    for name in functions:
        function = getattr(family, name)
        if hasattr(function, "flat"):
            continue
        flat = adapted(function, name)
        flat.flat = True
        setattr(family, name, flat)

    lift_time_step_limits(model)
    return True


@contextmanager
def only_memory(model: PreTrainedModel) -> Iterator[None]:
    """Replace recurrent functions, inside, by ones that compute nothing but keep their inputs.

    So do kernels for accelerators, which recompute the rest. The functions of transformers loop
    over chunks, for many minutes where tensors have only a shape.
    """
    family = sys.modules[type(model.get_decoder()).__module__]
    originals = {name: getattr(family, name) for name in SCANS if hasattr(family, name)}
    for name, original in originals.items():
        setattr(family, name, _keeping_inputs(original, SCANS[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(family, name, original)


def _keeping_inputs(original: Callable[..., Any], scan: Scan) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)

    def kept(*args: Any, **options: Any) -> Any:
        call = dict(zip(names, args, strict=False)) | options
        inputs = [call[name] for name in scan.tokens + scan.groups if name != scan.values]
        output = _KeepsInputs.apply(call[scan.values], *inputs)
        return (output, None) if scan.always_pair else output

    return kept


class _KeepsInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(values, *others)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def lift_time_step_limits(model: PreTrainedModel) -> None:
    """Let the layers of Mamba 2 take any time step, as engines do.

    transformers raises the time steps of Nemotron-H and Zamba 2 to a minimum when it reads a
    sequence, but not when it decodes a token. vLLM never does.
    """
    for module in model.modules():
        if "time_step_limit" in vars(module):
            module.time_step_limit = (0.0, float("inf"))


def adapted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Let a function of transformers, with this name there, compute flat batches too."""
    names = list(inspect.signature(original).parameters)

    @wraps(original)
    def flat(*args: Any, **options: Any) -> Any:
        function = _called_on(args[0].device, original)
        layout = options.get("layout") or options.get("seq_idx")
        if not isinstance(layout, Layout):
            return function(*args, **options)
        if name in FUSED_SCANS:
            return None

        call = dict(zip(names, args, strict=False)) | options
        for argument in ("layout", "seq_idx"):
            call.pop(argument, None)
        function = partial(_called, function, names[: len(args)])
        if name in SCANS:
            return _scan(function, call, layout, SCANS[name])
        return _convolution(function, call, layout)

    return flat


def _convolution(function: Callable[..., Tensor], call: dict[str, Any], layout: Layout) -> Tensor:
    """Compute a causal depthwise convolution: [1, C, t] and weights [C, K] -> [1, C, t]."""
    sequence = layout.sequence
    inputs = call["hidden_states"][0].T.unsqueeze(-1)
    values = sequence.split_heads(inputs)[0][..., 0]
    channels = _local_slice(inputs.shape[1], layout)
    call["weight"] = call["weight"][channels]
    if call.get("bias") is not None:
        call["bias"] = call["bias"][channels]

    # The row of zeros stands for the tokens before a sequence.
    values = torch.cat([values, values.new_zeros(1, values.shape[1])])
    source, positions = _with_tails(layout, call["weight"].shape[-1])
    call["hidden_states"] = values.index_select(0, source).T.unsqueeze(0)
    output = function(call)[0].T.index_select(0, positions)

    return sequence.after_attention(output.unsqueeze(-1))[..., 0].T.unsqueeze(0)


def _scan(function: Callable[..., Any], call: dict[str, Any], layout: Layout, scan: Scan) -> Any:
    """Compute a recurrent function: tokens [1, t, H, ...] -> [1, t, H, D]."""
    values = _local_heads(call, scan, layout)
    outputs = []
    states = None
    offsets_given = has_varlen_kernel(scan, values[0].device)
    levels, positions = _levels(layout, in_blocks=not offsets_given)

    for level in levels:
        finals = []
        selected = [value.index_select(0, level.source) for value in values]
        blocks_of_values = zip(*(_split(value, level.shapes) for value in selected), strict=True)
        for block, (size, width), tensors in zip(
            level.blocks, level.shapes, blocks_of_values, strict=True
        ):
            for name, tensor in zip(scan.tokens + scan.groups, tensors, strict=True):
                call[name] = tensor.view(size, width, *tensor.shape[1:])
            call[scan.initial] = None if states is None else states.index_select(0, block.parents)
            call[scan.final] = block.keeps_states
            if offsets_given:
                call["cu_seqlens"] = block.offsets

            output = function(call)
            if scan.always_pair or block.keeps_states:
                output, state = output
                finals.append(state)
            outputs.append(output.flatten(0, 1))

        kept = [state for state in finals if state is not None]
        states = torch.cat(kept) if kept else None

    output = torch.cat(outputs).index_select(0, positions)
    output = layout.sequence.after_attention(output).unsqueeze(0)
    return (output, None) if scan.always_pair else output


def _called_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for tensors on a device.

    If a package has a kernel, transformers' function calls only that, and the kernels of these
    packages need an accelerator. Below it is the one in plain torch.
    """
    return inspect.unwrap(function) if device.type == "cpu" else function


def _called(function: Callable[..., Any], positional: list[str], call: dict[str, Any]) -> Any:
    """Call a function as its caller did, with some arguments by position.

    Kernels have other names for these.
    """
    named = {name: value for name, value in call.items() if name not in positional}
    return function(*(call[name] for name in positional), **named)


def has_varlen_kernel(scan: Scan, device: torch.device) -> bool:
    """Return whether the function of transformers calls a kernel for concatenated runs.

    Otherwise it computes in plain torch, and ignores where the runs begin.
    """
    return device.type == "cuda" and bool(scan.kernel) and _is_importable(scan.kernel)


@cache
def _is_importable(kernel: str) -> bool:
    module, _, name = kernel.rpartition(".")
    try:
        return hasattr(import_module(module), name)
    except Exception:  # transformers falls back to plain torch after any error
        return False


def _local_heads(call: dict[str, Any], scan: Scan, layout: Layout) -> list[Tensor]:
    """Return the tokens [U, H of this rank, ...] and groups, and cut the parameters of `call`."""
    axis = layout.sequence.axis
    values = [call[name][0] for name in scan.tokens]
    groups = [call[name][0] for name in scan.groups]
    if axis.size == 1:
        return values + groups

    num_heads = max(value.shape[1] for value in values)
    local = _local_slice(num_heads, layout)
    for name in scan.heads:
        if call.get(name) is not None:
            call[name] = call[name][local]

    # An exchange has one dtype, and decays are float32.
    result = []
    for value in values:
        # Several heads may share queries and keys. A rank may have some of these heads only.
        if value.shape[1] % axis.size:
            value = value.repeat_interleave(num_heads // value.shape[1], dim=1)
        of_head = value if value.dim() > 2 else value.unsqueeze(-1)
        exchanged = layout.sequence.split_heads(of_head)[0]
        result.append(exchanged if value.dim() > 2 else exchanged[..., 0])

    # A rank may have some heads of a group only, so the groups' values are copied for its heads.
    for group in groups:
        gathered = gather_summed(group, axis)
        of_heads = torch.arange(num_heads, device=group.device)[local] // (
            num_heads // group.shape[1]
        )
        result.append(gathered.index_select(1, of_heads))
    return result


def _local_slice(size: int, layout: Layout) -> slice:
    """Return this rank's channels or heads."""
    axis = layout.sequence.axis
    if size % axis.size:
        raise ValueError(
            f"--sp_size {axis.size} does not divide the {size} channels or heads of a layer with a"
            " recurrent state"
        )
    size_per_rank = size // axis.size
    return slice(axis.rank * size_per_rank, (axis.rank + 1) * size_per_rank)


def _split(values: Tensor, shapes: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    return values.split([size * width for size, width in shapes])


def _with_tails(layout: Layout, kernel: int) -> tuple[Tensor, Tensor]:
    """Return the rows that a convolution reads one after another, and where the tokens are in them.

    Each run of computed tokens follows the `kernel` - 1 tokens before it, so it sees nothing else.
    Row U stands for a missing one.
    """
    key = "convolution", kernel
    if key not in layout.derived:
        pieces = layout.pieces
        before = kernel - 1
        steps = pieces.depth[:, None] + np.arange(-before, 0)
        tokens = (layout.starts[pieces.row][:, None] + steps).clip(0)
        tails = np.where(steps < 0, layout.num_computed, layout.computed_index[tokens])

        sizes = pieces.sizes + before
        begins = sizes.cumsum() - sizes
        source = np.empty(int(sizes.sum()), dtype=np.int64)
        source[(begins[:, None] + np.arange(before)).flatten()] = tails.flatten()
        positions = ranges(begins + before, pieces.sizes)
        source[positions] = ranges(pieces.begins, pieces.sizes)
        layout.derived[key] = tuple(
            to_device(torch.from_numpy(index), layout.device) for index in (source, positions)
        )

    return layout.derived[key]


@dataclass(frozen=True)
class Block:
    """Runs of tokens in one call."""

    keeps_states: bool
    """Whether runs of the next level continue some of these."""
    parents: Tensor | None
    """[runs] int64: the states of the level before that the runs begin with; None without one."""
    offsets: Tensor | None = None
    """[runs + 1] int64: where the runs begin if they are concatenated; None if they are rows."""


@dataclass(frozen=True)
class Level:
    """Runs of tokens that begin without a state, or with the states at the end of runs before."""

    shapes: list[tuple[int, int]]
    """(number of rows, width) of each block."""
    source: Tensor
    """[P] int64: the computed token at each position of the blocks."""
    blocks: list[Block]


@dataclass(frozen=True)
class PrefixTree:
    """The computed tokens as runs that end where a sequence ends, or where others continue."""

    begins: np.ndarray
    """First computed token of each run, int64 [runs]."""
    sizes: np.ndarray
    parent: np.ndarray
    """Run that a run continues, -1 without one."""
    depth: np.ndarray
    """Number of runs before a run."""


def _tree(layout: Layout) -> PrefixTree:
    pieces = layout.pieces
    continued = pieces.depth > 0
    # The computed token that each of these pieces follows; a run ends there.
    last = layout.computed_index[layout.starts[pieces.row] + pieces.depth - 1]
    begins = np.union1d(pieces.begins, last[continued] + 1)
    begins = begins[begins < layout.num_computed]
    run_of = np.searchsorted(begins, np.arange(layout.num_computed), side="right") - 1
    parent = np.arange(len(begins)) - 1
    parent[np.searchsorted(begins, pieces.begins)] = np.where(continued, run_of[last], -1)

    depth = np.zeros(len(begins), dtype=np.int64)
    for run in (parent >= 0).nonzero()[0]:
        depth[run] = depth[parent[run]] + 1
    return PrefixTree(begins, np.diff(np.r_[begins, layout.num_computed]), parent, depth)


def _levels(layout: Layout, *, in_blocks: bool) -> tuple[list[Level], Tensor]:
    """Return the levels of the tree of shared prefixes, and the position of each token in them.

    Without shared prefixes there is one level with one run for each sequence. A level is one call
    with concatenated runs, or `in_blocks` of padded rows.
    """
    key = "levels", in_blocks
    if key in layout.derived:
        return layout.derived[key]

    tree = _tree(layout)
    has_children = np.isin(np.arange(len(tree.sizes)), tree.parent)
    number_of_state = np.full(len(tree.sizes), -1)
    levels = []
    positions = np.empty(layout.num_computed, dtype=np.int64)
    written = 0

    for number in range(int(tree.depth.max()) + 1):
        runs = np.flatnonzero(tree.depth == number)
        rows = _rows(runs, has_children, tree.sizes) if in_blocks else [(runs, None)]
        shapes = []
        sources = []
        found = []
        states = 0
        for some, width in rows:
            sizes = tree.sizes[some]
            widths = sizes if width is None else np.full(len(some), width)
            tokens = ranges(tree.begins[some], sizes)
            # Padding repeats the last token of a run.
            steps = ranges(np.zeros_like(widths), widths)
            last = (tree.begins[some] + sizes - 1).repeat(widths)
            sources.append(np.minimum(tree.begins[some].repeat(widths) + steps, last))
            positions[tokens] = written + ranges(widths.cumsum() - widths, sizes)
            written += len(steps)
            shapes.append((1, len(steps)) if width is None else (len(some), width))

            before = number_of_state[tree.parent[some]]
            parents = to_device(torch.from_numpy(before), layout.device) if number else None
            starts = (
                offsets(torch.from_numpy(sizes), layout.device).long() if width is None else None
            )
            found.append(Block(bool(has_children[some].any()), parents, starts))
            if found[-1].keeps_states:
                number_of_state[some] = states + np.arange(len(some))
                states += len(some)

        source = to_device(torch.from_numpy(np.concatenate(sources)), layout.device)
        levels.append(Level(shapes, source, found))

    layout.derived[key] = levels, to_device(torch.from_numpy(positions), layout.device)
    return layout.derived[key]


def _rows(
    runs: np.ndarray, has_children: np.ndarray, sizes: np.ndarray
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the runs of each block with its width.

    Runs that others continue share a block with runs of the same size only, because padding would
    change their states. The rest is divided like sequences for attention.
    """
    inner = runs[has_children[runs]]
    for size in np.unique(sizes[inner]):
        yield inner[sizes[inner] == size], int(size)

    outer = runs[~has_children[runs]]
    if not len(outer):
        return

    cut = blocks(torch.from_numpy(sizes[outer]), torch.device("cpu"))
    first = np.arange(len(outer))
    if cut.positions is not None:
        starts = sizes[outer].cumsum() - sizes[outer]
        first = cut.positions[torch.from_numpy(starts)].argsort().numpy()
    for some, (_, width) in zip(
        np.split(outer[first], np.cumsum([size for size, _ in cut.shapes])[:-1]),
        cut.shapes,
        strict=True,
    ):
        yield some, width
