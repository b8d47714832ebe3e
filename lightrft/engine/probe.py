"""Record the outputs of a decoder's modules, to find where two implementations of a model diverge.

Names are as in the text-only Hugging Face model, with two additions: `self_attn.qkv_proj` is the
concatenation of q_proj, k_proj and v_proj, as engines fuse them, and `self_attn.heads` is the input
of o_proj. `embed_tokens` is the input of the first layer, because some models scale the embeddings
inside that module and others after it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

OBSERVED_MODULES = (
    *"embed_tokens input_layernorm q_proj k_proj v_proj qkv_proj q_norm k_norm o_proj".split(),
    *"post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm mlp norm".split(),
)
"""Last components of the names of observed modules."""
LOGITS = "lm_head"
BESIDE_TOWERS = {"language_model", "text_model"}
"""Names of the language model in multimodal ones. Implementations put it at different depths of
the path."""
MAX_MISMATCH = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Mean difference between an engine's and a trainer's log-probs that rounding explains."""
TRANSFORMERS_NAMES = {"block_sparse_moe": "mlp"}
"""Engines' name of a module of the model -> transformers' name."""


def logits_processor(model: nn.Module) -> nn.Module:
    """Return the module of an engine's model that turns hidden states into logits.

    Multimodal models have it in the language model.
    """
    return next(
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "logits_processor"
    )


class Probe:
    """Records the outputs of a model's modules while it is attached.

    They are [T, ...], float32 in host memory, in the order of computation.
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self.outputs: dict[str, Tensor] = {}

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for handle in self.attach(model):
                hooks.enter_context(handle)
            yield

    def attach(self, model: nn.Module) -> list[Any]:
        """Attach to a model; return handles that have remove()."""
        handles = []
        for path, module in model.named_modules():
            components = [
                TRANSFORMERS_NAMES.get(component, component)
                for component in path.split(".")
                if component not in BESIDE_TOWERS
            ]
            # A thinker's decoder is called model.model.
            name = ".".join(component for component, _ in groupby(components))
            if name.rpartition(".")[2] in OBSERVED_MODULES:
                handles.append(module.register_forward_hook(self._hook(name)))

            if name.endswith("layers.0.input_layernorm"):
                see = self._hook(name.split("layers.")[0] + "embed_tokens")
                handles.append(module.register_forward_pre_hook(see))

            if name.endswith(".o_proj"):
                see = self._hook(name.removesuffix("o_proj") + "heads")
                handles.append(module.register_forward_pre_hook(see))

        return handles

    def add(self, name: str, value: Tensor) -> None:
        """Record `value` [..., T, ...], or [1, H, T, D] as some models have it before a norm."""
        if value.dim() == 4 and self.num_tokens == value.shape[2] != value.shape[1]:
            value = value.transpose(1, 2)
        if value.numel() % self.num_tokens == 0:
            self.outputs[name] = value.detach().reshape(self.num_tokens, -1).float().cpu().clone()

    def recorded(self, logits: Tensor) -> dict[str, Tensor]:
        """Return all recorded outputs, and the logits [V] after the last token."""
        self._join_projections()
        return self.outputs | {LOGITS: logits.detach().reshape(1, -1).float().cpu()}

    def _hook(self, name: str) -> Any:
        def see(module: nn.Module, arguments: Any, output: Any = None) -> None:
            value = arguments if output is None else output
            self.add(name, value[0] if isinstance(value, tuple) else value)

        return see

    def _join_projections(self) -> None:
        outputs: dict[str, Tensor] = {}
        for name, value in self.outputs.items():
            path, _, layer = name.rpartition(".")
            if layer in ("q_proj", "k_proj", "v_proj"):
                name = f"{path}.qkv_proj"
                value = torch.cat([outputs[name], value], 1) if name in outputs else value
            outputs[name] = value
        self.outputs = outputs
