"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 3e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

SPECIAL = ["<pad>", "<start>", "<end>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h e", "Ġ he", "1 2", "a b"]
WORD = "xyz"
"""A token that no merge leads to."""
TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}\n{{ message['content'] }}<end>{%"
    " endfor %}"
)
QWEN_2 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LLAMA_3 = QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def vocabulary() -> list[str]:
    return [
        *SPECIAL,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in MERGES),
        WORD,
    ]


def tokenizer_of(pieces: str) -> Tokenizer:
    """Return the tokenizer that a published folder with this pre-tokenizer has."""
    vocab = {token: number for number, token in enumerate(vocabulary())}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pieces == "llama-bpe")
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoders.ByteLevel()

    if pieces == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        with_regex = True
    else:
        first = pre_tokenizers.Split(
            Regex({"qwen2": QWEN_2, "llama-bpe": LLAMA_3}[pieces]), "isolated"
        )
        with_regex = False

    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=with_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, rest])
    return tokenizer


def trained_sentencepiece() -> SentencePieceProcessor:
    """Return a tokenizer like Llama 2's: merges with byte fallback and single digits."""
    words = ["the", "cat", "hello", "world", "number", "numbers", "12", "345"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=map(" ".join, product(words, repeat=3)),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )

    return SentencePieceProcessor(model_proto=model.getvalue())


def random_model(family: str, **extra) -> PreTrainedModel:
    """Return a model with random values in every parameter, also in norms and biases."""
    config = AutoConfig.for_model(family, **(SIZES | {"vocab_size": len(vocabulary())} | extra))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1)
            )
    return model


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType,
    pieces: str | SentencePieceProcessor,
    *,
    settings: dict | None = None,
    extra: dict[str, np.ndarray] | None = None,
    without: str = "",
) -> dict[str, Tensor]:
    """Write the file, and return the numbers in it by the names of the model.

    `pieces` is the pre-tokenizer of vocabulary(), or another tokenizer, with the vocabulary of the
    model. `settings` and `extra` are added to its metadata and its tensors, and the tensor
    `without` is left out.
    """
    config = model.config
    writer = GGUFWriter(file, config.model_type.replace("_", ""))
    writer.add_name("A tiny model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)

    if config.model_type in ("qwen3", "qwen3_moe"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)

    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)

    if isinstance(pieces, str):
        _add_tokenizer(writer, pieces)
    else:
        _add_sentencepiece(writer, pieces)

    for name, value in (settings or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(name, value)

    held = {}
    for name, tensor in _with_separate_experts(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings or name == without:
            continue
        numbers = _as_in_llama_cpp(name, tensor.numpy(), config)
        stored = quantize(numbers, kind) if tensor.dim() == 2 else numbers
        writer.add_tensor(_name_of(name), stored, raw_dtype=kind if tensor.dim() == 2 else None)
        held[name] = (
            torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
            if tensor.dim() == 2
            else tensor
        )

    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    return held


def _add_tokenizer(writer: GGUFWriter, pieces: str) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pieces)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _add_sentencepiece(writer: GGUFWriter, processor: SentencePieceProcessor) -> None:
    tokens = range(processor.vocab_size())
    kinds = {2: processor.is_unknown, 3: processor.is_control, 6: processor.is_byte}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(token) for token in tokens])
    writer.add_token_scores([processor.get_score(token) for token in tokens])
    writer.add_token_types(
        [next((kind for kind, holds in kinds.items() if holds(token)), 1) for token in tokens]
    )
    writer.add_unk_token_id(processor.unk_id())
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())


def _name_of(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{MODULES[module]}.{kind}"


def _with_separate_experts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        module, fused, _ = name.partition("experts.gate_up_proj")
        if fused:
            gate, up = tensor.chunk(2, dim=1)
            yield f"{module}experts.gate_proj.weight", gate.contiguous()
            yield f"{module}experts.up_proj.weight", up.contiguous()
        else:
            yield name.replace("experts.down_proj", "experts.down_proj.weight"), tensor


def _as_in_llama_cpp(name: str, numbers: np.ndarray, config) -> np.ndarray:
    """Reorder queries and keys of a Llama.

    llama.cpp rotates neighbours, transformers the halves of a head.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if config.model_type != "llama" or heads is None:
        return numbers
    halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))
