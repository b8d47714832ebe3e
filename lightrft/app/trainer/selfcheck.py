"""Check at the start that a model computes packed sequences as it computes each one alone.

Most errors of a new family are silent: a window that only the mask has, a sink that is dropped, a
state that runs into the next sequence. A small copy of the model with random weights shows them
within a second. The reference is transformers itself with eager attention, one sequence at a time.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from loguru import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from lightrft.app.trainer.small_copy import FIRST_TOKEN, SMALL_VOCABULARY, small_config, small_model
from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.core.batch import Batch
from lightrft.models.attention.recurrent import lift_time_step_limits
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import attention_of, not_flat
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.sequence_parallel import (
    NO_SEQUENCE_PARALLEL,
    SequenceParallel,
    set_sequence_parallel,
)
from lightrft.models.parallel.tensor_parallel import parallelize
from lightrft.models.qwen_omni import load_config
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from lightrft.strategy.strategy import StrategyBase

SEQUENCE_LENGTHS = (11, 14, 9, 10, 7)
"""Lengths of the sequences; all are longer than a window of the copy."""
PREFIXES = (("a",), ("a", "b"), ("a", "b"), ("c",), ("c",))
"""What each sequence begins with: two prompts, and a prompt with the same first turn twice."""
PREFIX_TOKENS = 4
"""Tokens of each of these beginnings."""
TEMPERATURE = 0.8
LOGPROB_TOLERANCE = 1e-3
GRADIENTS = 1e-2
"""Largest differences that rounding in float32 explains; errors of a family are much larger."""
HIDDEN = 1e-4
"""Largest difference of a layer's output, relative to the largest value."""
SEEDS = (3, 4)
"""A mixture of experts may choose another expert by the last bit, but not with both."""
PACKED = "packed"
SHARED = "packed, with shared prefixes"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Distance of log-probs and gradients from what each sequence alone has."""

    name: str
    logprobs: float
    """Largest difference, relative to 1 + the absolute value."""
    gradients: float
    """Largest difference of a parameter's gradient, relative to its norm."""
    parameter: str
    """The parameter with this gradient."""
    first: str = ""
    """First module whose output differs, with its class. It is empty if none was compared."""

    @property
    def differs(self) -> bool:
        # NaN differs
        return not (self.logprobs <= LOGPROB_TOLERANCE and self.gradients <= GRADIENTS)

    @property
    def finding(self) -> str:
        """Say in a few words how large the difference is, and where it begins."""
        if not self.logprobs <= LOGPROB_TOLERANCE:
            where = self.first or "the head: a scale, a soft cap or a bias of the logits"
            return f"log-probs differ by {self.logprobs:.1e}, first in {where}"
        return f"the gradient of {self.parameter} differs by {self.gradients:.1e} of its norm"


@dataclass(slots=True)
class Computed:
    """Results of a model for all sequences, concatenated."""

    logprobs: Tensor
    """[2, T]: log-probs and entropies, or scores [1, T], detached."""
    gradients: dict[str, Tensor]
    outputs: dict[tuple[str, int], Tensor]
    """[T, ...] of each module, in order of computation. The number counts calls of a module."""
    classes: dict[str, str]


passed: set[str] = set()
"""Small configurations that this process has checked already."""
SCORES_LABEL = "scores "
NO_BEHAVIOUR = ("_name_or_path", "architectures", "id2label", "label2id", "dtype", "num_labels")


