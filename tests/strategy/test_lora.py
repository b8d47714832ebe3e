"""LoRA under every strategy: the steps of plain peft, engines and folders with merged weights,
checkpoints without the base.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from lightrft.config import ModelSection
from lightrft.core.batch import Batch
from lightrft.engine.hf import _add_adapters
from lightrft.models.empty import is_empty
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.lora import adapted_layers, adapter_shapes, freeze_parameters, is_adapter
from lightrft.models.peft import AdaptedLinear
from lightrft.models.weight_sync.adapters import Adapters
from lightrft.models.weight_sync.stream import unwrap
from lightrft.strategy import FSDPStrategy
from ranks import run_cases, run_ranks
from strategy.lora_course import (
    LORA,
    NUM_STEPS,
    PROMPTS,
    RATE,
    disturb,
    logprobs_of,
    names_in,
    plain_course,
    plain_steps,
    prepared,
    said,
    strategy,
    strategy_course,
    take_step,
)
from strategy.training import distance, load, snapshot
from strategy.user_strategies import DataParallelStrategy

LAYOUTS = {
    "fsdp-1": (1, {"fsdp": True}),
    "fsdp-2": (2, {"fsdp": True}),
    "tp-2": (2, {"fsdp": True, "tp_size": 2}),
    "tp-4": (4, {"fsdp": True, "tp_size": 2}),
    "zero0-2": (2, {"zero_stage": 0}),
    "zero1-2": (2, {"zero_stage": 1}),
    "zero3-2": (2, {"zero_stage": 3}),
}
PARAMS = [
    name if name == "fsdp-1" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS
]


@pytest.fixture(scope="module")
def expected(folder):
    return plain_course(folder)


@pytest.fixture(scope="module", params=PARAMS)
def course(request, folder, tmp_path_factory):
    """(results of every rank, the folder that they wrote to)."""
    world_size, args = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(request.param)
    return run_ranks(world_size, strategy_course, folder, args, out), out


def test_three_steps_are_those_of_peft(course, expected):
    losses, norms, merged = expected
    for found in course[0]:
        assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=0)
        assert_close(torch.tensor(found["norms"]), torch.tensor(norms), rtol=1e-5, atol=0)
        assert distance(found["merged"], merged) < 1e-5


def test_what_has_no_adapter_is_untouched(course, folder):
    base = dict(load(folder).named_parameters())
    merged = course[0][0]["merged"]
    same = {name for name in base if torch.equal(base[name], merged[name])}
    assert {
        name
        for name in base
        if not name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))
    } == same


def test_the_engine_has_the_merged_weights(course):
    results, out = course
    before, after = results[0]["said"]
    model = load(str(out / "model"))
    for prompt, (ids, logprobs) in zip(PROMPTS, after, strict=True):
        assert logprobs == pytest.approx(logprobs_of(model, prompt, ids), abs=1e-5)
    changes = [abs(old[0] - new[0]) for (_, old), (_, new) in zip(before, after, strict=True)]
    assert max(changes) > 1e-2


def test_both_exports_compute_the_same(course, folder):
    _, out = course
    ids = torch.arange(5, 25)[None]
    merged = load(str(out / "model"))
    adapter = PeftModel.from_pretrained(load(folder), out / "adapter")
    with torch.no_grad():
        assert_close(merged(ids).logits, adapter(ids).logits, rtol=1e-5, atol=1e-5)
        assert (merged(ids).logits - load(folder)(ids).logits).abs().max() > 1e-2


def test_a_checkpoint_holds_adapters_alone(course):
    names = names_in(course[1] / "checkpoints" / "three")
    tensors = {name for name in names if ".model." in name or ".optimizer.state." in name}
    assert tensors and all(".lora_A." in name or ".lora_B." in name for name in tensors)
    assert any(name.startswith("model.optimizer.state.") for name in tensors)


def test_training_goes_on_bit_by_bit(course):
    for found in course[0]:
        assert all(
            torch.equal(found["loaded"][name], tensor) for name, tensor in found["merged"].items()
        )
        assert all(
            torch.equal(found["resumed"][name], tensor)
            for name, tensor in found["uninterrupted"].items()
        )
    assert distance(course[0][0]["resumed"], course[0][0]["loaded"]) > 1e-4


# -- layers that are not trained, without adapters


FROZEN = ["model.embed_tokens", "model.layers.0."]


def frozen_prefix(folder: str, args: dict, out: Path) -> dict:
    made = strategy(**args)
    optimizers = []
    models = []
    for _ in range(2):
        model = freeze_parameters(
            load(folder), ModelSection(pretrain=folder, freeze_prefix=FROZEN)
        ).train()
        optimizer = made.create_optimizer(model, RATE, weight_decay=0.1)
        made.prepare((model, optimizer))
        models.append(model)
        optimizers.append(optimizer)

    for step in range(NUM_STEPS):
        take_step(made, models[0], optimizers[0], step)
    made.save_ckpt(models[0], out, "three")
    learned = snapshot(made, models[0])
    made.load_ckpt(models[1], out)
    for model, optimizer in zip(models, optimizers, strict=True):
        take_step(made, model, optimizer, NUM_STEPS)
    result = {"learned": learned, "went on": [snapshot(made, model) for model in models]}
    made.close()

    return result


@pytest.mark.parametrize(
    "layout",
    ["fsdp-2", *(pytest.param(f"zero{stage}-2", marks=pytest.mark.slow) for stage in (1, 3))],
)
def test_a_frozen_prefix_is_neither_trained_nor_saved(tied_folder, layout, tmp_path):
    """Tied embeddings have two names in the model and none in the checkpoint."""
    world_size, args = LAYOUTS[layout]
    base = load(tied_folder)
    for parameter in (p for name, p in base.named_parameters() if name.startswith(tuple(FROZEN))):
        parameter.requires_grad_(False)
    before = {name: p.clone() for name, p in base.named_parameters()}

    after = plain_steps(base)
    frozen = {name for name in before if name.startswith(tuple(FROZEN))}
    for found in run_ranks(world_size, frozen_prefix, tied_folder, args, tmp_path / "checkpoints"):
        assert distance(found["learned"], after) < 1e-5
        assert {
            name for name in before if torch.equal(found["learned"][name], before[name])
        } == frozen
        first, second = found["went on"]
        assert all(torch.equal(first[name], second[name]) for name in first)

    names = {
        name.removeprefix("model.model.")
        for name in names_in(tmp_path / "checkpoints" / "three")
        if name.startswith("model.model.")
    }
    assert names == before.keys() - frozen


# -- loading, dropout, dtypes


def adapted_actor(made, folder: str, *, empty: bool, **settings) -> Actor:
    section = ModelSection(pretrain=folder, lora_rank=4, **settings)
    torch.manual_seed(3)
    with made.init_model_context() if empty else nullcontext():
        actor = Actor(freeze_parameters(load_model(section), section))
    assert is_empty(actor) is empty
    return actor


def loaded_twice(folder: str, args: dict) -> dict:
    """Load into a model that was empty and into one that was not.

    Return the shards on this rank, and what both compute with dropout.
    """
    made = strategy(**args)
    actors = [adapted_actor(made, folder, empty=empty, lora_dropout=0.5) for empty in (True, False)]
    shards = []
    answers = []
    batch = Batch(
        lengths=torch.tensor([9]),
        input_ids=torch.arange(9),
        loss_mask=torch.arange(9) > 0,
        rows=torch.tensor([0]),
    )

    for actor in actors:
        disturb(actor)
        made.prepare((actor, made.create_optimizer(actor, RATE)))
        shards.append(
            {
                name: getattr(p, "_local_tensor", p).detach().clone()
                for name, p in actor.named_parameters()
            }
        )
        torch.manual_seed(4)
        answers.append([actor.train(mode)(batch, 1.0)[0].detach() for mode in (True, False)])

    made.close()
    return {"shards": shards, "answers": answers}


@pytest.mark.parametrize("args", [{}, {"bf16": True}], ids=str)
def test_an_empty_model_is_filled_as_one_that_was_read_whole(folder, args):
    ranks = run_ranks(2, loaded_twice, folder, {"fsdp": True, **args})
    for found in ranks:
        empty, whole = found["shards"]
        assert empty.keys() == whole.keys() and all(
            torch.equal(empty[name], whole[name]) for name in empty
        )
        frozen = torch.bfloat16 if args else torch.float32
        assert {shard.dtype for name, shard in empty.items() if is_adapter(name)} == {torch.float32}
        assert {shard.dtype for name, shard in empty.items() if not is_adapter(name)} == {frozen}
        assert all(torch.equal(a, b) for a, b in zip(*found["answers"], strict=True))

    (training, asking), (other_training, other_asking) = (found["answers"][0] for found in ranks)
    assert torch.equal(asking, other_asking) and not torch.equal(training, other_training)
    assert not torch.equal(training, asking)


def test_dropout_of_adapters_is_refused_with_tensor_parallelism():
    with pytest.raises(ValueError, match="--lora_dropout 0.1 needs --tp_size 1"):
        strategy(fsdp=True, lora_rank=4, lora_dropout=0.1, tp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("args", [{"fsdp": True}, {"zero_stage": 2}, {"zero_stage": 3}], ids=str)
def test_adapters_are_float32_in_a_bfloat16_run(folder, expected, args, tmp_path):
    """Trained, saved and resumed so; a bfloat16 number has 16 bits that are 0."""
    for found in run_ranks(2, strategy_course, folder, {"bf16": True, **args}, tmp_path):
        assert_close(torch.tensor(found["losses"]), torch.tensor(expected[0]), rtol=1e-2, atol=0)
        assert_close(torch.tensor(found["norms"]), torch.tensor(expected[1]), rtol=5e-2, atol=0)
        assert all(
            torch.equal(found["loaded"][name], tensor) for name, tensor in found["merged"].items()
        )
        assert all(
            torch.equal(found["resumed"][name], tensor)
            for name, tensor in found["uninterrupted"].items()
        )

    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modes = {file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1, "weights are as readable as the files beside them"
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in adapter.values())


BATCH = Batch(
    lengths=torch.tensor([9]),
    input_ids=torch.arange(9),
    loss_mask=torch.arange(9) > 0,
    rows=torch.tensor([0]),
)


def engine_differs(folder: str, args: dict) -> float:
    """Return how far the actor is from a plain bfloat16 model with the engine's weights."""
    made = strategy(bf16=True, **args)
    actor = adapted_actor(made, folder, empty=False)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter.bernoulli_(0.5).sub_(0.5).mul_(2e-4)
    made.prepare((actor, made.create_optimizer(actor, RATE)))
    plain = Actor(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    base = plain(BATCH, 1.0)[0].detach()
    weights = {name: tensor.cpu().clone() for name, tensor in made.full_params(actor)}
    missing = plain.language_model.load_state_dict(weights, strict=False).unexpected_keys
    assert not missing
    streamed = plain(BATCH, 1.0)[0].detach()
    trained = actor(BATCH, 1.0)[0].detach()
    made.close()
    assert (streamed - base).abs().max() > 1e-3, "the adapter has an effect"
    return (trained - streamed).abs().max().item()


@pytest.mark.slow
def test_a_bfloat16_actor_is_the_model_that_its_engine_gets(folder):
    layouts = ({"fsdp": True}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3})
    found = run_cases(2, engine_differs, {str(args): (folder, args) for args in layouts})
    assert {case: max(ranks) for case, ranks in found.items()} == dict.fromkeys(found, 0.0)


