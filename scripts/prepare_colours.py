"""Make what a first run on images needs, without a download.

It makes a tiny model that sees, and pictures for it to name the colour of.

    python -m scripts.prepare_colours --out runs/colours/data --seed 0

writes OUT/model (a Hugging Face folder with its processor), OUT/images, OUT/train.jsonl and
OUT/test.jsonl, always the same for the same seed.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
)

from lightrft.app.quickstart.inputs import byte_tokenizer

COLOURS = {
    "r": (220, 40, 40),
    "g": (40, 180, 60),
    "b": (40, 70, 220),
    "y": (230, 220, 40),
    "k": (30, 30, 30),
    "w": (235, 235, 235),
    "m": (220, 60, 200),
    "c": (40, 200, 220),
}
"""Colours by the letters that printers use."""
VARIATION = 24
"""How much the red, green and blue of a picture may differ from its colour."""
MARKS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
VOCAB_SIZE = 264  # 256 bytes, 3 special tokens, 4 for images, rounded up to a multiple of 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SIDE = 56

Row = dict[str, str | list[str]]


def tiny_idefics3(folder: Path | str, seed: int = 0) -> Path:
    """Save a random Idefics3 of 0.2 M parameters with its processor.

    An image is four tokens, and three around them.
    """
    tokenizer = byte_tokenizer()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.08}
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS.values())})
    for name, mark in MARKS.items():
        setattr(tokenizer, name, mark)
    ends = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")
    }
    config = Idefics3Config(
        text_config=sizes
        | ends
        | {
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_key_value_heads": 2,
            "max_position_embeddings": tokenizer.model_max_length,
        },
        vision_config=sizes
        | {"hidden_size": 32, "intermediate_size": 64, "image_size": SIDE, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Idefics3ForConditionalGeneration(config).save_pretrained(folder)

    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)

    return Path(folder)


def pictures(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """Write FOLDER/NAME.jsonl, and the pictures of its rows below FOLDER/images.

    There are equally many of each colour.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for number in range(count):
        colour = list(COLOURS)[number % len(COLOURS)]
        shade = tuple(
            max(0, min(255, value + rng.randint(-VARIATION, VARIATION)))
            for value in COLOURS[colour]
        )
        file = f"images/{name}{number:04d}.png"
        Image.new("RGB", (rng.randint(20, SIDE), rng.randint(20, SIDE)), shade).save(folder / file)
        rows.append({"input": "<image>colour?", "images": [file], "label": colour})

    rng.shuffle(rows)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the pictures"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    pictures(args.out, "train", 512, rng)
    pictures(args.out, "test", 64, rng)
    tiny_idefics3(args.out / "model", args.seed)
    print(
        f"{args.out}: 512 training and 64 held-out pictures, a random Idefics3 in"
        f" {args.out / 'model'}"
    )


if __name__ == "__main__":
    main()
