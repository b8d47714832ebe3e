"""LoRA: frozen matrices W, beside each of some a trained product of two small ones (Hu et al. 2021, arXiv:2106.09685).

    h = W x + (alpha / rank) B A x

peft puts them into the model, which stays the transformers model it was. The names of its parameters change: `q_proj.weight`
becomes `q_proj.base_layer.weight`, and `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight` follow. merged() undoes
this for whoever wants the model as one without adapters: engines and folders.
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

from lightrft.config import ConfigError, ModelSection
from lightrft.models.empty import real_parameters
from lightrft.models.weight_files import is_backbone

ADAPTER = "default"
BASE, A, B = ".base_layer.weight", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Value = TypeVar("Value")


def add_adapters(model: PreTrainedModel, section: ModelSection) -> None:
    """Freeze `model` and put adapters on the linear layers that --target_modules names, except below a --freeze_prefix.

    A begins random and B at 0, so the model computes what it did. A scorer's head is trained with them. ConfigError without peft,
    and for targets that are not there or cannot be merged.
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
    """Name in a transformers model -> layer with an adapter; empty without. ConfigError for one that merged() cannot merge.

    Those are plain products on linear layers of the backbone: the head's own product happens outside of its module.
    """
    if not any(".lora_" in name for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.lora import Linear, LoraLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        problems = {
            "is no torch.nn.Linear": not isinstance(layer, Linear) or not isinstance(layer.get_base_layer(), nn.Linear),
            "is outside of the backbone": isinstance(model, PreTrainedModel) and not is_backbone(model, name),
            "has several adapters": set(layer.scaling) != {ADAPTER},
            "has more than a product of two matrices": bool(layer.lora_variant) or any(layer.lora_bias.values()),
        }
        if any(problems.values()):
            reasons = ", ".join(problem for problem, holds in problems.items() if holds)
            raise ConfigError(f"LoRA on {name} cannot be trained here: it {reasons}")
    return layers


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the transformers model computes what it did before it was adapted."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weight stream of a transformers model as if it had no adapters: W + (alpha / rank) B A, computed in float32.

    A matrix is held until its adapter has come, at most one bucket longer than without. What was streamed is not changed; without
    adapters the stream stays as it is.
    """
    scalings = {name: layer.scaling[ADAPTER] for name, layer in adapted_layers(model).items()}

    def product(name: str, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.addmm(base.float(), b.float(), a.float(), alpha=scalings[name]).to(base.dtype)

    return fold_adapters(stream, product)


def fold_adapters(
    named: Iterable[tuple[str, Value]], join: Callable[[str, Value, Value, Value], Value]
) -> Iterator[tuple[str, Value]]:
    """Yield values by the names that a model had before it was adapted, for each adapter join(name of its layer, W, A, B)."""
    held: list[Value] = []
    for name, value in named:
        if name.endswith((BASE, A)):
            held.append(value)
        elif name.endswith(B):
            layer, (base, a) = name.removesuffix(B), held
            held = []
            yield f"{layer}.weight", join(layer, base, a, value)
        else:
            yield plain_name(name), value


def plain_name(name: str) -> str:
    """Of a parameter of the frozen model: its name before adapters came."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def save_adapter(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """What peft's own PeftModel.from_pretrained reads, from adapters by their names in the transformers model."""
    from safetensors.torch import save_file

    names = {name: "base_model.model." + name.replace(f".{ADAPTER}.", ".") for name in tensors}
    save_file({names[name]: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes for the owner alone


def is_adapter_folder(folder: Path | str) -> bool:
    """Return whether a folder has an adapter in peft's format, and no whole model."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "config.json").is_file()


def base_of(folder: Path | str) -> str:
    """Return the model that the adapter in a folder belongs to. ConfigError where the folder does not name it."""
    base = json.loads((Path(folder) / CONFIG).read_text()).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{Path(folder) / CONFIG} names no base model: write it there, as base_model_name_or_path")
    return base


def merge_adapter(model: PreTrainedModel, folder: Path | str) -> PreTrainedModel:
    """Merge the adapter in a folder, of any kind that peft can merge, into its base model, in place.

    ConfigError without peft, and for an adapter that does not fit.
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
