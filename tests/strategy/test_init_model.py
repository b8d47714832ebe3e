"""Models that are empty until they are sharded: the same bit for bit as models that every rank
loads whole.
"""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.config import ModelSection
from lightrft.models.empty import is_empty
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import load_model, load_scorer
from lightrft.strategy import get_strategy
from memory import larger_mixture, larger_model, peak_of
from ranks import run_cases, run_ranks, run_refusals
from strategy.training import one_step, snapshot, strategy

LAYOUTS = {
    "fsdp": [
        (1, {}),
        (2, {}),
        (2, {"bf16": True}),
        (2, {"fsdp_cpu_offload": True}),
        (4, {"dp_replicate": 2}),
        (4, {"tp_size": 2}),
    ],
    "zero3": [
        (2, {"zero_stage": 3}),
        (2, {"zero_stage": 3, "bf16": True}),
        (4, {"zero_stage": 3, "zpg": 2}),
    ],
}
"""Numbers of ranks with arguments of the strategy."""


def sharded(folder: Path | str) -> str:
    """The same model in many files with an index."""
    target = f"{folder}-sharded"
    if not Path(target).exists():
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(target, max_shard_size="100KB")
        assert len(list(Path(target).glob("*.safetensors"))) > 3
    return target


def shards(module: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shards of parameters, and buffers, those outside the folder too."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {
        name: getattr(t, "_local_tensor", getattr(t, "ds_tensor", t)).detach().clone()
        for name, t in tensors.items()
    }


def loaded(made, section: ModelSection, empty: bool, frozen: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)  # of the scorer's new head
    models = []
    for kind, load in ((Actor, load_model), (Scorer, load_scorer)):
        if empty:
            with made.init_model_context():
                models.append(kind(load(section)))
            assert is_empty(models[-1])
        else:
            models.append(kind(load(section)))

    module = nn.ModuleList(models)
    assert len({id(p) for p in models[0].parameters()}) == len(list(models[0].parameters()))
    for model in models:
        if frozen:
            made.prepare(model.requires_grad_(False))
        else:
            optimizer = made.create_optimizer(model, lr=1e-3)
            made.prepare((model, optimizer))

    return shards(module)


def both_ways(folders: list[str], args: dict) -> list[str]:
    """Names of tensors that differ."""
    made = get_strategy({"fsdp": "zero_stage" not in args, "seed": 1} | args)
    wrong = []
    made.setup_distributed()

    for folder, frozen in [*((folder, False) for folder in folders), (folders[0], True)]:
        section = ModelSection(pretrain=folder)
        whole, empty = (loaded(made, section, way, frozen) for way in (False, True))
        assert whole.keys() == empty.keys() and len(whole) > 30
        wrong += [name for name in whole if whole[name].dtype != empty[name].dtype]
        wrong += [name for name in whole if not torch.equal(whole[name], empty[name])]

    made.close()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("zero3", 2), ("zero3", 4)]
)
def test_every_shard_of_every_rank_is_equal(folder, tied_folder, experts_folder, kind, ranks):
    """The shards are equal on two ranks and on four.

    Transformers makes one tensor of the experts; there are five of them.
    """
    folders = [folder, sharded(folder), tied_folder]
    cases = {}
    for args in [args for number, args in LAYOUTS[kind] if number == ranks]:
        cases[repr(args)] = [*folders, *([] if "tp_size" in args else [experts_folder])], args
    assert run_cases(ranks, both_ways, cases) == {case: [[]] * ranks for case in cases}


def three_steps(folder: str, way: str):
    """Train a model for three steps that was made in one of the ways open to a user."""
    made = strategy()
    with nullcontext() if way == "whole" else made.init_model_context():
        if way == "from_config":
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)

    assert is_empty(model) == (way != "whole")
    optimizer = made.create_optimizer(model, lr=1e-3, weight_decay=0.1)
    model, optimizer = made.prepare((model, optimizer))
    numbers = [one_step(made, model, optimizer, step)[:2] for step in range(3)]

    return numbers, snapshot(made, model)


@pytest.mark.parametrize("tied", [False, True])
def test_training_is_the_same_bit_by_bit(folder, tied_folder, tied):
    source = tied_folder if tied else folder
    results = run_cases(
        2, three_steps, {way: (source, way) for way in ("whole", "from_config", "from_pretrained")}
    )
    whole_numbers, whole_state = results["whole"][0]
    for way in ("from_config", "from_pretrained"):
        numbers, state = results[way][0]
        assert numbers == whole_numbers
        assert all(torch.equal(state[name], whole_state[name]) for name in whole_state)


