"""Routers of a mixture of experts, and what they decide during a forward pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lightrft.config.facts import EXPERT_FAMILIES
from lightrft.core.batch import (
    Batch,
    RoutedShape,
    Routing,
    missing_expert,
    pad_to_multiple,
    to_device,
)
from lightrft.core.losses import Report, Weighted, sequence_sums
from lightrft.models.balance import routing
from lightrft.models.parallel.expert_parallel import routers
from lightrft.models.parallel.sequence_parallel import SequenceParallel

TOPK = (torch.topk, Tensor.topk)
BIAS = "e_score_correction_bias"
"""Name of the buffer that a family adds to the scores when experts are chosen."""


class Routers:
    """Routers of a model, found through the outputs that transformers can record for the family."""

    def __init__(self, model: PreTrainedModel, coefficient: float):
        """Find the routers; `coefficient` weights the balance loss.

        Raise ValueError if the model's family has no such loss.
        """
        self.coefficient = coefficient
        recorder = (model._can_record_outputs or {}).get("router_logits")
        config = model.config.get_text_config()
        if recorder is None or getattr(config, "router_aux_loss_coef", None) is None:
            raise ValueError(
                f"--aux_loss_coef: {type(model).__name__} has no experts whose load can be balanced"
            )

        self.modules: list[nn.Module] = [
            submodule
            for submodule in model.modules()
            if isinstance(submodule, recorder.target_class)
        ]
        self.index = recorder.index

    @contextmanager
    def watch(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Collect what every router that runs inside the context computes.

        It is the differentiable logits [t, E], and the chosen experts [t, k].
        """
        outputs: list[tuple[Tensor, Tensor]] = []

        def keep(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
            (chosen,) = (each for each in output if each.dtype == torch.int64)
            outputs.append((output[self.index], chosen))

        with ExitStack() as hooks:
            for router in self.modules:
                hooks.enter_context(router.register_forward_hook(keep))
            yield outputs

    def routing(
        self, outputs: list[tuple[Tensor, Tensor]], batch: Batch, sequence: SequenceParallel
    ) -> Routing:
        """Return the routing of all tokens, prompts included, of sequences with tokens in the loss.

        Padding does not count.
        """
        local = routing(outputs, token_weights(batch, sequence))
        return Routing(
            sequence.sum(local.chosen), sequence.sum(local.probabilities), sequence.sum(local.count)
        )


def token_weights(batch: Batch, sequence: SequenceParallel) -> Tensor:
    """Return how often each token that this rank computes counts in the load of experts: [t].

    Tokens of sequences without learned tokens count 0, a computed token once for each token that
    shares it.
    """
    padded = pad_to_multiple(batch, sequence.multiple)
    counts = (sequence_sums(padded.loss_mask.float(), padded) > 0)[padded.sequence_ids].float()
    if padded.shared:
        indices = to_device(padded.shared.indices, counts.device)
        counts = counts.new_zeros(padded.num_computed).index_add(0, indices, counts)
    return counts[sequence.positions(padded.num_computed, counts.device)]


class Choices:
    """Experts that the routers shall choose for the tokens of one forward pass, or do choose.

    It is no dataclass, because FSDP2 would give a copy with rounded tensors to each layer.
    """

    def __init__(self, recorded: Tensor | None, weights: Tensor | None):
        self.recorded = recorded
        """Experts that the engine chose, [t, layers, k], or None."""
        self.weights = weights
        """How often each token counts in the load, [t]; None: the load is not measured."""
        # Layers that are computed again in the backward pass set their entries to the same values.
        self.changed: dict[int, Tensor] = {}
        """Number of a layer -> how many tokens have other experts than it would choose, []."""
        self.loads: dict[int, Tensor] = {}
        """Number of a layer -> how many tokens chose each expert, [E] float32."""


class RouterChoices:
    """Controls and counts the choices of a model's routers.

    Experts of the engine replace a router's own (router replay, arXiv 2510.11370). Weights of
    chosen experts come from the router's scores, so that it learns. The load of the experts moves
    the biases that only the choice depends on (arXiv 2408.15664).
    """

    def __init__(self, model: PreTrainedModel, *, bias_rate: float = 0.0):
        """Take over the routers of a model, in place.

        Raise ValueError for a family that is not supported, and for a `bias_rate` if the routers
        have no such bias.
        """
        family = model.config.get_text_config().model_type
        if family not in EXPERT_FAMILIES:
            raise ValueError(
                f"--router_replay does not support {type(model).__name__}: supported are models of"
                f" type {', '.join(EXPERT_FAMILIES)}"
            )
        self.shape = RoutedShape.of(model.config)
        self.bias_rate = bias_rate
        self.last: Choices | None = None
        """Choices of the newest forward pass."""
        self.layers = list(routers(model))
        """Numbers of the layers that have experts."""
        self._biased: list[nn.Module] = []
        """Module of each layer that has the bias; a move to a device replaces the bias itself."""
        for number, router in routers(model).items():
            layer = model.get_decoder().layers[number]
            chooser = _Chooser(self.shape, number)
            layer.register_forward_pre_hook(chooser.take, with_kwargs=True)
            router.forward = partial(chooser.route, router.forward)
            self._biased += [
                submodule for submodule in layer.modules() if BIAS in submodule._buffers
            ]

        if bias_rate and len(self._biased) != len(self.layers):
            raise ValueError(f"--router_bias_rate: routers of {type(model).__name__} have no bias")
        for bias in self.biases if bias_rate else ():
            # A step of the bias would be lost in the rounding of bfloat16.
            bias.data = bias.data.float()

    @property
    def biases(self) -> list[Tensor]:
        """Return the bias of each layer with experts, [E] each; empty if the family has none."""
        return [router.get_buffer(BIAS) for router in self._biased]

    def begin(self, batch: Batch, sequence: SequenceParallel, *, measure: bool) -> Choices:
        """Return the choices for a forward pass over a padded batch, as an argument of the layers.

        `measure`: count the load of the experts.
        """
        recorded = batch.experts
        if recorded is not None:
            if batch.shared:
                recorded = recorded[to_device(batch.shared.computed, recorded.device)]
            recorded = recorded[sequence.positions(batch.num_computed, recorded.device)]
        self.last = Choices(recorded, token_weights(batch, sequence) if measure else None)
        return self.last

    def report(self, sequence: SequenceParallel) -> Report:
        """Report the share of recorded choices, of tokens and layers, that a router had changed."""
        last = self.last
        if last is None or last.recorded is None:
            return {}
        # A token has a record of all layers, or of none.
        of_tokens = last.recorded[:, self.layers[0], 0] != missing_expert(last.recorded.dtype)
        known = of_tokens.sum() * len(self.layers)
        changed = torch.stack(list(last.changed.values())).sum()
        changed, known = sequence.sum(torch.stack([changed, known]).float())
        return {"train/replay_changed": Weighted(changed / known.clamp(min=1), known)}

    def load(self, sequence: SequenceParallel) -> Tensor:
        """Return how many tokens of the newest pass chose each expert: [layers with experts, E]."""
        return sequence.sum(torch.stack([self.last.loads[number] for number in self.layers]))

    @torch.no_grad()
    def balance(self, load: Tensor) -> Report:
        """Move the biases against the load of all ranks' tokens in an optimizer step.

        Returns the largest load over the mean: of each layer, and their mean and maximum.
        """
        mean = load.mean(1, keepdim=True)
        for bias, step in zip(self.biases, self.bias_rate * (mean - load).sign(), strict=False):
            if self.bias_rate:
                bias.add_(step.to(bias.device))
        peaks = load.amax(1) / mean[:, 0].clamp(min=1e-9)
        of_layers = zip(self.layers, peaks, strict=True)
        layers = {f"experts/load_of_layer_{number}": peak for number, peak in of_layers}
        return {"train/expert_load": peaks.mean(), "train/expert_load_max": peaks.max(), **layers}


class _Chooser(TorchFunctionMode):
    """Answers the choice of the experts of one layer, while the layer's router runs."""

    def __init__(self, shape: RoutedShape, number: int):
        super().__init__()
        self.shape = shape
        self.number = number
        self.choices: Choices | None = None
        self.num_answers = 0

    def take(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the choices out of the arguments of the layer, also when it is computed again."""
        self.choices = kwargs.get("choices")
        return args, {name: value for name, value in kwargs.items() if name != "choices"}

    def route(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the router."""
        if self.choices is None:
            return forward(*args, **kwargs)

        self.num_answers = 0
        with self:
            result = forward(*args, **kwargs)
        if self.num_answers != 1:
            raise RuntimeError(
                f"the router of layer {self.number} chose experts {self.num_answers} times, not"
                " once"
            )
        return result

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # Some families choose among groups of experts first.
        if function not in TOPK or args[0].ndim != 2 or args[0].shape[1] != self.shape.num_experts:
            return result
        self.num_answers += 1
        return self._answer(args[0], result)

    def _answer(self, scores: Tensor, choice: Any) -> Any:
        choices = self.choices
        chosen = choice.indices
        if choices.recorded is not None:
            recorded = choices.recorded[:, self.number]
            known = recorded[:, :1] != missing_expert(recorded.dtype)
            chosen = torch.where(known, recorded.long(), choice.indices)
            same = (chosen[:, :, None] == choice.indices[:, None]).any(-1).all(-1)
            choices.changed[self.number] = (~same).sum()

        if choices.weights is not None:
            weights = choices.weights.repeat_interleave(chosen.shape[1])
            zeros = weights.new_zeros(self.shape.num_experts)
            choices.loads[self.number] = zeros.index_add(0, chosen.flatten(), weights)
        if choices.recorded is None:
            return choice
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
