"""Log-probabilities of tokens, without materializing all logits.

Only the logits of one chunk of tokens exist at a time. If the gradient of the objective is known as
soon as the log-probs are, the gradients of hidden states and weight are computed from the same
logits: three products of size T x V x H. That includes losses of sequences, if a chunk holds whole
sequences. Otherwise the logits are computed again, which makes it four. If all tokens fit into one
chunk, the values that the gradient needs are kept instead. A truncation is decided once, in the
forward pass, and kept as one bit per logit.

From the first exponential on everything is float32, whatever the dtype of the model. The products
accumulate and return float32 on an accelerator; a CPU rounds products of bfloat16 to bfloat16. The
temperature divides a chunk's own float32 logits, never a tensor of the caller. The steps after the
product run in the kernels of triton.py on CUDA, and in vocab_parallel.py elsewhere.

The vocabulary may be split over tensor-parallel ranks; vocab_parallel.py has the collectives. Every
part of the vocabulary contributes to the gradient of the hidden states, so that is summed once.

Shapes: T tokens, H hidden size, V vocabulary, v of it on this rank, K targets at each position.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

from lightrft.models.logits import vocab_parallel
from lightrft.models.logits.truncation import ALL, Truncation, runs, without_padding
from lightrft.models.logits.vocab_parallel import Distribution, LocalTargets, VocabularyRange
from lightrft.models.parallel.device import float32_product
from lightrft.models.parallel.sequence_parallel import all_gather_tensor
from lightrft.models.parallel.tensor_parallel import copy_to_parallel_region, vocabulary_shard

HOST_CHUNK = 2**25
DEVICE_CHUNK = 2**28
"""Maximum number of logits of a chunk: 128 MB on a host, 1 GB on an accelerator.

