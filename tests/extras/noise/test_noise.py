"""The noise of the gradient: what --measure_noise says, against gradients of plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightrft.core.metrics import Metrics
from lightrft.extras.noise.components import noise_of, normal_equations
from lightrft.extras.noise.meter import NoiseMeter, random_parts
from lightrft.extras.noise.sketch import COUNTERS, SKETCHED_AT_ONCE, Sketcher, num_blocks
from lightrft.models.parallel.collectives import Axis
from runs import PPO, prepare, repeatable, train

ALONE = Axis("data", 1, 0, None)


def meter() -> NoiseMeter:
    strategy = SimpleNamespace(
        device=torch.device("cpu"),
        full_shape=lambda parameter: parameter.shape,
        mesh=SimpleNamespace(sp=ALONE, data=ALONE),
    )
    return NoiseMeter(strategy, every=1)


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
            sketcher.add(sketch, gradient, 2 * number)

    flat = torch.stack([torch.cat([one.flatten() for one in each]) for each in gradients]).double()
    exact = flat @ flat.T
    found = sketches.double() @ sketches.double().T
    # three standard deviations
    assert (found - exact).abs().max() < 3 * (2 / COUNTERS) ** 0.5 * exact.diag().max()


def test_blocks_of_two_gradients_share_no_counter():
    """The second block of a matrix and the only one of the next parameter have equal signs."""
    x = torch.randn(SKETCHED_AT_ONCE, generator=torch.Generator().manual_seed(0))
    matrix = torch.cat([torch.zeros(SKETCHED_AT_ONCE), x])
    assert num_blocks(matrix.numel()) == 2 and num_blocks(1) == 1

    counters = torch.zeros(COUNTERS)
    sketcher = Sketcher(torch.device("cpu"))
    sketcher.add(counters, matrix, 0)
    sketcher.add(counters, -x, 2)
    assert float(counters @ counters) == pytest.approx(2 * float(x @ x), rel=0.1)


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

    found = noise_of(equations, samples_per_prompt=4)
    assert found["prompts"] == pytest.approx(prompts, abs=0.6)
    assert found["samples"] == pytest.approx(9, rel=0.1)
    assert found["scale"] == pytest.approx(4 * prompts + 9, rel=0.1)


def test_one_part_for_each_prompt_still_has_a_scale():
    """Two samples with the gradients 1 + a and 1 - a, and |a|^2 = 3: tr(S) = 6 |g|^2."""
    products = np.array([[8.0, 4], [4, 8]])
    counts = np.array([[2.0, 0], [0, 2]])
    found = noise_of(normal_equations(products, counts), samples_per_prompt=2)
    assert found == {"scale": pytest.approx(2.0)}


def test_without_a_signal_there_is_no_scale():
    products = np.array([[1.0, -0.5], [-0.5, 1]])
    assert noise_of(normal_equations(products, np.eye(2)), samples_per_prompt=1) == {}


def test_without_noise_the_scale_is_zero():
    counts = np.array([[2.0, 1], [1, 2]])
    of_parts = counts.sum(1)
    found = noise_of(normal_equations(np.outer(of_parts, of_parts), counts), samples_per_prompt=3)
    assert found["scale"] == pytest.approx(0, abs=1e-9) and found["scale"] >= 0


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_parts_hold_half_of_the_samples_of_each_prompt(ranks: int):
    groups = [row // 5 for row in range(60)]
    parts = random_parts(list(range(60)), groups, ranks, seed=1)

    assert sorted(row for part in parts for row in part) == list(range(60))
    assert len(parts) * ranks >= 8
    counts = np.array(
        [[sum(groups[row] == prompt for row in part) for prompt in range(12)] for part in parts]
    )
    for first, second in zip(counts[::2], counts[1::2], strict=True):
        assert set((first + second).tolist()) <= {0, 5} and np.abs(first - second).max() == 1
        assert abs(first.sum() - second.sum()) <= 1


def test_gradients_that_depend_on_the_length_change_nothing():
    """Plans put rows of similar length into a micro-batch; parts must not."""
    generator = np.random.default_rng(0)
    num_prompts, samples, size = 32, 4, 200
    lengths = np.sort(generator.lognormal(size=(num_prompts, 1)), axis=0)
    lengths = lengths * generator.lognormal(sigma=0.5, size=(num_prompts, samples))
    direction, mean = generator.normal(size=(2, size)) / size**0.5
    gradients = mean + 2 * np.log(lengths)[..., None] * direction
    gradients += generator.normal(size=gradients.shape) * 2 / size**0.5

    # the definition, for the samples of each prompt as a draw from what it could have
    of_prompts = gradients.mean(1)
    inside = np.square(gradients - of_prompts[:, None]).sum() / (num_prompts * (samples - 1))
    between = (
        np.square(of_prompts - of_prompts.mean(0)).sum() / (num_prompts - 1) - inside / samples
    )
    signal = np.square(of_prompts.mean(0)).sum() - (between + inside / samples) / num_prompts

    groups = [row // samples for row in range(num_prompts * samples)]
    flat = gradients.reshape(-1, size)
    equations = np.zeros((3, 4))
    for seed in range(1000):
        parts = random_parts(list(range(len(flat))), groups, 1, seed=seed)
        sums = np.stack([flat[part].sum(0) for part in parts])
        counts = np.zeros((len(parts), num_prompts))
        for number, part in enumerate(parts):
            np.add.at(counts[number], np.array(part) // samples, 1)
        equations += normal_equations(sums @ sums.T, counts)

    found = noise_of(equations, samples)
    assert found["prompts"] == pytest.approx(between / signal, rel=0.05)
    assert found["samples"] == pytest.approx(inside / signal, rel=0.05)


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

    reader = meter()
    with reader.reading(net, parts=[0, 1, 1]):
        for x, uses in zip(inputs, rare, strict=True):
            net(x, uses).backward()
            net.eval()(x, uses)  # learns nothing
            net.train()

    # A sketch of fewer elements than counters is exact.
    flat = torch.stack([exact[0], exact[1] + exact[2]])
    torch.testing.assert_close(reader._sketches @ reader._sketches.T, flat @ flat.T)
    assert not net._forward_pre_hooks


def test_a_step_that_is_not_finite_counts_for_nothing():
    reader = meter()
    reader.equations = normal_equations(np.array([[8.0, 4], [4, 8]]), 2 * np.eye(2))
    before = reader.equations.copy()
    reader._sketches = torch.full((2, COUNTERS), torch.nan)
    metrics = Metrics()
    reader.measure([[0, 0], [1, 1]], metrics)

    assert np.array_equal(reader.equations, before)
    assert metrics.reduce(ALONE)["noise/scale"] == pytest.approx(2.0)


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
    alone = train("train_ppo", 1, [*inputs, *NOISY, "--fsdp", "--max_steps=2"], tmp_path / "one")
    flags = ["--fsdp", "--sp_size=2", "--max_steps=2"]
    divided = train("train_ppo", 2, [*inputs, *NOISY, *flags], tmp_path / "sequence")
    assert noise(divided) == [pytest.approx(row, rel=1e-4) for row in noise(alone)]

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
@pytest.mark.parametrize("prompts", [1, 3])
def test_few_prompts_leave_parts_empty(prompts: int, tmp_path):
    """Three prompts on two ranks are unlike on both."""
    inputs = [*prepare(tmp_path), *NOISY, "--measure_noise=1", "--max_steps=1"]
    size = [f"--rollout_batch_size={prompts}", f"--train_batch_size={4 * prompts}"]
    (row,) = train("train_ppo", min(prompts, 2), [*inputs, *size], tmp_path / "run")
    assert "noise/signal_to_noise" in row


@pytest.mark.slow
def test_a_resumed_run_measures_the_same_noise(tmp_path):
    inputs = [*prepare(tmp_path), *NOISY, "--save_steps=1"]
    whole = train("train_ppo", 1, [*inputs, "--max_steps=4"], tmp_path / "whole")
    train("train_ppo", 1, [*inputs, "--max_steps=3"], tmp_path / "resumed")
    resumed = [*inputs, "--max_steps=4", "--load_checkpoint"]
    assert noise(train("train_ppo", 1, resumed, tmp_path / "resumed")) == noise(whole)

    # The flag may come or go.
    for every in (0, 1):
        flags = [*resumed, f"--measure_noise={every}", f"--max_steps={5 + every}"]
        rows = train("train_ppo", 1, flags, tmp_path / "resumed")
        assert bool(noise(rows)[-1]) == bool(every)
