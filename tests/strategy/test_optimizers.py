"""Optimizers of torch and bitsandbytes: sharded steps equal those of the library, and resume."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW, AdamW8bit, Lion
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Optimizer
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from lightrft.strategy.backends import optim
from ranks import run_cases, run_ranks, whole
from strategy.training import load, snapshot, strategy

RATE = 1e-3
DECAY = 0.1
BETAS = (0.9, 0.95)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """A model whose rows have 256 values, and some rows have 320."""
    folder = tmp_path_factory.mktemp("wide")
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=320,
        vocab_size=40,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def plain_optimizers(name: str, model: nn.Module) -> list[Optimizer]:
    """Build what the library has. Only matrices decay, and short rows have states of 32 bits."""
    matrices = [each for each in model.parameters() if each.ndim == 2]
    vectors = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0}]
    if name == "adamw_8bit":
        quantized = [each for each in matrices if each.shape[-1] % 256 == 0]
        groups[0]["params"] = [each for each in matrices if each.shape[-1] % 256]
        full = AdamW(groups, RATE, BETAS)
        return [full, AdamW8bit(quantized, RATE, BETAS, weight_decay=DECAY)]
    build = {"sgd": partial(SGD, lr=RATE), "lion": partial(Lion, lr=RATE, betas=BETAS)}
    return [build[name](groups)]


def plain_steps(folder: str, name: str) -> dict[str, Tensor]:
    model = load(folder)
    optimizers = plain_optimizers(name, model)
    for step in range(4):
        give_gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def steps(folder: str, name: str, root: Path, other: Path | None, args: dict[str, Any]) -> list:
    """Return parameters and states after four steps: in one go, and from checkpoints after two.

    `other` is a folder of another layout. A resumed run is sent to the host and back.
    """
    made = strategy(optimizer=name, **args)
    found = []
    for source in (None, root, other) if other else (None, root):
        model = load(folder)
        optimizer = made.create_optimizer(model, RATE, BETAS, DECAY)
        model, optimizer = made.prepare((model, optimizer))
        for step in range(4) if source is None else range(2, 4):
            if source and step == 2:
                made.load_ckpt(model, source, optimizer=optimizer)
                made.maybe_offload_optimizer(optimizer)
                made.maybe_load_optimizer(optimizer)
            give_gradients(model, step)
            optim.step(optimizer)
            if source is None and step == 1:
                made.save_ckpt(model, root, "two", optimizer=optimizer)
        names = {parameter: name for name, parameter in model.named_parameters()}
        states = {
            f"{names[parameter]}/{key}": whole(value).clone() if key != "step" else value
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
        found.append((snapshot(made, model), states))
    return found


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    pairs = ((torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in found)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


CASES = {
    1: {"plain": {}, "sharded": {"bf16": True}},
    2: {"fsdp": {}, "tp": {"tp_size": 2}, "replicas": {"dp_replicate": 0}},
}


@pytest.mark.parametrize("name", ["sgd", "lion", "adamw_8bit"])
def test_sharded_steps_equal_the_library_and_resume(wide, tmp_path, name):
    """On one rank, and from there on two: sharded, with tensor parallelism, and in replicas."""
    expected = plain_steps(wide, name)
    states = None
    for ranks, layouts in CASES.items():
        first = tmp_path / "1plain"
        cases = {
            layout: (wide, name, tmp_path / f"{ranks}{layout}", first if ranks > 1 else None, args)
            for layout, args in layouts.items()
        }
        for of_ranks in run_cases(ranks, steps, cases).values():
            for runs in of_ranks:
                for parameters, its_states in runs:
                    assert_same(parameters, expected)
                    states = states or its_states
                    assert_same(its_states, states)
    of_matrix = (
        each.nbytes for key, each in states.items() if "q_proj" in key and "step" not in key
    )
    bytes_each = sum(of_matrix) / (512 * 256)
    assert f"| `{name}` | {bytes_each:.2f} |" in Path("docs/algorithms.md").read_text()
    kinds = {str(each.dtype) for key, each in states.items() if not key.endswith("/step")}
    assert (
        kinds
        == {
            "sgd": set(),
            "lion": {"torch.float32"},
            "adamw_8bit": {"torch.float32", "torch.uint8"},
        }[name]
    )


def divided_too_far(folder: str) -> None:
    made = strategy(optimizer="adamw_8bit", tp_size=2)
    model = load(folder)
    model, optimizer = made.prepare((model, made.create_optimizer(model, RATE, BETAS, DECAY)))
    give_gradients(model, 0)
    with pytest.raises(ValueError, match="is divided into rows of 128 values, no multiple of 256"):
        optim.step(optimizer)


def test_rows_that_tensor_parallelism_divides_too_far_are_an_error(wide, tmp_path):
    """The output projection of one head has rows of 256 values, 128 on each of two ranks."""
    config = AutoConfig.from_pretrained(wide)
    config.update({"num_attention_heads": 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run_ranks(2, divided_too_far, str(tmp_path))
