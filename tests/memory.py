"""Measure how much memory something takes, on a model that is large enough to show it."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from scripts.bench.harness import peak_of

__all__ = ["Storages", "larger_mixture", "larger_model", "peak_of"]


class Storages(TorchDispatchMode):
    """While entered, counts the bytes that operations allocate: on all devices, or on one."""

    def __init__(self, uncounted: Iterable[Tensor] = (), device: str = ""):
        super().__init__()
        self.device = device
        self.uncounted = [tensor.untyped_storage() for tensor in uncounted]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor) and self.device in ("", each.device.type):
                storage = each.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.kept())
        return result

    def kept(self) -> int:
        """Return the bytes that are still in use."""
        self.made = {address: made for address, made in self.made.items() if not made[0].expired()}
        uncounted = {storage._cdata for storage in self.uncounted}
        return sum(size for address, (_, size) in self.made.items() if address not in uncounted)


def larger_model(tiny: str, folder: Path) -> int:
    """Write a larger model like the one in `tiny`, in bfloat16 and several files.

    Returns its bytes in float32, 230 million.
    """
    config = AutoConfig.from_pretrained(
        tiny, hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=4000
    )
    config.layer_types = ["full_attention"] * 16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="8MB")
    return 4 * model.num_parameters()


def larger_mixture(folder: Path) -> tuple[int, int]:
    """Write a random mixture of 64 experts in 4 layers, as published, in bfloat16.

    Returns its bytes in float32: of the whole model, and of a layer.
    """
    config = Qwen3MoeConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=64,
        num_experts_per_tok=2,
        vocab_size=1000,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30MB")

    return 4 * model.num_parameters(), 4 * sum(
        parameter.numel() for parameter in model.model.layers[0].parameters()
    )
