"""Why: a wrongly cut video, or wrongly read sound, spoils a run in silence.

A video must be cut to the length that was counted.
"""

import base64
import io
import json
import os
import re
import time
import wave
from typing import ClassVar

import av
import numpy as np
import pytest
from PIL import Image

from json_server import JsonHandler, listening
from lightrft.config import DataSection
from lightrft.config.errors import DataError
from lightrft.data.media_files import (
    VIDEOS,
    AudioFile,
    ImageFile,
    MediaLocation,
    VideoFile,
    fetch,
    items_of,
    media_of,
    open_media,
    with_parts,
)
from lightrft.data.prompts import load_prompts
from tiny import byte_tokenizer


def frame(value: int, size=(6, 4)) -> Image.Image:
    return Image.new("RGB", size, (value, value, value))


def gif(count: int, milliseconds: int = 100) -> bytes:
    """Return a GIF whose frames are 20 grey values brighter each time."""
    file = io.BytesIO()
    frames = [frame(20 * number) for number in range(count)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds)
    return file.getvalue()


def wav(samples: np.ndarray, rate: int = 16000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, 2, rate, 0, "NONE", ""))
        out.writeframes(samples.astype(np.int16).tobytes())
    return file.getvalue()


@pytest.mark.parametrize(
    ("fps", "most", "seen"),
    [
        (2.0, 64, [2, 7]),
        (10.0, 64, list(range(10))),
        (10.0, 4, [1, 3, 6, 8]),
        (0.1, 64, [5]),
        (99.0, 64, list(range(10))),
    ],
)
def test_frames_are_evenly_spaced(fps, most, seen):
    """Ten frames in one second; the middle of each of as many equal parts is taken."""
    video = VideoFile("v.gif", gif(10), fps, most)
    shown = video.open()
    assert [round(int(each[0, 0, 0]) / 20) for each in shown["frames"]] == seen
    assert shown["frames"].shape == (*video.size, 3) == (len(seen), 4, 6, 3) and shown[
        "fps"
    ] == pytest.approx(len(seen))


def test_a_list_of_images_is_a_video(tmp_path):
    for number in range(3):
        frame(100 * number).save(tmp_path / f"{number}.png")
    files = tuple(ImageFile(f"{number}.png", tmp_path / f"{number}.png") for number in range(3))
    assert VideoFile("v", files).open()["frames"][:, 0, 0, 0].tolist() == [0, 100, 200]
    assert VideoFile("v", files).open()["fps"] == 2.0 and VideoFile("v", files, most=2).size == (
        2,
        4,
        6,
    )


def test_pixels_in_memory_are_read_as_they_are(tmp_path):
    """Rows of `module:object` contain them: a file's bytes, images and arrays."""
    location = MediaLocation(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[0]).save(file, "PNG")
    for form in (file.getvalue(), Image.fromarray(pixels[0]), pixels[0]):
        assert np.array_equal(np.asarray(location.image(form).open()), pixels[0])

    for form in (pixels, list(pixels), [Image.fromarray(each) for each in pixels]):
        (video,) = items_of(VIDEOS, form)
        assert np.array_equal(location.video(video, fps=2, most=9).open()["frames"], pixels)

    assert len(items_of(VIDEOS, [pixels, pixels])) == 2
    for wrong in (pixels[0] / 255, pixels):
        with pytest.raises(
            ValueError, match=r"an array must be \[H, W\] or \[H, W, 3\] of uint8, not"
        ):
            location.image(wrong)


def test_sound_is_the_mean_of_its_channels():
    samples = np.array([[0, 8192], [-32768, -32768], [16384, 0]])
    clip = AudioFile("s.wav", wav(samples, 8000, channels=2))
    assert clip.open()["array"].tolist() == [0.125, -1.0, 0.25] and clip.size == (3, 8000) == (
        3,
        clip.open()["sampling_rate"],
    )
    given = AudioFile("x", ([0.5, -0.5], 16000))
    assert given.open()["array"].tolist() == [0.5, -0.5] and given.size == (2, 16000)
    assert given.player().startswith("data:audio/wav;base64,UklGR")


