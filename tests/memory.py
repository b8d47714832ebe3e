"""How much memory something takes, and a model that is large enough to see it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def larger_model(tiny: str, folder: Path) -> int:
    """A random relative of the model in `tiny`, in bfloat16 and several files; returns its bytes in float32, 230 million."""
    config = AutoConfig.from_pretrained(tiny, hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=4000)
    config.layer_types = ["full_attention"] * 16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="30MB")
    return 4 * model.num_parameters()


def peak_of(action: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory grew at most, while `action` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is there
    before = resident("VmHWM")
    action()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
