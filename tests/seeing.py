"""Random models of 0.2 M parameters that see or hear, with tokenizer and processor.

They are in folders as a user would have them, with a byte tokenizer.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    CLIPImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    WhisperFeatureExtractor,
)

from lightrft.engine.media import Clip
from lightrft.models.weight_sync.names import PublishedNames
from tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer

# its checks of types write whole configurations into errors that are dropped
PreTrainedConfig.__repr__ = object.__repr__
IMAGE = EOS + 1
MARKS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
FRAMED = "<|vision_start|><|image_pad|><|vision_end|>"
"""Text for an image in a prompt of Qwen-VL; Idefics3 has <image>."""
FILMED = FRAMED.replace("image", "video")
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.12}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "partial_rotary_factor": 1.0,
}
"""Layers of the text part of a Qwen3.5; vLLM's kernel for CPUs computes heads of 64 and more."""
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def seeing_model(folder: Path | str, seed: int = 0, family: str = "idefics3") -> str:
    """Write a model that reads seven tokens for an image, and return the folder.

    Four are the image's own and three stand around them; smolvlm needs torchvision.
    """
    config = CONFIG_MAPPING[family](
        text_config=SIZES
        | {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
        vision_config=SIZES
        | {"hidden_size": 32, "intermediate_size": 64, "image_size": 56, "patch_size": 14},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)

    tokenizer = byte_tokenizer(marks=list(MARKS.values()))
    size = {"longest_edge": 56}
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS.values())})
    for name, mark in MARKS.items():
        setattr(tokenizer, name, mark)

    sizes = {"size": size, "max_image_size": size}
    if family == "smolvlm":
        from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

        images = SmolVLMImageProcessor(**sizes, do_image_splitting=False)
        SmolVLMProcessor(
            images, tokenizer, SmolVLMVideoProcessor(**sizes), image_seq_len=4
        ).save_pretrained(folder)
    else:
        images = Idefics3ImageProcessor(**sizes, do_image_splitting=False)
        Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)

    return str(folder)


