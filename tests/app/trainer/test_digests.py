"""Why: the digests of a run are compared with those of another, so equal runs have equal ones."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from app.trainer.planted import run_all
from lightrft.app.run.digests import OF_SEQUENCES, PHASES, blocks_of, read_digests
from lightrft.models.weight_sync.verify import random_odd_numbers
from lightrft.strategy.backends.optim import (
    MIXING_FACTOR,
    SHORT,
    SUM_BLOCK,
    BitSums,
    step,
    sum_of_bits,
)
from ranks import run_ranks
from runs import PPO, prepare, run_here

FACTORS = random_odd_numbers(32, 0, torch.device("cpu"))
FLAGS = [*PPO, "--rollout_batch_size=4", "--train_batch_size=8", "--max_steps=2"]
STRATEGIES = {"fsdp": ["--fsdp"], "zero2": ["--zero_stage=2"], "zero3": ["--zero_stage=3"]}


def bits_by_hand(octets: bytes, factors: torch.Tensor) -> int:
    """Sum the words of 8 bytes with Python's integers."""
    octets += bytes(-len(octets) % 8)
    words = [
        int.from_bytes(octets[at : at + 8], "little", signed=True)
        for at in range(0, len(octets), 8)
    ]
    total = 0
    for at in range(0, len(words), len(factors)):
        block = words[at : at + len(factors)]
        total = total * MIXING_FACTOR + sum(
            w * f for w, f in zip(block, factors.tolist(), strict=False)
        )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_changed_bit_or_position_changes_the_sum(dtype):
    factors = FACTORS[:7]  # fewer than words
    values = torch.arange(1, 101).to(dtype)
    total = sum_of_bits([values], factors)
    assert total.dtype == torch.int64 and total.shape == ()
    assert total == bits_by_hand(values.view(torch.uint8).numpy().tobytes(), factors)

    sums = {int(total)}
    for index in range(100):
        changed = values.clone()
        words = changed.view(torch.uint8)
        words[index * dtype.itemsize] ^= 1
        sums.add(int(sum_of_bits([changed], factors)))
    assert len(sums) == 101

    exchanged = values.clone()
    exchanged[[3, 70]] = values[[70, 3]]
    assert sum_of_bits([exchanged], factors) != total
    assert sum_of_bits([values.view(10, 10).T], factors) != total


def test_short_tensors_are_joined_and_views_need_no_alignment():
    long = torch.arange(SHORT + 4.0)
    short, other = torch.arange(3.0), torch.arange(5, dtype=torch.bfloat16)
    total = sum_of_bits([short, long[1:-1], other, short], FACTORS)

    tensors = [long[1:-1], torch.cat([short, short]), other]
    blocks = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
    expected = 0
    for octets in blocks:
        # One product for each block of words, so the sum goes on where the last tensor ended.
        for at in range(0, len(octets), 8 * len(FACTORS)):
            block = bits_by_hand(octets[at : at + 8 * len(FACTORS)], FACTORS)
            expected = expected * MIXING_FACTOR + block
    assert int(total) == (expected + 2**63) % 2**64 - 2**63


def test_sums_follow_an_optimizer():
    """Gradients before the step, and weights before the first one and after each."""
    weight, bias, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = torch.optim.SGD([weight, bias, unused], lr=1.0)
    sums = BitSums(optimizer, "cpu", {weight: "layer", bias: "layer"}, "rest")
    for number in (1.0, 2.0):
        weight.grad = bias.grad = torch.full((3,), number)
        optimizer.step()

    taken = {kind: sums.take(kind) for kind in ("before", "gradient", "weights")}
    assert [each[:2] for each in taken["gradient"]] == [(0, "layer"), (1, "layer")]
    assert [each[:2] for each in taken["weights"]] == [
        (update, block) for update in (0, 1) for block in ("layer", "rest")
    ]
    factors = random_odd_numbers(SUM_BLOCK, 0, torch.device("cpu"))
    assert [int(total) for *_, total in taken["before"]] == [
        int(sum_of_bits([torch.ones(6)], factors)),
        int(sum_of_bits([torch.ones(3)], factors)),
    ]
    assert sums.take("weights") == []


