"""Write the lists of families that are trained and refused in docs/models.md.

    python scripts/families_page.py

Each family of transformers that generates text is built small from its default configuration, and
packed sequences are compared with each sequence alone, as at the start of a run. A test compares the
page with what this script writes.
"""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lightrft.app.trainer.selfcheck import ImpossibleError, compare_small_copy  # noqa: E402
from lightrft.models.attention.flat import ATTENTION  # noqa: E402  after its folder
from lightrft.models.load import new_model, not_flat  # noqa: E402
from scripts.pages import between_marks  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
EXPERTS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"sliding_window": 2047},
    "reformer": {"is_decoder": True},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 14},
}
"""What released folders set, and the default configuration leaves out."""
NOT_CHECKED = {
    "cohere_compass_text": "its default configuration has no rotary embeddings",
    "dbrx": "transformers cannot read its own configuration again",
    "gemma3n": "one of its towers needs the package timm; `gemma3n_text` is trained",
    "gemma4_assistant": "it needs the configuration of another model",
    "gemma4_unified_assistant": "it needs the configuration of another model",
    "mamba2": "its default configuration has incompatible sizes",
    "mllama": "its backbone is not a separate module",
    "modernbert-decoder": "its decoder is not a separate module",
    "musicgen": "it has a text encoder",
    "musicgen_melody": "it has a text encoder",
    "qwen4_exp": "its default configuration lacks sizes",
    "qwen4_exp_text": "its default configuration lacks sizes",
    "xmod": "it needs a language",
}
"""Families without a model that could be compared, with the reason."""
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_CHECKED)


@dataclass(frozen=True)
class Verdict:
    """Whether a family is trained, and how far packed sequences are from each alone."""

    refused: str = ""
    """Why it is refused; empty if it is trained."""
    logprobs: float = 0.0
    gradients: float = 0.0


@cache
def verdict(family: str) -> Verdict:
    """Compare a small copy of a family's default configuration."""
    config = CONFIG_MAPPING[family](**SETTINGS.get(family, {}))
    try:
        comparisons = compare_small_copy(config)
    except ImpossibleError as error:
        return Verdict(_reason(str(error)))
    except Exception as error:  # no copy; loading the model refuses it, or does not
        return Verdict(_reason_of_loading(config) or f"{type(error).__name__}: {error}")

    different = [each for each in comparisons if each.differs]
    if different:
        return Verdict(f"packed sequences differ, first in {different[0].first or 'the head'}")
    return Verdict(
        logprobs=max(each.logprobs for each in comparisons),
        gradients=max(each.gradients for each in comparisons),
    )


def _reason_of_loading(config: PretrainedConfig) -> str:
    """Return why loading a model refuses it, without weights."""
    try:
        with torch.device("meta"):
            return "; ".join(not_flat(new_model(config, ATTENTION)))
    except Exception as error:  # no model at all, or none whose decoder is found
        return _reason(str(error)) if isinstance(error, ValueError) else repr(error)


def _reason(message: str) -> str:
    """Shorten a message, so that families with the same reason have the same one."""
    short = re.sub(r"^\w+ (cannot be trained on flat batches|is not supported): ", "", message)
    short = re.sub(r"^the attention implementation of \w+", "its attention implementation", short)
    short = short.removesuffix(", and log-probs would be wrong")
    return re.sub(r"^\w+ cannot compute flat batches: ", "", short)


def families() -> str:
    """Return the lists of trained and refused families."""
    reasons = defaultdict(list)
    for family in FAMILIES:
        reasons[verdict(family).refused].append(f"`{family}`")
    trained = reasons.pop("")

    rows = [
        f"| {reason} | {', '.join(names)} |"
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    others = [f"| {reason} | `{family}` |" for family, reason in NOT_CHECKED.items()]
    head = "Families |\n|---|---|\n"
    return (
        f"**Trained** ({len(trained)}): {', '.join(trained)}.\n\n"
        f"| Refused, because | {head}" + "\n".join(rows) + "\n\n"
        f"| Not checked, because | {head}" + "\n".join(others) + "\n"
    )


def page(text: str) -> str:
    """Return the page with the families between its marks."""
    return between_marks(text, "families", families())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
