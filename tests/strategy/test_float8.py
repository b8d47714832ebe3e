"""Training in FP8, emulated on a CPU: one layer beside plain torch, a model, and two ranks."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from flat_models import TEMPERATURE, gradients_of, make_batch, weighted
from lightrft.config.errors import ConfigError
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.parallel.recompute import recompute
from lightrft.strategy import get_strategy
from lightrft.strategy.backends import torchao as float8
from lightrft.strategy.backends.torchao import compile_layers, use_float8
from ranks import run_ranks
from runs import PPO, prepare, repeatable, train
from tiny import tiny_experts, tiny_model

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="test_extras.py runs it where torchao is"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model") / "model", tie=True)


def e4m3(x: Tensor, axis: int) -> Tensor:
    """Round with a scale for each vector along `axis`, a power of two below 448 / the largest."""
    largest = x.abs().amax(axis, keepdim=True).double().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest))).float()
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


def model_of(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_a_layer_computes_what_plain_torch_does(folder: str) -> None:
    """Forward, and both gradients, each rounded along the inner axis of the product."""
    model = model_of(folder)
    use_float8(model, CPU)
    layer = model.model.layers[0].mlp.gate_proj
    x = torch.randn(37, layer.in_features, requires_grad=True)
    out = layer(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)

    weight = layer.weight.detach()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, e4m3(x, -1) @ e4m3(weight, 1).T, **close)
    torch.testing.assert_close(x.grad, e4m3(gradient, -1) @ e4m3(weight, 0), **close)
    torch.testing.assert_close(layer.weight.grad, e4m3(gradient, 0).T @ e4m3(x, 0), **close)


def test_only_layers_of_blocks_are_converted(folder: str, tmp_path) -> None:
    model = model_of(folder)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    names = use_float8(model, CPU)
    assert len(names) == 7 * 2
    assert type(model.lm_head) is nn.Linear
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters

    experts = model_of(tiny_experts(tmp_path / "experts"))
    assert {name.rpartition(".")[2] for name in use_float8(experts, CPU)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }


def test_gpus_before_hopper_are_refused(folder: str, monkeypatch) -> None:
    monkeypatch.setattr(float8, "compute_capability", lambda: (8, 9))
    with pytest.raises(ConfigError, match=r"compute capability 9.0 \(Hopper\)"):
        use_float8(model_of(folder), torch.device("cuda", 0))


def test_loss_and_gradient_are_near_those_of_bfloat16(folder: str) -> None:
    found = {}
    for kind in ("float32", "bfloat16", "fp8"):
        model = model_of(folder)
        if kind == "fp8":
            use_float8(model, CPU)
        model = model if kind == "float32" else model.bfloat16()
        loss = loss_of(model, batch())
        loss.backward()
        gradient = torch.cat([each.grad.float().flatten() for each in model.parameters()])
        found[kind] = loss.item(), gradient
    exact_loss, exact = found["float32"]
    for kind, most in (("bfloat16", 0.02), ("fp8", 0.2)):
        loss, gradient = found[kind]
        distance = ((gradient - exact).norm() / exact.norm()).item()
        print(f"{kind}: loss {loss - exact_loss:+.5f}, gradient {distance:.4f}")
        assert abs(loss - exact_loss) < 0.01
        assert distance < most


def learns(folder: str) -> dict[str, Any]:
    """Train on one batch, and look at what the run would write and stream."""
    strategy = get_strategy(
        {"fsdp": True, "bf16": True, "fp8_training": True, "train_batch_size": 4}
        | {"micro_train_batch_size": 2}
    )
    strategy.setup_distributed()
    model = model_of(folder)
    optimizer = strategy.create_optimizer(model, lr=3e-3)
    model, optimizer = strategy.prepare((model, optimizer))
    rows = batch()[strategy.mesh.data.rank :: strategy.mesh.data.size]
    losses = []
    for _ in range(12):
        loss = loss_of(model, rows) / strategy.mesh.data.size
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model, None)
        losses.append(strategy.all_reduce(loss.item(), "sum"))

    dtypes = {parameter.dtype for parameter in model.parameters()}
    kinds = {type(layer).__name__ for layer in model.modules() if isinstance(layer, nn.Linear)}
    states = {state.dtype for each in optimizer.state.values() for state in each.values()}
    streamed = {name: (tuple(t.shape), t.dtype) for name, t in strategy.full_params(model)}
    strategy.close()
    return {"losses": losses, "dtypes": dtypes | states, "kinds": kinds, "streamed": streamed}


def test_two_ranks_learn_with_weights_in_float32(folder: str) -> None:
    first, second = run_ranks(2, learns, folder)
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0] - 1
    assert first["dtypes"] == {torch.float32}
    assert first["kinds"] == {"Float8Linear", "Linear"} or "FSDPFloat8Linear" in first["kinds"]
    plain = model_of(folder)
    assert first["streamed"] == {
        name: (tuple(parameter.shape), torch.bfloat16)
        for name, parameter in plain.named_parameters()
    }


@pytest.mark.slow
def test_the_reference_of_a_run_is_computed_in_the_same_way(tmp_path) -> None:
    flags = ["--fp8_training", "--bf16", "--init_kl_coef=0.01", "--max_steps=2"]
    rows = train("train_ppo", 1, [*prepare(tmp_path), *PPO, *flags], tmp_path / "run")
    first, second = (row["train/kl"] for row in rows)
    assert first == 0 < second
    assert all(1e-3 < row["engine/logprob_mismatch"] < 0.2 for row in rows)


@pytest.mark.slow
def test_a_run_continues_from_a_checkpoint_with_equal_bits(tmp_path) -> None:
    flags = [
        *prepare(tmp_path),
        *PPO,
        "--fp8_training",
        "--bf16",
        "--max_steps=4",
        "--save_steps=2",
    ]
    whole = train("train_ppo", 2, flags, tmp_path / "run")
    again = [f"--fork_from={tmp_path / 'run'}", "--at=2"]
    forked = train("train_ppo", 2, [*flags, *again], tmp_path / "fork")
    assert repeatable(forked) == repeatable(whole)


def test_on_a_gpu_each_layer_is_compiled_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **options: compiled.append(layer))
    monkeypatch.setattr(float8, "compute_capability", lambda: (9, 0))
    names = use_float8(model := model_of(folder), torch.device("cuda"))
    assert len(compiled) == len(names) == len(model.model.layers) * 7
    assert {type(layer).__name__ for layer in compiled} == {"Float8Linear"}
    compiled.clear()
    use_float8(model_of(folder), CPU)
    assert compiled == []


def test_a_layer_is_compiled_without_breaks_and_for_all_shapes(folder: str) -> None:
    """Forward and backward, with and without gradients, and for any number of tokens."""
    model = model_of(folder)
    use_float8(model, CPU)
    layers = [layer for layer in model.modules() if type(layer).__name__ == "Float8Linear"]
    found = torch._dynamo.explain(layers[0])(torch.randn(5, layers[0].in_features))
    assert (found.graph_count, found.graph_break_count) == (1, 0)

    counters = torch._dynamo.utils.counters
    counters.clear()
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        torch._dynamo.reset()
        if compiled:
            compile_layers(model, backend="aot_eager")
        results.append([])
        for tokens in (40, 57, 2):
            for layer in layers:
                x = torch.randn(
                    tokens, layer.in_features, generator=torch.Generator().manual_seed(tokens)
                ).requires_grad_()
                layer.zero_grad()
                layer(x).sum().backward()
                with torch.no_grad():
                    results[-1] += [layer(x), x.grad, layer.weight.grad.clone()]
    assert all(map(torch.equal, *results))
    shapes = {(layer.in_features, layer.out_features) for layer in layers}
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2 * len(shapes)


def test_compiled_layers_of_recomputed_blocks_have_the_same_gradients(folder: str) -> None:
    """A micro-batch is one row [1, T, H]; layers are called in the backward pass once more."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    found: dict[str, list[Tensor]] = {}
    for policy in ("", "full", "selective", "offload"):
        torch._dynamo.reset()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION
        )
        use_float8(model, CPU)
        actor = Actor(model).train()
        if policy:
            compile_layers(model, backend="aot_eager")
            recompute(actor, policy)
        losses = []
        for lengths in ([16] * 4, [9, 5], [40]):
            losses.append(weighted(actor(make_batch(lengths), TEMPERATURE)))
            losses[-1].backward()
        found[policy] = [*losses, *gradients_of(actor).values()]
        assert bool(counters["stats"]["unique_graphs"]) == bool(policy)

    assert not counters["graph_break"]
    for policy, values in found.items():
        assert all(map(torch.equal, values, found[""])), policy
