"""Models with the heads that training needs.

An actor returns log-probs of given tokens instead of logits, a scorer one score per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config.errors import ConfigError
from lightrft.config.tables import table
from lightrft.core.batch import (
    Batch,
    Features,
    append_sequence,
    concatenated_features,
    pad_to_multiple,
    padded,
    to_device,
    unpadded,
)
from lightrft.core.losses import Denominator
from lightrft.core.samples import Expanded
from lightrft.models.attention.layout import Layout, bidirectional_token
from lightrft.models.empty import real_parameters
from lightrft.models.logits.logprobs import Upstream, token_logprobs, top_logprobs
from lightrft.models.logits.truncation import ALL, Truncation
from lightrft.models.parallel.sequence_parallel import (
    NO_SEQUENCE_PARALLEL,
    SequenceParallel,
    SequenceParallelModule,
    select_tokens,
)
from lightrft.models.routers import Choices, RouterChoices

LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
MULTIPLIED: list[str] = table("models/families")["logits_multiplied"]
DIVIDED: list[str] = table("models/families")["logits_divided"]
"""Model types that divide logits by an entry of LOGIT_SCALES; MULTIPLIED multiply by it."""


class Actor(SequenceParallelModule):
    """Causal language model whose head tells log-probs instead of logits.

    The product of the head and the hidden states is computed inside, in chunks, so the full logits
    never exist.
    """

    def __init__(self, language_model: PreTrainedModel):
        super().__init__()
        self.token_logprobs = token_logprobs
        self.language_model = language_model
        self.backbone = Backbone(language_model)
        self.logit_scale = logit_scale(language_model)
        self.softcap = logit_softcap(language_model)
        self.router_choices: RouterChoices | None = None
        """Choices of the routers of a mixture of experts, if they are replayed or counted."""
        self.blank: tuple[Expanded, ...] = ()
        """Sequences to append to batches that lack a medium: one with an item of each medium,
        excluded from the loss. While other ranks train on the medium, all ranks must run the same
        collectives, and trained towers need a gradient of zeros. Empty if all batches are text."""

    def forward(
        self,
        batch: Batch,
        temperature: float,
        truncation: Truncation = ALL,
        read: "Read | None" = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `read` computes from the hidden states.

        None reads the log-probs of the learned tokens, and the entropy. Everything is taken at
        `temperature`. With a truncation, it refers to the part of the vocabulary that was sampled
        from.
        """
        computed = pad_to_multiple(
            with_blank(batch, self.blank) if self.blank else batch, self.sequence.multiple
        )
        choices = self.router_choices and self.router_choices.begin(
            computed, self.sequence, measure=self.training
        )
        values = self.backbone(computed, self.sequence, choices)
        hidden = Hidden(values, batch, computed, self.sequence)
        return (read or LOGPROBS)(self, hidden, temperature / self.logit_scale, truncation)

    @property
    def hf_model(self) -> PreTrainedModel:
        return self.language_model

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.language_model.named_parameters()


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of a batch, as this rank has computed them."""

    values: Tensor
    """[t, H] of the computed tokens of this rank."""
    batch: Batch
    computed: Batch
    """The batch with all that was computed: with blank sequences and padding."""
    sequence: SequenceParallel

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Find the hidden states of some tokens of the batch, `positions` [m] on the host.

        Return which of them this rank has, as indices [k] on the host, and their rows [k] of
        `values`, on the device.
        """
        shared = self.computed.shared
        computed = shared.indices[positions] if shared else positions
        indices, local = self.sequence.find_local(computed, self.computed.num_computed)
        return indices, to_device(local, self.values.device)


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """Gradients of an objective that are known before all log-probs of the batch are."""

    compute: Callable[[Tensor, Tensor | None], tuple[Tensor | None, Tensor | None]]
    """(log-probs [T], entropy [T] or None) -> the gradients of the objective by both.

    The gradients of some tokens are right as soon as these tokens have their log-probs.
    """
    num_sequences: int
    """Number of consecutive sequences whose tokens determine each other's gradients.

    0: a token alone determines its own, 1: a sequence, 2: a pair.
    """


