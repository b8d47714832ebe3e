"""Routers of a mixture of experts, and what they decide during a forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.algorithms.balance import routing
from lightrft.algorithms.reduce import sequence_sums
from lightrft.models.heads import pad_to_multiple
from lightrft.parallel.sequence_parallel import SequenceParallel
from lightrft.types import Batch, Routing, to_device


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
            part for part in model.modules() if isinstance(part, recorder.target_class)
        ]
        self.index = recorder.index
        self.top_k: int = config.num_experts_per_tok
        """Number of experts per token."""

    @contextmanager
    def watch(self) -> Iterator[list[Tensor]]:
        """Collect the differentiable logits [t, E] of every router that runs inside the context."""
        outputs: list[Tensor] = []
        hooks = [
            part.register_forward_hook(lambda _, __, output: outputs.append(output[self.index]))
            for part in self.modules
        ]
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()

    def routing(self, logits: list[Tensor], batch: Batch, sequence: SequenceParallel) -> Routing:
        """Return the routing of all tokens, prompts included, of sequences with tokens in the loss.

        Padding does not count.
        """
        padded = pad_to_multiple(batch, sequence.multiple)
        counts = (sequence_sums(padded.loss_mask.float(), padded) > 0)[padded.sequence_ids].float()
        if padded.shared:  # a computed token counts once for each token that shares it
            places = to_device(padded.shared.places, counts.device)
            counts = counts.new_zeros(padded.num_computed).index_add(0, places, counts)

        local = routing(
            logits, counts[sequence.positions(padded.num_computed, counts.device)], self.top_k
        )
        return Routing(
            sequence.sum(local.chosen), sequence.sum(local.probabilities), sequence.sum(local.count)
        )