@pytest.mark.parametrize("kind", [VideoFile, AudioFile, ImageFile])
@pytest.mark.parametrize("content", [b"", b"nothing", b"RIFF" + b"\0" * 40, gif(3)[:30]])
def test_damaged_files_are_named(kind, content):
    with pytest.raises(DataError, match="bad cannot be read: .*; repair it, or remove its rows"):
        kind("bad", content).open()


def test_media_have_their_places_in_a_chat():
    text = {"type": "text", "text": "a"}
    counts = {"images": 1, "videos": 1, "audios": 2}
    (message,) = with_parts([{"role": "user", "content": "<video>a<audio><audio>"}], counts)
    assert message["content"] == [
        {"type": "image"},
        {"type": "video"},
        text,
        {"type": "audio"},
        {"type": "audio"},
    ]
    (message,) = with_parts([{"role": "user", "content": "<video>a"}], {"images": 0})
    assert message["content"] == [{"type": "text", "text": "<video>a"}]


TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{"
    " part.text }}{% else %}[{{ part.type }}]{% endif %}{% endfor %}{% endfor %}"
)


def load(folder, rows, **options):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    section = DataSection(
        prompt_data=str(folder / "rows.jsonl"),
        apply_chat_template=True,
        videos_key="film",
        audios_key="sound",
        **options,
    )

    return load_prompts(section, tokenizer, requirements=1)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "v.gif").write_bytes(gif(3))
    (tmp_path / "s.wav").write_bytes(wav(np.arange(4)))
    (tmp_path / "cut.gif").write_bytes(gif(5)[:120])
    frame(7).save(tmp_path / "0.png")
    return tmp_path


def test_rows_with_every_medium(folder):
    rows = [
        {"input": "x<audio>", "film": "v.gif", "sound": ["s.wav", "s.wav"], "label": "1"},
        {"input": "y", "film": ["0.png", "0.png"], "label": "2"},
        {"input": "z", "film": ["v.gif", "v.gif"], "label": "3"},
        {"input": "w", "label": "4"},
    ]
    first, second, third, fourth = load(folder, rows)
    assert (first.text, second.text, third.text, fourth.text) == (
        "[video]x[audio]",
        "[video]y",
        "[video][video]z",
        "w",
    )
    assert {name: len(items) for name, items in first.multi_modal.items()} == {
        "videos": 1,
        "audios": 2,
    }

    assert (
        open_media(second.multi_modal)["videos"][0]["frames"].shape == (2, 4, 6, 3)
        and fourth.multi_modal == {}
    )
    del rows[1]
    direct = load(folder, rows)
    cached = load(folder, rows, data_cache=str(folder / "cache"))
    assert [prompt.multi_modal for prompt in cached] == [prompt.multi_modal for prompt in direct]


@pytest.mark.parametrize("mode", ["first", "all"])
def test_media_are_read_before_the_run(folder, mode):
    rows = [
        {"input": "x", "film": "v.gif"},
        {"input": "y", "film": "cut.gif"},
        {"input": "z", "sound": "s.wav"},
    ]
    with pytest.raises(DataError, match="rows.jsonl:2: video cut.gif cannot be read"):
        load(folder, rows, check_media=mode)
    assert [prompt.text for prompt in load(folder, rows, check_media=mode, bad_rows="skip")] == [
        "[video]x",
        "[audio]z",
    ]
    late = load(folder, rows, check_media="none")
    assert len(late) == 3
    with pytest.raises(DataError, match="rows.jsonl:2: video cut.gif cannot be read"):
        media_of(late[1])


