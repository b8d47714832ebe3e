"""Attention over flat batches: sequences end to end, none sees another.

One function, registered with transformers under the name `lightrft`. Two kernels do the work: variable-length flash attention
where the device has it; elsewhere torch's own, over blocks of sequences of similar length, padded on the right. There plain
causal attention is already right: padding stands behind every token that counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from transformers import AttentionInterface

from lightrft.parallel.device import has_flash_attention
from lightrft.parallel.sequence import UNDIVIDED, Undivided
from lightrft.types import Shared, send

ATTENTION = "lightrft"

ALONE = 64
"""A sequence longer than this shares a block with those of its very length only: one more call costs less than padding."""

Kernel = Callable[..., Tensor]
"""(query [T, H, D], key and value [T, H_kv, D], layout, scaling=, window=, dropout=) -> [T, H, D]; all of computed tokens."""


@dataclass(frozen=True)
class Blocks:
    """The sequences in blocks of one width, end to end."""

    shapes: list[tuple[int, int]]
    """(sequences, width) of each block."""
    source: Tensor | None
    """[P] int64: the token at each place of the blocks; padding repeats the last token. None: blocks are flat already."""
    places: Tensor | None
    """[T] int64: where each token stands in the blocks."""


class Layout:
    """Where the sequences of a flat batch lie; made once per micro-batch, used by every layer.

    Made on the host from lengths that are there, so that nobody waits for the device. No dataclass: in mixed precision FSDP
    copies those for every layer, and what is kept here would be computed again.
    """

    def __init__(
        self, lengths: Tensor, device: torch.device, sequence: Undivided = UNDIVIDED, shared: Shared | None = None
    ):
        self.lengths = lengths.cpu()
        """[N] int64 on the host."""
        self.device = device
        """Where the batch is."""
        self.sequence = sequence
        """How ranks divide its tokens."""
        self.shared = shared
        """Which of its tokens are computed, where not all are; ranks do not divide them then."""
        self.runs = tuple(_runs(self.lengths, device, sequence)) if sequence.axis.size > 1 else ()
        """The runs of tokens whose queries this rank has, where ranks divide them."""

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def offsets(self) -> Tensor:
        """[N + 1] int32 on the device: where each sequence begins; the last entry is T."""
        return send(F.pad(self.lengths.cumsum(0), (1, 0)).int(), self.device)

    def whole(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Of computed tokens -> of all tokens, [T, ...] each, for a kernel that knows nothing of shared pasts."""
        return values if self.shared is None else tuple(value.index_select(0, self._shared[1]) for value in values)

    def computed(self, output: Tensor) -> Tensor:
        """What such a kernel gave for all tokens, [T, ...], of computed ones only."""
        return output if self.shared is None else output.index_select(0, self._shared[0])

    @cached_property
    def _shared(self) -> tuple[Tensor, Tensor]:
        return send(self.shared.computed, self.device), send(self.shared.places, self.device)

    @cached_property
    def blocks(self) -> Blocks:
        """On the device. Where pasts are shared, a computed token stands at the places of all for which it is computed."""
        shapes, source, places = self._blocks()
        if self.shared is not None:
            source = self.shared.places if source is None else self.shared.places[source]
            places = self.shared.computed if places is None else places[self.shared.computed]
        return Blocks(shapes, *(None if index is None else send(index, self.device) for index in (source, places)))

    def _blocks(self) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
        """Long sequences with those of their length, short ones with those of the same power of two: padding is under a half."""
        lengths = self.lengths
        similar = lengths.double().log2().ceil().long()
        similar[lengths > ALONE] = 64 + _first_alike(lengths)[lengths > ALONE]  # above every exponent
        if bool((lengths == lengths[0]).all()):
            return [(len(lengths), int(lengths[0]))], None, None
        _, block, sizes = similar.unique(return_inverse=True, return_counts=True)
        widths = torch.zeros_like(sizes).scatter_reduce(0, block, lengths, "amax")
        shapes = list(zip(sizes.tolist(), widths.tolist(), strict=True))
        order = block.argsort(stable=True)
        width, starts = widths[block], lengths.cumsum(0) - lengths
        place = torch.empty_like(starts)
        place[order] = width[order].cumsum(0) - width[order]
        source = (starts[order].repeat_interleave(width[order])
                  + torch.minimum(_steps(width[order]), (lengths[order] - 1).repeat_interleave(width[order])))  # fmt: skip
        places = place.repeat_interleave(lengths) + _steps(lengths)
        return (shapes, None, None) if torch.equal(source, torch.arange(len(places))) else (shapes, source, places)