def engine_with_adapters_differs(folder: str, args: dict) -> float:
    """Return how far the actor is from a plain bfloat16 model with the adapters that are sent."""
    made = strategy(bf16=True, **args)
    made.adapters_apart = True
    actor = adapted_actor(made, folder, empty=False, lora_alpha=12.0)
    disturb(actor)
    made.prepare((actor, made.create_optimizer(actor, RATE)))
    plain = Actor(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    base = plain(BATCH, 1.0)[0].detach()
    held = _add_adapters(plain.language_model, Adapters(adapter_shapes(unwrap(actor))))
    alone = dict(made.adapter_params(actor, base=False))
    assert alone.keys() == held.keys()
    whole = dict(made.adapter_params(actor, base=True))
    assert whole.keys() == alone.keys() | dict(made.full_params(actor)).keys()
    for name, tensor in alone.items():
        held[name].copy_(tensor)

    beside = plain(BATCH, 1.0)[0].detach()
    trained = actor(BATCH, 1.0)[0].detach()
    made.close()
    assert (beside - base).abs().max() > 1e-2, "the adapter has an effect"
    return (trained - beside).abs().max().item()


@pytest.mark.slow
def test_a_bfloat16_actor_adds_the_adapters_that_its_engine_gets(folder):
    layouts = ({"fsdp": True}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3})
    cases = {str(args): (folder, args) for args in layouts}
    found = run_cases(2, engine_with_adapters_differs, cases)
    assert {case: max(ranks) for case, ranks in found.items()} == dict.fromkeys(found, 0.0)


