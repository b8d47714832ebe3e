"""The noise of the gradient: what --measure_noise says, against gradients of plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightrft.extras.noise.components import Noise, normal_equations
from lightrft.extras.noise.meter import NoiseMeter, split
from lightrft.extras.noise.sketch import COUNTERS, Sketcher
from lightrft.models.parallel.collectives import Axis
from runs import PPO, prepare, repeatable, train

ALONE = Axis("data", 1, 0, None)


def test_products_of_sketches_are_those_of_the_gradients():
    """Gradients of low rank, of which whole rows and columns agree, and longer than a block."""
    torch.manual_seed(0)
    shapes = [(300, 4000), (64,), (1,)]
    gradients = [
        [
            torch.randn(shape[0], 2) @ torch.randn(2, *shape[1:])
            if len(shape) > 1
            else torch.randn(shape)
            for shape in shapes
        ]
        for _ in range(5)
    ]
    sketcher = Sketcher(torch.device("cpu"))
    sketches = torch.zeros(5, COUNTERS)
    for sketch, each in zip(sketches, gradients, strict=True):
        for number, gradient in enumerate(each):
            sketcher.add(sketch, gradient, number)

    flat = torch.stack([torch.cat([one.flatten() for one in each]) for each in gradients]).double()
    exact = flat @ flat.T
    found = sketches.double() @ sketches.double().T
    # three standard deviations
    assert (found - exact).abs().max() < 3 * (2 / COUNTERS) ** 0.5 * exact.diag().max()


@pytest.mark.parametrize("prompts", [4.0, 0.0])
def test_the_spread_of_prompts_and_of_samples_is_found(prompts: float):
    """Gaussian gradients with |g|^2 = 1, U = 4 or 0, V = 9, in 400 dimensions."""
    generator = np.random.default_rng(0)
    size = 400
    mean = generator.normal(size=size)
    mean /= np.linalg.norm(mean)
    equations = np.zeros((3, 4))
    for _ in range(100):
        counts = np.zeros((8, 12))
        gradients = np.zeros((8, size))
        for prompt in range(12):
            of_prompt = generator.normal(size=size) * (prompts / size) ** 0.5
            for sample in range(4):
                part = prompt % 4 + 4 * (sample % 2)
                counts[part, prompt] += 1
                of_sample = generator.normal(size=size) * (9 / size) ** 0.5
                gradients[part] += mean + of_prompt + of_sample
        equations += normal_equations(gradients @ gradients.T, counts)

    found = Noise.solve(equations, samples_per_prompt=4)
    assert found.prompts == pytest.approx(prompts, abs=0.6)
    assert found.samples == pytest.approx(9, rel=0.1)
    assert found.scale == pytest.approx(4 * prompts + 9, rel=0.1)


def test_whole_prompts_in_each_micro_batch_still_have_a_scale():
    """Two samples with the gradients 1 + a and 1 - a, and |a|^2 = 3: tr(S) = 6 |g|^2."""
    products = np.array([[8.0, 4], [4, 8]])
    counts = np.array([[2.0, 0], [0, 2]])
    found = Noise.solve(normal_equations(products, counts), samples_per_prompt=2)
    assert found == Noise(pytest.approx(2.0), None, None)


def test_without_a_signal_there_is_no_scale():
    products = np.array([[1.0, -0.5], [-0.5, 1]])
    found = Noise.solve(normal_equations(products, np.eye(2)), samples_per_prompt=1)
    assert found == Noise(None)


@pytest.mark.parametrize(("update", "ranks"), [(1, 1), (1, 2), (2, 1), (5, 1), (5, 4)])
def test_splitting_keeps_all_samples_and_tells_prompts_apart(update: int, ranks: int):
    groups = torch.arange(40 * update) // 4
    rows = [list(range(40 * k, 40 * k + 40)) for k in range(update)]
    found = split(rows, SimpleNamespace(groups=groups), ranks)

    assert sorted(row for members in found for row in members) == list(range(40 * update))
    assert len(found) * ranks >= 8
    counts = torch.stack(
        [torch.bincount(groups[members], minlength=10 * update) for members in found]
    )
    products = torch.randn(len(found), len(found)).numpy()
    equations = normal_equations(products @ products.T, counts.double().numpy())
    assert np.linalg.matrix_rank(equations[:, :3]) == 3


def test_the_meter_reads_the_gradients_of_plain_torch():
    """A frozen layer, tied weights, a layer that only some micro-batches use; the rest is ignored."""
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {name: nn.Linear(6, 6, bias=name == "a") for name in ("a", "b", "tied", "frozen", "rare")}
    )
    module["tied"].weight = module["a"].weight
    module["frozen"].requires_grad_(False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = module

        def forward(self, x, rare):
            layers = self.layers
            x = layers["frozen"](layers["b"](layers["a"](x).tanh()))
            return (layers["rare"](x) if rare else layers["tied"](x)).square().sum()

    net = Net()
    inputs = [torch.randn(3, 6) for _ in range(4)]
    rare = [False, True, False, False]
    trained = [each for each in net.parameters() if each.requires_grad]
    exact = []
    for x, uses in zip(inputs, rare, strict=True):
        gradients = torch.autograd.grad(net(x, uses), trained, allow_unused=True)
        exact.append(
            torch.cat(
                [
                    (torch.zeros_like(parameter) if gradient is None else gradient).flatten()
                    for parameter, gradient in zip(trained, gradients, strict=True)
                ]
            )
        )

    meter = NoiseMeter(1, ALONE, ALONE, torch.device("cpu"))
    with meter.reading(net, num_microbatches=3):
        for x, uses in zip(inputs, rare, strict=True):
            net(x, uses).backward()
            net.eval()(x, uses)  # learns nothing
            net.train()

    # A sketch of fewer elements than counters is exact.
    flat = torch.stack(exact[:3])
    torch.testing.assert_close(meter._sketches @ meter._sketches.T, flat @ flat.T)
    assert not net._forward_pre_hooks


NOISY = [*PPO, "--measure_noise=2", "--max_tokens_per_microbatch=64"]


def noise(rows: list[dict]) -> list[dict]:
    return [
        {name: value for name, value in row.items() if name.startswith("noise/")} for row in rows
    ]


@pytest.mark.slow
def test_all_layouts_have_the_same_noise_and_learn_as_without(tmp_path):
    inputs = prepare(tmp_path)[1:]
    layouts = {
        "replicas": ["--fsdp", "--dp_replicate=2"],
        "shards": ["--fsdp", "--dp_replicate=1", "--bf16=false"],
        "zero1": ["--strategy=deepspeed", "--zero_stage=1"],
        "zero3": ["--strategy=deepspeed", "--zero_stage=3"],
    }
    found = {
        name: train("train_ppo", 2, [*inputs, *NOISY, *flags, "--max_steps=4"], tmp_path / name)
        for name, flags in layouts.items()
    }
    replicas = noise(found["replicas"])
    assert [set(row) for row in replicas][0::2] == [set(), set()]
    assert all({"noise/scale", "noise/prompts"} <= set(row) for row in replicas[1::2])
    for rows in found.values():
        assert noise(rows) == [pytest.approx(row, rel=1e-4) for row in replicas]

    plain = train(
        "train_ppo", 2, [*inputs, *PPO, *layouts["replicas"], "--max_steps=4"], tmp_path / "plain"
    )
    for mine, theirs in zip(found["replicas"], repeatable(plain), strict=True):
        assert mine["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_measures_the_same_noise(tmp_path):
    inputs = [*prepare(tmp_path), *NOISY, "--save_steps=1"]
    whole = train("train_ppo", 1, [*inputs, "--max_steps=4"], tmp_path / "whole")
    train("train_ppo", 1, [*inputs, "--max_steps=3"], tmp_path / "resumed")
    resumed = [*inputs, "--max_steps=4", "--load_checkpoint"]
    assert noise(train("train_ppo", 1, resumed, tmp_path / "resumed")) == noise(whole)
