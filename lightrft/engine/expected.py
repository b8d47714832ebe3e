"""What a model's configuration tells an engine before there are weights."""

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig


def expected_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> dict[str, torch.Size]:
    """Hugging Face name -> full shape of every parameter, tied ones once: what one weight stream must bring."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def end_token_ids(model_path: str, config: PretrainedConfig) -> frozenset[int]:
    """Tokens that end a response: of generation_config.json where there is one, else of the model's configuration."""
    try:
        ids = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # no generation_config.json
        ids = None
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
