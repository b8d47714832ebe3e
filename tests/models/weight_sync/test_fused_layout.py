"""Which weights are copied straight into the engine's layers."""

import torch
from torch import nn

from lightrft.models.weight_sync.fused_layout import FusedWeights


def model() -> nn.ModuleDict:
    block = {
        "attention": nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4)}),
        "mlp": nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)}),
    }
    return nn.ModuleDict({"block": nn.ModuleDict(block), "head": nn.Linear(4, 8)})


def direct(unknown: dict[str, str | None]) -> set[str]:
    """Return the layers that are filled directly, if the engine calls some weights otherwise."""
    layers = model()
    weights = dict(layers.named_parameters())
    fused = FusedWeights(
        layers,
        {name: name for name in weights} | unknown,
        {name: weight.shape for name, weight in weights.items()},
        keeps=lambda piece: True,
    )
    assert sorted(fused.unknown) == sorted(unknown)

    targets = fused.copy_targets()
    for name in targets:
        (target,) = targets[name]
        target.copy(torch.full(weights[name].shape, 7.0))
        assert (weights[name] == 7).all()
    return {name.rpartition(".")[0] for name in targets}


EVERY_LAYER = {"block.attention.q", "block.attention.o", "block.mlp.up", "block.mlp.down", "head"}


def test_known_layers_are_filled_directly_beside_an_unknown_one() -> None:
    """Only the layers of the same module are left out, because they may hold the unknown weight."""
    assert direct({}) == EVERY_LAYER
    unknown = {"block.mlp.up.weight": "block.mlp.strange.weight"}
    assert direct(unknown) == EVERY_LAYER - {"block.mlp.up", "block.mlp.down"}
    assert direct({"head.weight": "strange.weight"}) == EVERY_LAYER - {"head"}


def test_a_weight_that_the_engine_drops_costs_its_own_layer_only() -> None:
    assert direct({"block.mlp.up.weight": None}) == EVERY_LAYER - {"block.mlp.up"}
