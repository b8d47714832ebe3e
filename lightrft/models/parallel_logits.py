"""Log-probs from existing logits that are split over ranks, with the function names of NeMo-RL.

The vocabulary may be split over tensor-parallel ranks, in consecutive parts of any sizes, and
sequences over context-parallel ranks in zigzag order: of the 2 x ranks equal chunks of a sequence,
rank r has chunk r and chunk 2 x ranks - 1 - r. Log-probs need two collectives over the vocabulary
and one over the sequence, the gradient none; results are equal on all ranks.

All ranks compute the same loss from them. The gradient of a rank's logits is then the gradient of
this loss, counted once: do not divide by the number of context-parallel ranks, and sum the
gradients of parameters that these ranks share.

Shapes: B rows, S tokens of each, T tokens end to end, V vocabulary, v of it on this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightrft.algorithms.truncation import ALL, Truncation
from lightrft.models.logprobs import logprobs_of_logits, top_logprobs_of_logits
from lightrft.models.vocab_parallel import VocabularyPart
from lightrft.parallel.collectives import Axis
from lightrft.parallel.sequence_parallel import Gather
from lightrft.parallel.zigzag import Zigzag

IGNORED_TARGET = -100


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = 0,
    *,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
) -> Tensor:
    """Return the log-prob of each token of `target` [B, S] but the first: [B, S - 1] float32.

    Logits are [B, S, v], or [B, S / cp, v] for this rank's chunks of the rows, padded to a multiple
    of 2 cp if necessary. The rank holds the vocabulary from `vocab_start_index` up to but excluding
    `vocab_end_index`. A negative target has log-prob 0 and no gradient. Raise ValueError if there
    are fewer logits than targets, or if `v` does not match the vocabulary range.
    """
    rows, num_tokens = target.shape
    sequence = Zigzag(axis_of(cp_group, "cp")) if cp_group is not None else None
    width = vocab_parallel_logits.shape[1] * (1 if sequence is None else sequence.axis.size)
    if width < num_tokens:
        raise ValueError(
            f"the logits have {width} tokens in each row, but the targets have {num_tokens}"
        )

    # A position's logits predict the next token, which may lie in another rank's chunk. So targets
    # are shifted before they are split.
    following = torch.nn.functional.pad(
        target[:, 1:], (0, width - num_tokens + 1), value=IGNORED_TARGET
    )
    following = (
        following if sequence is None else following[:, sequence.positions(width, target.device)]
    )

    part = vocabulary_part(vocab_parallel_logits, vocab_start_index, vocab_end_index, tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        options = {"temperature": temperature, "truncation": truncation, "chunk": chunk_size}
        values, _ = logprobs_of_logits(
            vocab_parallel_logits.flatten(0, 1), following.flatten(), part=part, **options
        )
        values = values.view(rows, -1)
        if sequence is not None:
            values = sequence.gather(values.T).T

    return values[:, : num_tokens - 1]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup | None,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = 0,
    *,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
) -> Tensor:
    """Return the log-probs of packed sequences: [B, S - 1] float32 with S = `unpacked_seqlen`.

    After the end of a sequence they are 0. Logits are [1, T, v] and `target` [1, T];
    `cu_seqlens_padded` [B + 1] has the start of each sequence and the end of the last. With context
    parallelism the logits are [1, T / cp, v], this rank's chunks of each sequence; every sequence's
    length must be a multiple of 2 cp. Raise ValueError if the sizes do not match.
    """
    starts = cu_seqlens_padded.tolist()
    spans = list(zip(starts[:-1], starts[1:], strict=True))

    sequence = Zigzag(axis_of(cp_group, "cp"))
    if (
        target.numel() != starts[-1]
        or vocab_parallel_logits.shape[1] * sequence.axis.size != starts[-1]
    ):
        raise ValueError(
            f"cu_seqlens_padded ends at {starts[-1]}, but there are {target.numel()} targets and"
            f" logits of {vocab_parallel_logits.shape[1]} tokens on each of {sequence.axis.size}"
            " ranks"
        )

    places = (
        zigzag_places(spans, sequence) if sequence.axis.size > 1 else [torch.arange(starts[-1])]
    )
    following = target.flatten().roll(-1)
    # the last token predicts nothing
    following[[end - 1 for begin, end in spans if end > begin]] = IGNORED_TARGET

    own = places[sequence.axis.rank].to(target.device)
    part = vocabulary_part(vocab_parallel_logits, vocab_start_index, vocab_end_index, group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        options = {"temperature": temperature, "truncation": truncation, "chunk": chunk_size}
        values, _ = logprobs_of_logits(
            vocab_parallel_logits[0], following[own], part=part, **options
        )
        if sequence.axis.size > 1:
            values = Gather.apply(sequence.axis, values)[0][
                torch.cat(places).argsort().to(target.device)
            ]

        counts = [max(min(end - begin - 1, unpacked_seqlen - 1), 0) for begin, end in spans]
        rows = torch.repeat_interleave(
            torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)
        )
        columns = torch.cat([torch.arange(0), *map(torch.arange, counts)])
        flat = columns + torch.tensor(starts[:-1], dtype=torch.int64)[rows]
        result = values.new_zeros(len(counts), unpacked_seqlen - 1)
        rows, columns, flat = (index.to(target.device) for index in (rows, columns, flat))

        return result.index_put((rows, columns), values[flat])


def parallel_logprobs_and_entropy(
    vocab_parallel_logits: Tensor,
    targets: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None,
    chunk_size: int | None = 0,
    *,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
) -> tuple[Tensor, Tensor]:
    """Return log-probs at `targets` and the entropies, float32 and differentiable.

    Targets are not shifted. Logits are [T, v]; targets [T], or [T, K] for several tokens at each
    position. The log-probs have the shape of the targets, the entropies are [T].
    """
    part = vocabulary_part(vocab_parallel_logits, vocab_start_index, vocab_end_index, tp_group)
    options = {"temperature": temperature, "truncation": truncation, "chunk": chunk_size}
    return logprobs_of_logits(vocab_parallel_logits, targets, part=part, **options)


def parallel_top_logprobs(
    vocab_parallel_logits: Tensor,
    k: int,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup | None,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and ids, [T, k] each, of the k likeliest tokens of the whole vocabulary.

    Logits are [T, v].
    """
    part = vocabulary_part(vocab_parallel_logits, vocab_start_index, vocab_end_index, tp_group)
    return top_logprobs_of_logits(vocab_parallel_logits, k, part=part, temperature=temperature)