# -- what a folder can look like


def load_empty(folder: str, scorer: bool):
    made = strategy()
    with made.init_model_context():
        model = (load_scorer if scorer else load_model)(ModelSection(pretrain=folder))
    empty = is_empty(model)
    model = made.prepare(model)

    return (
        empty,
        snapshot(made, model),
        model.generation_config.temperature if model.can_generate() else None,
        model.training,
    )


def save_as(folder: str, target: Path, change, **config) -> str:
    """A copy whose tensors `change` has changed."""
    settings = json.loads((Path(folder) / "config.json").read_text()) | config
    target.mkdir()
    (target / "config.json").write_text(json.dumps(settings))
    tensors = load_file(Path(folder) / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_a_trained_head_is_read_and_not_made(folder, tmp_path):
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(
        tmp_path / "scorer"
    )
    head = load_file(tmp_path / "scorer" / "model.safetensors")["score.weight"]
    for empty, found, *_ in run_ranks(2, load_empty, str(tmp_path / "scorer"), True):
        assert empty and torch.equal(found["score.weight"], head)


def test_settings_of_generation_come_along(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.update(temperature=0.31, do_sample=True)
    model.save_pretrained(tmp_path / "model")
    assert run_ranks(1, load_empty, str(tmp_path / "model"), False)[0][2:] == (0.31, False)


def test_a_name_on_the_hub_is_where_its_files_lie_on_this_machine(folder, tmp_path, monkeypatch):
    """As a download leaves them; offline nothing is asked for."""
    path = tmp_path / "models--me--tiny"
    shutil.copytree(folder, path / "snapshots" / "0123")
    (path / "refs").mkdir()
    (path / "refs" / "main").write_text("0123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    empty, found, *_ = run_ranks(2, load_empty, "me/tiny", False)[0]
    assert empty and all(
        torch.equal(found[name], tensor)
        for name, tensor in load_file(f"{folder}/model.safetensors").items()
    )


def test_pickled_weights_are_read_whole(folder, tmp_path):
    expected = load_file(Path(folder) / "model.safetensors")
    target = Path(save_as(folder, tmp_path / "bin", lambda tensors: None))
    (target / "model.safetensors").unlink()
    torch.save(expected, target / "pytorch_model.bin")
    empty, found, *_ = run_ranks(2, load_empty, str(target), False)[0]
    assert not empty and all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_that_transformers_changes_are_read_in_pieces(folder, tmp_path):
    """The folder was saved from the backbone alone, with a separate head beside it."""

    def without_prefix(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    expected = load_file(Path(folder) / "model.safetensors")
    target = save_as(folder, tmp_path / "backbone", without_prefix)
    empty, found, *_ = run_ranks(2, load_empty, target, False)[0]
    assert empty and all(torch.equal(found[name], expected[name]) for name in expected)


NORM = "model.layers.1.input_layernorm.weight"
WRONG = {
    "missing": (
        lambda tensors: tensors.pop(NORM),
        False,
        f"1 tensors of the model are not in the folder, the first is {NORM}",
    ),
    "unexpected": (
        lambda tensors: tensors.update(extra=torch.ones(3)),
        False,
        "in the folder are not in the model, .* extra",
    ),
    "no head": (
        lambda tensors: tensors.pop("lm_head.weight"),
        False,
        "the first is lm_head.weight",
    ),
    "scorer": (lambda tensors: tensors.pop(NORM), True, f"the first is {NORM}"),
    "shape": (
        lambda tensors: tensors.update({NORM: torch.ones(65)}),
        False,
        r"has shape \(65,\) in the folder, but \(64,\) in the model",
    ),
    "not finite": (
        lambda tensors: tensors[NORM][:1].fill_(torch.nan),
        False,
        (
            rf"rank 0: ValueError: .*not finite/model.safetensors: {NORM} has values that are not"
            r" finite"
        ),
    ),
}


def test_a_folder_that_does_not_fit_is_an_error(folder, tmp_path):
    cases = {
        case: (save_as(folder, tmp_path / case, change), scorer)
        for case, (change, scorer, _) in WRONG.items()
    }
    for case, refusals in run_refusals(2, load_empty, cases).items():
        assert all(re.search(WRONG[case][2], text) for text in refusals), (case, refusals)


def users_model(folder: str, config_of: str):
    made = strategy()
    with made.init_model_context():
        config = AutoConfig.from_pretrained(config_of)
        config._name_or_path = folder
        model = AutoModelForCausalLM.from_config(config)
    made.prepare(model)


def test_a_users_model_that_does_not_fit_is_an_error(folder, tmp_path):
    problems = {
        1: "11 tensors in it are not of the model, the first is model.layers.1.",
        3: "11 tensors of the model are not in it, the first is model.layers.2.",
    }
    for layers in problems:
        config = AutoConfig.from_pretrained(
            folder, num_hidden_layers=layers, layer_types=["full_attention"] * layers
        )
        config.save_pretrained(tmp_path / str(layers))

    refusals = run_refusals(
        2, users_model, {layers: (folder, str(tmp_path / str(layers))) for layers in problems}
    )
    for layers, says in problems.items():
        assert all(
            re.search(f"{folder} could not be loaded: rank 0: ValueError: {says}", text)
            for text in refusals[layers]
        )


def stray(folder: str, inside: bool):
    made = strategy()
    with made.init_model_context():
        module = Actor(load_model(ModelSection(pretrain=folder))) if inside else nn.Linear(2, 2)
        module.add_module("mine", nn.Linear(2, 2))
    made.prepare(module)


@pytest.mark.parametrize(
    "inside, says",
    [
        (
            True,
            (
                "mine.weight is empty and no part of .*Qwen3ForCausalLM: make it outside of"
                " init_model_context"
            ),
        ),
        (
            False,
            (
                "Linear is empty and names no folder to be filled from: make it outside of"
                " init_model_context"
            ),
        ),
    ],
)
def test_what_no_folder_can_fill_is_an_error(folder, inside, says):
    with pytest.raises(RuntimeError, match=says):
        run_ranks(1, stray, folder, inside)


# -- memory


def peak_of_loading(folder: str, args: dict, empty: bool) -> int:
    made = get_strategy(args)
    made.setup_distributed()

    def load():
        with made.init_model_context() if empty else nullcontext():
            model = load_model(ModelSection(pretrain=folder))
        made.prepare(model.requires_grad_(False))

    return peak_of(load)


@pytest.fixture(scope="module")
def larger(folder, tmp_path_factory) -> tuple[str, int]:
    """(folder, bytes) of a model that another process writes.

    Memory that this process had freed would hide some of a peak.
    """
    target = tmp_path_factory.mktemp("larger") / "model"
    return str(target), run_ranks(1, larger_model, folder, target)[0]


@pytest.mark.slow
@pytest.mark.parametrize("args", [{"fsdp": True}, {"zero_stage": 3}])
def test_a_rank_never_holds_the_whole_model(larger, args):
    """bfloat16 in the folder, as models are published, and float32 in training."""
    model, size = larger
    for empty, share in ((True, 0.5), (False, 1.0)):
        found = run_ranks(4, peak_of_loading, model, args, empty)
        print(
            f"{size / 1e6:.0f} MB of parameters, empty {empty}:"
            f" {[round(peak / 1e6) for peak in found]} MB"
        )
        assert all(peak < share * size if empty else peak > share * size for peak in found)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[str, tuple[int, int]]:
    """(folder, (bytes of the model, bytes of a layer))."""
    target = tmp_path_factory.mktemp("mixture") / "model"
    return str(target), run_ranks(1, larger_mixture, target)[0]


@pytest.mark.slow
@pytest.mark.parametrize("args", [{"fsdp": True}, {"zero_stage": 3}])
def test_a_rank_holds_its_shard_of_a_mixture_and_one_layer(mixture, args):
    """The published folder has a tensor for each expert, and transformers makes one for each layer.

    Rank 0 reads all of them for ZeRO.
    """
    model, (size, layer) = mixture
    found = run_ranks(4, peak_of_loading, model, args, True)
    print(
        f"{size / 1e6:.0f} MB of parameters, {layer / 1e6:.0f} MB a layer:"
        f" {[round(peak / 1e6) for peak in found]} MB"
    )
    # Two layers at once would be half a layer above, and pages of other things are a small share.
    assert all(peak < size / 4 + 1.5 * layer for peak in found)
