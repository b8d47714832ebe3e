"""Count the parameters of a model, and the floating-point operations of training, for MFU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class TrainingOperations:
    """Operations of the products of tokens and matrices, forward and backward.

    A product with a matrix of P elements takes 2 P operations for each token, and so do its two
    gradients. Gradients of a frozen matrix are not computed, nor any below the first parameter that
    is trained. Attention, towers for media, and forward passes that are repeated to save memory do
    not count.
    """

    per_token: float
    """Operations of the decoder for a token that it computes."""
    per_learned_token: float
    """Operations of the head that predicts tokens; it computes learned tokens only."""

    @classmethod
    def of(cls, model: PreTrainedModel, full_shape: Callable[[nn.Parameter], torch.Size]) -> Self:
        """Count the operations of a model.

        `full_shape` returns the shape of a parameter over all ranks.
        """
        head = model.get_output_embeddings()
        decoder = model.get_decoder()
        trained = False

        # A lookup in an embedding is no product.
        tables = {
            id(parameter)
            for module in decoder.modules()
            if isinstance(module, nn.Embedding) or module is decoder.get_input_embeddings()
            for parameter in module.parameters(recurse=False)
        }
        per_token = 0.0
        for name, parameter in decoder.named_parameters():
            shape = full_shape(parameter)
            if len(shape) > 1 and id(parameter) not in tables:
                # A token is computed by its own experts only.
                _, size = count_parameters([(f".{name}", shape)], model.config)
                per_token += 2 * size * (1 + trained + parameter.requires_grad)
            trained = trained or parameter.requires_grad
        if head is None:
            return cls(per_token, 0.0)
        size = full_shape(head.weight).numel()
        return cls(per_token, 2.0 * size * (1 + trained + head.weight.requires_grad))

    def __call__(self, num_computed: int, num_learned: int) -> float:
        """Return the operations for so many computed tokens, and learned tokens among them."""
        return self.per_token * num_computed + self.per_learned_token * num_learned


def count_parameters(
    shapes: Iterable[tuple[str, torch.Size]], config: PretrainedConfig
) -> tuple[int, int]:
    """Return the number of parameters, and how many of them compute one token.

    `shapes` has names and shapes. transformers keeps the experts of a layer in tensors [experts,
    ...]; a token uses only `num_experts_per_tok` of them.
    """
    total = 0
    active = 0.0
    for name, shape in shapes:
        of_experts = ".experts." in name and len(shape) == 3
        total += shape.numel()
        active += shape.numel() * (
            config.get_text_config().num_experts_per_tok / shape[0] if of_experts else 1
        )
    return total, round(active)