An accelerator needs larger products.
"""

Upstream = Callable[[slice, Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""(rows, log-probs, entropy) -> gradients of the objective with respect to both, in the same
shapes.
"""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
    chunk: int | None = 0,
    entropy: bool = True,
    upstream: Upstream | None = None,
    units: list[int] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy.

    hidden is [T, H], weight [V, H]; targets [T], or [T, K] for several tokens at each position.
    Return the log-probs in the shape of the targets and the entropy [T] (None without `entropy`),
    both float32 and differentiable. A negative target (-100) is ignored: it has log-prob 0 and no
    gradient. `chunk` is the number of tokens at a time: 0 derives it from the vocabulary size, None
    takes all tokens. With a `softcap` c, a logit z is c tanh(z / c) before the temperature, as in
    Gemma 2 (arXiv 2408.00118).

    With `upstream` the gradients of hidden states and weight are computed in the forward pass. Only
    one backward pass is then possible, and the gradients must be what `upstream` returned, or a
    multiple of it; otherwise raise RuntimeError. With `units`, the numbers of rows of sequences one
    after another, `upstream` is called for whole sequences only.

    A weight that parallelize() has split is used in place; hidden states and targets must then be
    equal on all ranks of the axis, and so are the results and the gradient of the hidden states. A
    truncation and `upstream` each need a few collectives per chunk in the forward pass.
    """
    if isinstance(weight, DTensor):
        shard = vocabulary_shard(weight)
        hidden = copy_to_parallel_region(hidden, shard.axis)
        weight = shard.weight
        size, truncation = without_padding(truncation, shard.size)
        num = max(0, min(len(weight), size - shard.first))
        local_vocab = VocabularyRange(shard.first, num, shard.axis)
        columns = -(-shard.size // shard.axis.size)  # equal on all ranks
    else:
        columns = len(weight)
        if truncation != ALL:
            columns, truncation = without_padding(truncation, columns)
        local_vocab = VocabularyRange.full(columns)

    rows = chunk_rows(hidden, columns, chunk)
    truncated = truncation != ALL and truncation.active
    options = _Options(local_vocab, temperature, truncation, truncated, rows, entropy, softcap)
    return _logprobs(hidden, weight, targets, options, upstream, units)


def logprobs_of_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    local_vocab: VocabularyRange | None = None,
    temperature: float = 1.0,
    truncation: Truncation = ALL,
    chunk: int | None = 0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy, as token_logprobs() does, from existing logits [T, V].

    The logits are not modified. With `local_vocab` they are [T, v], this rank's range of the
    vocabulary, and each rank gets the gradient of its own logits.
    """
    local_vocab = local_vocab or VocabularyRange.full(logits.shape[1])
    rows = chunk_rows(logits, max(local_vocab.num, 1), chunk)
    # equal number of chunks on all ranks, whose ranges may differ
    if truncation.active and chunk == 0:
        rows = int(local_vocab.axis.min(torch.tensor(rows, device=logits.device)))

    options = _Options(local_vocab, temperature, truncation, truncation.active, rows, entropy=True)
    return _logprobs(logits, None, targets, options, None)


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    banned: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Return log-probs and ids of the k likeliest tokens at each position, likeliest first.

    The log-probs are [T, k] float32, the ids [T, k]. `banned` tokens have probability 0; one of
    them has log-prob -inf if fewer than k other tokens exist. A weight that parallelize() has split
    needs three collectives; results are equal on all ranks of the axis. Raise ValueError if k
    exceeds the size of the vocabulary.
    """
    size = len(weight)
    vocab = VocabularyRange.full(size)
    if isinstance(weight, DTensor):
        shard = vocabulary_shard(weight)
        weight = shard.weight
        size = shard.size
        vocab = VocabularyRange(shard.first, len(weight), shard.axis)
    if k > size:
        raise ValueError(
            f"the {k} most likely tokens were requested, but the vocabulary has {size}"
        )

    # remains if a rank has fewer than k
    values = torch.full((len(hidden), k), -torch.inf, device=hidden.device)
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)

    sums = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    local_k = min(k, vocab.num)
    for rows, logits in row_chunks(hidden, vocab.num, chunk_rows(hidden, max(vocab.num, 1))):
        scaled_logits(hidden[rows], weight, temperature, softcap, out=logits)
        for start, end in runs(banned):
            logits[:, max(start - vocab.first, 0) : max(end - vocab.first, 0)] = -torch.inf
        values[rows, :local_k], ids[rows, :local_k] = logits.topk(local_k)
        nothing = LocalTargets(ids[rows, :0], vocab)  # torch's logsumexp() takes five times as long
        top, total, *_ = vocab_parallel.local_sums(logits, nothing, masked=True, entropy=False)
        sums[rows] = top + total.log()

    axis = vocab.axis
    if axis.size > 1:
        values, ids, sums = (
            all_gather_tensor(x, axis).view(axis.size, *x.shape)
            for x in (values, ids + vocab.first, sums)
        )
        values, found = values.transpose(0, 1).flatten(1).topk(k)
        ids = ids.transpose(0, 1).flatten(1).gather(1, found)
        sums = sums.logsumexp(0)

    return values - sums[:, None], ids


def chunk_rows(inputs: Tensor, vocabulary: int, chunk: int | None = 0) -> int:
    """Return the number of tokens per chunk, at least 1.

    It is `chunk`, or all of the `inputs` [T, ...] with None. 0: as many as the device has memory
    for, with a vocabulary of this size.
    """
    if chunk is None:
        return max(1, len(inputs))
    most = HOST_CHUNK if inputs.device.type == "cpu" else DEVICE_CHUNK
    return chunk or max(1, most // vocabulary)


@dataclass(frozen=True, slots=True)
class _Options:
    local_vocab: VocabularyRange
    temperature: float
    truncation: Truncation
    truncated: bool
    """Whether the truncation leaves out any token."""
    chunk: int
    """Rows of logits that exist together.

    Both passes use the same chunks: a product of another shape rounds differently.
    """
    entropy: bool
    softcap: float | None = None


def _logprobs(
    inputs: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    options: _Options,
    upstream: Upstream | None,
    units: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    columns = targets if targets.dim() == 2 else targets[:, None]
    learns = torch.is_grad_enabled() and (
        inputs.requires_grad or (weight is not None and weight.requires_grad)
    )
    # With a single chunk the values for the gradient are kept, and nothing has to be computed
    # again.
    if learns and upstream is not None and len(inputs) > options.chunk:

        def of_columns(
            rows: slice, logprobs: Tensor, entropy: Tensor | None
        ) -> tuple[Tensor | None, Tensor | None]:
            grad_logprobs, grad_entropy = upstream(
                rows, logprobs.view(targets[rows].shape), entropy
            )
            return (
                None if grad_logprobs is None else grad_logprobs.view(logprobs.shape)
            ), grad_entropy

        if units and weight.requires_grad:
            # A sequence may take the memory that the weight's float32 gradient takes.
            longest = min(max(units), weight.shape[1])
            options = replace(options, chunk=max(options.chunk, longest))

        logprobs, entropy = _KnownUpstream.apply(
            inputs, weight, columns, options, of_columns, _groups(len(inputs), units, options.chunk)
        )
    else:
        logprobs, entropy = _Logprobs.apply(inputs, weight, columns, options, learns)
    return logprobs.view(targets.shape), entropy


def _groups(num: int, units: list[int] | None, chunk: int) -> list[slice]:
    """Divide `num` rows into groups of at most `chunk` rows.

    Units remain whole, so a longer one is a group of its own.
    """
    if units is None:
        return [slice(start, min(start + chunk, num)) for start in range(0, num, chunk)]

    groups = []
    start = 0
    end = 0
    for size in units:
        if end > start and end + size - start > chunk:
            groups.append(slice(start, end))
            start = end
        end += size
    return [*groups, slice(start, end)]


class _Logprobs(torch.autograd.Function):
    """Log-probs [T, K] and entropy [T] from hidden states [T, H] and a weight [v, H].

    Without a weight the inputs are the logits [T, v].
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        inputs: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        options: _Options,
        learns: bool,
    ) -> tuple[Tensor, Tensor | None]:
        local_targets = LocalTargets(targets, options.local_vocab)
        memory = _logits_memory(inputs, options)

        bits = _bits(inputs, options) if learns and options.truncated else None
        result = _distribution(inputs, weight, local_targets, options, memory, bits)
        is_kept = learns and weight is not None and len(inputs) <= options.chunk
        ctx.memory = memory if is_kept else None
        if not is_kept:
            _give_back(memory)
        saved = result.entropy, result.largest, result.total, result.scale
        ctx.save_for_backward(inputs, weight, targets, bits, *saved)
        ctx.options = options
        ctx.set_materialize_grads(False)

        return result.logprobs, result.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inputs, weight, targets, bits, *saved = ctx.saved_tensors
        options = ctx.options
        distribution = Distribution(None, *saved)
        local_targets = LocalTargets(targets, options.local_vocab)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(targets.shape, device=inputs.device)
        upstream = _Gradients(grad_logprobs, grad_entropy)

        # overwritten by the gradient, so a second backward pass recomputes
        memory, ctx.memory = ctx.memory, None
        if memory is None:
            memory = _logits_memory(inputs, options)
            gradients = _computed_again(
                inputs, weight, distribution, local_targets, upstream, bits, memory, options
            )
        else:
            some = distribution, local_targets, upstream
            gradients = [(slice(None), _gradient(memory, *some, options, inputs.dtype))]

        if weight is None:
            grad_inputs, grad_weight = _of_logits(inputs, gradients), None
        else:
            learned = ctx.needs_input_grad[1]
            grad_inputs, grad_weight = _of_product(inputs, weight, gradients, learned=learned)
            grad_weight = grad_weight.to(weight.dtype) if learned else None

        _give_back(memory)
        return grad_inputs, grad_weight, None, None, None