def vocabulary_part(
    logits: Tensor, first: int, end: int, group: ProcessGroup | None
) -> VocabularyPart:
    """Return this rank's part of the vocabulary.

    Raise ValueError if the last dimension of the logits has another size.
    """
    if logits.shape[-1] != end - first:
        raise ValueError(
            f"the logits have {logits.shape[-1]} tokens, but the range from {first} to {end} has"
            f" {end - first}"
        )
    return VocabularyPart(first, end - first, axis_of(group, "tp"))


def axis_of(group: ProcessGroup | None, name: str) -> Axis:
    """Return the axis of a process group; an axis of one rank for None."""
    if group is None or dist.get_world_size(group) == 1:
        return Axis(name, 1, 0, None)
    return Axis(name, dist.get_world_size(group), dist.get_rank(group), group)


def zigzag_places(spans: list[tuple[int, int]], sequence: Zigzag) -> list[Tensor]:
    """Return for each rank the token indices of its chunks of all sequences: [T / ranks] each.

    The indices are in the rank's order. Raise ValueError for a sequence that cannot be divided into
    equal chunks.
    """
    wrong = [end - begin for begin, end in spans if (end - begin) % sequence.num_chunks]
    if wrong:
        raise ValueError(
            f"a sequence of {wrong[0]} tokens cannot be divided into {sequence.num_chunks} chunks:"
            " pad it"
        )

    sizes = [(begin, (end - begin) // sequence.num_chunks) for begin, end in spans]
    return [
        torch.cat(
            [
                torch.arange(begin + chunk * size, begin + (chunk + 1) * size)
                for begin, size in sizes
                for chunk in sequence.chunks(rank)
            ]
        )
        for rank in range(sequence.axis.size)
    ]
