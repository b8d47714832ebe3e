"""Make what a first run on videos needs, without a download.

It makes a tiny model that sees, and films of a dot that moves one way.

    python -m scripts.prepare_dots --out runs/dots/data --seed 0

writes OUT/model (a Hugging Face folder with its processor, which needs torchvision), OUT/films,
OUT/train.jsonl and OUT/test.jsonl, always the same for the same seed.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from lightrft.app.quickstart.inputs import byte_tokenizer

DIRECTIONS = {"l": (-1, 0), "r": (1, 0), "u": (0, -1), "d": (0, 1)}
"""Columns and rows that the dot moves from one frame to the next, in steps."""
SIDE = 56
STEP = 10
RADIUS = 8
FRAMES = 4
MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
VOCAB_SIZE = 264  # 256 bytes, 3 special tokens, 4 for media, rounded up to a multiple of 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% for part in message['content']"
    " %}{{ '<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>' if part['type'] != 'text'"
    " else part['text'] }}{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " 'assistant: ' }}{% endif %}"
)


def tiny_qwen2_5_vl(folder: Path | str, seed: int = 0) -> Path:
    """Save a random Qwen2.5-VL of 0.2 M parameters with its processor.

    A film is eight tokens.
    """
    tokenizer = byte_tokenizer()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.08}
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS.values())})
    ends = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    config = Qwen2_5_VLConfig(
        text_config=sizes
        | ends
        | {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": tokenizer.model_max_length,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "patch_size": 14,
            "fullatt_block_indexes": [0, 1],
            "window_size": SIDE,
            "initializer_range": 0.08,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
        },
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()},
        tie_word_embeddings=False,
        dtype="float32",
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)

    size = {"shortest_edge": SIDE**2, "longest_edge": FRAMES * SIDE**2}
    images = Qwen2VLImageProcessor(size=size, patch_size=14)
    videos = Qwen2VLVideoProcessor(size=size, patch_size=14)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE).save_pretrained(
        folder
    )

    return Path(folder)


def film(direction: str, rng: random.Random) -> list[Image.Image]:
    """Return the frames of a light dot on a dark ground.

    It begins anywhere, as long as it stays inside.
    """
    frames = []
    reach = (FRAMES - 1) * STEP
    shade = rng.randint(180, 255)
    ground = rng.randint(0, 60)
    moves = DIRECTIONS[direction]
    first = [
        rng.randint(RADIUS + reach * (move < 0), SIDE - RADIUS - reach * (move > 0))
        for move in moves
    ]

    for number in range(FRAMES):
        frame = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
        x, y = (place + number * STEP * move for place, move in zip(first, moves, strict=True))
        ImageDraw.Draw(frame).ellipse(
            (x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), (shade, shade, shade)
        )
        frames.append(frame)

    return frames


def films(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """Write FOLDER/NAME.jsonl, and the films of its rows below FOLDER/films.

    There are equally many of each direction.
    """
    (folder / "films").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        direction = list(DIRECTIONS)[number % len(DIRECTIONS)]
        path = f"films/{name}{number:04d}.png"
        first, *others = film(direction, rng)
        first.save(folder / path, save_all=True, append_images=others, duration=500, loop=0)
        rows.append({"input": "<video>where to?", "film": path, "label": direction})
    rng.shuffle(rows)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the films")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    films(args.out, "train", 512, rng)
    films(args.out, "test", 64, rng)
    tiny_qwen2_5_vl(args.out / "model", args.seed)
    print(
        f"{args.out}: 512 training and 64 held-out films, a random Qwen2.5-VL in"
        f" {args.out / 'model'}"
    )


if __name__ == "__main__":
    main()