def local_gradients(
    objective: Callable[..., tuple[Tensor, Any]], batch: Batch, denominator: Denominator
) -> LocalGradients | None:
    """Return the gradients of an objective whose `reach` is a token, a sequence or a pair.

    Return None for any other objective. If an objective has more than log-probs, such as the load
    of experts, its `of_logprobs` is the objective without that.
    """
    objective = getattr(objective, "of_logprobs", objective)
    reach = getattr(objective, "reach", None)
    if reach is None or reach(batch) == "batch":
        return None

    def gradients(logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        # Detached leaves: the graph ends at the log-probs, so no gradient runs back into the model
        # here.
        inputs = [
            value.detach().requires_grad_() for value in (logprobs, entropy) if value is not None
        ]
        batch.entropy = None if entropy is None else inputs[1]
        with torch.enable_grad():
            loss, _ = objective(inputs[0], batch, denominator)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return grads[0], None if entropy is None else grads[1]

    return LocalGradients(gradients, {"token": 0, "sequence": 1, "pair": 2}[reach(batch)])


Read = Callable[[Actor, Hidden, float, Truncation], tuple[Tensor, Tensor | None]]
"""(actor, hidden states, temperature of unscaled logits, truncation) -> the actor's output."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Reads log p(token | previous tokens of the sequence), and the entropy there.

    Both are [T] float32, and 0 for tokens outside of the loss mask: the head is not computed there
    at all.
    """

    entropy: bool = True
    """Compute the entropy; otherwise it is None."""
    targets: Tensor | None = None
    """Tokens to take the log-probs of, [T] or [T, K]; the log-probs have the same shape. A negative
    id has log-prob 0. None: the batch's own tokens."""
    gradients: LocalGradients | None = None
    """Gradients of the objective. With them the gradients of the head are computed in the forward
    pass, which saves one matrix product; see token_logprobs()."""

    def __call__(
        self, actor: Actor, hidden: Hidden, temperature: float, truncation: Truncation
    ) -> tuple[Tensor, Tensor | None]:
        batch = hidden.batch
        # Each position predicts the next token; the first token is never in the loss.
        before = hidden.computed.learned_tokens - 1
        indices, local = hidden.at(before)
        next_ = to_device(before[indices] + 1, hidden.values.device)
        targets = batch.input_ids if self.targets is None else self.targets
        weight = actor.language_model.get_output_embeddings().weight

        # Separate tensors: in a joint one, an output that the loss does not use would get a full
        # backward pass of zeros.
        zeros = torch.zeros(targets.shape, device=hidden.values.device)
        outputs = [zeros, torch.zeros(batch.num_tokens, device=zeros.device)][: 1 + self.entropy]
        groups = [(slice(None), truncation)]
        if batch.early is not None and truncation.banned_early:
            groups = early_and_late(truncation, batch.early[next_])

        gradients = self.gradients
        units = None
        if gradients and gradients.num_sequences:
            # A piece of a sequence is not enough, and sequence-parallel ranks have only pieces.
            if hidden.sequence.axis.size > 1 or len(groups) > 1:
                gradients = None
            else:
                units = rows_of_sequences(hidden.computed, gradients.num_sequences)

        for rows, sampled_with in groups:
            tokens = next_[rows]
            values = actor.token_logprobs(
                hidden.values[local[rows]],
                weight,
                targets[tokens],
                temperature=temperature,
                truncation=sampled_with,
                entropy=self.entropy,
                upstream=gradients and of_rows(gradients, tokens, batch.num_tokens),
                units=units,
                softcap=actor.softcap,
            )
            outputs = [
                output.index_put((tokens,), value)
                for output, value in zip(outputs, values, strict=False)
            ]

        logprobs, *entropies = hidden.sequence.sums(*outputs)
        return logprobs, entropies[0] if self.entropy else None


LOGPROBS = TokenLogprobs()


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Reads the k likeliest ids instead of each learned token, likeliest first.

    Log-probs are [T, k] float32 and ids [T, k] int64, both 0 elsewhere and without gradient. Banned
    tokens have probability 0, and log-prob -inf where they are returned. No other part of a
    truncation counts.
    """

    k: int
    after_all: bool = False
    """Read the ids after each token of the batch instead, also after the last one of a sequence."""

    def __call__(
        self, actor: Actor, hidden: Hidden, temperature: float, truncation: Truncation
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden.batch.num_tokens
        before = hidden.computed.learned_tokens - 1
        tokens = before + 1
        if self.after_all:
            before = tokens = torch.arange(num_tokens)
        indices, local = hidden.at(before)
        tokens = to_device(tokens[indices], hidden.values.device)

        values = top_logprobs(
            hidden.values[local],
            actor.language_model.get_output_embeddings().weight,
            self.k,
            temperature=temperature,
            softcap=actor.softcap,
            banned=truncation.banned,
        )
        zeros = torch.zeros(num_tokens, self.k, device=hidden.values.device)
        columns = (zeros.index_put((tokens,), value.float()) for value in values)
        logprobs, ids = hidden.sequence.sums(*columns)
        return logprobs, ids.long()


class Scorer(SequenceParallelModule):
    """Model with one score per token, used by critics and reward models.

    A reward model may have several heads.
    """

    def __init__(self, model: PreTrainedModel, *, num_heads: int = 1, learn_scale: bool = False):
        """Check and wrap a backbone with one linear layer of `num_heads` outputs.

        Raise ValueError for any other model. With `learn_scale`, the scores of each head are
        multiplied by a learned positive factor that starts at 1.
        """
        super().__init__()
        heads = [name for name, child in model.named_children() if child is not model.base_model]
        linear = [name for name in heads if isinstance(getattr(model, name), nn.Linear)]
        if len(heads) != 1 or linear != heads or getattr(model, heads[0]).out_features != num_heads:
            outputs = "one output" if num_heads == 1 else f"{num_heads} outputs"
            raise ValueError(
                f"{type(model).__name__} has {', '.join(heads) or 'nothing'} above its backbone,"
                f" not a head with {outputs}"
            )

        self.scored_model = model
        self.backbone = Backbone(model)
        self.head = heads[0]
        self.blank: tuple[Expanded, ...] = ()
        """See Actor.blank."""
        self.log_scale: nn.Parameter | None = None

        # A model may be built without memory, but no file has this parameter.
        if learn_scale:
            with real_parameters():
                self.log_scale = nn.Parameter(torch.zeros(num_heads))

    def forward(self, batch: Batch) -> Tensor:
        """Return the head's output at each token, computed in float32.

        It is [T] float32, or [T, K] of K heads.
        """
        padded = pad_to_multiple(
            with_blank(batch, self.blank) if self.blank else batch, self.sequence.multiple
        )
        hidden = self.backbone(padded, self.sequence).float()
        head: nn.Linear = getattr(self.scored_model, self.head)
        scores = F.linear(
            hidden, head.weight.float(), None if head.bias is None else head.bias.float()
        )
        if self.log_scale is not None:
            scores = scores * self.log_scale.float().exp()
        scores = self.sequence.gather(scores[:, 0] if scores.shape[1] == 1 else scores)

        scores = padded.shared.spread(scores) if padded.shared else scores
        return scores[: batch.num_tokens].clone()

    @property
    def hf_model(self) -> PreTrainedModel:
        return self.scored_model


def early_and_late(truncation: Truncation, early: Tensor) -> list[tuple[Tensor, Truncation]]:
    """Divide some tokens, as rows, into two groups with the truncation they were sampled with.

    `early` [t] bool says which ones were sampled before a response might end.
    """
    return [((~early).nonzero()[:, 0], truncation), (early.nonzero()[:, 0], truncation.while_early)]


def rows_of_sequences(batch: Batch, num_sequences: int) -> list[int]:
    """Count the learned tokens of every `num_sequences` consecutive sequences, where there are any.

    The counts are on the host.
    """
    sequences = torch.searchsorted(batch.offsets, batch.learned_tokens, right=True) - 1
    return (sequences // num_sequences).unique_consecutive(return_counts=True)[1].tolist()


def of_rows(gradients: LocalGradients, tokens: Tensor, num_tokens: int) -> Upstream:
    """Adapt the gradients of an objective to rows of the head.

    Row i belongs to token `tokens[i]` of `num_tokens`. The objective receives 0 for the log-probs
    of all other tokens: the gradients of the rows do not depend on them.
    """

    def upstream(
        rows: slice, logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        indices = tokens[rows]
        scattered = [
            None
            if value is None
            else value.new_zeros(num_tokens, *value.shape[1:]).index_put((indices,), value)
            for value in (logprobs, entropy)
        ]
        of_logprobs, of_entropy = (
            None if grad is None else grad[indices] for grad in gradients.compute(*scattered)
        )
        return of_logprobs, of_entropy

    return upstream


class Backbone:
    """A model below the head, which computes flat batches."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.window = rope_window(model)

    def __call__(
        self,
        batch: Batch,
        sequence: SequenceParallel = NO_SEQUENCE_PARALLEL,
        choices: Choices | None = None,
    ) -> Tensor:
        """Return the hidden states of the tokens that this rank computes: [t, H].

        A token attends to its own sequence only, up to itself or to the end of its image (see
        Layout.bidirectional). Ranks split the computed tokens: all tokens of the batch, or each
        shared prefix once (see `Batch.shared`). Towers compute all media on each of these ranks,
        and only the decoder's work is split. Routers that RouterChoices has taken over read
        `choices`.
        """
        device = batch.input_ids.device
        shared = batch.shared
        if self.window is not None:
            check_window(self.model, int(batch.lengths.max()))

        token_positions = sequence.positions(batch.num_computed, device)
        if shared:
            computed = to_device(shared.computed, device)
        else:
            computed = torch.arange(batch.num_tokens, device=device)
        positions = batch.position_ids
        features: Features = {}
        bidirectional = None
        split: AbstractContextManager[None] = nullcontext()
        if batch.media is not None and any(batch.media):
            images = concatenated_features(computed_images(batch))
            features = {name: to_device(value, device) for name, value in images.items()}
            bidirectional = bidirectional_tokens(self.model, batch)
            positions = media_positions(self.model, batch)

        # Media replace embeddings by position, so the model reads all tokens and is split inside.
        if features and sequence.axis.size > 1:
            split = split_in_decoder(self.model, token_positions)
        else:
            computed = computed[token_positions]

        layout = Layout(batch.lengths, device, sequence, shared, bidirectional)
        with split:
            return self.model.base_model(
                input_ids=batch.input_ids[computed].unsqueeze(0),
                position_ids=positions[..., computed].unsqueeze(-2),
                attention_mask=None,
                use_cache=False,
                layout=layout,
                seq_idx=layout,  # the only argument that LFM2 passes on to its convolutions
                **features,
                **({} if choices is None else {"choices": choices}),
            ).last_hidden_state[0]


@contextmanager
def split_in_decoder(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """Let the decoder compute only the tokens `positions` [t] that the model reads.

    They are selected after media have replaced the embeddings.
    """

    def split(
        decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        selected = select_tokens(kwargs, positions)
        return args, kwargs | selected | {"position_ids": kwargs["position_ids"][..., positions]}

    with model.get_decoder().register_forward_pre_hook(split, prepend=True, with_kwargs=True):
        yield


def media_positions(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return position ids of a batch with media: [T], or [3, T] with M-RoPE.

    M-RoPE counts time, rows and columns of images and videos: arXiv 2409.12191.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    grids = concatenated_features(
        [{name: value for name, value in each.items() if "grid" in name} for each in batch.media]
    )
    # Sound has positions like text.
    if "mrope_section" not in rope or not grids:
        return batch.position_ids

    ids = padded(batch.input_ids.cpu(), batch.lengths, int(batch.lengths.max()))
    real = padded(torch.ones_like(batch.input_ids, device="cpu"), batch.lengths, ids.shape[1])
    is_image, is_video = ids == model.config.image_token_id, ids == model.config.video_token_id
    kinds = is_image.int() + 2 * is_video.int()
    rows = model.base_model.get_rope_index(
        ids, mm_token_type_ids=kinds, attention_mask=real, **grids
    )[0]

    return to_device(
        torch.stack([unpadded(axis, batch.lengths) for axis in rows]), batch.input_ids.device
    )


def bidirectional_tokens(model: PreTrainedModel, batch: Batch) -> Tensor | None:
    """Return a mask [T] bool, on the host, of tokens that attend to all tokens of an image.

    None for a model without such tokens.
    """
    token = bidirectional_token(model.config)
    return None if token is None else batch.input_ids.cpu() == token


def computed_images(batch: Batch) -> list[Features]:
    """Return the images of the computed sequences; the images of a shared prompt occur once."""
    if batch.media is None or batch.shared is None:
        return batch.media or []
    computes_start = torch.isin(batch.offsets[:-1], batch.shared.computed).tolist()
    return [
        images for images, computed in zip(batch.media, computes_start, strict=True) if computed
    ]


def with_blank(batch: Batch, blank: Sequence[Expanded]) -> Batch:
    """Append the sequences of `blank` whose media the batch does not have.

    A model runs a tower once for each medium.
    """
    names = {name for features in batch.media or () for name in features}
    for sequence in blank:
        if not sequence.features.keys() <= names:
            batch = append_sequence(batch, torch.tensor(sequence.token_ids), sequence.features)
    return batch


def rope_window(model: PreTrainedModel) -> int | None:
    """Return the maximum sequence length with fixed rotary frequencies.

    None if the frequencies never depend on the length. Beyond it, `dynamic` and `longrope` use
    other frequencies for everything that is computed together: transformers chooses them by the
    longest sequence of a micro-batch, so that log-probs would depend on the other samples; vLLM by
    the maximum model length.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    changing = [each for each in ropes if each.get("rope_type") in ("dynamic", "longrope")]
    most = config.max_position_embeddings

    return min(
        (parameters.get("original_max_position_embeddings") or most for parameters in changing),
        default=None,
    )


def check_window(model: PreTrainedModel, longest: int) -> None:
    """Raise ConfigError if a sequence of `longest` tokens exceeds rope_window()."""
    window = rope_window(model)
    if window is not None and longest > window:
        raise ConfigError(
            f"a sequence of {longest} tokens is longer than the {window} for which"
            f" {type(model).__name__} has fixed rotary frequencies (type dynamic or longrope):"
            " shorten --prompt_max_len and --generate_max_len, or use a model with frequencies of"
            " type yarn, llama3 or linear"
        )


def logit_softcap(model: PreTrainedModel) -> float | None:
    """Return c if the model replaces a logit z by c tanh(z / c), None for most models."""
    config = model.config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    caps = (getattr(config, name, None) for name in names)
    return next((cap for cap in caps if cap is not None), None)


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor that the model multiplies logits by, 1 for most models.

    Raise ValueError, with the reasons, for a model whose head computes anything else.
    """
    config = model.config.get_text_config()
    problems = []
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        problems.append("its output layer has a bias")
    scaled = {
        name: getattr(config, name)
        for name in LOGIT_SCALES
        if getattr(config, name, None) is not None
    }
    if scaled and (config.model_type not in MULTIPLIED + DIVIDED or logit_softcap(model)):
        problems.append(f"its logits are scaled ({', '.join(scaled)})")
    if problems:
        raise ValueError(
            f"{type(model).__name__} is not supported: {'; '.join(problems)}, and log-probs would"
            " be wrong"
        )

    scale = next(iter(scaled.values()), 1.0)
    return 1 / scale if config.model_type in DIVIDED else scale
