"""Why: the load of experts is a product of two means over all tokens.

Taken per micro-batch it is another loss for every split. Here it equals transformers' own, of all
sequences at once, on any ranks and in any micro-batches.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from algorithms.roles import rows
from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.mixture import MixturePolicy
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.models.balance import Balance, routing
from lightrft.models.routers import Routers
from lightrft.strategy import get_strategy
from ranks import run_ranks
from strategy.zero import DeepSpeedStrategy
from tiny import tiny_model

COEFFICIENT = 3.0
SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=5, **SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_experts=5, moe_intermediate_size=24, head_dim=16, **SIZES)
    ),
}


def test_the_loss_by_hand():
    # two tokens, one layer, three experts, the best of each: probabilities .5 .25 .25 and .25 .25
    # .5, so f = 1/2 0 1/2
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [9.0, 1.0, 1.0]]).log()
    mask = torch.tensor([True, True, False])
    best = torch.tensor([[0], [2], [0]])
    found = routing([(logits, best)], mask)
    assert found.chosen.tolist() == [1.0, 0.0, 1.0] and found.count == 2
    balance = Balance.of(found, lambda values: values)
    assert balance.loss.item() == pytest.approx(3 * (0.5 * 0.375 + 0.5 * 0.375))
    masks = [mask & (torch.arange(3) == layer) for layer in range(3)]
    halves = [routing([(logits, best)], each) for each in masks]
    assert sum(balance.share(half).item() for half in halves) == pytest.approx(balance.loss.item())


def updated(folder: str, args: dict, limit: int):
    """Return [loss, norm] of two steps, the parameters after them, and the reported load."""
    made = get_strategy({"fsdp": True, **args})
    made.max_norm = 0.5
    made.setup_distributed()
    policy = rows.policy(made, folder, kind=MixturePolicy, max_tokens=limit)
    metrics = Metrics()
    policy.routers = Routers(policy.actor.language_model, COEFFICIENT)
    data = made.mesh.data
    batch, (members,) = policy.redistribute(rows.share(rows.whole(), data.rank, data.size))
    numbers = [
        policy.learn([LossTerm(batch, members, sft, policy.denominator(batch, members))], metrics)
        for _ in range(2)
    ]

    return (
        torch.stack([torch.stack(each) for each in numbers]),
        dict(made.full_params(policy.module)),
        metrics.reduce(data),
    )


def plain(folder: str):
    """Compute all learned rows in one forward pass, padded on the right.

    What is masked counts nowhere.
    """
    model = rows.plain_model(folder)
    batch = rows.whole()
    learned = torch.tensor(
        [
            row
            for row in range(len(rows.LENGTHS))
            if row != 3 and rows.PROMPT[row] < rows.LENGTHS[row]
        ]
    )
    ids = batch["input_ids"][learned]
    lengths = batch["input_lengths"][learned]
    mask = torch.arange(rows.WIDTH) < lengths[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    numbers = []
    loads = []
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.05 * (0.5 if step == 0 else 1.0)
        found = model(ids, attention_mask=mask.long(), output_router_logits=True, use_cache=False)
        load = load_balancing_loss_func(found.router_logits, 5, 2, mask)
        logprobs = (
            (found.logits[:, :-1] / rows.TEMPERATURE)
            .log_softmax(-1)
            .gather(2, ids[:, 1:, None])[..., 0]
        )
        loss = -logprobs[batch["token_mask"][learned][:, 1:]].mean() + COEFFICIENT * load
        loss.backward()
        loads.append(load.item())
        numbers.append([loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()])
        optimizer.step()
        optimizer.zero_grad()

    return (
        torch.tensor(numbers),
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        loads,
    )


LAYOUTS = [
    (1, {}, 1000),
    (2, {}, 24),
    (2, {"sp_size": 2}, 40),
    (2, {"sp_size": 2, "sp_impl": "zigzag"}, 40),
    (2, {"gradient_checkpointing": True}, 30),
    (2, {"fsdp": False, "zero_stage": 2}, 24),
    (2, {"fsdp": False, "zero_stage": 3}, 24),
]


CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in (LAYOUTS if family == "qwen3_moe" else LAYOUTS[:1])
]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*case, marks=[] if case == ("qwen3_moe", LAYOUTS[1]) else pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
def test_every_split_is_transformers_loss(tmp_path, family, layout):
    assert DeepSpeedStrategy
    torch.manual_seed(0)
    FAMILIES[family]().save_pretrained(tmp_path)

    numbers, parameters, loads = plain(str(tmp_path))
    world_size, args, limit = layout
    for found, tensors, metrics in run_ranks(world_size, updated, str(tmp_path), args, limit):
        torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)
        assert metrics["train/aux_loss"] == pytest.approx(sum(loads) / 2, rel=1e-4)
        assert tensors.keys() == parameters.keys()
        for name, wanted in parameters.items():
            assert (tensors[name] - wanted).norm() <= 1e-5 * wanted.norm(), name


class Products(TorchDispatchMode):
    """While entered, records the shapes of the factors of every matrix product that has a row."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.name() and args[0].numel():
            self.shapes += [tuple(each.shape) for each in args[:2]]
        return function(*args, **(kwargs or {}))


def products_of_the_load(folder: str) -> list[tuple[int, ...]]:
    made = get_strategy({"fsdp": True})
    made.setup_distributed()
    policy = rows.policy(made, folder, kind=MixturePolicy, max_tokens=1000)
    policy.routers = Routers(policy.actor.language_model, COEFFICIENT)
    batch, (members,) = policy.redistribute(rows.whole())
    with Products() as seen:
        policy._balance(batch, members)
    return seen.shapes


def test_the_load_is_measured_without_the_head(tmp_path):
    torch.manual_seed(0)
    FAMILIES["qwen3_moe"]().save_pretrained(tmp_path)
    (shapes,) = run_ranks(1, products_of_the_load, str(tmp_path))
    assert any(5 in shape for shape in shapes), "routers decide between five experts"
    assert not any(SIZES["vocab_size"] in shape for shape in shapes)


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="--aux_loss_coef: Qwen3ForCausalLM has no experts whose load can be balanced",
    ):
        Routers(rows.plain_model(tiny_model(tmp_path)), 0.1)
