"""Tensors of training: Batch, what it is made of, and its micro-batches.

Shapes: T tokens of all sequences, concatenated without padding; N sequences.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor


def per_token(default: Any = None) -> Any:
    return field(default=default, metadata={"per": "token"})


def per_sequence(default: Any = None) -> Any:
    return field(default=default, metadata={"per": "sequence"})


@dataclass(slots=True)
class Routing:
    """Routing statistics of a mixture of E experts, summed over tokens and layers; float32."""

    chosen: Tensor  # [E] how often each expert was chosen
    probabilities: Tensor  # [E] sum of the routing probabilities, with gradient
    count: Tensor  # [] tokens times layers


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """Shape of a record of the experts that each layer has chosen for a token: [layers, k].

    Layers without experts have an entry too, with any ids.
    """

    num_layers: int
    num_chosen: int
    num_experts: int

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """Return the shape for a model's configuration; None for a model without experts."""
        text = config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        num_experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 0)
        if not num_experts:
            return None
        return cls(text.num_hidden_layers, text.num_experts_per_tok, num_experts)

    @property
    def dtype(self) -> torch.dtype:
        """Return the smallest type that has room for all ids and for `missing`."""
        return torch.uint8 if self.num_experts <= torch.iinfo(torch.uint8).max else torch.int16

    def empty(self, num_tokens: int) -> Tensor:
        """Return records of tokens whose experts nobody knows: [num_tokens, layers, k]."""
        shape = (num_tokens, self.num_layers, self.num_chosen)
        return torch.full(shape, missing_expert(self.dtype), dtype=self.dtype)


def missing_expert(dtype: torch.dtype) -> int:
    """Return the id that stands for an unknown expert in a record of this type."""
    return torch.iinfo(dtype).max


Features = dict[str, Tensor]
"""Output of a processor for the images of one sequence, as inputs of the model.

It is empty without images.
"""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prefixes that sequences of a batch share.

    A causal model computes each token of a prefix once, so U tokens instead of T. Of two sequences
    `a b c` and `a b d`, the second needs only `d`:

        tokens    a b c a b d    [T]
        computed  0 1 2 5        [U]
        indices   0 1 2 0 1 3    [T], spread() of values w x y z gives w x y w x z
    """

    # [U] int64 on the host, ascending: indices of the computed tokens, one for all with the same
    # prefix
    computed: Tensor
    # [T] int64 on the host: for each token, the index of its representative in `computed`
    indices: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Expand values of computed tokens, [U, ...], to all tokens: [T, ...]."""
        return values.index_select(0, to_device(self.indices, values.device))

    def append_sequence(self, count: int) -> Self:
        """Return a copy with one more sequence of `count` tokens that shares nothing."""
        appended = torch.arange(count)
        return replace(
            self,
            computed=torch.cat([self.computed, len(self.indices) + appended]),
            indices=torch.cat([self.indices, len(self.computed) + appended]),
        )


