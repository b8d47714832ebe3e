"""Tokens visit experts on other ranks, also if a rank has no token, or no visitor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.expert_parallel import (
    Exchange,
    _WeightedSum,
    divide_experts,
    expert_layers,
    visit,
)
from lightrft.models.parallel.mesh import Mesh
from memory import Storages
from models.parallel.families import family_config
from ranks import fake_group, run_ranks

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


def plain_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (rows[places] * weights[..., None]).sum(1).to(rows.dtype)


TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
"""Types of rows and weights; some families keep weights in float32."""


@pytest.mark.parametrize("num_tokens", [0, 1, 6, 37])
@pytest.mark.parametrize(("of_rows", "of_weights"), TYPES)
def test_results_are_summed_as_if_in_one_piece(
    of_rows: torch.dtype, of_weights: torch.dtype, num_tokens: int
) -> None:
    rows = torch.randn(4 * num_tokens, 16, dtype=of_rows)
    weights = torch.rand(num_tokens, 4, dtype=of_weights)
    places = torch.randperm(len(rows)).view(num_tokens, 4)
    goal = torch.randn(num_tokens, 16, dtype=of_rows)
    found = []
    for function in (plain_sum, _WeightedSum.apply):
        inputs = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
        result = function(inputs[0], places, inputs[1])
        result.backward(goal)
        found.append([result, *(each.grad for each in inputs)])
    assert all(map(torch.equal, *found))
    assert [each.dtype for each in found[1]] == [of_rows, of_rows, of_weights]


def test_products_with_weights_take_a_part_of_the_memory() -> None:
    """Rows in another order and products took three times as much as the rows: one layer of 30B
    with 16,384 tokens has 0.5 GB of them."""
    rows = torch.randn(8 * 64, 32, requires_grad=True)
    weights = torch.rand(64, 8, requires_grad=True)
    places = torch.randperm(len(rows)).view(64, 8)
    peaks = []
    for function in (plain_sum, _WeightedSum.apply):
        rows.grad = weights.grad = None
        with Storages([rows]) as storages:
            function(rows, places, weights).sum().backward()
        peaks.append(storages.peak / rows.nbytes)
    assert peaks[0] > 2.9
    assert peaks[1] < 1.8, "a gradient of the rows, and two buffers for a quarter of them"


def bytes_of_a_visit(sent: list[int], received: list[int]) -> float:
    """Return the peak of a layer's forward and backward pass, relative to the rows of one rank."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(Tensor, "tolist", lambda _: [sent, received])
    experts = expert_layers(mixture().to("meta", torch.bfloat16))[0]
    experts.num_experts = 2
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.data[:2]))
    num_tokens = sum(sent) // 2
    hidden = torch.empty(num_tokens, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.empty(num_tokens, 2, device="meta", dtype=torch.int64)
    weights = torch.empty(num_tokens, 2, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with monkeypatch.context(), fake_group(2), Storages(experts.parameters()) as storages:
        axis = Axis("ep", 2, 0, dist.group.WORLD)
        visit(experts.forward, 2, axis, hidden, chosen, weights).sum().backward()
    monkeypatch.undo()
    return storages.peak / (sum(sent) * hidden[0].nbytes)


def test_memory_follows_the_tokens_that_visit_a_rank() -> None:
    """A rank that all tokens of two ranks visit needs twice as much as in balance, not more.

    In balance it was 9.4 times the rows of a rank when results were weighted in one piece.
    """
    balanced = bytes_of_a_visit([4096, 4096], [4096, 4096])
    all_here = bytes_of_a_visit([8192, 0], [8192, 8192])
    assert 7.5 < balanced < 8.2
    assert balanced < all_here < 2 * balanced


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
        def call(*args: Any, **options: Any) -> Any:
            events.append(name)
            return function(*args, **options)

        return call

    shared = block._modules.get("shared_experts", block._modules.get("shared_expert"))
    shared.register_forward_hook(lambda *_: events.append("shared"))
    for projection in (shared.down_proj, shared.up_proj):
        projection.weight.register_hook(lambda _: events.append("shared back"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "start", noted("start", Exchange.start))
        patch.setattr(Exchange, "finish", noted("finish", Exchange.finish))
        block(torch.randn(1, 5, 32, requires_grad=True)).sum().backward()
    return events


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_the_shared_expert_runs_while_tokens_travel(family: str) -> None:
    forward = ["start", "shared", "finish", "start", "finish"]
    backward = ["start", "finish", "start", "shared back", "shared back", "finish"]
    assert run_ranks(2, order_of_work, family) == [forward + backward] * 2