def sums_of_two_meshes() -> dict[str, list[tuple[int, str]]]:
    """Return the update and the block of each sum of two steps."""
    parameters = [
        torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()] * mesh.ndim))
        for mesh in (init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1)))
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    names = dict(zip(parameters, ("layer", "experts"), strict=True))
    sums = BitSums(optimizer, "cpu", names, "rest")
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        step(optimizer)
    return {
        kind: [each[:2] for each in sums.take(kind)] for kind in ("before", "gradient", "weights")
    }


def test_a_step_of_several_meshes_is_one_update():
    """Experts that ranks divide, and layers that they split, have a mesh of their own.

    The first line of a run has the weights of all of them.
    """
    (found,) = run_ranks(1, sums_of_two_meshes)
    first = [(0, "layer"), (0, "experts")]
    both = [*first, (1, "layer"), (1, "experts")]
    assert found == {"before": first, "gradient": both, "weights": both}


def test_blocks_of_deep_models_share_a_digest():
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.mlp.up.weight" for layer in range(36)),
        "model.norm.weight",
        "lm_head.weight",
    ]
    blocks = blocks_of(names, 10)
    assert blocks["model.layers.0.mlp.up.weight"] == "layers.0-5"
    assert blocks["model.layers.35.mlp.up.weight"] == "layers.30-35"
    assert len(set(blocks.values())) <= 10
    assert {blocks[name] for name in names if "layers" not in name} == {
        "embed_tokens",
        "norm",
        "lm_head",
    }
    assert blocks_of(names[:3], 10)["model.layers.1.mlp.up.weight"] == "layers.1"


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_runs_have_equal_digests(tmp_path, name):
    if name != "fsdp" and not find_spec("deepspeed"):
        pytest.skip("needs deepspeed")
    inputs = [flag for flag in prepare(tmp_path) if flag != "--fsdp"]
    flags = [*inputs, *FLAGS, *STRATEGIES[name]]
    run_ranks(2, run_all, [(str(tmp_path / run), flags, "") for run in ("one", "other")])

    one, other = (read_digests(tmp_path / run) for run in ("one", "other"))
    assert one == other and list(one) == [0, 1, 2]
    assert [*one[2]] == ["step", *PHASES, "updates"] and len(one[2]["updates"]) == 2
    assert len({one[step]["weights"][block] for step in one for block in one[0]["weights"]}) >= 3
    assert one[1]["gradient"].keys() == one[1]["weights"].keys() == one[0]["weights"].keys()
    if name == "fsdp":
        assert {"embed_tokens", "layers.0", "layers.1"} <= one[0]["weights"].keys()
    lines = (tmp_path / "one" / "digests.jsonl").read_text().splitlines()
    assert max(map(len, lines)) < 2000


@pytest.mark.slow
def test_sequences_have_the_same_digests_on_any_number_of_ranks(tmp_path):
    flags = [*prepare(tmp_path), *FLAGS, "--max_steps=1"]
    for ranks in (1, 2):
        run_ranks(ranks, run_all, [(str(tmp_path / str(ranks)), flags, "")])
    one, two = (read_digests(tmp_path / str(ranks))[1] for ranks in (1, 2))
    same = [phase for phase in OF_SEQUENCES if one[phase] == two[phase]]
    # Log-probs are rounded differently in other batches.
    assert {"prompts", "samples", "rewards", "advantages"} <= set(same)


@pytest.mark.slow
def test_supervised_runs_have_digests_and_a_flag_switches_them_off(tmp_path):
    inputs = [each for each in prepare(tmp_path) if not each.startswith("--reward")]
    flags = [*inputs, "--train_batch_size=8", "--max_steps=2", "--label_key=label"]
    for name, added in (("on", []), ("off", ["--no_digests"])):
        path = tmp_path / name
        run_ranks(1, run_here, "train_sft", [*flags, *added, f"--save_path={path}"])
    rows = read_digests(tmp_path / "on")
    assert list(rows) == [0, 1, 2] and "samples" not in rows[1]
    assert {"prompts", "plan", "loss", "gradient", "weights", "updates"} <= rows[1].keys()
    assert not (tmp_path / "off" / "digests.jsonl").exists()
    described = json.loads((Path(tmp_path) / "on" / "run.json").read_text())
    assert described["machine"]["threads"] and described["versions"]["torch"]