@dataclass(slots=True)
class Batch:
    """Concatenated sequences, the layout of all training tensors.

    Two sequences `a b c` and `x y`, where `b c` and `y` are in the loss:

        input_ids  a b c x y        [T]
        loss_mask  0 1 1 0 1        [T]
        lengths    3 2              [N]
    """

    lengths: Tensor = per_sequence()  # [N] int64, stays on the host in `to`: shapes depend on it
    input_ids: Tensor = per_token()  # [T] int64
    loss_mask: Tensor = per_token()  # [T] bool, tokens in the loss; never the first of a sequence
    # [N] int64, index of each sequence in the whole batch of all ranks
    rows: Tensor = per_sequence()
    # [T] float32, of the trained model: set by the forward() of its role, with gradient
    entropy: Tensor | None = per_token()
    # [T] bool, sampled before a response may end; None: it may end anywhere
    early: Tensor | None = per_token()
    # [T, layers, k] experts that the engine chose, see RoutedShape; None: routers choose freely
    experts: Tensor | None = per_token()
    # [T, K] int32, more ids whose log-probs the policy computes in training; -1: none
    candidates: Tensor | None = per_token()
    teacher_logprobs: Tensor | None = per_token()  # [T, K] float32, of the candidates
    # [M] int64, see learned_tokens; set by `to`
    learned: Tensor | None = field(default=None, metadata={"per": "batch"})
    # of a micro-batch; None: nothing is shared
    shared: SharedPrefix | None = field(default=None, metadata={"per": "batch"})
    # of the trained model, set like entropy
    routing: Routing | None = field(default=None, metadata={"per": "batch"})
    # [N] per sequence, on the host; None: text
    media: list[Features] | None = field(default=None, metadata={"per": "media"})
    # [N] int64, cost of the towers for its media, in text tokens
    tower_tokens: Tensor | None = per_sequence()
    # of a caller, [T] or [N]
    extra_columns: dict[str, Tensor] = field(default_factory=dict, metadata={"per": "batch"})
    # names of those that are [T]
    extra_per_token: frozenset[str] = field(default=frozenset(), metadata={"per": "batch"})

    def __getattr__(self, name: str) -> Tensor:
        """Return a column of the caller."""
        if not name.startswith(("_", "extra_")) and name in self.extra_columns:
            return self.extra_columns[name]
        raise AttributeError(f"{type(self).__name__} has no column {name!r}")

    def set_column(self, name: str, values: Tensor, per: str = "token") -> None:
        """Add a column, [T] or with `per` "sequence" [N]; each micro-batch contains it."""
        self.extra_columns[name] = values
        if per == "token":
            self.extra_per_token |= {name}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_computed(self) -> int:
        """Return the number of tokens that a model computes: all, or each shared prefix once."""
        return len(self.shared.computed) if self.shared else self.num_tokens

    @property
    def learned_tokens(self) -> Tensor:
        """Return the positions of the loss tokens, ascending, [M] int64.

        They are on the host, because the number is a shape.
        """
        return self.loss_mask.nonzero()[:, 0].cpu() if self.learned is None else self.learned

    @property
    def offsets(self) -> Tensor:
        """Return the start of each sequence, [N + 1] int64; the last entry is T."""
        return F.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def position_ids(self) -> Tensor:
        """Return the position of each token in the sequence: [T] int64."""
        starts = torch.repeat_interleave(
            self.offsets[:-1], self.lengths, output_size=self.num_tokens
        )
        positions = torch.arange(self.num_tokens, device=starts.device) - starts
        return to_device(positions, self.input_ids.device)

    @property
    def sequence_ids(self) -> Tensor:
        """Return the index of the sequence of each token: [T] int64."""
        rows = torch.arange(len(self), device=self.lengths.device)
        # Without output_size the host waits for the sum.
        rows = torch.repeat_interleave(rows, self.lengths, output_size=self.num_tokens)
        return to_device(rows, self.input_ids.device)

    def columns(self, per: str) -> dict[str, Tensor]:
        """Return the tensors that are present, `per` "token" or "sequence", by name."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["per"] == per}
        for name, value in self.extra_columns.items():
            if (name in self.extra_per_token) == (per == "token"):
                present[name] = value
        return {name: value for name, value in present.items() if value is not None}

    def with_columns(self, columns: Mapping[str, Any]) -> Self:
        """Return a batch with these columns, by name, in place of the current ones.

        What is derived from them is left out.
        """
        extra = {name: columns.get(name, value) for name, value in self.extra_columns.items()}
        others = {name: value for name, value in columns.items() if name not in extra}
        return replace(self, **{"learned": None, "shared": None} | others, extra_columns=extra)

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Return a batch of the given sequences, in the given order."""
        rows = torch.as_tensor(rows, dtype=torch.int64, device=self.lengths.device)
        tokens = token_index(self.offsets, rows)
        media = None if self.media is None else [self.media[row] for row in rows.tolist()]
        per_token = {name: value[tokens] for name, value in self.columns("token").items()}
        per_sequence = {name: value[rows] for name, value in self.columns("sequence").items()}
        return self.with_columns(per_token | per_sequence | {"media": media})

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to a device.

        Lengths, positions of loss tokens and media stay on the host.
        """
        columns = self.columns("sequence") | self.columns("token")
        del columns["lengths"]
        device = torch.device(device)
        moved = {name: to_device(value, device) for name, value in columns.items()}
        kept = {"learned": self.learned_tokens, "shared": self.shared}
        return self.with_columns(kept | moved)


@dataclass(slots=True)
class Experience(Batch):
    """Batch of scored samples with the tensors that the policy gradient needs.

    Two samples `p a b` and `p c` of one prompt `p`, with rewards 1 and 0; the estimator subtracts
    the mean of the group:

        input_ids        p   a   b   p   c       [T]
        loss_mask        0   1   1   0   1       [T]
        engine_logprobs  0  -.1 -.2  0  -.9      [T]
        groups           7           7           [N]
        rewards          1           0           [N]
        advantages       0   .5  .5  0  -.5      [T]
    """

    groups: Tensor = per_sequence()  # [N] int64
    rewards: Tensor = per_sequence()  # [N] float32
    # [T] float32, advantage of the reward at each token, 0 without a reward
    reward_advantages: Tensor | None = per_token()
    advantages: Tensor | None = per_token()  # [T] float32
    engine_logprobs: Tensor = per_token()  # [T] float32, as sampled
    # [T] float32, of the actor before the first update of the step
    old_logprobs: Tensor | None = per_token()
    reference_logprobs: Tensor | None = per_token()  # [T] float32
    # [T] float32, critic's value before each token, before the first update
    values: Tensor | None = per_token()
    returns: Tensor | None = per_token()  # [T] float32, targets of the critic
    weights: Tensor | None = per_token()  # [T] float32, weight of each token in the policy loss
    # [T] bool, tokens with a special treatment in the policy loss; see covariance.py
    marked: Tensor | None = per_token()
    teachers: Tensor | None = per_sequence()  # [N] int64, number of the teacher; None: the only one
    # [N, W] int32, prompt that the teacher sees, then -1; None: the same prompt
    teacher_prompts: Tensor | None = per_sequence()
    # [N] int64, tokens before the response; only with teacher_prompts
    prompt_lengths: Tensor | None = per_sequence()


@dataclass(slots=True)
class JudgedBatch(Batch):
    """Batch of given answers with a judgement: pairs, or single answers.

    In a pair the chosen answer precedes the rejected one, and both sequences have the pair's
    values. Two pairs, with the names of heads as numbers:

        rows     0 1 2 3        chosen, rejected, chosen, rejected
        margins  0.5 0.5 1 1    [N]
        heads    0 0 2 2        [N]
    """

    # [N] float32, difference of scores that a pair should have
    margins: Tensor | None = per_sequence()
    # [N] bool, True if the answers of the pair are equally good
    ties: Tensor | None = per_sequence()
    heads: Tensor | None = per_sequence()  # [N] int64, head of the reward model that learns
    desirable: Tensor | None = per_sequence()  # [N] bool, False for a bad answer
    # [T] float32, label from 0 to 1 of the step that ends at a learned token
    targets: Tensor | None = per_token()
    # [N] float32, sum of the reference's log-probs of the learned tokens
    reference: Tensor | None = per_sequence()


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing.

    An accelerator copies asynchronously from pinned memory only.
    """
    if torch.accelerator.is_available() and value.device.type == "cpu" and device.type != "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def append_sequence(batch: Batch, token_ids: Tensor, features: Features | None = None) -> Batch:
    """Return the batch with one more sequence, outside of the loss, and the images.

    Only columns that a model reads remain.
    """
    lengths = F.pad(batch.lengths, (0, 1), value=len(token_ids))
    mask = F.pad(batch.loss_mask, (0, len(token_ids)))
    rows = F.pad(batch.rows, (0, 1))
    ids = torch.cat([batch.input_ids, token_ids.to(batch.input_ids)])
    if batch.media is None and not features:
        media = None
    else:
        media = [*(batch.media or [{}] * len(batch)), features or {}]
    shared = batch.shared and batch.shared.append_sequence(len(token_ids))
    experts = batch.experts
    if experts is not None:
        shape = (len(token_ids), *experts.shape[1:])
        missing = experts.new_full(shape, missing_expert(experts.dtype))
        experts = torch.cat([experts, missing])

    return Batch(
        lengths, ids, mask, rows, learned=batch.learned, shared=shared, media=media, experts=experts
    )


