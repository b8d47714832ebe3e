"""Images of rows: all forms in data, what a chat makes of them, and errors for bad ones."""

import io
import json
import os
from pathlib import Path
from random import Random

import datasets
import pytest
from PIL import Image

from lightrft.config import ConfigError, DataSection
from lightrft.data.conversations import load_examples
from lightrft.data.media_files import ImageFile, MediaLocation, open_media, with_parts
from lightrft.data.prompts import load_prompts
from lightrft.data.readers import DataError
from tiny import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ '@' if part.type == 'image'"
    " else part.text }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        Image.new("RGB", (4 + number, 3), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


def load(folder: Path, *rows: dict, media_root: str = "", **options) -> list:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    section = DataSection(
        prompt_data=str(folder / "rows.jsonl"),
        apply_chat_template=True,
        images_key="pictures",
        media_root=media_root,
    )
    return load_prompts(section, tokenizer, **options)


def test_paths_stay_in_the_media_root(folder):
    root = folder / "media"
    (root / "deep").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(root / "deep" / "in.png")
    (root / "link.png").symlink_to(folder / "0.png")
    rows = [
        {
            "input": "a",
            "pictures": ["deep/in.png", "deep/../deep/in.png", str(root / "deep" / "in.png")],
        }
    ]
    (prompt,) = load(folder, *rows, media_root=str(root))
    assert [image.size for image in prompt.multi_modal["images"]] == [(9, 9)] * 3

    for path in ("../0.png", str(folder / "0.png"), "link.png", "/dev/zero"):
        with pytest.raises(
            DataError, match=f"rows.jsonl:1: image {path} is not in --media_root {root}"
        ):
            load(folder, {"input": "a", "pictures": {"path": path}}, media_root=str(root))

    assert len(load(folder, {"input": "a", "pictures": "media/link.png"})) == 1


@pytest.mark.parametrize("name", ["pipe.png", "/dev/zero"])
def test_a_pipe_or_a_device_is_no_image(folder, name):
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(ValueError, match=f"image {name} cannot be read: not a regular file"):
        _ = ImageFile(name, folder / name).size
    with pytest.raises(DataError, match=f"image {name} cannot be read: not a regular file"):
        ImageFile(name, folder / name).open()


def test_rows_and_their_images(folder):
    one, several, none, empty = load(
        folder,
        {"input": "what?", "pictures": "0.png", "label": "x"},
        {"input": "a<image>b<image>", "pictures": ["1.png", str(folder / "2.png")]},
        {"input": "text"},
        {"input": [{"role": "user", "content": "hi"}], "pictures": []},
    )
    texts = [prompt.text.removesuffix("<assistant>") for prompt in (one, several, none, empty)]
    assert texts == ["<user>@what?", "<user>a@b@", "<user>text", "<user>hi"]
    assert one.columns == {"label": "x"}
    assert [image.size for image in open_media(several.multi_modal)["images"]] == [(5, 3), (6, 3)]
    assert (
        one.multi_modal["images"][0].name == "0.png" and none.multi_modal == empty.multi_modal == {}
    )