def check_model(
    section: ModelSection,
    strategy: StrategyBase,
    flag: str = "pretrain",
    *,
    name: str = "",
    scores: bool = False,
) -> None:
    """Check the model given by `flag` before it is loaded, on all ranks, once for each family.

    `name` selects one of several models, and one that `scores` has no logits. Raise ConfigError if
    packed sequences would be computed wrongly. A copy that cannot be built is mentioned in the log.
    """
    name = name or getattr(section, flag)
    try:
        config = load_config(name, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError):  # loading the model says what is wrong
        return

    mesh = strategy.mesh
    layout = {
        "sequence": strategy.sequence,
        "tensor": mesh.tensor if mesh.tp.size > 1 else None,
        "tensor_sequence": strategy.config.strategy.tp_sequence_parallel,
        "device": strategy.device,
    }
    try:
        key = _behaviour(small_config(config), mesh.sp.size, mesh.tp.size)
        # What generates correctly also scores correctly.
        if key in passed or (scores and SCORES_LABEL + key in passed):
            return
        layout["scores"] = scores
        different = differences(config, trust_remote_code=section.trust_remote_code, **layout)
    except ImpossibleError as error:
        raise ConfigError(f"--{flag} {name}: {error}") from error
    except Exception as error:  # a configuration may have sizes that do not go together
        if mesh.world.rank == 0:
            reason = f"{type(error).__name__}: {error}"
            logger.info("--{} {} was not checked on a small copy: {}", flag, name, reason)
        return

    if different:
        raise ConfigError(
            f"--{flag} {name}: this family ({config.model_type}) would be trained wrongly. A small"
            f" copy with random weights was computed {different[0].name}, and compared with"
            f" transformers {transformers.__version__}, one sequence at a time:"
            f" {different[0].finding}. Use another version of transformers or another model;"
            f" `lightrft selfcheck {name}` shows all comparisons"
        )
    passed.add(SCORES_LABEL + key if scores else key)


def _behaviour(config: PretrainedConfig, *sizes: int) -> str:
    """Return what two models must have in common to be checked once."""
    values = {name: value for name, value in config.to_dict().items() if name not in NO_BEHAVIOUR}
    return json.dumps([values, sizes], sort_keys=True, default=str)


def differences(config: PretrainedConfig, **options: Any) -> list[Comparison]:
    """Return the comparisons that find a difference with both seeds; for options see below."""
    different = [each for each in compare_small_copy(config, **options) if each.differs]
    if not different:
        return []
    again = {
        each.name for each in compare_small_copy(config, seed=SEEDS[1], **options) if each.differs
    }
    return [each for each in different if each.name in again]


class ImpossibleError(ValueError):
    """A family that flat batches are known not to support, with the reasons."""