def seeing_qwen(folder: Path | str, family: str = "qwen2_5_vl") -> str:
    """Write a Qwen2-VL, 2.5, 3 or a Qwen3.5: its images are framed, and have positions by row and
    column.

    Needs torchvision.
    """
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    processor, videos, patch, tower = {
        "qwen2_vl": (
            Qwen2VLProcessor,
            Qwen2VLVideoProcessor,
            14,
            {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        ),
        "qwen2_5_vl": (
            Qwen2_5_VLProcessor,
            Qwen2VLVideoProcessor,
            14,
            {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 64,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
        ),
        "qwen3_vl": (
            Qwen3VLProcessor,
            Qwen3VLVideoProcessor,
            16,
            {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 64,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
        ),
        "qwen3_5": (
            Qwen3VLProcessor,
            Qwen3VLVideoProcessor,
            16,
            {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 64,
                "num_position_embeddings": 16,
            },
        ),
    }[family.removesuffix("_moe")]
    marks = [f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")]
    tokenizer = byte_tokenizer(marks=marks)
    tokenizer.add_special_tokens({"extra_special_tokens": marks})

    config = CONFIG_MAPPING[family](
        text_config=SIZES
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "rope_parameters": {
                "rope_type": "default",
                "type": "mrope",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
                "mrope_interleaved": patch == 16,
            },
        }
        | (HYBRID if family.startswith("qwen3_5") else {})
        | (EXPERTS if family.endswith("_moe") else {}),
        vision_config=tower
        | {
            "depth": 2,
            "num_heads": 2,
            "patch_size": patch,
            "initializer_range": 0.12,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
        },
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)

    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 9 * (2 * patch) ** 2}
    images = Qwen2VLImageProcessor(size=size, patch_size=patch)
    processor(images, tokenizer, videos(size=size, patch_size=patch)).save_pretrained(folder)

    return str(folder)


def hearing_model(folder: Path | str, seconds: int = 30) -> str:
    """Write a Qwen2-Audio that reads a token for each 40 ms of a clip.

    It hears 16,000 samples a second. A clip costs as much as the longest one, of so many seconds;
    vLLM knows only 30.
    """
    config = Qwen2AudioConfig(
        text_config=SIZES
        | {
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "init_std": 0.2,
            "max_source_positions": 50 * seconds,
        },
        audio_token_index=IMAGE,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2AudioForConditionalGeneration(config)

    # by which it is saved: transformers' own way back has one name too many of this family
    PublishedNames(model)
    model.save_pretrained(folder)
    marks = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer = byte_tokenizer(marks=marks)
    tokenizer.add_special_tokens({"extra_special_tokens": marks})
    Qwen2AudioProcessor(
        WhisperFeatureExtractor(feature_size=16, chunk_length=seconds), tokenizer
    ).save_pretrained(folder)

    return str(folder)


def omni(folder: Path | str, seconds: int = 30) -> str:
    """Write a whole Qwen2.5-Omni.

    Its thinker reads a token for each 40 ms of a clip of at most so many seconds. Needs
    torchvision.
    """
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    ends = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    talker = {
        "vocab_size": 32,
        "embedding_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": rope | {"mrope_section": [2, 3, 3]},
    }

    voice = {
        "dit_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 16,
            "emb_dim": 16,
            "num_embeds": 16,
            "mel_dim": 8,
            "enc_emb_dim": 8,
            "enc_dim": 8,
            "enc_channels": [8, 8, 8, 8, 24],
            "enc_attention_channels": 4,
            "enc_res2net_scale": 2,
            "enc_se_channels": 4,
        },
        "bigvgan_config": {
            "mel_dim": 8,
            "upsample_initial_channel": 8,
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
            "upsample_rates": [2],
            "upsample_kernel_sizes": [4],
        },
    }
    marks = {
        "audio_token": "<|AUDIO|>",
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
    }
    ids = {
        "audio_start": IMAGE + 3,
        "audio_end": IMAGE + 4,
        "vision_start": IMAGE + 5,
        "vision_end": IMAGE + 6,
    }
    thinker = {
        "text_config": SIZES
        | ends
        | {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": rope | {"type": "mrope", "mrope_section": [4, 6, 6]},
        },
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "output_dim": 64,
            "n_window": 10,
            "initializer_range": 0.2,
        },
        "vision_config": {
            "depth": 2,
            "num_heads": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "initializer_range": 0.12,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
        },
        "audio_token_index": IMAGE,
        "image_token_index": IMAGE + 1,
        "video_token_index": IMAGE + 2,
    } | {f"{name}_token_id": token for name, token in ids.items()}
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=voice, dtype=torch.float32
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2_5OmniForConditionalGeneration(config).save_pretrained(folder)

    torch.save({}, Path(folder) / "spk_dict.pt")
    plain = byte_tokenizer(marks=list(marks.values()))
    plain.add_special_tokens({"extra_special_tokens": list(marks.values())})
    names = {name: getattr(plain, name) for name in ("pad_token", "bos_token", "eos_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, extra_special_tokens=marks, **names
    )
    parts = (
        Qwen2VLImageProcessor(),
        Qwen2VLVideoProcessor(),
        WhisperFeatureExtractor(feature_size=16, chunk_length=seconds),
    )
    Qwen2_5OmniProcessor(*parts, tokenizer).save_pretrained(folder)

    return str(folder)


def transformers_model(folder: Path | str) -> PreTrainedModel:
    """Load the model in a folder with transformers.

    The parameters of a thinker have the names that training uses.
    """
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    if isinstance(model, Qwen2_5OmniForConditionalGeneration):
        model = model.thinker
        model.__class__ = Thinker
    return model


class Thinker(Qwen2_5OmniThinkerForConditionalGeneration):
    def named_parameters(
        self, *args: Any, **options: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **options):
            yield name if name.startswith("lm_head") else f"model.{name}", parameter


def clip(seed: int, seconds: float = 0.2, rate: int = 16000) -> Clip:
    """Return noise as sound."""
    noise = torch.rand(int(seconds * rate), generator=torch.Generator().manual_seed(seed))
    return Clip((noise * 2 - 1).numpy(), rate)


def film(seed: int, frames: int = 4, width: int = 40, height: int = 40) -> np.ndarray:
    """Return coloured noise that moves: [frames, height, width, 3]."""
    return np.stack(
        [np.asarray(picture(100 * seed + frame, width, height)) for frame in range(frames)]
    )


def picture(seed: int, width: int = 40, height: int = 40) -> Image.Image:
    """Return coloured noise."""
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return Image.fromarray(pixels.numpy())


def seeing_llava(folder: Path | str) -> str:
    """Write a LLaVA with four tokens for an image."""
    config = LlavaConfig(
        text_config=SIZES
        | {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
        vision_config=SIZES
        | {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).save_pretrained(folder)

    tokenizer = byte_tokenizer(marks=["<image>"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    ).save_pretrained(folder)

    return str(folder)


def seeing_gemma(folder: Path | str) -> str:
    """Write a Gemma 3 with the names of released folders.

    An image has eight tokens, and four of them see each other.
    """
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    config = CONFIG_MAPPING["gemma3"](
        text_config=SIZES
        | {
            "model_type": "gemma3_text",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "head_dim": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
        vision_config=SIZES
        | {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        boi_token_index=IMAGE,
        image_token_index=IMAGE + 1,
        eoi_token_index=IMAGE + 2,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        # zeros without weights
        torch.nn.init.normal_(
            model.model.multi_modal_projector.mm_input_projection_weight, std=0.12
        )
        model.save_pretrained(folder)

    file = Path(folder) / "model.safetensors"
    weights = {
        re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    marks = {
        "boi_token": "<image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    }
    breaks = ["\n" * count for count in range(1, 5)]
    plain = byte_tokenizer(marks=[*marks.values(), *breaks])
    plain.add_special_tokens({"extra_special_tokens": list(marks.values())})
    plain.add_tokens(breaks)  # those around images are joined with those of the text
    ends = {name: getattr(plain, name) for name in ("pad_token", "bos_token", "eos_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, extra_special_tokens=marks, **ends
    )
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)

    return str(folder)


def seeing_internvl(folder: Path | str) -> str:
    """Write an InternVL with four tokens for an image, and one before and after them.

    Needs torchvision.
    """
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    config = CONFIG_MAPPING["internvl"](
        text_config=SIZES
        | {
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
        vision_config=SIZES
        | {
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": [56, 56],
            "patch_size": [14, 14],
        },
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)

    marks = {
        "context_image_token": "<image>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    plain = byte_tokenizer(marks=list(marks.values()))
    size = {"height": 56, "width": 56}
    plain.add_special_tokens({"extra_special_tokens": list(marks.values())})
    ends = {name: getattr(plain, name) for name in ("pad_token", "bos_token", "eos_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, extra_special_tokens=marks, **ends
    )
    images = GotOcr2ImageProcessor(size=size, crop_to_patches=False)
    InternVLProcessor(
        images, tokenizer, InternVLVideoProcessor(size=size), image_seq_length=4
    ).save_pretrained(folder)

    return str(folder)
