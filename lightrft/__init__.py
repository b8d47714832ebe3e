"""lightrft: reinforcement fine-tuning of language and vision-language models, one process per device.

    lightrft.train_ppo(config="configs/quickstart.yaml", max_steps=20)      # others: see lightrft.trainer.run
"""

from typing import Any

__version__ = "0.1.0"
RUNS = ("evaluate", "train_dpo", "train_kto", "train_ppo", "train_prm", "train_rm", "train_sft")


def __getattr__(name: str) -> Any:
    """Import what starts a run when it is asked for."""
    if name not in RUNS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightrft.trainer import run

    return getattr(run, name)