def compare_small_copy(
    config: PretrainedConfig,
    *,
    trust_remote_code: bool = False,
    scores: bool = False,
    sequence: SequenceParallel = NO_SEQUENCE_PARALLEL,
    tensor: DeviceMesh | None = None,
    tensor_sequence: bool = False,
    device: torch.device | None = None,
    seed: int = SEEDS[0],
) -> list[Comparison]:
    """Compare a small copy of a model over flat batches with transformers.

    The copy generates, or `scores` each token with a head of one output. With ranks that split
    sequences (`sequence`) or layers (`tensor`) the copy is also computed in their layout, on
    `device`; all of them call this. Raise ImpossibleError for a family that cannot be computed. Any
    other error says that a small copy cannot be built.
    """
    ranks = sequence.axis.size * (tensor.size() if tensor is not None else 1)
    small = small_config(config, multiple=ranks)
    build = partial(
        small_model, small, scores=scores, seed=seed, trust_remote_code=trust_remote_code
    )
    batch = _batch()
    reference = build("eager")
    lift_time_step_limits(reference)  # transformers decodes without them, and so do engines
    expected = _alone(reference, batch)

    def flat() -> Actor | Scorer:
        model = build(attention_of(small))
        if problems := not_flat(model):
            raise ValueError(
                f"{type(model).__name__} cannot be trained on flat batches: {'; '.join(problems)}"
            )
        return (Scorer if scores else Actor)(model).eval()

    shared = replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))
    try:
        comparisons = [
            _compare(name, _packed(flat(), layout), expected)
            for name, layout in ((PACKED, batch), (SHARED, shared))
        ]
        if ranks > 1:
            actor = flat().to(device)
            if tensor is not None:
                parallelize(actor, tensor, sequence=tensor_sequence)
            if sequence.multiple > 1:
                set_sequence_parallel(actor, sequence, tp=ranks // sequence.axis.size)
            name = f"{SHARED}, split over {ranks} ranks"
            computed = _packed(actor, shared.to(device), sequence.axis)
            comparisons.append(_compare(name, computed, expected))
    except ValueError as error:  # transformers itself has computed the copy
        raise ImpossibleError(str(error)) from error

    return comparisons


def resumed_gap(config: PretrainedConfig, strategy: StrategyBase, **options: Any) -> float:
    """Return how far a resumed training is from one that was not stopped; 0 is expected.

    A small copy takes two optimizer steps, once with a checkpoint between them that another copy
    continues from. `options` go to small_model(). The gap is the largest difference of a parameter.
    """
    small = small_config(config)
    batch = _batch().to(strategy.device)

    def begin(seed: int) -> tuple[nn.Module, Any, Any]:
        model = small_model(small, attention_of(small), seed=seed, **options)
        not_flat(model)
        actor = Actor(model)
        optimizer = strategy.create_optimizer(actor, 1e-2)
        return strategy.prepare(
            (actor, optimizer, strategy.create_scheduler(optimizer, "cosine", 1, 4))
        )

    def step(actor: nn.Module, optimizer: Any, scheduler: Any) -> None:
        loss = -actor(batch, TEMPERATURE)[0].sum() / batch.num_tokens
        strategy.backward(loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler)

    through = begin(SEEDS[0])
    step(*through)
    # Other weights, so that what is not loaded shows
    resumed = begin(SEEDS[1])
    with TemporaryDirectory() as folder:
        strategy.save_ckpt(through[0], folder, "half")
        strategy.load_ckpt(resumed[0], folder, "half")
    for run in (through, resumed):
        step(*run)

    pairs = zip(through[0].parameters(), resumed[0].parameters(), strict=True)
    return max((_whole(one) - _whole(two)).abs().max().item() for one, two in pairs)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _batch() -> Batch:
    """Return a few sequences of random tokens that begin alike."""
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randint, FIRST_TOKEN, SMALL_VOCABULARY, generator=generator)
    prefixes = {name: draw((PREFIX_TOKENS,)) for name in "abc"}
    rows = []
    for length, prefix in zip(SEQUENCE_LENGTHS, PREFIXES, strict=True):
        begin = torch.cat([prefixes[name] for name in prefix])
        # The first tokens after them differ, so that these are all that sequences share.
        rest = draw((length - len(begin),))
        rest[0] = FIRST_TOKEN + len(rows)
        rows.append(torch.cat([begin, rest]))

    lengths = torch.tensor(SEQUENCE_LENGTHS)
    mask = torch.ones(sum(SEQUENCE_LENGTHS), dtype=torch.bool)
    mask[lengths.cumsum(0) - lengths] = False
    return Batch(
        lengths=lengths, input_ids=torch.cat(rows), loss_mask=mask, rows=torch.arange(len(rows))
    )


def _alone(model: PreTrainedModel, batch: Batch) -> Computed:
    """Compute each sequence alone with transformers' own forward pass."""
    values = []
    outputs: dict[tuple[str, int], list[Tensor]] = {}
    for ids in batch.input_ids.split(batch.lengths.tolist()):
        with _recorded(model, len(ids)) as seen:
            values.append(_values(model, ids))
        for key, output in seen.items():
            outputs.setdefault(key, []).append(output)

    joined = {
        key: torch.cat(pieces)
        for key, pieces in outputs.items()
        if len(pieces) == len(batch.lengths)
    }
    return _computed(model, torch.cat(values, 1), joined)


