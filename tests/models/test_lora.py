"""Adapters: where they go, what merging makes of a weight stream, and what is refused."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightrft.config import ConfigError, ModelSection
from lightrft.core.batch import Batch
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import load_model, load_scorer
from lightrft.models.lora import (
    adapted_layers,
    adapter_shapes,
    adapters_off,
    adopt_layers,
    base_model_of_adapter,
    freeze_parameters,
    is_adapter,
    is_adapter_folder,
    merge_adapter,
    merge_adapters,
    split_adapters,
)
from lightrft.models.parallel.recompute import recompute
from lightrft.models.peft import merge
from lightrft.models.weight_sync.adapters import Adapters, names_of
from tiny import tiny_model

LAYERS = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"), tie=True)


def load(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder: str, **settings):
    """Return a model with adapters whose B looks as if it were trained."""
    torch.manual_seed(0)
    model = freeze_parameters(
        load(folder), ModelSection(pretrain=folder, **{"lora_rank": 4} | settings)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def whole(model) -> dict[str, torch.Tensor]:
    return dict(
        merge_adapters(
            model, ((name, parameter.detach()) for name, parameter in model.named_parameters())
        )
    )


def test_by_default_every_linear_layer_but_the_head_has_an_adapter(folder):
    model = adapted(folder)
    assert set(adapted_layers(model)) == {
        f"model.layers.{n}.{layer}" for n in (0, 1) for layer in LAYERS
    }
    assert all(
        parameter.requires_grad == is_adapter(name) for name, parameter in model.named_parameters()
    )


def test_a_new_adapter_changes_nothing_and_begins_equally_each_time(folder):
    section = ModelSection(pretrain=folder, lora_rank=4)
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(freeze_parameters(load(folder), section))
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(models[0](IDS).logits, load(folder)(IDS).logits)
    assert all(tensor.abs().max() > 0 for name, tensor in first.items() if "lora_A" in name)


def test_adapters_begin_as_peft_s_own(folder):
    for init in ("kaiming", "gaussian"):
        torch.manual_seed(7)
        section = ModelSection(lora_rank=4, lora_alpha=6, rslora=True, lora_init=init)
        ours = freeze_parameters(load(folder), section)
        assert {layer.scaling["default"] for layer in adapted_layers(ours).values()} == {3.0}
        torch.manual_seed(7)
        config = LoraConfig(
            r=4,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            init_lora_weights=init if init == "gaussian" else True,
        )
        theirs = inject_adapter_in_model(config, load(folder), low_cpu_mem_usage=True)
        for layer in adapted_layers(theirs).values():
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", config.init_lora_weights)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=str)
def test_the_merged_stream_is_what_peft_merges(folder, options):
    """The reference is peft's own model; names, order and shapes have no adapters."""
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", **options
    )
    ours = inject_adapter_in_model(config, load(folder))
    theirs = get_peft_model(load(folder), config)
    torch.manual_seed(1)

    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.1)

    theirs.load_state_dict(
        {f"base_model.model.{name}": value for name, value in ours.state_dict().items()}
    )
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    found = whole(ours)
    expected = dict(theirs.merge_and_unload().named_parameters())
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    assert all(torch.equal(before[name], parameter) for name, parameter in ours.named_parameters())


def test_merged_bfloat16_is_a_neighbour_of_the_float32_product(folder):
    model = adapted(folder)
    stream = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    found = dict(merge_adapters(model, stream.items()))
    layer = "model.layers.0.mlp.down_proj"
    base, a, b = (
        stream[f"{layer}.{matrix}.weight"].double()
        for matrix in ("base_layer", "lora_A.default", "lora_B.default")
    )
    merged = found[f"{layer}.weight"]
    exact = base + 4.0 * b @ a
    assert merged.dtype == torch.bfloat16
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-7).all()


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_merging_in_bfloat16_keeps_an_adapter_of_any_size_on_average(size):
    """Rounding to the nearest loses 99 % of the smallest; the error of a mean has a known size."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(512, 1024, generator=generator) * 0.02).bfloat16()
    a = torch.rand(4, 1024, generator=generator).bfloat16()
    b = torch.full((512, 4), size).bfloat16()
    exact = 2.0 * b.double() @ a.double()
    error = merge(weight, a, b, 2.0).double() - weight.double() - exact

    assert abs(error.mean()) < 5 * error.std() / error.numel() ** 0.5
    for axis in (0, 1):
        outputs = error.mean(axis)
        assert outputs.std() < 2 * error.std() / error.shape[axis] ** 0.5, (
            "rows or columns that err together"
        )
    assert torch.equal(merge(weight, a, 0 * b, 2.0), weight)
    assert torch.equal(merge(weight, a, b, 2.0), merge(weight, a, b, 2.0))


@pytest.mark.parametrize("bias", [False, True])
def test_a_bfloat16_layer_computes_with_the_merged_matrix(bias):
    """Gradients are taken as if the product were not rounded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32, bias=bias))
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["0"]), model)
    (layer,) = adopt_layers(model.bfloat16())
    base = layer.get_base_layer()
    a = layer.lora_A["default"].weight
    b = layer.lora_B["default"].weight
    with torch.no_grad():
        b.normal_(std=1e-3)
    x = torch.randn(3, 5, 48).bfloat16().requires_grad_()
    upstream = torch.randn(3, 5, 32).bfloat16()

    y = model(x)
    y.backward(upstream)
    merged = merge(base.weight, a.detach(), b.detach(), 2.0).double()
    offset = base.bias.double() if bias else 0.0
    assert_close(y.double(), x.double() @ merged.T + offset, rtol=2**-7, atol=2**-7)

    flat = x.detach().double().flatten(0, 1)
    grad = upstream.double().flatten(0, 1)
    assert_close(x.grad.double().flatten(0, 1), grad @ merged, rtol=2e-2, atol=2e-2)
    assert_close(b.grad.double(), 2.0 * grad.T @ flat @ a.double().T, rtol=2e-2, atol=2e-2)
    assert_close(a.grad.double(), 2.0 * b.double().T @ grad.T @ flat, rtol=2e-2, atol=2e-4)
    assert base.weight.grad is None


