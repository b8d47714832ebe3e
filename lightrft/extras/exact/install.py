"""Let a model compute exactly, whatever else it computes in the same call."""

from functools import partial

import torch
from loguru import logger
from torch import nn
from transformers import PreTrainedModel

from lightrft.config.errors import ConfigError
from lightrft.extras.exact.attention import KEYS, attention_name
from lightrft.extras.exact.logprobs import exact_token_logprobs
from lightrft.extras.exact.products import (
    LEAST,
    Products,
    ProductShapes,
    chosen_products,
    use_exact_products,
)
from lightrft.models.heads import Actor
from lightrft.models.parallel.collectives import Axis

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers whose only connection between tokens is attention."""


def make_exact(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Products:
    """Replace the attention of a model and the products of its linear layers; return these.

    Raise ConfigError for a model with other layers, and on a machine where products depend on the
    number of rows.
    """
    problem = inexact_module(model)
    if problem:
        raise ConfigError(f"--exact does not support {type(model).__name__}: {problem}")

    products = chosen_products(product_shapes(model, dtype), device, torch.get_num_threads())
    use_exact_products(model, products)
    model.set_attn_implementation(attention_name(products))
    return products


def make_actor_exact(actor: Actor, dtype: torch.dtype, device: torch.device, world: Axis) -> None:
    """Let an actor compute what the exact engine computes; all ranks call this together.

    Raise ConfigError if the ranks' machines compute differently.
    """
    products = make_exact(actor.language_model, dtype, device)
    actor.token_logprobs = partial(exact_token_logprobs, products)

    everywhere = world.gather((products, _bits(products, actor.language_model, dtype, device)))
    if any(each != everywhere[0] for each in everywhere):
        raise ConfigError(
            "--exact: the same product has other bits on other ranks: use equal processors, numbers"
            " of threads and versions of torch"
        )
    if world.rank == 0:
        logger.info(
            f"--exact: products are {products}, attention reads blocks of {KEYS} keys; probed with"
            f" {torch.get_num_threads()} threads"
        )


def inexact_module(model: PreTrainedModel) -> str:
    """Return why a model cannot be exact, or nothing."""
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"

    for path, module in model.named_modules():
        is_exact = type(module) is nn.Linear or isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False):
            if not is_exact and parameter.dim() > 1:
                return (
                    f"{path}.{name} is a matrix outside of linear layers, as experts, convolutions"
                    " and adapters have"
                )
    return ""


def product_shapes(model: PreTrainedModel, dtype: torch.dtype) -> ProductShapes:
    """Return the shapes of the products that a model computes in `dtype`."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = model.get_output_embeddings()
    linear = frozenset(
        (module.out_features, module.in_features)
        for module in model.modules()
        if type(module) is nn.Linear and module is not head
    )
    batched = frozenset({(size, KEYS), (KEYS, size)})
    return ProductShapes(linear, tuple(head.weight.shape), batched, dtype)


def _bits(
    products: Products, model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> list[int]:
    """Return the bits of a small product, to compare machines by."""
    num, width = min(product_shapes(model, dtype).linear)
    random = torch.Generator(device).manual_seed(0)
    rows = torch.randn(LEAST, width, generator=random, device=device)
    weight = torch.randn(num, width, generator=random, device=device)
    return products.linear(rows, weight)[:, 0].view(torch.int32).tolist()