def pad_to_multiple(batch: Batch, multiple: int) -> Batch:
    """Append padding so that the number of computed tokens is a multiple of `multiple`.

    The padding is a sequence that is excluded from the loss.
    """
    missing = -batch.num_computed % multiple
    return append_sequence(batch, batch.input_ids.new_zeros(missing)) if missing else batch


def concatenated_features(features: Sequence[Features]) -> Features:
    """Concatenate the features of several sequences, in order.

    Smaller tensors are padded with zeros, as by a processor.
    """
    names = dict.fromkeys(name for one in features for name in one)
    return {name: _stack([one[name] for one in features if name in one]) for name in names}


def _stack(tensors: list[Tensor]) -> Tensor:
    """Concatenate along the first dimension and pad all others to the largest size."""
    shape = [
        sum(map(len, tensors)),
        *(max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)),
    ]
    result = tensors[0].new_zeros(shape)
    start = 0
    for tensor in tensors:
        result[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return result


def unpadded(values: Tensor, lengths: Tensor) -> Tensor:
    """Convert right-padded rows [B, S] to the concatenated tokens: [T]."""
    return values[torch.arange(values.shape[1], device=lengths.device) < lengths[:, None]]


def padded(values: Tensor, lengths: Tensor, width: int, *, fill: float = 0) -> Tensor:
    """Convert concatenated tokens [T, ...] to right-padded rows [B, width, ...].

    The padding is `fill`.
    """
    rows = values.new_full((len(lengths), width, *values.shape[1:]), fill)
    rows[torch.arange(width, device=lengths.device) < lengths[:, None]] = values
    return rows


def token_index(offsets: Tensor, rows: Tensor) -> Tensor:
    """Return the flat positions of all tokens of `rows`, in the order of `rows`: [T'].

    `offsets` are [N + 1].
    """
    lengths = (offsets[1:] - offsets[:-1])[rows]
    ends = lengths.cumsum(0)
    before = torch.repeat_interleave(ends - lengths, lengths)
    within = torch.arange(int(lengths.sum()), device=rows.device) - before
    return torch.repeat_interleave(offsets[rows], lengths) + within


# -- micro-batches


Rows = list[list[int]]
"""[m]: the sequences of micro-batch m, as positions in a batch."""


@dataclass(slots=True)
class TrainingPlan:
    """This rank's share of the experience, and the micro-batches of each optimizer step.

    minibatches[k][m] are the rows of micro-batch m of optimizer step k.
    """

    experience: Experience
    minibatches: list[Rows]
    epochs: int = 1
    """How often a step learns from each of them."""

    @property
    def updates(self) -> list[Rows]:
        """Return the micro-batches of all optimizer steps of all epochs."""
        return self.minibatches * self.epochs

    @property
    def microbatches(self) -> Rows:
        """Return the micro-batches of one epoch."""
        return [members for minibatch in self.minibatches for members in minibatch]


def consecutive(lengths: list[int], minibatch_size: int | None, max_tokens: int) -> list[Rows]:
    """Divide sequences, in their order, into optimizer steps and these into micro-batches: [k][m].

    A micro-batch has at most `max_tokens` tokens. Runs balance several ranks, too.
    """
    size = minibatch_size or max(len(lengths), 1)
    steps = []
    for first, stop in pairwise([*range(0, len(lengths), size), len(lengths)]):
        rows: Rows = []
        room = -1
        for row in range(first, stop):
            room -= lengths[row]
            if room < 0:
                rows.append([])
                room = max_tokens - lengths[row]
            if room < 0:
                raise ValueError(f"a sequence of {lengths[row]} tokens exceeds {max_tokens}")
            rows[-1].append(row)
        steps.append(rows)
    return steps


def micro_batches(batch: Batch, rows: Rows, to_device: Callable[[Batch], Batch]) -> Iterator[Batch]:
    """Yield the micro-batches on the device.

    An empty one becomes a single unlearned token, so that ranks stay in step.
    """
    for members in rows:
        yield to_device(batch.select(members) if members else empty_microbatch(batch))


def infer(
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    rows: Rows,
    to_device: Callable[[Batch], Batch],
) -> Tensor:
    """Run `forward` on all micro-batches without gradients.

    It returns [t, ...] for each; the result is [T, ...] on the host, in the batch's order.
    """
    with torch.no_grad():
        values = [forward(micro_batch) for micro_batch in micro_batches(batch, rows, to_device)]
    result = torch.zeros(batch.num_tokens, *(values[0].shape[1:] if values else ()))
    for members, value in zip(rows, values, strict=True):
        if members:
            result[token_index(batch.offsets, torch.tensor(members))] = value.cpu()
    return result


def empty_microbatch(batch: Batch) -> Batch:
    """Return a batch of one token that is not learned, with the columns of `batch`."""
    tensors = batch.columns("token") | batch.columns("sequence")
    zeros = {name: value.new_zeros(1, *value.shape[1:]) for name, value in tensors.items()}
    absent = {"media": None, "experts": None}
    return batch.with_columns(zeros | absent | {"lengths": batch.lengths.new_ones(1)})
