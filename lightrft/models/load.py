"""Models and tokenizers from a Hugging Face folder or hub name."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightrft.config import ModelSection
from lightrft.models.attention import ATTENTION


def load_model(section: ModelSection) -> PreTrainedModel:
    """The causal language model in float32 (the master weights), with attention over flat batches."""
    model = AutoModelForCausalLM.from_pretrained(
        _checked(section.pretrain),
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        trust_remote_code=section.trust_remote_code,
    )
    model.config.use_cache = False
    return model


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(_checked(section.pretrain), trust_remote_code=section.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--pretrain {section.pretrain}: its tokenizer has no end token, so no response would ever stop")
    return tokenizer


def _checked(pretrain: str) -> str:
    """A folder must hold a model; anything else is a hub name."""
    folder = Path(pretrain)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"--pretrain {pretrain}: the folder has no config.json, so it is not a Hugging Face model")
    if not folder.exists() and pretrain.count("/") != 1:
        raise ValueError(f"--pretrain {pretrain}: no such folder, and not a hub name (owner/name) either")
    return pretrain
