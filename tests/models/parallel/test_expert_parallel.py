"""Tokens visit experts on other ranks, also if a rank has no token, or no visitor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightrft.models.parallel.expert_parallel import Exchange, divide_experts, expert_layers
from lightrft.models.parallel.mesh import Mesh
from models.parallel.families import family_config
from ranks import run_ranks

CHOSEN = {
    "to all": [[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]],
    "to one rank": [[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]],
    "to one expert each": [[2, 0], [2, 0], [2, 0], [2, 0], [2, 0]],
}
"""Two of four experts for each of five tokens; two ranks have two experts each."""


def mixture() -> nn.Module:
    torch.manual_seed(0)
    config = family_config("qwen3_moe", tie=False, vocabulary=261)
    return AutoModelForCausalLM.from_config(config)


def computed(experts: nn.Module, chosen: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results for some tokens, and the gradients of these tokens and their weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 32, generator=generator)[rows].requires_grad_()
    weights = torch.rand(5, 2, generator=generator)[rows].requires_grad_()
    goal = torch.randn(5, 32, generator=generator)[rows]
    result = experts(hidden, chosen[rows], weights)
    (result * goal).sum().backward()
    return result.detach(), hidden.grad, weights.grad


def visited(split: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Return results and gradients of this rank's tokens, and the gradients of its experts."""
    mesh = Mesh("cpu", ep=2)
    rows = slice(0, split) if mesh.ep.rank == 0 else slice(split, 5)
    found = {}
    for name, chosen in CHOSEN.items():
        model = mixture()
        experts = divide_experts(model, mesh.experts, mesh.ep, ["qwen3_moe"])[0]
        values = computed(experts, torch.tensor(chosen), rows)
        gradients = [parameter.grad.to_local() for parameter in experts.parameters()]
        found[name] = list(values), gradients
    return found


@pytest.mark.parametrize("split", [0, 2])
def test_tokens_of_two_ranks_are_computed_as_on_one(split: int) -> None:
    first, second = run_ranks(2, visited, split)
    for name, chosen in CHOSEN.items():
        experts = expert_layers(mixture())[0]
        expected = computed(experts, torch.tensor(chosen), slice(0, 5))
        for tensor, *of_ranks in zip(expected, first[name][0], second[name][0], strict=True):
            torch.testing.assert_close(torch.cat(of_ranks), tensor)
        for parameter, *of_ranks in zip(
            experts.parameters(), first[name][1], second[name][1], strict=True
        ):
            torch.testing.assert_close(torch.cat(of_ranks), parameter.grad)


def refusals() -> list[str]:
    mesh = Mesh("cpu", ep=2)
    odd = family_config("qwen3_moe", tie=False, vocabulary=261)
    odd.num_experts = 5
    said = []
    for model, families in (
        (mixture(), ["mixtral"]),
        (AutoModelForCausalLM.from_config(odd), ["qwen3_moe"]),
    ):
        with pytest.raises(ValueError) as error:
            divide_experts(model, mesh.experts, mesh.ep, families)
        said.append(str(error.value))
    return said


def test_what_cannot_be_divided_is_named() -> None:
    family, number = run_ranks(2, refusals)[0]
    assert family.endswith("is of the family qwen3_moe; supported are mixtral")
    assert number.endswith("has 5 experts in a layer, and 2 does not divide them")


def order_of_work(family: str) -> list[str]:
    """Return what a block with a shared expert does forward and backward, in order."""
    mesh = Mesh("cpu", ep=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, tie=False, vocabulary=261))
    divide_experts(model, mesh.experts, mesh.ep, [family])
    block = next(
        submodule for submodule in model.modules() if {"experts", "gate"} < set(submodule._modules)
    )
    events: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    shared = block._modules.get("shared_experts", block._modules.get("shared_expert"))
    shared.register_forward_hook(lambda *_: events.append("shared"))
    for projection in (shared.down_proj, shared.up_proj):
        projection.weight.register_hook(lambda _: events.append("shared back"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "_start", noted("start", Exchange._start))
        patch.setattr(Exchange, "finish", noted("finish", Exchange.finish))
        block(torch.randn(1, 5, 32, requires_grad=True)).sum().backward()
    return events


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_the_shared_expert_runs_while_tokens_travel(family: str) -> None:
    forward = ["start", "shared", "finish", "start", "finish"]
    backward = ["start", "finish", "start", "shared back", "shared back", "finish"]
    assert run_ranks(2, order_of_work, family) == [forward + backward] * 2
