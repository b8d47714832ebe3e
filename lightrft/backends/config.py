"""Configuration of a strategy, built from any form of arguments."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, get_args, get_type_hints

from lightrft.config import (
    Config,
    DataSection,
    EngineSection,
    ModelSection,
    OptimSection,
    RolloutSection,
    StrategySection,
    cp_problems,
    deepspeed_problems,
    fused_problems,
    lora_problems,
)

Arguments = Config | Namespace | Mapping[str, Any] | None
"""Arguments that users can pass to a strategy: the typed configuration, parsed flags, a dict or an EasyDict."""


CHOICES = (
    (EngineSection, "engine_type"),
    (StrategySection, "sp_impl"),
    (ModelSection, "gradient_checkpointing_policy"),
    (ModelSection, "fused_kernels"),
)


@dataclass
class StrategyConfig(ModelSection, DataSection, StrategySection, EngineSection, RolloutSection):
    """Configuration with the sections' fields and defaults; other names go to `extra_args` and can be read as attributes.

        config = StrategyConfig.from_args({"bf16": True, "my_flag": 3})
        config.bf16, config.engine_tp_size, config.my_flag        # True, 1, 3
    """

    extra_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: Arguments) -> Self:
        """Build the configuration; a known name whose value is None keeps its default, as an omitted argparse flag does."""
        values = flat(args)
        known = {f.name for f in fields(cls)} - {"extra_args"}
        return cls(
            **{name: value for name, value in values.items() if name in known and value is not None},
            extra_args={name: value for name, value in values.items() if name not in known},
        )

    def __getattr__(self, name: str) -> Any:
        """Return an extra argument by name. Private and special names are excluded, which would recurse in unpickling."""
        if not name.startswith("_") and name != "extra_args" and name in self.extra_args:
            return self.extra_args[name]
        raise AttributeError(f"StrategyConfig has no {name!r}, neither as a field nor in extra_args")

    def check(self) -> None:
        """Raise ValueError for values that no run can use."""
        for section, name in CHOICES:
            known = get_args(get_type_hints(section)[name])
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        problems = cp_problems(self) + lora_problems(self, tp_size=self.tp_size) + fused_problems(self, tp_size=self.tp_size)
        if problems:
            raise ValueError("; ".join(problems))
        for name in ("timeout_minutes", "arrival_minutes", "phase_minutes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.offload_idle and self.fsdp_cpu_offload:
            raise ValueError("--offload_idle has nothing to move with --fsdp_cpu_offload: all is in host memory, drop one")

    def check_deepspeed(self) -> None:
        """Raise ValueError for settings that ZeRO does not support."""
        if problems := deepspeed_problems(self, bf16=self.bf16):
            raise ValueError("; ".join(problems))


def optim_section(args: Arguments) -> OptimSection:
    """Return the section of `args` for optimizers and schedules."""
    known = {f.name for f in fields(OptimSection)}
    return OptimSection(**{name: value for name, value in flat(args).items() if name in known and value is not None})


def sequence_layout(config: StrategyConfig) -> tuple[int, str]:
    """Return how many ranks divide a sequence, and the method, from --sp_size, --sp_impl and the short form --cp_size."""
    if config.cp_size > 1:
        return config.cp_size, "zigzag"
    return config.sp_size, "ulysses" if config.sp_impl == "auto" else config.sp_impl


def flat(args: Arguments) -> dict[str, Any]:
    """Return a dict of names and values, without sections."""
    if args is None:
        return {}
    if isinstance(args, Config):
        return {name: value for section in asdict(args).values() for name, value in section.items()}
    if isinstance(args, StrategyConfig):
        values = asdict(args)
        return values.pop("extra_args") | values
    if isinstance(args, Namespace):
        return dict(vars(args))
    if isinstance(args, Mapping):
        return dict(args)
    raise TypeError(f"a strategy's args are a Config, an argparse Namespace, a mapping or None, not {type(args).__name__}")
