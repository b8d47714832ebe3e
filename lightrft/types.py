"""The nouns: Prompt, Sample, Batch, Experience.

Shapes: T tokens of all sequences end to end, N sequences. There is no padding here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrft.samples import Completion, Expand, Expanded, Prompt, Sample, TokenIds  # noqa: F401


def per_token(default: Any = None) -> Any:
    return field(default=default, metadata={"per": "token"})


def per_sequence(default: Any = None) -> Any:
    return field(default=default, metadata={"per": "sequence"})


@dataclass(slots=True)
class Routing:
    """What the routers of a mixture of E experts did, summed over tokens and layers; float32."""

    chosen: Tensor  # [E] how often an expert was among the chosen
    probabilities: Tensor  # [E] with gradient
    count: Tensor  # [] tokens times layers


Features = dict[str, Tensor]
"""What a processor makes of the images of one sequence, for its model; empty where it has none."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The prefixes that sequences of a batch share: a causal model computes each of their tokens once, U tokens for T."""

    computed: Tensor  # [U] int64 on the host, ascending: the tokens that stand for all with the same tokens up to them
    places: Tensor  # [T] int64 on the host: for each token, where among them its own is

    def spread(self, values: Tensor) -> Tensor:
        """Return values of computed tokens, [U, ...], for all tokens: [T, ...]."""
        return values.index_select(0, to_device(self.places, values.device))

    def append_sequence(self, count: int) -> Self:
        """Return the same with a sequence of `count` tokens more, which shares nothing."""
        more = torch.arange(count)
        return replace(self, computed=torch.cat([self.computed, len(self.places) + more]),
                       places=torch.cat([self.places, len(self.computed) + more]))


