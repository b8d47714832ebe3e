"""Why: a reader compares the outputs of docs/debugging.md with what the commands print."""

import re

import pytest

from scripts import debugging_page
from warm import warm_environment


@pytest.mark.slow
def test_the_page_shows_what_the_commands_print(tmp_path, monkeypatch):
    """Numbers may differ in other versions of torch, and so may the responses."""
    for name, value in warm_environment().items():
        monkeypatch.setenv(name, value)
    text = debugging_page.PAGE.read_text()
    printed = debugging_page.outputs(tmp_path)
    assert _without_numbers(debugging_page.page(text, printed)) == _without_numbers(text)
    assert "step 3, rewards: the first difference" in printed["first"]
    assert "rewards    different" in printed["replay"]
    assert printed["fixed"].startswith("equal: all digests of the 4 steps")


def _without_numbers(text: str) -> str:
    text = re.sub(r"(  response   ).*", r"\1", text)
    return re.sub(r"-?\d[\d.e-]*", "N", text)
