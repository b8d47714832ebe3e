"""LoRA: frozen matrices W, some of them with a trained low-rank product B A (Hu et al. 2021, arXiv:2106.09685).

    h = W x + (alpha / rank) B A x

peft injects the adapters into the transformers model, whose class does not change. Its parameters are renamed: `q_proj.weight`
becomes `q_proj.base_layer.weight`, followed by `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.
merge_adapters() undoes this for engines and saved models, which need the model without adapters.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.models.empty import real_parameters
from lightrft.models.weight_files import is_backbone

ADAPTER = "default"
BASE, A, B = ".base_layer.weight", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Value = TypeVar("Value")


def add_adapters(model: PreTrainedModel, section: ModelSection) -> None:
    """Freeze `model` and add adapters to the linear layers of --target_modules, except below a --freeze_prefix.

    A is initialized randomly and B with 0, so the outputs of the model do not change. A scorer's head is trained as well. Raise
    ConfigError without peft, and for targets that do not exist or cannot be merged.
    """
    try:
        from peft import LoraConfig, TaskType, inject_adapter_in_model
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ConfigError("--lora_rank needs peft, which is not installed: pip install peft") from None
    targets = section.target_modules
    settings = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules="|".join(re.escape(prefix) + ".*" for prefix in section.freeze_prefix) or None,
        task_type=TaskType.CAUSAL_LM if model.can_generate() else TaskType.SEQ_CLS,
    )
    settings.base_model_name_or_path = model.name_or_path
    with real_parameters():
        try:
            inject_adapter_in_model(settings, model, ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(f"--target_modules {' '.join(targets)}: {error}") from error
        for layer in adapted_layers(model).values():
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, True)
    if not model.can_generate():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or not is_backbone(model, name))


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with adapters by their names in a transformers model; may be empty.

    Raise ConfigError for a layer that merge_adapters() cannot merge: only plain products on linear layers of the backbone can
    be merged, because the head's product is computed outside of its module.
    """
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.lora import Linear, LoraLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        problems = {
            "is not a torch.nn.Linear": not isinstance(layer, Linear) or not isinstance(layer.get_base_layer(), nn.Linear),
            "is outside of the backbone": isinstance(model, PreTrainedModel) and not is_backbone(model, name),
            "has several adapters": set(layer.scaling) != {ADAPTER},
            "has more than the product of two matrices": bool(layer.lora_variant) or any(layer.lora_bias.values()),
        }
        if any(problems.values()):
            reasons = ", ".join(problem for problem, holds in problems.items() if holds)
            raise ConfigError(f"LoRA on {name} cannot be trained: it {reasons}")
    return layers


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the context: the transformers model computes the outputs of its base model."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapters(model: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weight stream of a transformers model with merged adapters: W + (alpha / rank) B A, computed in float32.

    A matrix is held until its adapter arrives, at most one bucket longer than otherwise. The streamed tensors are not modified;
    without adapters the stream is unchanged.
    """
    scalings = {name: layer.scaling[ADAPTER] for name, layer in adapted_layers(model).items()}

    def product(name: str, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.addmm(base.float(), b.float(), a.float(), alpha=scalings[name]).to(base.dtype)

    return fold_adapters(stream, product)


def fold_adapters(
    named: Iterable[tuple[str, Value]], join: Callable[[str, Value, Value, Value], Value]
) -> Iterator[tuple[str, Value]]:
    """Yield values under the model's names without adapters; the value of an adapted layer is join(layer name, W, A, B)."""
    factors: list[Value] = []
    for name, value in named:
        if name.endswith((BASE, A)):
            factors.append(value)
        elif name.endswith(B):
            layer, (base, a) = name.removesuffix(B), factors
            factors = []
            yield f"{layer}.weight", join(layer, base, a, value)
        else:
            yield plain_name(name), value


def plain_name(name: str) -> str:
    """Return the name of a parameter of the frozen model as it is without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def save_adapter(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Save adapters, given by their names in the transformers model, in the format of peft's PeftModel.from_pretrained."""
    from safetensors.torch import save_file

    names = {name: "base_model.model." + name.replace(f".{ADAPTER}.", ".") for name in tensors}
    save_file({names[name]: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors makes the file readable by its owner only


def is_adapter_folder(folder: Path | str) -> bool:
    """Return True if a folder has an adapter in peft's format and no whole model."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "config.json").is_file()


def base_model_of_adapter(folder: Path | str) -> str:
    """Return the base model of the adapter in a folder. Raise ConfigError if the folder does not name it."""
    base = json.loads((Path(folder) / CONFIG).read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{Path(folder) / CONFIG} names no base model: add it as base_model_name_or_path")
    return base


def merge_adapter(model: PreTrainedModel, folder: Path | str) -> PreTrainedModel:
    """Merge the adapter in a folder, of any kind that peft can merge, into its base model, in place.

    Raise ConfigError without peft, without the adapter's weights, and for an adapter that does not fit the model.
    """
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ConfigError(f"the adapter in {folder} needs peft, which is not installed: pip install peft") from None
    if not (Path(folder) / WEIGHTS).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}")
    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the adapter in {folder} does not fit its base model {model.name_or_path}: {error}") from error
