"""A random Qwen3 of 0.14 M parameters with a byte tokenizer, in a folder.

A user would have one like it.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD = 256
BOS = 257
EOS = 258
VOCABULARY = 384


def tiny_model(folder: Path | str, seed: int = 0, tie: bool = False, layers: int = 2) -> str:
    """Write model and tokenizer; return the folder."""
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        vocab_size=VOCABULARY,
        initializer_range=0.08,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    return _written(config, folder, seed)


def _written(config: PretrainedConfig, folder: Path | str, seed: int) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_experts(folder: Path | str, num_experts: int = 5) -> str:
    """Write the same as a mixture of experts; a token gets two."""
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=num_experts,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
        max_position_embeddings=512,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
    )

    return _written(config, folder, 0)


def tiny_hybrid(folder: Path | str, seed: int = 0, tie: bool = False) -> str:
    """Write a Qwen3.5 with three layers of linear attention before one of full attention.

    The heads of linear attention have the sizes of released models, which kernels require.
    """
    config = Qwen3_5TextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=VOCABULARY,
        initializer_range=0.08,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    return _written(config, folder, seed)


def byte_tokenizer(size: int = VOCABULARY, marks: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer where token 0..255 is the byte itself.

    `marks` follow the end tokens; by default every row of the models has a token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocabulary = {letter: byte for byte, letter in enumerate(alphabet)} | {
        "<pad>": PAD,
        "<bos>": BOS,
        "<eos>": EOS,
    }
    vocabulary |= {mark: token for token, mark in enumerate(marks, len(vocabulary))}
    vocabulary |= {f"<unused{token}>": token for token in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _byte_of(letter: str) -> int:
    """Return the byte of a character that ByteLevel writes.

    A printable Latin-1 byte is written as itself, and the others, in order, as code points from 256
    on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) < 256 else hidden[ord(letter) - 256]
