"""Models and tokenizers from a Hugging Face folder or hub name."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightrft.config import ModelSection
from lightrft.models.attention import ATTENTION


def load_model(section: ModelSection) -> PreTrainedModel:
    """The causal language model in float32 (the master weights), with attention over flat batches."""
    return _load(AutoModelForCausalLM, section)


def load_scorer(section: ModelSection) -> PreTrainedModel:
    """The same with one number per token instead of logits; the head is new, and random, where the folder has none."""
    return _load(AutoModelForSequenceClassification, section, num_labels=1)


def _load(kind: type, section: ModelSection, **options: Any) -> PreTrainedModel:
    model = kind.from_pretrained(
        _checked(section.pretrain),
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        trust_remote_code=section.trust_remote_code,
        **options,
    )
    problems = _not_flat(model)
    if problems:
        name = type(model).__name__
        raise ValueError(f"--pretrain {section.pretrain}: {name} cannot be trained on flat batches: {'; '.join(problems)}")
    model.config.use_cache = False
    return model


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(_checked(section.pretrain), trust_remote_code=section.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--pretrain {section.pretrain}: its tokenizer has no end token, so no response would ever stop")
    return tokenizer


def _not_flat(model: PreTrainedModel) -> list[str]:
    """Ways in which tokens of one sequence would see another, or too little of their own; empty when there is none."""
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    reasons = {
        "its attention is not exchangeable in transformers": not model._supports_attention_backend,
        "it carries a recurrent state from token to token": model._is_stateful,
        f"it has layers of type {', '.join(sorted(others))}": bool(others),
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None),
        "its attention is soft-capped": getattr(config, "attn_logit_softcapping", None) is not None,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _checked(pretrain: str) -> str:
    """A folder must hold a model; anything else is a hub name."""
    folder = Path(pretrain).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"--pretrain {pretrain}: the folder has no config.json, so it is not a Hugging Face model")
    if not folder.exists() and (pretrain.count("/") != 1 or pretrain.startswith((".", "/", "~"))):
        raise ValueError(f"--pretrain {pretrain}: no such folder, and not a hub name (owner/name) either")
    return str(folder)
