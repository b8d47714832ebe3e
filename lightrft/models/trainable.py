"""Which part of a model learns."""

from dataclasses import replace

from loguru import logger
from transformers import PreTrainedModel

from lightrft.config import ConfigError, ModelSection
from lightrft.models.lora import add_adapters


def choose_trained(model: PreTrainedModel, section: ModelSection) -> PreTrainedModel:
    """All of it; or all but what --freeze_prefix names; or with --lora_rank new adapters only, none of them in what is named.

    What a model has for images alone is frozen where --freeze_vision_tower. In place, and returned. Every rank calls it with the
    same random state: adapters begin equally.
    """
    towers = _towers(model) if section.freeze_vision_tower else []
    if towers:
        logger.info("{} are not trained (--freeze_vision_tower)", ", ".join(towers))
        section = replace(section, freeze_prefix=[*section.freeze_prefix, *towers])
    for prefix in section.freeze_prefix:
        frozen = [parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name.startswith(prefix)]
        if not frozen:
            names = sorted({".".join(name.split(".")[:2]) for name, _ in model.named_parameters()})
            raise ConfigError(f"--freeze_prefix {prefix}: no parameter begins so; they begin with {', '.join(names)}")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if section.lora_rank:
        add_adapters(model, section)
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"--freeze_prefix {' '.join(section.freeze_prefix)} leaves nothing to train")
    return model


def _towers(model: PreTrainedModel) -> list[str]:
    """How the names of parameters begin that no text reaches: beside the decoder, where that is not all there is."""
    decoder = model.get_decoder()
    if decoder is model.base_model:
        return []
    return [
        f"{model.base_model_prefix}.{name}."
        for name, child in model.base_model.named_children()
        if decoder not in child.modules() and any(True for _ in child.parameters())
    ]
