"""Why: a reader compares the outputs of docs/debugging.md with what the commands print."""

import re

import pytest
import torch

from scripts import debugging_page
from warm import warm_environment


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    for name, value in warm_environment().items():
        monkeypatch.setenv(name, value)


def check_page(printed: dict[str, str]) -> None:
    """Check that the page shows these outputs.

    Numbers may differ in other versions of torch, and so may the responses.
    """
    text = debugging_page.PAGE.read_text()
    assert _without_numbers(debugging_page.page(text, printed)) == _without_numbers(text)


@pytest.mark.slow
def test_the_page_shows_what_the_commands_print(tmp_path):
    printed = debugging_page.outputs(tmp_path)
    check_page(printed)
    assert "step 3, rewards: the first difference" in printed["first"]
    assert "rewards    different" in printed["replay"]
    assert printed["fixed"].startswith("equal: all digests of the 4 steps")


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM packs no convolutions on this CPU"
)
def test_the_page_shows_the_bug_of_the_engine(tmp_path):
    printed = debugging_page.outputs_of_engines(tmp_path)
    check_page(printed)
    assert "its engine has other weights than are trained" in printed["engines"]
    assert "conv1d.weight in the engine differs" in printed["verified"]
    assert "other weights" not in printed["repaired"]


def _without_numbers(text: str) -> str:
    text = re.sub(r"(  response   ).*", r"\1", text)
    return re.sub(r"-?\d[\d.e-]*", "N", text)
