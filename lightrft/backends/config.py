"""The part of the configuration that a strategy reads, from whatever the caller holds."""

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
"""What users hand to a strategy: the typed configuration, parsed flags, a dict or an EasyDict."""


CHOICES = (
    (EngineSection, "engine_type"),
    (StrategySection, "sp_impl"),
    (ModelSection, "gradient_checkpointing_policy"),
    (ModelSection, "fused_kernels"),
)


@dataclass
class StrategyConfig(ModelSection, DataSection, StrategySection, EngineSection, RolloutSection):
    """Fields and defaults are those of the sections; every other name goes to `extra_args` and reads as an attribute.

        config = StrategyConfig.from_args({"bf16": True, "my_flag": 3})
        config.bf16, config.engine_tp_size, config.my_flag        # True, 1, 3
    """

    extra_args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: Arguments) -> Self:
        """A known name whose value is None keeps its default, as an argparse flag that was not written."""
        values = flat(args)
        known = {f.name for f in fields(cls)} - {"extra_args"}
        return cls(
            **{name: value for name, value in values.items() if name in known and value is not None},
            extra_args={name: value for name, value in values.items() if name not in known},
        )

    def __getattr__(self, name: str) -> Any:
        """Called for names that are no field. Python's own names must not look for themselves while unpickling."""
        if not name.startswith("_") and name != "extra_args" and name in self.extra_args:
            return self.extra_args[name]
        raise AttributeError(f"StrategyConfig has no {name!r}, neither as a field nor in extra_args")

    def check(self) -> None:
        """ValueError for values that no run can use."""
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
        """ValueError for what ZeRO cannot do."""
        if problems := deepspeed_problems(self, bf16=self.bf16):
            raise ValueError("; ".join(problems))


def optim_section(args: Arguments) -> OptimSection:
    """What of `args` an optimizer and its schedule need."""
    known = {f.name for f in fields(OptimSection)}
    return OptimSection(**{name: value for name, value in flat(args).items() if name in known and value is not None})


def sequence_layout(config: StrategyConfig) -> tuple[int, str]:
    """How many ranks divide a sequence, and how: what --sp_size, --sp_impl and the short form --cp_size say together."""
    if config.cp_size > 1:
        return config.cp_size, "zigzag"
    return config.sp_size, "ulysses" if config.sp_impl == "auto" else config.sp_impl


def flat(args: Arguments) -> dict[str, Any]:
    """Name -> value, without sections."""
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