@dataclass(frozen=True)
class Run:
    """Consecutive queries, by flat position: first to middle end a sequence that begins before, middle to stop are the rest."""

    begin: int
    """Where the sequence begins to which the first token belongs."""
    first: int
    middle: int
    stop: int
    causal: CausalBias | None
    """What first to middle see from begin on; None where middle is first. Made here because torch cannot make it inside a block
    whose operations it watches, as selective recomputation does."""
    rest: Layout | None
    """Of the sequences that begin here, as far as the run goes; None where there are none."""


def _runs(lengths: Tensor, device: torch.device, sequence: Undivided) -> Iterator[Run]:
    stops = lengths.cumsum(0)
    begins = stops - lengths
    for first, stop in sequence.queries(int(stops[-1])):
        inside = (begins >= first) & (begins < stop)
        rest = stops[inside].clamp(max=stop) - begins[inside]
        middle = stop - int(rest.sum())
        begin = int(begins[begins <= first][-1])
        causal = causal_lower_right(middle - first, middle - begin) if middle > first else None
        yield Run(begin, first, middle, stop, causal, Layout(rest, device) if len(rest) else None)


def _first_alike(lengths: Tensor) -> Tensor:
    """[N] int64: of each sequence the first one of its length."""
    kind = lengths.unique(return_inverse=True)[1]
    return torch.full_like(lengths, len(lengths)).scatter_reduce(0, kind, torch.arange(len(lengths)), "amin")[kind]


def _steps(lengths: Tensor) -> Tensor:
    """0, 1, ... of every sequence, end to end."""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def attention_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The one place that chooses."""
    if not has_flash_attention(device) or dtype not in (torch.bfloat16, torch.float16):
        return block_attention
    from lightrft.models.flash_attn import flash_kernel

    return flash_kernel() or block_attention


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, t, D], key and value [1, H_kv, t, D] of this rank's tokens -> ([1, t, H, D], None).

    A token sees `sliding_window` with itself.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__} uses soft-capped or sink attention, which flat batches do not support")
    query, key, value = layout.sequence.enter(*(x[0].transpose(0, 1) for x in (query, key, value)))
    window = sliding_window if sliding_window and sliding_window < layout.longest else None
    kernel = attention_kernel(query.device, query.dtype)
    if len(query) != len(key):
        kernel = partial(run_attention, kernel)
    output = kernel(query, key, value, layout, scaling=scaling, window=window, dropout=dropout)
    return layout.sequence.leave(output).unsqueeze(0), None


def run_attention(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, layout: Layout, **options: Any) -> Tensor:
    """This rank's queries [t, H, D] in the keys and values [T, H_kv, D] of all tokens: [t, H, D].

    A sequence that begins in a run is an ordinary one, as far as it goes; only one that began before is seen from its end.
    """
    outputs = []
    for run, queries in zip(layout.runs, query.split([run.stop - run.first for run in layout.runs]), strict=True):
        ending, rest = queries.split([run.middle - run.first, run.stop - run.middle])
        if len(ending):
            whole = slice(run.begin, run.middle)
            outputs.append(end_attention(ending, key[whole], value[whole], run.causal, **options))
        if run.rest is not None:
            outputs.append(kernel(rest, key[run.middle : run.stop], value[run.middle : run.stop], run.rest, **options))
    return torch.cat(outputs)


def end_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: CausalBias, *, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """The last S tokens of one sequence: query [S, H, D], key and value [longer, H_kv, D] -> [S, H, D]."""
    size = len(query)
    windowed = window is not None and len(key) > window
    if windowed:
        key, value = key[-(size + window - 1) :], value[-(size + window - 1) :]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if windowed:
        mask = _window_mask(size, window, query.device, num_keys=len(key))
    else:
        mask = causal  # not for grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """torch's scaled dot product attention, block by block."""
    blocks, outputs = layout.blocks, []
    for (size, width), q, k, v in zip(blocks.shapes, *(_split(x, blocks) for x in (query, key, value)), strict=True):
        q, k, v = (x.view(size, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = _window_mask(width, window, query.device) if window and width > window else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output if blocks.places is None else output.index_select(0, blocks.places)


def _split(x: Tensor, blocks: Blocks) -> tuple[Tensor, ...]:
    """[T, H, D] -> of each block [n * S, H, D]. One split: its gradient is one concatenation, that of slices one sum each."""
    x = x if blocks.source is None else x.index_select(0, blocks.source)
    return x.split([size * width for size, width in blocks.shapes])


def _window_mask(size: int, window: int, device: torch.device, num_keys: int | None = None) -> Tensor:
    """[S, keys] bool, S keys when None: each of the last S tokens sees itself and the window - 1 before it."""
    steps = torch.arange(num_keys or size, device=device)
    distance = steps[-size:, None] - steps
    return (distance >= 0) & (distance < window)


AttentionInterface.register(ATTENTION, flat_attention)
