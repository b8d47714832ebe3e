"""Freeze parameters, and LoRA: frozen matrices W with a trained low-rank product B A.

    h = W x + (alpha / rank) B A x

Hu et al. 2021, arXiv:2106.09685. peft injects the adapters into the transformers model, whose class
does not change. Its parameters are renamed: `q_proj.weight` becomes `q_proj.base_layer.weight`,
followed by `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Engines and saved
models need the model without adapters, so merge_adapters() undoes this for them.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.models.empty import real_parameters
from lightrft.models.weight_files import is_backbone
from lightrft.models.weight_sync.adapters import names_of
from lightrft.models.weight_sync.names import NamedTensor

ADAPTER = "default"
BASE = ".base_layer.weight"
FACTOR_A = f".lora_A.{ADAPTER}.weight"
FACTOR_B = f".lora_B.{ADAPTER}.weight"
ALL_LINEAR = "all-linear"
PATTERNS = ("lora_rank_pattern", "lora_alpha_pattern")
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"

Value = TypeVar("Value")


def freeze_parameters(model: PreTrainedModel, section: ModelSection) -> PreTrainedModel:
    """Freeze the parameters below --freeze_prefix; with --lora_rank freeze all and add adapters.

    No adapter is added below a --freeze_prefix. With --freeze_vision_tower, modules for images are
    frozen as well. The model is changed in place and returned. Every rank must call this with the
    same random state, so that adapters start equal. Raise ConfigError for a prefix that matches no
    parameter, and if nothing is left to train.
    """
    towers = _towers(model) if section.freeze_vision_tower else []
    if towers:
        logger.info("{} are not trained (--freeze_vision_tower)", ", ".join(towers))
        section = replace(section, freeze_prefix=[*section.freeze_prefix, *towers])

    for prefix in section.freeze_prefix:
        # Tied parameters are found under each of their names.
        named = model.named_parameters(remove_duplicate=False)
        frozen = [parameter for name, parameter in named if name.startswith(prefix)]
        if not frozen:
            names = sorted({".".join(name.split(".")[:2]) for name, _ in model.named_parameters()})
            raise ConfigError(
                f"--freeze_prefix {prefix}: no parameter has this prefix; the prefixes are"
                f" {', '.join(names)}"
            )

        for parameter in frozen:
            parameter.requires_grad_(False)

    if section.lora_rank:
        add_adapters(model, section)
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"--freeze_prefix {' '.join(section.freeze_prefix)} freezes all parameters"
        )

    return model


def _towers(model: PreTrainedModel) -> list[str]:
    """Return the name prefixes of parameters that text never uses.

    These are the modules next to the decoder, if there are any.
    """
    decoder = model.get_decoder()
    if decoder is model.base_model:
        return []
    return [
        f"{model.base_model_prefix}.{name}."
        for name, child in model.base_model.named_children()
        if decoder not in child.modules() and any(True for _ in child.parameters())
    ]


def add_adapters(model: PreTrainedModel, section: ModelSection) -> None:
    """Freeze `model` and add adapters to the linear layers of --target_modules.

    Layers below a --freeze_prefix get none. A is initialized randomly and B with 0, so the outputs
    of the model do not change. A scorer's head is trained as well. With --load_in_4bit the
    decoder's matrices are quantized. Raise ConfigError for targets that do not exist or cannot
    be merged.
    """
    if section.load_in_4bit:
        from lightrft.models.four_bits.linear import quantize_layers

        quantize_layers(model, torch.bfloat16 if section.bf16 else torch.float32)

    from peft import LoraConfig, TaskType, inject_adapter_in_model
    from peft.utils.other import get_pattern_key

    targets = section.target_modules
    patterns = {name: read_pattern(section, name) for name in PATTERNS}
    settings = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,
        rank_pattern=patterns["lora_rank_pattern"],
        alpha_pattern=patterns["lora_alpha_pattern"],
        use_rslora=section.rslora,
        lora_dropout=section.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules="|".join(re.escape(prefix) + ".*" for prefix in section.freeze_prefix)
        or None,
        task_type=TaskType.CAUSAL_LM if model.can_generate() else TaskType.SEQ_CLS,
    )
    settings.base_model_name_or_path = model.name_or_path

    init = True if section.lora_init == "kaiming" else section.lora_init
    with real_parameters():
        try:
            inject_adapter_in_model(settings, model, ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(f"--target_modules {' '.join(targets)}: {error}") from error
        used = {
            get_pattern_key(pattern, layer)
            for pattern in patterns.values()
            for layer in adapted_layers(model)
        }
        for name, pattern in patterns.items():
            if unused := pattern.keys() - used:
                raise ConfigError(f"--{name}: no layer with an adapter is called {min(unused)!r}")
        # The model may be empty, but adapters are drawn at once, so that all ranks draw the same.
        for layer in adapted_layers(model).values():
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, init)

    adopt_layers(model)
    if not model.can_generate():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or not is_backbone(model, name))


def read_pattern(section: ModelSection, flag: str) -> dict[str, float]:
    """Return the numbers by layer of --lora_rank_pattern or --lora_alpha_pattern.

    Raise ConfigError for a key that is no regular expression, and a value that is no such number.
    """
    pattern = json.loads(getattr(section, flag) or "{}")
    kinds, kind = (int, "rank") if flag == "lora_rank_pattern" else (int | float, "number")
    for name, value in pattern.items():
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise ConfigError(f"--{flag}: {value!r} of {name!r} is no {kind} above 0")
        try:
            re.compile(name)
        except re.error as error:
            raise ConfigError(f"--{flag}: {name!r} is no regular expression: {error}") from error
    return pattern


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with adapters by the names in a transformers model; may be empty.

    Raise ConfigError for a layer that merge_adapters() cannot merge. Only plain products on linear
    layers of the backbone can be merged: the head's product is computed outside of the module.
    """
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.lora import Linear, LoraLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        problems = {
            "is not a torch.nn.Linear": (
                not isinstance(layer, Linear) or not isinstance(layer.get_base_layer(), nn.Linear)
            ),
            "is outside of the backbone": (
                isinstance(model, PreTrainedModel) and not is_backbone(model, name)
            ),
            "has several adapters": set(layer.scaling) != {ADAPTER},
            "has more than the product of two matrices": (
                bool(layer.lora_variant) or any(layer.lora_bias.values())
            ),
        }
        if any(problems.values()):
            reasons = ", ".join(problem for problem, holds in problems.items() if holds)
            raise ConfigError(f"LoRA on {name} cannot be trained: it {reasons}")
    return layers