def test_other_formats_are_read_by_ffmpeg():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        video = out.add_stream("mpeg4", rate=10)
        video.width = 64
        video.height = 32
        video.pix_fmt = "yuv420p"
        for number in range(20):
            for packet in video.encode(av.VideoFrame.from_image(frame(10 * number, (64, 32)))):
                out.mux(packet)
        out.mux(video.encode())

    shown = VideoFile("v.mp4", file.getvalue(), fps=2.0)
    assert shown.size == (4, 32, 64) and shown.open()["fps"] == pytest.approx(2.0)
    assert shown.open()["frames"][:, 16, 32, 0] == pytest.approx([20, 70, 120, 170], abs=6)
    with pytest.raises(DataError, match="no sound that FFmpeg reads"):
        AudioFile("v.mp4", file.getvalue()).open()
    assert AudioFile("a.flac", flac()).open()["array"].mean() == pytest.approx(0.25, abs=1e-3)
    assert AudioFile("a.flac", flac()).size == (4096, 8000)


def test_sound_is_resampled():
    """A tone of 440 Hz is the same tone at other sampling points.

    Its ends, where the filter sees nothing, are left out.
    """
    for rate, count in ((44100, 22051), (8000, 4001)):
        tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(count) / rate)
        for clip in (
            AudioFile("t", (tone, rate), 16000),
            AudioFile("t.wav", wav(tone * 32767, rate), 16000),
        ):
            heard = clip.open()
            assert (
                clip.size
                == (len(heard["array"]), 16000)
                == (round(count * 16000 / rate), heard["sampling_rate"])
            )
            expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(heard["array"])) / 16000)
            np.testing.assert_allclose(heard["array"][100:-100], expected[100:-100], atol=2e-3)


