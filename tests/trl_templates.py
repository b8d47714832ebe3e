"""Chat templates in TRL's wheel, each with a byte tokenizer, and messages for them."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lightrft.config import DataSection
from tiny import byte_tokenizer

try:
    SHIPPED = {
        Path(file).stem: file
        for file in files("trl") or ()
        if file.parent.name == "chat_templates" and file.suffix == ".jinja"
    }
except PackageNotFoundError:
    SHIPPED = {}
SPECIAL = re.compile(r"<[|｜][^<>\s]*[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|</?s>")
"""Special tokens in the source of a template."""
SECTION = DataSection(apply_chat_template=True, prompt_max_len=100_000)
NEEDS_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take only lists of parts."""
THOUGHT = "<think>\nSix and one.\n</think>\n\n"


def turn(role: str, content, **others) -> dict:
    return {"role": role, "content": content} | others


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with the special tokens that the template writes."""
    made = byte_tokenizer()
    made.chat_template = SHIPPED[name].read_text(encoding="utf-8")
    made.add_special_tokens(
        {"additional_special_tokens": sorted(set(SPECIAL.findall(made.chat_template)))}
    )
    return made