def test_a_stream_without_adapters_stays_itself(folder):
    model = load(folder)
    found = whole(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(
        found[name].data_ptr() == parameter.data_ptr()
        for name, parameter in model.named_parameters()
    )


def test_a_bias_keeps_its_name(folder):
    """Why: it comes between the matrix and the factors that are merged into it."""
    model = adapted(folder)
    name, layer = next(iter(adapted_layers(model).items()))
    base, a, b = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
    bias = torch.randn(4)
    stream = [
        (f"{name}.base_layer.weight", base),
        (f"{name}.base_layer.bias", bias),
        (f"{name}.lora_A.default.weight", a),
        (f"{name}.lora_B.default.weight", b),
        ("y.weight", base),
    ]
    merged = dict(merge_adapters(model, stream))
    assert list(merged) == [f"{name}.bias", f"{name}.weight", "y.weight"]
    assert merged[f"{name}.bias"] is bias and merged["y.weight"] is base
    torch.testing.assert_close(merged[f"{name}.weight"], base + layer.scaling["default"] * b @ a)


def test_switched_off_the_model_is_its_base(folder):
    model = adapted(folder)
    on = model(IDS).logits
    base = load(folder)(IDS).logits
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, base)
    assert torch.equal(model(IDS).logits, on) and not torch.equal(on, base)
    assert all(
        parameter.requires_grad == is_adapter(name) for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_training_alone(folder, dtype):
    model = adapted(folder, lora_dropout=0.5).to(dtype)
    plain = adapted(folder).to(dtype)
    assert torch.equal(model.eval()(IDS).logits, plain.eval()(IDS).logits)
    model.train()
    torch.manual_seed(0)
    first = model(IDS).logits
    second = model(IDS).logits
    torch.manual_seed(0)
    assert torch.equal(model(IDS).logits, first) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
def test_recomputation_gives_adapters_the_same_gradients(folder, policy, dtype):
    """Embeddings are frozen, so the inputs of the first block need no gradient."""
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        section = ModelSection(pretrain=folder, lora_rank=4, lora_dropout=0.3)
        actor = Actor(freeze_parameters(load_model(section), section)).train().to(dtype)
        if recomputed:
            recompute(actor, policy)
        mask = torch.arange(12) % 7 > 0
        rows = torch.tensor([0, 1])
        batch = Batch(lengths=torch.tensor([7, 5]), input_ids=IDS[0], loss_mask=mask, rows=rows)
        torch.manual_seed(1)
        actor(batch, 1.0)[0].sum().backward()
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in actor.named_parameters()
                if parameter.requires_grad
            }
        )

    assert all(tensor is not None and tensor.isfinite().all() for tensor in gradients[0].values())
    assert all(gradients[0][name].abs().max() > 0 for name in gradients[0] if "lora_B" in name)
    for name, tensor in gradients[0].items():
        assert_close(gradients[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_a_scorer_trains_its_head_too(folder):
    section = ModelSection(pretrain=folder, lora_rank=2)
    scorer = Scorer(freeze_parameters(load_scorer(section), section))
    trained = {name for name, parameter in scorer.hf_parameters() if parameter.requires_grad}
    assert "score.weight" in trained and all(
        is_adapter(name) for name in trained - {"score.weight"}
    )


# -- modules that are not trained


def test_a_prefix_is_not_trained(folder):
    model = freeze_parameters(
        load(folder), ModelSection(freeze_prefix=["model.layers.0", "model.embed_tokens"])
    )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("model.layers.0.", "model.embed"))
    }


