"""How much memory something takes, and a model that is large enough to see it."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.weight_sync import peak_of

__all__ = ["larger_model", "peak_of"]


def larger_model(tiny: str, folder: Path) -> int:
    """A random relative of the model in `tiny`, in bfloat16 and several files; returns its bytes in float32, 230 million."""
    config = AutoConfig.from_pretrained(tiny, hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=4000)
    config.layer_types = ["full_attention"] * 16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30MB")
    return 4 * model.num_parameters()
