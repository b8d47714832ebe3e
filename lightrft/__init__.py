"""lightrft: reinforcement fine-tuning of language and vision-language models, one process per device.

    run = lightrft.train_ppo(model="some/model", prompt_data=rows, reward=my_reward, max_steps=20)
    run.history, run.model_path, run.evaluate()
"""

from typing import Any

__version__ = "0.1.0"
_HOMES = {
    **dict.fromkeys(("train_ppo", "train_sft", "train_rm", "train_prm", "train_dpo", "train_kto", "evaluate", "TrainedRun"),
                    "lightrft.trainer.python"),
    "Config": "lightrft.config.sections",
    "ConfigError": "lightrft.config.errors",
    "DataError": "lightrft.config.errors",
}  # fmt: skip
"""Public name -> the module that has it, which is imported when the name is used."""
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