class _KnownUpstream(torch.autograd.Function):
    """Log-probs and entropy whose gradients are computed in the forward pass.

    The backward pass only scales them.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: _Options,
        upstream: Upstream,
        groups: list[slice],
    ) -> tuple[Tensor, Tensor | None]:
        memory = _logits_memory(hidden, options)
        logprobs = []
        entropies = []
        gradients_of_groups = []

        def gradients() -> Iterator[tuple[slice, Tensor]]:
            for rows in groups:
                inputs = hidden[rows]
                local_targets = LocalTargets(targets[rows], options.local_vocab)
                fits = len(inputs) <= options.chunk
                bits = None
                if options.truncated and not fits:
                    bits = _bits(inputs, options)
                distribution = _distribution(inputs, weight, local_targets, options, memory, bits)

                grad_logprobs, grad_entropy = upstream(
                    rows, distribution.logprobs, distribution.entropy
                )
                if grad_logprobs is None:
                    grad_logprobs = torch.zeros_like(distribution.logprobs)
                gradients_of_groups.append((grad_logprobs, grad_entropy))
                logprobs.append(distribution.logprobs)
                entropies.append(distribution.entropy)

                some = distribution, local_targets, _Gradients(grad_logprobs, grad_entropy)
                if fits:
                    logits = memory[: len(inputs)]
                    yield rows, _gradient(logits, *some, options, hidden.dtype)
                    continue

                for inner, grad in _computed_again(inputs, weight, *some, bits, memory, options):
                    yield slice(rows.start + inner.start, rows.start + inner.stop), grad

        # This runs the generator above, so it fills the lists.
        ctx.gradients = _of_product(hidden, weight, gradients(), learned=ctx.needs_input_grad[1])
        _give_back(memory)
        of_logprobs, of_entropy = zip(*gradients_of_groups, strict=True)
        ctx.upstream_gradients = (
            torch.cat(of_logprobs),
            None if of_entropy[0] is None else torch.cat(of_entropy),
        )
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)

        return torch.cat(logprobs), torch.cat(entropies) if options.entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "gradients computed in the forward pass can be used for only one backward pass"
            )
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        factor = _proportion(ctx.upstream_gradients, upstream)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.dtype)
        return grad_hidden.mul_(factor), grad_weight, None, None, None, None


def _proportion(assumed: tuple[Tensor | None, ...], exact: tuple[Tensor | None, ...]) -> Tensor:
    """Return the factor (a scalar tensor) between the `assumed` gradients and the `exact` ones.

    It is 1, or the factor that the loss was multiplied by. Nothing waits for the device. Raise
    RuntimeError if the gradients are not proportional. Values that are not finite pass this check
    and appear in the gradient norm.
    """
    pairs = [
        (
            torch.zeros_like(other) if one is None else one,
            torch.zeros_like(one) if other is None else other,
        )
        for one, other in zip(assumed, exact, strict=True)
        if one is not None or other is not None
    ]
    expected, actual = (
        torch.cat([tensor.flatten() for tensor in side]) for side in zip(*pairs, strict=True)
    )
    # Compared at the largest element, where rounding matters least.
    largest = expected.abs().argmax(keepdim=True)
    top = expected[largest]
    factor = torch.where(top == 0, 1.0, actual[largest] / top)
    far = (actual - factor * expected).abs().amax() > 1e-3 * actual.abs().amax()
    torch._assert_async(
        ~far, "the gradient of the log-probs is not the `upstream` of the forward pass"
    )

    return factor[0]


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients of the objective by log-probs [t, K] and entropy [t]."""

    logprobs: Tensor
    entropy: Tensor | None

    def rows(self, rows: slice) -> "_Gradients":
        return _Gradients(self.logprobs[rows], None if self.entropy is None else self.entropy[rows])