def adopt_layers(model: nn.Module) -> list[nn.Module]:
    """Make the layers with adapters layers of lightrft, and return them.

    They share peft's parameters.
    """
    layers = list(adapted_layers(model).values())
    if layers:
        from lightrft.models.peft import AdaptedLinear

        for layer in layers:
            layer.__class__ = AdaptedLinear
    return layers


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute the outputs of the base model inside the context.

    Parameters keep `requires_grad`: peft's own switch clears it, and FSDP2 reads it at the first
    forward pass to choose the dtype of gradients.
    """
    layers = adopt_layers(model)
    for layer in layers:
        layer.adapters_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapters_on = True


def merge_adapters(model: nn.Module, stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the weight stream of a transformers model with merged adapters.

    A merged matrix is W + s B A with peft's scaling s, computed in float32. A matrix is held until the
    adapter arrives, at most one bucket longer than otherwise. The streamed tensors are not
    modified; without adapters the stream is unchanged.
    """
    scalings = {name: layer.scaling[ADAPTER] for name, layer in adapted_layers(model).items()}
    if not scalings:
        return iter(stream)
    from lightrft.models.peft import merge

    def product(name: str, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            return merge(base, a, b, scalings[name])

    return fold_adapters(stream, product)


def fold_adapters(
    named: Iterable[tuple[str, Value]], join: Callable[[str, Value, Value, Value], Value]
) -> Iterator[tuple[str, Value]]:
    """Yield values under the model's names without adapters.

    The value of an adapted layer is join(layer name, W, A, B).
    """
    factors: list[Value] = []
    for name, value in named:
        if name.endswith((BASE, FACTOR_A)):
            factors.append(value)
        elif name.endswith(FACTOR_B):
            layer = name.removesuffix(FACTOR_B)
            base, a = factors
            factors = []
            yield f"{layer}.weight", join(layer, base, a, value)
        else:
            yield plain_name(name), value


def adapter_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return peft's name -> full shape of each adapter; the model may be distributed, or away."""
    shapes: dict[str, torch.Size] = {}
    for name, layer in adapted_layers(model).items():
        a, b = names_of(name)
        shapes[a] = torch.Size([layer.r[ADAPTER], layer.in_features])
        shapes[b] = torch.Size([layer.out_features, layer.r[ADAPTER]])
    return shapes


def split_adapters(model: nn.Module, stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the weight stream of a transformers model for an engine that holds adapters.

    Frozen matrices keep the names that they have without adapters. A and s B follow by peft's
    names. B is scaled in the dtype of the stream, as AdaptedLinear scales it.
    """
    scalings = {name: layer.scaling[ADAPTER] for name, layer in adapted_layers(model).items()}
    for name, tensor in stream:
        if not is_adapter(name):
            yield plain_name(name), tensor
        elif name.endswith(FACTOR_A):
            yield _peft_name(name), tensor
        else:
            yield _peft_name(name), tensor * scalings[name.removesuffix(FACTOR_B)]


def keep_adapters_apart(model: nn.Module) -> None:
    """Make the layers add the adapter's output to W's, as an engine with adapters does.

    Layers with a float32 matrix do so in any case.
    """
    for layer in adopt_layers(model):
        layer.is_merged = False


def _peft_name(name: str) -> str:
    a, b = names_of(name.removesuffix(FACTOR_A).removesuffix(FACTOR_B))
    return a if name.endswith(FACTOR_A) else b


def plain_name(name: str) -> str:
    """Return the name that a frozen parameter has without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    return name.endswith((FACTOR_A, FACTOR_B))


def set_rate_of_factors(optimizer: Optimizer, model: nn.Module, rate: float) -> None:
    """Train the factors B of a model's adapters at a rate of their own: Hayou et al., arXiv
    2402.12354.
    """
    factors = {each for name, each in model.named_parameters() if name.endswith(FACTOR_B)}
    for group in list(optimizer.param_groups):
        chosen = [each for each in group["params"] if each in factors]
        if chosen:
            group["params"] = [each for each in group["params"] if each not in factors]
            optimizer.add_param_group(group | {"params": chosen, "lr": rate})


def adapter_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are adapters."""
    return ((name, parameter) for name, parameter in named if is_adapter(name))


def save_adapter(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Save adapters in the format of peft's PeftModel.from_pretrained.

    `tensors` has them by the names in the transformers model.
    """
    from safetensors.torch import save_file

    save_file(
        {_peft_name(name): tensor.cpu().contiguous() for name, tensor in tensors.items()},
        folder / ADAPTER_WEIGHTS_FILE,
        {"format": "pt"},
    )
    model.peft_config[ADAPTER].save_pretrained(folder)


def is_adapter_folder(folder: Path | str) -> bool:
    """Return True if a folder has an adapter in peft's format; some also have a config.json.

    Raise ConfigError for a folder that has the weights of a whole model too.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        return False
    whole = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if whole and (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has a whole model ({whole[0].name}) and an adapter ({ADAPTER_CONFIG_FILE}):"
            " leave only the one that you mean in the folder"
        )
    return True


def base_model_of_adapter(folder: Path | str) -> str:
    """Return the base model of the adapter in a folder.

    Raise ConfigError if the folder does not name it.
    """
    file = Path(folder) / ADAPTER_CONFIG_FILE
    try:
        base = json.loads(file.read_text())["base_model_name_or_path"]
    except (ValueError, LookupError, TypeError):
        base = None
    if not base or not isinstance(base, str):
        raise ConfigError(f"{file} names no base model: add it as base_model_name_or_path")
    return base


def merge_adapter(model: PreTrainedModel, folder: Path | str) -> PreTrainedModel:
    """Merge the adapter in a folder into the base model, in place.

    It may be of any kind that peft can merge. Raise ConfigError without peft, without the adapter's
    weights, and for an adapter that does not fit the model.
    """
    if not (Path(folder) / ADAPTER_WEIGHTS_FILE).is_file():
        raise ConfigError(f"{folder} has no {ADAPTER_WEIGHTS_FILE}")

    try:
        from peft import PeftModel

        with warnings.catch_warnings():
            # Layers without weights would get new ones.
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except ModuleNotFoundError as error:
        raise ConfigError(f"the adapter in {folder} needs {error.name}: pip install peft") from None
    except Exception as error:  # peft takes the files for what they should be
        raise ConfigError(
            f"the adapter in {folder} cannot be merged into its base model {model.name_or_path}:"
            f" {type(error).__name__}: {error}"
        ) from error
