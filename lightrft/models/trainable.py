"""Selection of the trained parameters of a model."""

from dataclasses import replace

from loguru import logger
from transformers import PreTrainedModel

from lightrft.config.errors import ConfigError
from lightrft.config.sections import ModelSection
from lightrft.models.lora import add_adapters


def freeze_parameters(model: PreTrainedModel, section: ModelSection) -> PreTrainedModel:
    """Freeze the parameters below --freeze_prefix; with --lora_rank freeze all and add adapters, none below a --freeze_prefix.

    With --freeze_vision_tower, modules for images are frozen as well. The model is changed in place and returned. Every rank must
    call this with the same random state, so that adapters start equal. Raise ConfigError for a prefix that matches no parameter,
    and if nothing is left to train.
    """
    towers = _towers(model) if section.freeze_vision_tower else []
    if towers:
        logger.info("{} are not trained (--freeze_vision_tower)", ", ".join(towers))
        section = replace(section, freeze_prefix=[*section.freeze_prefix, *towers])
    for prefix in section.freeze_prefix:
        frozen = [parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name.startswith(prefix)]
        if not frozen:
            names = sorted({".".join(name.split(".")[:2]) for name, _ in model.named_parameters()})
            raise ConfigError(f"--freeze_prefix {prefix}: no parameter has this prefix; the prefixes are {', '.join(names)}")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if section.lora_rank:
        add_adapters(model, section)
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"--freeze_prefix {' '.join(section.freeze_prefix)} freezes all parameters")
    return model


def _towers(model: PreTrainedModel) -> list[str]:
    """Return the name prefixes of parameters that text never uses: the modules next to the decoder, if there are any."""
    decoder = model.get_decoder()
    if decoder is model.base_model:
        return []
    return [
        f"{model.base_model_prefix}.{name}."
        for name, child in model.base_model.named_children()
        if decoder not in child.modules() and any(True for _ in child.parameters())
    ]