@dataclass(slots=True)
class Batch:
    """Sequences end to end: the one layout of training tensors.

    Two sequences `a b c` and `x y` of which `b c` and `y` are to be learned:

        input_ids  a b c x y        [T]
        loss_mask  0 1 1 0 1        [T]
        lengths    3 2              [N]
    """

    lengths: Tensor = per_sequence()  # [N] int64, left on the host by `to`: shapes follow without waiting
    input_ids: Tensor = per_token()  # [T] int64
    loss_mask: Tensor = per_token()  # [T] bool, tokens that are learned; never the first of a sequence
    rows: Tensor = per_sequence()  # [N] int64, where each sequence stood in the whole batch of all ranks
    entropy: Tensor | None = per_token()  # [T] float32, of the model that learns: Policy.forward sets it, with its gradient
    learned: Tensor | None = field(default=None, metadata={"per": "batch"})  # [M] int64, see learned_tokens; made by `to`
    shared: SharedPrefix | None = field(default=None, metadata={"per": "batch"})  # of one micro-batch; None: nothing is shared
    routing: Routing | None = field(default=None, metadata={"per": "batch"})  # of the model that learns, set as entropy is
    media: list[Features] | None = field(default=None, metadata={"per": "media"})  # [N] of each sequence, on the host; None: text

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_computed(self) -> int:
        """Tokens that a model computes: all, or each shared prefix once."""
        return len(self.shared.computed) if self.shared else self.num_tokens

    @property
    def num_loss_tokens(self) -> Tensor:
        """[] float32, tokens that are learned."""
        return self.loss_mask.sum(dtype=torch.float32)

    @property
    def learned_tokens(self) -> Tensor:
        """[M] int64, the positions of learned tokens in ascending order; on the host, as their number is a shape."""
        return self.loss_mask.nonzero()[:, 0].cpu() if self.learned is None else self.learned

    @property
    def offsets(self) -> Tensor:
        """[N + 1] int64, where each sequence begins; the last entry is T."""
        return F.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def position_ids(self) -> Tensor:
        """[T] int64, restarting at every sequence."""
        starts = torch.repeat_interleave(self.offsets[:-1], self.lengths, output_size=self.num_tokens)
        return to_device(torch.arange(self.num_tokens, device=starts.device) - starts, self.input_ids.device)

    @property
    def sequence_ids(self) -> Tensor:
        """[T] int64, the sequence of each token."""
        rows = torch.arange(len(self), device=self.lengths.device)
        rows = torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)  # else the host waits for the sum
        return to_device(rows, self.input_ids.device)

    def columns(self, per: str) -> dict[str, Tensor]:
        """The tensors that are present, `per` "token" or "sequence"."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["per"] == per}
        return {name: value for name, value in present.items() if value is not None}

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given sequences, in the given order."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.lengths.device)
        tokens = token_index(self.offsets, rows)
        return replace(
            self,
            learned=None,
            shared=None,
            media=None if self.media is None else [self.media[row] for row in rows.tolist()],
            **{name: value[rows] for name, value in self.columns("sequence").items()},
            **{name: value[tokens] for name, value in self.columns("token").items()},
        )

    def to(self, device: torch.device | str) -> Self:
        """All but the lengths, the positions of learned tokens and media, which stay on the host."""
        moved = {name: value for name, value in (self.columns("sequence") | self.columns("token")).items() if name != "lengths"}
        device = torch.device(device)
        return replace(self, learned=self.learned_tokens, **{name: to_device(value, device) for name, value in moved.items()})


@dataclass(slots=True)
class Experience(Batch):
    """Scored samples: a Batch with what the policy gradient needs."""

    groups: Tensor = per_sequence()  # [N] int64
    rewards: Tensor = per_sequence()  # [N] float32
    step_rewards: Tensor | None = per_token()  # [T] float32, the advantage of the reward that came with each token, 0 elsewhere
    advantages: Tensor | None = per_token()  # [T] float32
    engine_logprobs: Tensor = per_token()  # [T] float32, as sampled
    old_logprobs: Tensor | None = per_token()  # [T] float32, of the actor before this step's first update
    reference_logprobs: Tensor | None = per_token()  # [T] float32
    values: Tensor | None = per_token()  # [T] float32, what the critic expects before each token, before the first update
    returns: Tensor | None = per_token()  # [T] float32, what it learns
    weights: Tensor | None = per_token()  # [T] float32, of the policy loss of each token
    marked: Tensor | None = per_token()  # [T] bool, tokens that the policy loss treats differently; see covariance.py


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it; an accelerator copies asynchronously from pinned memory only."""
    if torch.accelerator.is_available() and value.device.type == "cpu" and device.type != "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def append_sequence(batch: Batch, token_ids: Tensor, features: Features | None = None) -> Batch:
    """Return the batch with one more sequence that is not learned, and its images; it has only the columns that a model reads."""
    lengths = F.pad(batch.lengths, (0, 1), value=len(token_ids))
    mask, rows = F.pad(batch.loss_mask, (0, len(token_ids))), F.pad(batch.rows, (0, 1))
    ids = torch.cat([batch.input_ids, token_ids.to(batch.input_ids)])
    media = None if batch.media is None and not features else [*(batch.media or [{}] * len(batch)), features or {}]
    shared = batch.shared and batch.shared.append_sequence(len(token_ids))
    return Batch(lengths, ids, mask, rows, learned=batch.learned, shared=shared, media=media)


def concatenated_features(features: Sequence[Features]) -> Features:
    """Concatenate the images of several sequences, in order; smaller and fewer parts are padded with zeros, as in a processor."""
    names = dict.fromkeys(name for each in features for name in each)
    return {name: _stacked([each[name] for each in features if name in each]) for name in names}


def _stacked(tensors: list[Tensor]) -> Tensor:
    """One behind the other along the first dimension, all others as long as the longest."""
    shape = [sum(map(len, tensors)), *(max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True))]
    whole, start = tensors[0].new_zeros(shape), 0
    for tensor in tensors:
        whole[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return whole


def unpadded(values: Tensor, lengths: Tensor) -> Tensor:
    """Right-padded rows [B, S] to their tokens end to end: [T]."""
    return values[_is_token(lengths, values.shape[1])]


def padded(values: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The other way round: tokens [T, ...] to rows [B, width, ...], 0 in the padding."""
    rows = values.new_zeros(len(lengths), width, *values.shape[1:])
    rows[_is_token(lengths, width)] = values
    return rows


def _is_token(lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool, False in the padding."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def token_index(offsets: Tensor, rows: Tensor) -> Tensor:
    """Positions in the flat layout of all tokens of `rows`, in the order of `rows`. offsets [N + 1]; returns [T']."""
    lengths = (offsets[1:] - offsets[:-1])[rows]
    ends = lengths.cumsum(0)
    within = torch.arange(int(lengths.sum()), device=rows.device) - torch.repeat_interleave(ends - lengths, lengths)
    return torch.repeat_interleave(offsets[rows], lengths) + within
