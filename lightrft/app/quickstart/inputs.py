"""Make what the quick start learns from without a download: tokenizer, random model, additions."""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from lightrft.config.tables import table

TOKENIZER = table("app/quickstart/tokenizer")
VOCAB_SIZE = 264  # 256 bytes and 3 special tokens, rounded up to a multiple of 8
NUM_HELD_OUT = 500

Problem = dict[str, str]


def byte_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE without merges.

    Ids 0..255 are the bytes, then come <|pad|> 256, <|bos|> 257, <|eos|> 258, and the words.
    """
    model = models.BPE(
        vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(TOKENIZER["special_tokens"].values()))
    backend.add_tokens(list(words))

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=TOKENIZER["chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        **TOKENIZER["special_tokens"],
    )


def tiny_qwen3(
    folder: Path | str, seed: int = 0, words: Sequence[str] = (), experts: int = 0
) -> Path:
    """Save a random Qwen3 of 157,120 parameters with its byte tokenizer, as a Hugging Face folder.

    At most 5 words are tokens of their own. With `experts` it is a mixture, and two experts compute
    a token.
    """
    tokenizer = byte_tokenizer(words)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention supports
        initializer_range=0.08,  # so small a model hardly starts to learn from the usual 0.02
        tie_word_embeddings=False,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        **(mixture if experts else {}),
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def addition_problems(seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Make all sums of two numbers below 100, `27+58=` -> `580`: three digits, units first.

    Returns (train, held out).
    """
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return split(
        [{"input": f"{a:02d}+{b:02d}=", "label": f"{a + b:03d}"[::-1]} for a, b in pairs], seed
    )


def split(problems: list[Problem], seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems in random order: those to train on, and those that are held out."""
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in every byte-level BPE.

    It is the byte itself, or the next character from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = map(chr, range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(substitutes) for byte in range(256)]


if __name__ == "__main__":
    disable_progress_bar()
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    tiny_qwen3(folder / "model", seed)
    for name, problems in zip(("train", "test"), addition_problems(seed), strict=True):
        write_jsonl(folder / f"{name}.jsonl", problems)
