"""Adapters on a base in four bits: the steps of plain peft on the dequantized model, and the bytes
that ranks hold, gather and send.
"""

import json
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from transformers import AutoConfig, PretrainedConfig

from lightrft.config import ModelSection
from lightrft.config.errors import ConfigError
from lightrft.core.batch import Batch
from lightrft.models.four_bits.linear import QuantizedLinear, matrix_shape, quantize_layers
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.lora import freeze_parameters, is_adapter
from memory import larger_model, peak_of
from ranks import run_cases, run_ranks
from strategy.lora_course import (
    LORA,
    PROMPTS,
    RATE,
    disturb,
    logprobs_of,
    names_in,
    plain_course,
    prepared,
    strategy,
    strategy_course,
    take_step,
)
from strategy.training import distance, load
from tiny import tiny_experts, tiny_hybrid

pytest.importorskip("bitsandbytes")

NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
)
"""Quantiles of a normal distribution: Dettmers et al. 2023, arXiv:2305.14314, appendix E."""
LAYOUTS = {
    "fsdp-1": (1, {"fsdp": True}),
    "fsdp-2": (2, {"fsdp": True, "gradient_checkpointing": True}),
    "replicas-2": (2, {"fsdp": True, "dp_replicate": 2, "lora_sync": "merged"}),
}


@pytest.fixture(scope="module")
def dense_folder(folder, tmp_path_factory) -> str:
    """The model of `folder` with the matrices that bitsandbytes makes of it in four bits."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = load(folder)
    with torch.no_grad():
        for layer in model.model.layers.modules():
            if isinstance(layer, nn.Linear):
                packed, state = quantize_4bit(
                    layer.weight, compress_statistics=True, quant_type="nf4"
                )
                layer.weight.copy_(dequantize_4bit(packed, state))
    dense = tmp_path_factory.mktemp("dense")
    model.save_pretrained(dense)
    return str(dense)


# -- one layer


def quantized(layer: nn.Linear, dtype: torch.dtype = torch.float32) -> QuantizedLinear:
    """Return the layer in four bits, quantized as part of a model."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def get_decoder(self) -> nn.Module:
            return self

    quantize_layers(Decoder(), dtype)
    return layer


