import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from lightrft.config import ModelSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.parallel.collectives import Axis
from lightrft.models.weight_files import WeightFiles
from lightrft.strategy.checkpoint import hf_export
from lightrft.strategy.checkpoint.shard_writer import ShardWriter
from memory import larger_model, peak_of
from ranks import run_ranks
from seeing import IMAGE, picture, seeing_model
from strategy.training import fill_the_disk, load, snapshot, strategy
from tiny import byte_tokenizer, tiny_hybrid


def exported(folder: str, target: Path, shard_bytes: int, **args):
    """The exported model is the actor's, role wrapper and all, slightly changed."""
    hf_export.MAX_SHARD_BYTES = shard_bytes
    made = strategy(weight_sync_bucket_mb=1, **args)
    actor = Actor(load_model(ModelSection(pretrain=folder)))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.01)
    actor = made.prepare(actor)
    path = made.save_model(actor, AutoTokenizer.from_pretrained(folder), target)
    return path, snapshot(made, actor)


@pytest.mark.parametrize("world_size, tied, shard_bytes", [(1, False, 200_000), (2, True, 10**9)])
def test_from_pretrained_loads_what_was_trained(
    folder, tied_folder, tmp_path, world_size, tied, shard_bytes
):
    source = tied_folder if tied else folder
    target = tmp_path / "model"
    path, trained = run_ranks(world_size, exported, source, target, shard_bytes)[0]
    assert path == target
    original, written = (
        json.loads((Path(saved) / "config.json").read_text()) for saved in (source, target)
    )
    assert written == original and (target / "generation_config.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(target)
    found = dict(loaded.named_parameters())
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in found)
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(target)("27+58=").input_ids == [50, 55, 43, 53, 56, 61]
    ids = torch.arange(6)[None]
    assert torch.isfinite(loaded(input_ids=ids).logits).all()


@pytest.mark.slow
def test_layers_that_predict_several_tokens_are_kept(tmp_path):
    """They are not trained, and an engine may draft by them."""
    source = Path(tiny_hybrid(tmp_path / "source"))
    weights = load_file(source / "model.safetensors")
    extra = {"mtp.fc.weight": torch.arange(6.0).view(2, 3).bfloat16()}
    save_file(weights | extra, source / "model.safetensors", metadata={"format": "pt"})

    target, trained = run_ranks(2, exported, str(source), tmp_path / "target", 10**9)[0]
    written = load_file(target / "model.safetensors")
    assert torch.equal(written["mtp.fc.weight"], extra["mtp.fc.weight"])
    found = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
    assert all(torch.equal(found[name], trained[name]) for name in trained)


def test_a_model_that_sees_keeps_what_reads_images(tmp_path):
    source = seeing_model(tmp_path / "source")
    target = tmp_path / "model"
    _, trained = run_ranks(2, partial(exported, bf16=True), source, target, 10**9)[0]
    found = dict(
        AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32).named_parameters()
    )
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name].bfloat16().float()) for name in found)

    inputs = AutoProcessor.from_pretrained(target)(
        text=["What is <image>?"], images=[[picture(1)]], return_tensors="pt"
    )
    assert inputs["input_ids"].tolist()[0].count(IMAGE) == 4


def test_shards_keep_to_the_size_and_the_index_covers_all(folder, tmp_path):
    _, trained = run_ranks(2, exported, folder, tmp_path / "model", 200_000)[0]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == trained.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in trained.values())
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values())) and len(
        files
    ) > 2
    assert f"-of-{len(files):05d}" in files[0].name
    contents = [load_file(file) for file in files]
    assert all(sum(tensor.nbytes for tensor in content.values()) <= 200_000 for content in contents)
    assert all(
        torch.equal(tensor, trained[name])
        for content in contents
        for name, tensor in content.items()
    )


def test_bf16_runs_export_bfloat16(folder, tmp_path):
    run_ranks(2, bf16_export, folder, tmp_path / "model")
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()
    } == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def bf16_export(folder: str, target: Path):
    made = strategy(bf16=True)
    made.save_model(made.prepare(load(folder)), None, target)


