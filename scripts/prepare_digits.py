"""Make what a first run on sound needs, without a download.

It makes a tiny model that hears, and synthesised digits.

    python -m scripts.prepare_digits --out runs/digits/data --seed 0

writes OUT/model (a Hugging Face folder with its processor), OUT/sound, OUT/train.jsonl and
OUT/test.jsonl, always the same for the same seed.
"""

import argparse
import json
import random
import wave
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from lightrft.app.quickstart.inputs import byte_tokenizer
from lightrft.models.weight_sync.names import PublishedNames

VOWELS = {"i": (280, 2250), "e": (450, 1900), "a": (750, 1250), "o": (450, 850), "u": (310, 700)}
"""Frequencies of the first two formants in Hz: textbook values for vowels."""
SYLLABLES = ("ie", "ia", "io", "iu", "ae", "ao", "au", "oe", "oi", "ui")
"""The two vowels of each digit, one after the other."""
RATE = 16_000
VOCAB_SIZE = 264  # 256 bytes, 3 special tokens, 3 for sound, rounded up to a multiple of 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% for part in message['content']"
    " %}{{ '<|AUDIO|>' if part['type'] == 'audio' else part['text'] }}{% endfor %}{{ '\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_qwen2_audio(folder: Path | str, seed: int = 0, *, seconds: int = 1) -> Path:
    """Save a random Qwen2-Audio of 0.2 M parameters with its processor.

    It reads a token for each 40 ms of a clip. A clip costs as much as the longest one, of so many
    seconds; in vLLM that is 30, in the engine hf any number.
    """
    tokenizer = byte_tokenizer()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.08}
    tokenizer.add_special_tokens(
        {"extra_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]}
    )
    ends = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    config = Qwen2AudioConfig(
        text_config=sizes
        | ends
        | {
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": tokenizer.model_max_length,
        },
        audio_config={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 32,
            "init_std": 0.2,
            "max_source_positions": 50 * seconds,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2AudioForConditionalGeneration(config)

    PublishedNames(model)  # by which it is saved
    model.save_pretrained(folder)
    ear = WhisperFeatureExtractor(feature_size=32, chunk_length=seconds)
    Qwen2AudioProcessor(ear, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)

    return Path(folder)


def spoken(digit: int, rng: random.Random) -> np.ndarray:
    """Return the sound of a digit, [N] int16.

    Two resonances make harmonics of a voice louder, one vowel after the other.
    """
    pitch = rng.uniform(100, 220)
    parts = []
    for vowel in SYLLABLES[digit]:
        times = np.arange(int(RATE * rng.uniform(0.16, 0.24))) / RATE
        formants = [frequency * rng.uniform(0.95, 1.05) for frequency in VOWELS[vowel]]
        harmonics = pitch * np.arange(1, int(4000 / pitch))
        loudness = sum(1 / (1 + ((harmonics - formant) / 80) ** 2) for formant in formants)
        sound = (loudness[:, None] * np.sin(2 * np.pi * harmonics[:, None] * times)).sum(0)
        parts.append(sound * np.hanning(len(sound)) / np.abs(sound).max())
    return (np.concatenate(parts) * rng.uniform(8_000, 24_000)).astype(np.int16)


def recordings(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """Write FOLDER/NAME.jsonl, and the clips of its rows below FOLDER/sound.

    There are equally many of each digit.
    """
    (folder / "sound").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        digit = number % len(SYLLABLES)
        path = f"sound/{name}{number:04d}.wav"
        with wave.open(str(folder / path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(spoken(digit, rng).tobytes())
        rows.append({"input": "<audio>digit?", "sound": path, "label": str(digit)})

    rng.shuffle(rows)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the recordings"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    recordings(args.out, "train", 640, rng)
    recordings(args.out, "test", 80, rng)
    tiny_qwen2_audio(args.out / "model", args.seed)
    print(
        f"{args.out}: 640 training and 80 held-out clips, a random Qwen2-Audio in"
        f" {args.out / 'model'}"
    )


if __name__ == "__main__":
    main()