def test_a_prefix_gets_no_adapters(folder):
    layers = adapted_layers(adapted(folder, freeze_prefix=["model.layers.0"]))
    assert set(layers) == {f"model.layers.1.{layer}" for layer in LAYERS}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"freeze_prefix": ["visual"]},
            (
                "--freeze_prefix visual: no parameter has this prefix; the prefixes are"
                " model.embed_tokens"
            ),
        ),
        ({"freeze_prefix": ["model", "lm_head"]}, "freezes all parameters"),
        (
            {"lora_rank": 4, "lora_rank_pattern": '{"q_proj": 2, "query": 8}'},
            "--lora_rank_pattern: no layer with an adapter is called 'query'",
        ),
        (
            {"lora_rank": 4, "lora_rank_pattern": '{"q_proj": 1.5}'},
            "--lora_rank_pattern: 1.5 of 'q_proj' is no rank above 0",
        ),
        (
            {"lora_rank": 4, "lora_alpha_pattern": '{"q_proj": true}'},
            "--lora_alpha_pattern: True of 'q_proj' is no number above 0",
        ),
        (
            {"lora_rank": 4, "lora_alpha_pattern": '{"*proj": 1}'},
            "--lora_alpha_pattern: '*proj' is no regular expression: nothing to repeat",
        ),
        ({"lora_rank": 4, "target_modules": ["query"]}, "--target_modules query: Target modules"),
        (
            {"lora_rank": 4, "target_modules": ["lm_head"]},
            "LoRA on lm_head cannot be trained: it is outside of the",
        ),
        (
            {"lora_rank": 4, "target_modules": ["embed_tokens"]},
            "LoRA on model.embed_tokens cannot be trained: it is not a",
        ),
    ],
)
def test_what_cannot_be_trained_is_said(folder, settings, message):
    with pytest.raises(ConfigError) as error:
        freeze_parameters(load(folder), ModelSection(pretrain=folder, **settings))
    assert message in str(error.value)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_adapters_are_not_merged_wrongly(folder, options):
    model = inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["q_proj"], **options), load(folder)
    )
    with pytest.raises(ConfigError, match="more than the product of two matrices"):
        whole(model)


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
DAMAGED_ADAPTERS = {
    "other names": ({}, "other.", "Found missing adapter keys"),
    "another rank": ({"r": 8}, "", "size mismatch"),
    "a scale of text": ({"lora_alpha": "x"}, "", "TypeError"),
    "an unknown kind": ({"peft_type": "SPIRAL"}, "", "KeyError: 'SPIRAL'"),
    "of prompts": (
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
        "",
        "KeyError: 'prompt",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_ADAPTERS)
def test_an_adapter_that_cannot_be_merged_is_one_message(folder, tmp_path, case):
    entries, prefix, message = DAMAGED_ADAPTERS[case]
    config = ADAPTER | {"task_type": "CAUSAL_LM"} | entries
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"{prefix}base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight": zeros
        for layer in range(2)
        for factor, zeros in (("A", torch.zeros(4, 64)), ("B", torch.zeros(128, 4)))
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path} cannot be merged into its base (.|\n)*{message}"
    ):
        merge_adapter(model, tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 5}'])
def test_an_adapter_without_a_base_is_one_message(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/adapter_config.json names no base model"):
        base_model_of_adapter(tmp_path)


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ("", False),
        ("config.json model.safetensors", False),
        ("adapter_config.json adapter_model.safetensors", True),
        ("adapter_config.json adapter_model.safetensors config.json", True),
    ],
)
def test_an_adapter_may_lie_beside_a_configuration(tmp_path, files, answer):
    for name in files.split():
        (tmp_path / name).touch()
    assert is_adapter_folder(tmp_path) is answer


@pytest.mark.parametrize(
    "weights", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"]
)
def test_a_folder_with_a_whole_model_and_an_adapter_is_refused(tmp_path, weights):
    for name in ("adapter_config.json", "config.json", weights):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"whole model .{weights}. and an adapter"):
        load_model(ModelSection(pretrain=str(tmp_path)))


def test_two_adapters_are_not_merged_wrongly(folder):
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), load(folder))
    model = inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["q_proj"]), model, adapter_name="second"
    )
    with pytest.raises(ConfigError, match="has several adapters"):
        whole(model)


def test_adapters_alone_are_less_than_a_hundredth_of_a_model():
    """Counted for the shapes of Qwen3-4B, with adapters of rank 16 on all linear layers."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    freeze_parameters(model, ModelSection(lora_rank=16))
    shapes = adapter_shapes(model)
    assert len(shapes) == 2 * 7 * 36
    assert sum(shape.numel() for shape in shapes.values()) < 0.01 * size


def test_a_stream_of_adapters_adds_up_to_the_merged_weights(folder):
    """By peft's names, with B scaled; what is frozen has the names of the model."""
    model = adapted(folder, lora_alpha=12.0)
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    assert set(adapter_shapes(model).values()) == {p.shape for n, p in named if is_adapter(n)}
    found = dict(split_adapters(model, named))
    merged = dict(merge_adapters(model, named))
    assert merged.keys() == {name for name in found if not name.startswith("base_model.model.")}
    for layer in Adapters(adapter_shapes(model)).layers:
        a, b = (found.pop(name) for name in names_of(layer))
        whole = found[f"{layer}.weight"] + b @ a
        torch.testing.assert_close(whole, merged[f"{layer}.weight"])