def test_codes_are_the_nearest_of_16_numbers():
    matrix = torch.randn(24, 192, generator=torch.Generator().manual_seed(1))
    layer = nn.Linear(192, 24, bias=False)
    layer.weight.data.copy_(matrix)
    packed = quantized(layer).weight
    assert packed.dtype == torch.uint8 and matrix_shape(packed.shape) == matrix.shape

    blocks = matrix.view(24, -1, 64)
    relative = blocks / blocks.abs().amax(-1, keepdim=True)
    nearest = (relative[..., None] - NF4).abs().argmin(-1).view(24, -1)
    high, low = packed[:, :96] >> 4, packed[:, :96] & 15
    assert torch.equal(torch.stack([high, low], dim=-1).view(24, -1).long(), nearest)

    # A scale has 8 bits itself, and a number is off by half the distance of its neighbours.
    error = (layer.matrix(packed) - matrix).norm() / matrix.norm()
    assert 0.08 < error < 0.11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_computes_as_a_plain_one_with_the_dequantized_matrix(dtype):
    torch.manual_seed(2)
    layer = quantized(nn.Linear(192, 320).to(dtype), dtype)
    plain = nn.Linear(192, 320, dtype=dtype)
    plain.load_state_dict({"weight": layer.matrix(layer.weight), "bias": layer.bias})
    inputs = [torch.randn(5, 7, 192).to(dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    outputs = [each(x) for each, x in zip((layer, plain), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs) and torch.equal(inputs[0].grad, inputs[1].grad)
    assert layer.weight.grad is None and layer.bias.grad is None


def test_a_cast_of_the_model_changes_nothing():
    layer = quantized(nn.Linear(128, 64))
    before = layer.matrix(layer.weight)
    layer.bfloat16()
    assert torch.equal(layer.matrix(layer.weight), before)


def test_layers_that_cannot_be_quantized_are_named(tmp_path):
    with pytest.raises(ConfigError, match="layer has 96 inputs, which is not a multiple of 64"):
        quantized(nn.Linear(96, 64))
    section = ModelSection(pretrain=tiny_experts(tmp_path / "experts"), **LORA, load_in_4bit=True)
    with pytest.raises(ConfigError, match="linear layers only, and .*experts"):
        freeze_parameters(load_model(section), section)


REFUSED = {
    "--load_in_4bit needs --lora_rank": {"lora_rank": 0},
    "--load_in_4bit needs --tp_size 1": {"tp_size": 2},
    "--load_in_4bit needs --fsdp": {"fsdp": False, "zero_stage": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(folder, message):
    flags = {"fsdp": True, "pretrain": folder, "lora_rank": 4, "load_in_4bit": True}
    with pytest.raises(ConfigError, match=message):
        strategy(**flags | REFUSED[message])


@pytest.mark.parametrize(
    ("written", "found"),
    [(tiny_experts, "support experts"), (tiny_hybrid, "support layers of type linear_attention")],
    ids=["experts", "hybrid"],
)
def test_models_with_other_layers_are_refused_before_they_are_loaded(tmp_path, written, found):
    with pytest.raises(ConfigError, match=found):
        strategy(fsdp=True, pretrain=written(tmp_path), lora_rank=4, load_in_4bit=True)


def test_a_folder_that_is_quantized_already_is_refused_by_name(folder, tmp_path):
    copytree(folder, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for load_in_4bit in (False, True):
        section = ModelSection(pretrain=str(tmp_path / "model"), load_in_4bit=load_in_4bit)
        with pytest.raises(ValueError, match="quantized .bitsandbytes.*--load_in_4bit"):
            load_model(section)


# -- training under a strategy


@pytest.fixture(scope="module")
def expected(dense_folder):
    return plain_course(dense_folder)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def course(request, folder, tmp_path_factory):
    """(results of every rank, the folder that they wrote to)."""
    world_size, args = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(request.param)
    return run_ranks(world_size, strategy_course, folder, args | {"load_in_4bit": True}, out), out


def test_three_steps_are_those_of_peft_on_the_dequantized_model(course, expected):
    losses, norms, merged = expected
    for found in course[0]:
        assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=0)
        assert_close(torch.tensor(found["norms"]), torch.tensor(norms), rtol=1e-5, atol=0)
        assert distance(found["merged"], merged) < 1e-5


def test_the_engine_and_the_saved_model_have_the_dequantized_matrices(course, dense_folder):
    results, out = course
    before, after = results[0]["said"]
    for name, said in ((dense_folder, before), (str(out / "model"), after)):
        model = load(name)
        for prompt, (ids, logprobs) in zip(PROMPTS, said, strict=True):
            assert logprobs == pytest.approx(logprobs_of(model, prompt, ids), abs=1e-5)

    base = load_file(f"{dense_folder}/model.safetensors")
    saved = load_file(out / "model" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], saved[name])}
    adapted = ("q_proj.weight", "v_proj.weight", "down_proj.weight")
    assert changed == {name for name in base if name.endswith(adapted)}


def test_a_checkpoint_holds_adapters_alone_and_training_goes_on_bit_by_bit(course):
    results, out = course
    names = names_in(out / "checkpoints" / "three")
    tensors = {name for name in names if ".model." in name or ".optimizer.state." in name}
    assert tensors and all(".lora_A." in name or ".lora_B." in name for name in tensors)
    for found in results:
        for one, other in (("loaded", "merged"), ("resumed", "uninterrupted")):
            assert all(torch.equal(found[one][name], found[other][name]) for name in found[one])


# -- what ranks hold


BATCH = Batch(
    lengths=torch.tensor([9]),
    input_ids=torch.arange(9),
    loss_mask=torch.arange(9) > 0,
    rows=torch.tensor([0]),
)


def held(folder: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank holds of models that were empty and that were read whole.

    Also return what they compute, and what is left of the base after 20 steps.
    """
    made = strategy(lora_rank=4, load_in_4bit=True, **args)
    section = ModelSection(pretrain=folder, load_in_4bit=True, bf16=args.get("bf16", False), **LORA)
    shards = []
    answers = []
    for is_empty in (True, False):
        torch.manual_seed(3)
        with made.init_model_context(None if is_empty else "cpu"):
            actor = Actor(freeze_parameters(load_model(section), section))
        disturb(actor)
        made.prepare((actor, made.create_optimizer(actor, RATE)))
        shards.append(local_shards(actor))
        answers.append(actor(BATCH, 1.0)[0].detach())

    gathered = []
    layer = actor.language_model.model.layers[0].self_attn.o_proj
    assert isinstance(layer, QuantizedLinear)
    layer.register_forward_pre_hook(lambda layer, _: gathered.append(layer.weight.detach()))
    dense = {name: tensor.clone() for name, tensor in made.adapter_params(actor, base=True)}
    actor(BATCH, 1.0)
    model, optimizer = prepared(made, folder, load_in_4bit=True, bf16=args.get("bf16", False))
    before = local_shards(model)
    for step in range(20):
        take_step(made, model, optimizer, step % 3)
    after = local_shards(model)
    made.close()

    return {
        "shards": shards,
        "answers": answers,
        "gathered": (gathered[0].dtype, tuple(gathered[0].shape)),
        "shape": (layer.out_features, layer.in_features),
        "dense": dense,
        "trained": (before, after),
    }


def local_shards(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in named
    }


@pytest.fixture(scope="module")
def on_two_ranks(folder) -> dict[str, list[dict[str, Any]]]:
    cases = {str(args): (folder, {"fsdp": True, **args}) for args in ({}, {"bf16": True})}
    return run_cases(2, held, cases)


def test_ranks_hold_and_gather_bytes(on_two_ranks, folder):
    base = {name: tensor for name, tensor in load(folder).named_parameters()}
    for results in on_two_ranks.values():
        for found in results:
            empty, whole = found["shards"]
            assert empty.keys() == whole.keys()
            assert all(torch.equal(empty[name], whole[name]) for name in empty)
            assert torch.equal(*found["answers"])
            packed = {name: shard for name, shard in empty.items() if shard.dtype == torch.uint8}
            of_layers = [name for name in packed if name.endswith("weight")]
            assert len(of_layers) == 2 * 7
            rows, columns = found["shape"]
            assert found["gathered"] == (torch.uint8, (rows, columns * 33 // 64))
        half = sum(shard.numel() for name, shard in packed.items() if name in of_layers)
        elements = sum(p.numel() for name, p in base.items() if "_proj" in name)
        assert half * 2 == elements * 33 // 64


@pytest.mark.slow
def test_a_plan_has_the_bytes_that_a_rank_holds(on_two_ranks, folder):
    options = {"fsdp": True, "bf16": True, "load_in_4bit": True, **LORA}
    (planned,) = run_ranks(1, planned_bytes, AutoConfig.from_pretrained(folder), options)
    (results,) = [results for args, results in on_two_ranks.items() if "bf16" in args]
    shards, _ = results[0]["shards"]
    held = sum(shard.nbytes for name, shard in shards.items() if name.endswith("weight"))
    assert planned == pytest.approx(held, rel=0.01)


def planned_bytes(config: PretrainedConfig, options: dict[str, Any]) -> float:
    if dist.is_initialized():
        dist.destroy_process_group()
    step_memory = pytest.importorskip("lightrft.extras.tools.step_memory")
    return step_memory.step_bytes(config, options, world=2, tokens=64).parameters


def test_the_base_is_untouched_after_20_steps(on_two_ranks):
    for results in on_two_ranks.values():
        for found in results:
            before, after = found["trained"]
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            assert changed == {name for name in before if is_adapter(name)}


def test_the_engine_gets_the_matrices_that_the_trainer_computes_with(on_two_ranks, dense_folder):
    base = load_file(f"{dense_folder}/model.safetensors")
    for args, results in on_two_ranks.items():
        dtype = torch.bfloat16 if "bf16" in args else torch.float32
        for found in results:
            assert base.keys() == {name for name in found["dense"] if "lora" not in name}
            assert all(torch.equal(found["dense"][name], base[name].to(dtype)) for name in base)


# -- memory


def peak_of_loading(tiny: str, larger: str, load_in_4bit: bool) -> int:
    made = strategy(fsdp=True, bf16=True, lora_rank=4, load_in_4bit=load_in_4bit)

    def load_adapted(folder: str):
        section = ModelSection(pretrain=folder, bf16=True, load_in_4bit=load_in_4bit, **LORA)
        with made.init_model_context():
            actor = Actor(freeze_parameters(load_model(section), section))
        made.prepare((actor, made.create_optimizer(actor, RATE)))

    load_adapted(tiny)  # the first model imports libraries
    return peak_of(lambda: load_adapted(larger))


@pytest.mark.slow
def test_a_rank_holds_its_shard_of_the_bytes_and_one_matrix(folder, tmp_path):
    """The folder is in bfloat16, and a matrix has 4 MB in float32."""
    size = run_ranks(1, larger_model, folder, tmp_path / "model")[0]
    peaks = {
        bits: run_ranks(2, peak_of_loading, folder, str(tmp_path / "model"), bits)
        for bits in (True, False)
    }
    print(f"{size / 1e6:.0f} MB in float32:", peaks)
    assert max(peaks[True]) < 0.2 * size < min(peaks[False])