class UserStream(FSDPStrategy):
    """FSDP2 that changes what engines get."""

    def full_params(self, model, dtype=None):
        for name, tensor in super().full_params(model, dtype):
            yield name, tensor * (1.5 if name == "model.norm.weight" else 1)


def said_by_users(folder: str) -> tuple[set[str], bool, bool]:
    """Return what such strategies give an engine: names of adapters, and whether it holds them."""
    held = []
    for kind in (DataParallelStrategy, UserStream):
        options = {"pretrain": folder, "engine_type": "hf", "prompt_max_len": 8, **LORA}
        made = kind(args={**options, "generate_max_len": 8})
        made.setup_distributed()
        model, _ = prepared(made, folder)
        if kind is DataParallelStrategy:
            names = {name for name, _ in made.adapter_params(model, base=False)}
        engine = made.setup_inference_engine(actor=model)
        said(made, model)
        held.append(engine.adapters is not None)
        made.close()
    return names, *held


def test_strategies_of_users_decide_what_the_engine_gets(folder):
    ((names, plain, changed),) = run_ranks(1, said_by_users, folder)
    assert len(names) == 2 * 3 * 2 and plain and not changed


def adapted_by_users(folder: str) -> bool:
    """Return whether a model to which peft itself has added adapters computes as lightrft does."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model)
    made = DataParallelStrategy(args={"pretrain": folder})
    made.setup_distributed()
    made.make_ready(Actor(model))
    made.close()
    return all(isinstance(layer, AdaptedLinear) for layer in adapted_layers(model).values())


def test_a_prepared_model_of_peft_has_the_layers_of_lightrft(folder):
    assert run_ranks(1, adapted_by_users, folder) == [True]


def loaded_elsewhere(folder: str, args: dict, root: Path) -> dict[str, torch.Tensor]:
    made = strategy(**LORA, **args)
    model, optimizer = prepared(made, folder, seed=99)
    made.load_ckpt(model, root, "three", optimizer=optimizer)
    take_step(made, model, optimizer, NUM_STEPS)
    found = snapshot(made, model)
    made.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("course", ["fsdp-2"], indirect=True)
def test_another_strategy_goes_on_from_a_checkpoint(course, folder):
    written, out = course
    for other in ("fsdp-1", "zero1-2", "zero3-2"):
        world_size, args = LAYOUTS[other]
        for found in run_ranks(world_size, loaded_elsewhere, folder, args, out / "checkpoints"):
            assert distance(found, written[0]["uninterrupted"]) < 1e-5