def _values(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return log-probs and entropies [2, L] of one sequence, or scores [1, L]."""
    if not model.can_generate():
        head = next(child for child in model.children() if child is not model.base_model)
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
        return head(hidden)[0].T

    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    logp = (logits / TEMPERATURE).log_softmax(-1)[:-1]
    chosen = logp.gather(-1, ids[1:, None])[:, 0]
    entropies = -(logp.exp() * logp).sum(-1)
    return torch.cat([torch.zeros(2, 1), torch.stack([chosen, entropies])], 1)


def _packed(module: Actor | Scorer, batch: Batch, axis: Axis | None = None) -> Computed:
    """Compute all sequences in one flat batch."""
    model = module.hf_model
    with _recorded(model, batch.num_computed) as seen:
        if isinstance(module, Actor):
            values = torch.stack(module(batch, TEMPERATURE))
        else:
            values = module(batch)[None]
    outputs = {
        key: batch.shared.spread(output) if batch.shared else output for key, output in seen.items()
    }
    return _computed(model, values, outputs, axis)


def _computed(
    model: PreTrainedModel,
    values: Tensor,
    outputs: dict[tuple[str, int], Tensor],
    axis: Axis | None = None,
) -> Computed:
    """Compute the gradients of a loss that gives another weight to every token and result."""
    size = values.shape[1]
    weights = torch.stack([torch.linspace(-1, 1, size), torch.linspace(0.3, -0.6, size)])
    weights = weights[: len(values)]
    (values * weights.to(values.device)).sum().backward()

    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if axis is not None and axis.size > 1:
            torch.distributed.all_reduce(gradient, group=axis.group)
        gradients[name] = gradient.cpu()

    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    return Computed(values.detach().cpu(), gradients, outputs, classes)


@contextmanager
def _recorded(model: PreTrainedModel, num_tokens: int) -> Iterator[dict[tuple[str, int], Tensor]]:
    """Record the outputs [num_tokens, ...] of the decoder's layers and of the modules in them."""
    seen: dict[tuple[str, int], Tensor] = {}

    def record(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return
        if first.dim() > 1 and first.shape[:2] == (1, num_tokens):
            first = first[0]
        if first.dim() and first.shape[0] == num_tokens:
            calls = sum(key[0] == name for key in seen)
            seen[name, calls] = first.detach().float().cpu()

    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    with ExitStack() as hooks:
        for name, module in decoder.named_modules():
            if name and name.count(".") < 3:
                see = partial(record, f"{prefix}.{name}")
                hooks.enter_context(module.register_forward_hook(see))
        yield seen


def _compare(name: str, actual: Computed, expected: Computed) -> Comparison:
    scale = 1 + expected.logprobs.abs()
    gap = ((actual.logprobs - expected.logprobs).abs() / scale).max().item()
    norm = torch.stack([each.norm() for each in expected.gradients.values()]).norm().item()
    # A gradient that is nearly zero consists of rounding errors.
    gradients = {
        parameter: (
            (actual.gradients[parameter] - gradient).norm() / (gradient.norm() + 1e-4 * norm)
        ).item()
        if parameter in actual.gradients
        else torch.inf
        for parameter, gradient in expected.gradients.items()
    }
    parameter = max(gradients, key=lambda each: _nan_last(gradients[each]))

    first = ""
    if not gap <= LOGPROB_TOLERANCE:
        wrong = (
            module
            for (module, number), output in actual.outputs.items()
            if _gap(output, expected.outputs.get((module, number))) > HIDDEN
        )
        first = next((f"{module} ({expected.classes[module]})" for module in wrong), "")
    return Comparison(name, gap, gradients[parameter], parameter, first)


def _gap(actual: Tensor, expected: Tensor | None) -> float:
    """Return the largest difference relative to the largest value; 0 for other shapes."""
    if expected is None or actual.shape != expected.shape:
        return 0.0
    largest = expected.abs().max().item() or 1.0
    return _nan_last((actual - expected).abs().max().item() / largest)


def _nan_last(value: float) -> float:
    return torch.inf if value != value else value
