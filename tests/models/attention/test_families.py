"""Every language model of transformers is computed as it is alone, or refused by name.

None is silently wrong. docs/models.md has the lists, from the same script.
"""

import pytest
import transformers

from scripts import families_page
from scripts.families_page import FAMILIES, NOT_CHECKED, verdict

LOOSE = {"hrm_text": 1e-4}
"""Recurrent blocks multiply rounding errors."""
REFUSED = {
    "doge": "packed sequences differ, first in model.layers.0.self_attn (DogeAttention)",
    "deepseek_v32": "it has layers of type indexed_attention",
    "falcon": "its attention implementation cannot be replaced in transformers",
    "nemotron": "its layers do not pass the arguments of a model on to attention",
    "phi": "its output layer has a bias",
    "recurrent_gemma": "it carries a recurrent state that flat batches do not support",
}
"""Reasons that must not change unnoticed, one of each kind."""
COMMON = {"gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
"""Families of the quick tests; all take half a minute."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in COMMON else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_packed_equals_alone_or_the_family_is_refused(family):
    found = verdict(family)
    assert found.logprobs <= LOOSE.get(family, 1e-5)
    assert found.gradients <= 1e-4
    assert "Error" not in found.refused, "a crash is no reason"


def test_reasons():
    assert {family: verdict(family).refused for family in REFUSED} == REFUSED
    assert not NOT_CHECKED.keys() & set(FAMILIES)


@pytest.mark.slow
@pytest.mark.skipif(
    not transformers.__version__.startswith("5.19"), reason="the page is about version 5.19"
)
def test_the_page_is_current():
    """Otherwise run `python scripts/families_page.py`."""
    text = families_page.PAGE.read_text()
    assert text == families_page.page(text)