NAMED = [
    {"type": "image", "image": "0.png"},
    {"type": "image", "image": {"bytes": None, "path": "0.png"}, "text": None},
    {"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}},
    {"type": "input_image", "image_url": "0.png"},
    {"type": "image", "path": "0.png"},
    {"image": "0.png"},
]


@pytest.mark.parametrize("part", NAMED)
def test_parts_of_messages_name_their_images(folder, part):
    other = {"type": "image", "image": str(folder / "1.png")}
    content = [
        {"type": "text", "text": "a", "image": None},
        part,
        {"type": "text", "text": "b"},
        other,
    ]
    chat, text = load(
        folder, {"input": [{"role": "user", "content": content}], "pictures": None}, {"input": "hi"}
    )
    assert chat.text == "<user>a@b@<assistant>" and [
        image.size for image in chat.multi_modal["images"]
    ] == [(4, 3), (5, 3)]
    assert text.multi_modal == {}

    (column,) = load(
        folder, {"input": [{"role": "user", "content": [part]}], "pictures": ["2.png"]}
    )
    assert [image.name for image in column.multi_modal["images"]] == ["2.png"], "the column wins"


def test_what_a_model_reads_counts(folder):
    """Its processor says how much that is; the limit is on all of it."""
    rows = [{"input": "what?", "pictures": ["0.png", "1.png"]}, {"input": "text"}]
    first, second = load(
        folder, *rows, measure=lambda prompt: 500 * len(prompt.multi_modal.get("images", []))
    )
    assert (first.num_tokens, second.num_tokens) == (
        len(first.token_ids) + 1000,
        len(second.token_ids),
    )

    with pytest.raises(
        DataError,
        match=r"rows.jsonl:1: the prompt has 2024 tokens, more than --prompt_max_len 1024",
    ):
        load(folder, *rows, measure=lambda prompt: 2000)


def test_data_of_the_datasets_package_keep_their_files(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    kinds = datasets.Features(
        {"input": datasets.Value("string"), "pictures": datasets.List(datasets.Image())}
    )
    files = [
        {"path": None, "bytes": (folder / f"{number}.png").read_bytes()} for number in range(2)
    ]
    rows = {"input": ["a", "b"], "pictures": [files, []]}
    datasets.Dataset.from_dict(rows, features=kinds).to_parquet(folder / "rows.parquet")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE

    section = DataSection(
        prompt_data=str(folder / "rows.parquet"), apply_chat_template=True, images_key="pictures"
    )
    first, second = load_prompts(section, tokenizer)
    assert [image.source for image in first.multi_modal["images"]] == [
        file["bytes"] for file in files
    ]
    assert [image.size for image in open_media(first.multi_modal)["images"]] == [
        (4, 3),
        (5, 3),
    ] and not second.multi_modal


@pytest.mark.parametrize(
    ("value", "reason"),
    [(3, "not 3"), ("", "not ''"), ({"bytes": None}, "image: it must be a path")],
)
def test_what_is_no_image(value, reason):
    with pytest.raises(ValueError, match=reason):
        MediaLocation(Path()).image(value)


def test_files_that_cannot_be_read(folder, monkeypatch):
    (folder / "text.png").write_text("no image")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:45])
    for name in ("missing.png", "text.png"):
        with pytest.raises(ValueError, match=f"image {name} cannot be read"):
            _ = ImageFile(name, folder / name).size

    Image.new("I;16", (2, 2)).save(folder / "deep.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    for name, reason in {"0.png": "12 pixels", "deep.png": "mode I;16, not 8 bits"}.items():
        with pytest.raises(
            DataError, match=f"rows.jsonl:1: image {name} cannot be read: .*{reason}"
        ):
            load(
                folder,
                {"input": "a", "pictures": name},
                measure=lambda prompt: prompt.multi_modal["images"][0].size[0],
            )

    monkeypatch.undo()
    with pytest.raises(
        ConfigError,
        match="image cut.png cannot be read: .*; repair it, or remove its rows from the data",
    ):
        ImageFile("cut.png", folder / "cut.png").open()

    file = io.BytesIO()  # of several pieces, the last of which has no name
    Image.frombytes("L", (300, 300), Random(0).randbytes(90_000)).save(file, "PNG")
    with pytest.raises(DataError, match="image broken.png cannot be read: broken PNG file"):
        ImageFile("broken.png", b"\0DAT".join(file.getvalue().rsplit(b"IDAT", 1))).open()


def test_a_column_without_images(folder):
    with pytest.raises(
        DataError, match="--images_key pictures: no row of --prompt_data .* has one here"
    ):
        load(folder, {"input": "a", "images": "0.png"})


def test_turned_images_are_upright_and_transparency_is_dropped():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 2), "red").save(file, "JPEG", exif=exif)
    turned = ImageFile("x", file.getvalue())
    assert turned.size == turned.open().size == (2, 8)
    file = io.BytesIO()
    Image.new("RGBA", (1, 1), (9, 8, 7, 0)).save(file, "PNG")
    assert ImageFile("x", file.getvalue()).open().getpixel((0, 0)) == (9, 8, 7)


def test_messages_with_parts():
    system = {"role": "system", "content": "be brief"}
    user = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    image = {"type": "image"}
    text = {"type": "text", "text": "a"}
    assert with_parts([system, user], {"images": 2})[1]["content"] == [image, image, text]
    assert with_parts([user | {"content": [text, image]}], {"images": 1})[0]["content"] == [
        text,
        image,
    ]

    assert with_parts([system], {"images": 0}) == [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    ]
    assert with_parts([user | {"content": "<image>a"}], {"images": 1})[0]["content"] == [
        image,
        text,
    ]

    for content in (["a"], image, 3):
        with pytest.raises(
            ValueError, match="the content of a chat message must be text, or a list of parts"
        ):
            with_parts([user | {"content": content}], {"images": 1})


def test_a_conversation_about_images(folder):
    """The images of the prompt are read and counted with it."""
    row = {
        "messages": [
            {"role": "user", "content": "a<image>b"},
            {"role": "assistant", "content": "c"},
        ],
        "pictures": ["0.png"],
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}<assistant>{% endif %}"

    section = DataSection(
        prompt_data=str(folder / "rows.jsonl"), apply_chat_template=True, images_key="pictures"
    )
    (prompt,) = load_examples(section, tokenizer, longest=99, measure=lambda prompt: 5)
    assert prompt.token_ids == [*b"<user>a@b<assistant>"] and prompt.media_tokens == 5
    assert prompt.columns["label"] == ([ord("c"), tokenizer.eos_token_id], [True, True])
    assert [image.name for image in prompt.multi_modal["images"]] == ["0.png"]
