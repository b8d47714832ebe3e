"""Reinforcement fine-tuning of language and vision-language models, one process per device.

run = lightrft.train_ppo(model="some/model", prompt_data=rows, reward=my_reward, max_steps=20)
run.history, run.model_path, run.evaluate()
"""

import os
from typing import Any

# Torch reads this at its first tensor. It then asks the kernel for huge pages for tensors of 2 MB
# and more: a host takes long to page in the memory of a large tensor in steps of 4 kB.
if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.2.0"
_HOMES = {
    **dict.fromkeys(
        ("train_ppo train_sft train_rm train_prm train_dpo train_kto evaluate TrainedRun").split(),
        "lightrft.app.trainer.python",
    ),
    "Config": "lightrft.config.sections",
    **dict.fromkeys(("ConfigError", "DataError"), "lightrft.config.errors"),
}
"""Public name -> its module. The module is imported when the name is used."""
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