def exported_twice(folder: str, target: Path):
    made = strategy()
    model = made.prepare(load(folder))
    made.save_model(model, None, target)
    if made.is_rank_0():
        fill_the_disk(10_000)
    try:
        made.save_model(model, None, target)
    except RuntimeError as error:
        return str(error)


def test_a_full_disk_leaves_the_model_before(folder, tmp_path):
    results = run_ranks(2, exported_twice, folder, tmp_path / "model")
    assert results[0] == results[1] and "model could not be written: rank 0:" in results[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0


def test_an_earlier_model_is_replaced_but_nothing_else(folder, tmp_path):
    for _ in range(2):
        run_ranks(1, exported, folder, tmp_path / "model", 10**9)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(
        RuntimeError, match="run contains other files than a model; use a separate folder"
    ):
        run_ranks(2, exported, folder, tmp_path / "run", 10**9)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def export_no_model(target: Path):
    made = strategy()
    made.save_model(torch.nn.Linear(2, 2), None, target)


def test_only_transformers_models_are_exported(tmp_path):
    with pytest.raises(RuntimeError, match="Linear is not a transformers model and"):
        run_ranks(1, export_no_model, tmp_path / "model")


class OneRanksTokenizer:
    """Records on which ranks it was asked to write."""

    def __init__(self) -> None:
        self.init_kwargs: dict[str, Any] = {}

    def save_pretrained(self, folder: Path) -> None:
        assert dist.get_rank() == 0
        byte_tokenizer().save_pretrained(folder)


def saved_with_tokenizer(folder: str, target: Path):
    made = strategy()
    made.save_model(made.prepare(load(folder)), OneRanksTokenizer(), target)


def test_one_rank_writes_the_tokenizer(folder, tmp_path):
    run_ranks(2, saved_with_tokenizer, folder, tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").is_file()


# -- memory, and the files themselves


def peak_of_export(folder: str, target: Path):
    hf_export.MAX_SHARD_BYTES = 10_000_000
    made = strategy(weight_sync_bucket_mb=1, bf16=True)
    with made.init_model_context():
        model = load_model(ModelSection(pretrain=folder))
    made.prepare(model)
    return peak_of(lambda: made.save_model(model, None, target))


@pytest.mark.slow
def test_no_rank_gathers_the_model(folder, tmp_path):
    size = run_ranks(1, larger_model, folder, tmp_path / "model")[0] // 2
    found = run_ranks(2, peak_of_export, str(tmp_path / "model"), tmp_path / "exported")
    print(f"{size / 1e6:.0f} MB written, peaks {[round(peak / 1e6) for peak in found]} MB")
    assert all(peak < 0.6 * size for peak in found)
    for file in (tmp_path / "model").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(WeightFiles.of(tmp_path / "exported").read(name, ()), tensor)


TENSORS = {
    "odd": torch.arange(3).bfloat16(),
    "number": torch.tensor(7, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
    "wide": torch.arange(12.0).view(3, 4).T,
    "none": torch.zeros(0, 4),
    "half": torch.ones(5, dtype=torch.float16),
    "more": torch.arange(40.0),
    "last": torch.arange(2, dtype=torch.int32),
}


@pytest.mark.parametrize("max_bytes, num_files", [(10**9, 1), (100, 3), (10, 7)])
def test_the_files_hold_what_was_added(tmp_path, max_bytes, num_files):
    """A full file begins another one; each rank writes every second one."""
    writers = [ShardWriter(tmp_path, max_bytes, Axis("world", 2, rank, None)) for rank in range(2)]
    for writer in writers:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
        writer.finish()

    writers[0].name_files()
    found = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert found.keys() == TENSORS.keys() and len(list(tmp_path.glob("*.safetensors"))) == num_files
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert WeightFiles.of(tmp_path).files.keys() == TENSORS.keys()