class Files(JsonHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        port = self.server.server_address[1]
        to = {
            "/here": "/v.gif",
            "/loop": "/loop",
            "/expired": "/login",
            "/loopback": f"http://localhost:{port}/v.gif",
            "/mapped": f"http://[::ffff:127.0.0.1]:{port}/v.gif",
            "/number": f"http://2130706433:{port}/v.gif",
            "/private": "http://10.0.0.1/",
            "/link-local": "http://169.254.169.254/latest/meta-data",
            "/file": "file:///etc/passwd",
            "/nonsense": "http://[::1/v.gif",
        }
        try:
            if self.path == "/v.gif":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(gif(3))
            elif self.path in to:
                self.send_response(302)
                self.send_header("Location", to[self.path])
                self.end_headers()
            elif self.path == "/truncated":
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                self.wfile.write(gif(3))
            elif self.path in ("/login", "/part"):
                self.send_response(200 if self.path == "/login" else 206)
                self.send_header(
                    "Content-Type", "text/html" if self.path == "/login" else "image/gif"
                )
                self.end_headers()
                self.wfile.write(gif(3))
            elif self.path == "/large":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(bytes(2 << 20))
            elif self.path.startswith("/drip"):
                if self.path == "/drip":
                    self.send_response(200)
                    self.end_headers()
                for _ in range(100):
                    self.wfile.write(b"H")
                    self.wfile.flush()
                    time.sleep(0.1)
            elif self.path == "/no-http":
                self.wfile.write(b"SSH-2.0\r\n\r\n")
            else:
                self.send_error(404)
        except OSError:
            self.close_connection = True


def test_addresses_are_fetched_once_and_with_a_flag(folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder / "fetched"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (folder / "fetched").mkdir()

    with listening(Files) as address:
        film = f"{address}/v.gif"
        rows = [
            {"input": "x", "film": film},
            {"input": "y", "film": {"path": film}, "sound": "s.wav"},
        ]
        first, _ = load(folder, rows, media_urls=True)
        assert open_media(first.multi_modal)["videos"][0]["frames"].shape == (
            1,
            4,
            6,
            3,
        ) and Files.asked == ["/v.gif"]
        with pytest.raises(DataError, match="v.gif is an address: --media_urls allows to fetch it"):
            load(folder, rows)
        with pytest.raises(DataError, match="nothing.gif cannot be fetched: .*404"):
            load(folder, [{"input": "x", "film": f"{address}/nothing.gif"}], media_urls=True)

        for scheme in ("HTTP", "Http"):
            rows[0]["film"] = film.replace("http", scheme)
            assert len(load(folder, rows, media_urls=True)) == 2
            with pytest.raises(DataError, match="v.gif is an address: --media_urls allows"):
                load(folder, rows[:1])
        assert Files.asked.count("/v.gif") == 1


@pytest.mark.parametrize("scheme", ["s3", "S3", "gs", "hf", "az", "ftp", "zip", "rsync+ssh"])
def test_other_schemes_are_named(folder, scheme):
    """Why: they were taken for paths, and the message named a file that is missing."""
    message = rf"row.*: video {re.escape(scheme)}://a/v.gif: {re.escape(scheme.lower())}:// is not"
    with pytest.raises(DataError, match=message):
        load(folder, [{"input": "x", "film": f"{scheme}://a/v.gif"}], media_urls=True)


def test_heads_of_items_are_read_in_capitals(folder):
    content = base64.b64encode((folder / "v.gif").read_bytes()).decode()
    for item in (f"File://{folder}/v.gif", f"DATA:image/gif;base64,{content}"):
        assert load(folder, [{"input": "x", "film": item}, {"input": "y", "sound": "s.wav"}])


FETCHED = {
    "/loop": "leads on more than 10 times",
    "/loopback": "leads to localhost, which is no public address",
    "/mapped": "no public address",
    "/number": "no public address",
    "/private": "leads to 10.0.0.1, which",
    "/link-local": "leads to 169.254.169.254, which",
    "/file": "",
    "/nonsense": "",
    "/truncated": "incomplete|without sending complete",
    "/login": "the answer is 200 text/html",
    "/expired": "the answer is 200 text/html",
    "/part": "the answer is 206 image/gif",
    "/large": "more than --media_max_mb 1",
    "/drip": "in 1 s",
    "/drip-head": "in 1 s",
    "/no-http": "",
}


def test_what_cannot_be_fetched_is_a_bad_row_and_not_kept(tmp_path, monkeypatch):
    """Why: a truncated file was kept for ever, and a drip held the start for ever."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("lightrft.data.media_files.FETCH_SECONDS", 1.0)
    with listening(Files) as address:
        for path, message in FETCHED.items():
            with pytest.raises(ValueError, match=f"{path} cannot be fetched.*({message})"):
                fetch(address + path, 1_000_000)
        for wrong in (
            "http://[::1",
            "http:///x",
            "http://a b/",
            "http://x:99999/",
            "http://127.0.0.1:99999/",
            "http://\ud800",
        ):
            with pytest.raises(ValueError, match="cannot be fetched"):
                fetch(wrong, 1000)
        assert list(tmp_path.glob("*/*")) == []
        assert fetch(f"{address}/here", 1_000_000).read_bytes() == gif(3)


@pytest.mark.parametrize("made", ["a link", "by another user", "for all"])
def test_a_folder_that_others_can_write_is_not_used(folder, monkeypatch, made):
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    theirs = folder / f"lightrft-media-{os.getuid()}"
    theirs.symlink_to(folder) if made == "a link" else theirs.mkdir()
    if made == "for all":
        theirs.chmod(0o777)

    if made == "by another user":
        other = os.getuid() + 1
        theirs.rename(folder / f"lightrft-media-{other}")
        monkeypatch.setattr(os, "getuid", lambda: other)

    with pytest.raises(ValueError, match="is a folder that others can write, or a link"):
        fetch("http://127.0.0.1:1/v.gif", 100)


def test_large_files_are_bad_rows(folder):
    with pytest.raises(
        DataError, match="video v.gif has 0.000.* MB, more than --media_max_mb 1e-05"
    ):
        load(folder, [{"input": "x", "film": "v.gif"}], media_max_mb=1e-5)


def flac() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        stream = out.add_stream("flac", rate=8000)
        sound = av.AudioFrame.from_ndarray(
            np.full((1, 4096), 8192, dtype=np.int16), format="s16", layout="mono"
        )
        sound.sample_rate = 8000
        out.mux(stream.encode(sound))
        out.mux(stream.encode())
    return file.getvalue()