def _distribution(
    inputs: Tensor,
    weight: Tensor | None,
    local_targets: LocalTargets,
    options: _Options,
    memory: Tensor,
    bits: Tensor | None = None,
) -> Distribution:
    """Compute the distribution of each row [t] in `memory`, a chunk of rows at a time.

    Afterwards `memory` holds what _gradient() needs for the last chunk, and `bits` the truncation.
    """
    fused = _fused(inputs, options.local_vocab)
    sums = []
    for start in range(0, len(inputs), options.chunk):
        rows = slice(start, min(start + options.chunk, len(inputs)))
        logits = memory[: rows.stop - start]
        some = local_targets.rows(rows)
        scaled_logits(inputs[rows], weight, options.temperature, options.softcap, out=logits)
        if options.truncated:
            _truncate(logits, some, options, None if bits is None else bits[rows])
        if fused:
            from lightrft.models.logits import triton

            sums.append(triton.local_sums(logits, some))
        else:
            masked = options.truncated or weight is None
            sums.append(
                vocab_parallel.local_sums(logits, some, masked=masked, entropy=options.entropy)
            )
    return vocab_parallel.join_sums(sums, local_targets, entropy=options.entropy)


def _truncate(
    logits: Tensor, local_targets: LocalTargets, options: _Options, bits: Tensor | None
) -> None:
    """Write -inf to the truncated logits.

    It takes some of the rows at a time, because the search needs several times the memory.
    """
    step = max(1, options.chunk // 4)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        outside = vocab_parallel.outside(logits[rows], options.truncation, local_targets.rows(rows))
        logits[rows].masked_fill_(outside, -torch.inf)
        if bits is not None:
            bits[rows] = vocab_parallel.pack_mask(outside)


_spare: deque[Tensor] = deque(maxlen=1)
"""Memory on a host for the logits of a chunk that nothing uses."""


def _logits_memory(inputs: Tensor, options: _Options) -> Tensor:
    """Return memory for the logits of a chunk, float32.

    On a host it is that of an earlier chunk, if possible: to page in new memory takes longer than
    all exponentials.
    """
    size = min(options.chunk, len(inputs)), options.local_vocab.num
    num = math.prod(size)
    on_host = inputs.device.type == "cpu" and type(inputs) is Tensor  # not a fake one
    memory = _spare.pop() if _spare and on_host else None
    if memory is None or len(memory) < num:
        memory = torch.empty(num, dtype=torch.float32, device=inputs.device)
    return memory[:num].view(size)


def _give_back(memory: Tensor) -> None:
    """Let the next chunk have this memory, unless it is larger than a chunk usually is."""
    num = memory.untyped_storage().nbytes() // memory.itemsize
    on_host = memory.device.type == "cpu" and type(memory) is Tensor
    if on_host and num <= HOST_CHUNK and not memory.is_inference():
        _spare.append(memory.as_strided((num,), (1,), 0))


def _bits(inputs: Tensor, options: _Options) -> Tensor:
    """Return memory for the truncation of each row.

    It is decided once, so that the gradient leaves out exactly the same tokens.
    """
    width = vocab_parallel.packed_width(options.local_vocab.num)
    return torch.empty(len(inputs), width, dtype=torch.uint8, device=inputs.device)


def _computed_again(
    inputs: Tensor,
    weight: Tensor | None,
    distribution: Distribution,
    local_targets: LocalTargets,
    upstream: _Gradients,
    bits: Tensor | None,
    memory: Tensor,
    options: _Options,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the gradient of the logits of each chunk, after computing the logits once more."""
    for start in range(0, len(inputs), options.chunk):
        rows = slice(start, min(start + options.chunk, len(inputs)))
        logits = memory[: rows.stop - start]
        scaled_logits(inputs[rows], weight, options.temperature, options.softcap, out=logits)
        if bits is not None:
            vocab_parallel.fill_packed(logits, bits[rows], -torch.inf)

        chunk = distribution.rows(rows), local_targets.rows(rows), upstream.rows(rows)
        yield rows, _gradient(logits, *chunk, options, inputs.dtype, again=True)


def _gradient(
    memory: Tensor,
    distribution: Distribution,
    local_targets: LocalTargets,
    upstream: _Gradients,
    options: _Options,
    dtype: torch.dtype,
    *,
    again: bool = False,
) -> Tensor:
    """Return the gradient of some rows' logits, overwriting `memory`.

    It is computed from what _distribution() left in `memory`, or, with `again`, from the logits.
    With the Triton kernels `memory` holds the logits in both cases, and the gradient has `dtype`.
    """
    # The logits were divided by the temperature, so their gradients are too.
    of_logprobs = torch.where(local_targets.ids < 0, 0.0, upstream.logprobs) / options.temperature
    of_entropy = None if upstream.entropy is None else upstream.entropy / options.temperature
    fused = _fused(memory, options.local_vocab)
    slopes = None
    if options.softcap is not None:
        slopes = _softcap_slopes(memory, distribution, options, logits=fused or again)

    if fused:
        from lightrft.models.logits import triton

        gradient = triton.gradient(
            memory, distribution, local_targets, of_logprobs, of_entropy, dtype
        )
    else:
        of_softmax = vocab_parallel.gradient if again else vocab_parallel.gradient_of_exponentials
        gradient = of_softmax(memory, distribution, of_logprobs, of_entropy)
        gradient = local_targets.add(gradient, of_logprobs)

    return gradient if slopes is None else gradient.mul_(slopes)


def _softcap_slopes(
    memory: Tensor, distribution: Distribution, options: _Options, *, logits: bool
) -> Tensor:
    """Return 1 - tanh(z / c)^2 for the logits z before the cap: [t, v].

    `memory` has the capped `logits` / temperature, or their exponentials. Truncated ones have no
    gradient, so that their slope does not matter.
    """
    capped = memory
    if not logits:
        to_logit = distribution.scale.log() + distribution.total.log() + distribution.largest
        capped = memory.log().add_(to_logit[:, None])
    share = (capped * (options.temperature / options.softcap)).clamp_(-1.0, 1.0)
    return share.square_().neg_().add_(1.0)


def _fused(like: Tensor, local_vocab: VocabularyRange) -> bool:
    """Return True if the Triton kernels are used: on CUDA, and on a CPU with TRITON_INTERPRET=1."""
    return local_vocab.num > 0 and (
        like.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    )


def _of_logits(logits: Tensor, gradients: Iterator[tuple[slice, Tensor]]) -> Tensor:
    grad_logits = torch.empty_like(logits)
    for rows, grad in gradients:
        grad_logits[rows] = grad
    return grad_logits


def _of_product(
    hidden: Tensor, weight: Tensor, gradients: Iterator[tuple[slice, Tensor]], *, learned: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of hidden states and weight from the gradients of the logits.

    The gradient of the weight is float32, and None unless the weight is `learned`. In rows of
    padding it is 0, as these have no logits.
    """
    grad_hidden = torch.empty_like(hidden)
    grad_weight = None
    if learned:
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)

    filled = 0
    for rows, grad in gradients:
        grad = grad.to(hidden.dtype)
        torch.mm(grad, weight[: grad.shape[1]], out=grad_hidden[rows])
        if grad_weight is not None:
            _add_product(grad_weight[: grad.shape[1]], grad, hidden[rows], first=not filled)
            filled = grad.shape[1]
        del grad  # the next one takes its memory

    if grad_weight is not None:
        grad_weight[filled:].zero_()

    return grad_hidden, grad_weight


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor, *, first: bool) -> None:
    """Add grad.T @ hidden to a float32 total [v, H]; the first product overwrites it."""
    beta = 0 if first else 1
    if grad.dtype == torch.float32:
        total.addmm_(grad.T, hidden, beta=beta)
    elif grad.device.type != "cpu":
        torch.addmm(total, grad.T, hidden, beta=beta, out_dtype=torch.float32, out=total)
    elif first:
        total.copy_(grad.T @ hidden)
    else:
        total += grad.T @ hidden


def row_chunks(like: Tensor, num: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of `size` rows of `like` [T, ...], each with the same memory, [t, num] float32.

    New memory for every chunk would cost a host more than the exponentials, because it is paged in
    at the first touch.
    """
    memory = torch.empty(min(size, len(like)), num, dtype=torch.float32, device=like.device)
    for start in range(0, len(like), size):
        rows = slice(start, min(start + size, len(like)))
        yield rows, memory[: rows.stop - start]


def scaled_logits(
    inputs: Tensor,
    weight: Tensor | None,
    temperature: float,
    softcap: float | None = None,
    *,
    out: Tensor,
) -> Tensor:
    """Write float32 logits / temperature [t, v] to `out`.

    The inputs are hidden states [t, H] to multiply with a weight [v, H], or logits [t, v]. Rows of
    the weight beyond v are padding. Logits are never rounded to the dtype of the model, and engines
    do not round them either.
    """
    if weight is None:
        out.copy_(inputs)
    else:
        float32_product(inputs, weight[: out.shape[1]], out)
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)

    return out if temperature == 1.0 else out.div_(temperature)
