"""With more ranks than experts, FSDP2 shards another dim of them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lightrft.models.parallel.dtensor_slices import shard_slices
from lightrft.strategy.fsdp import shard_placement
from ranks import run_ranks
from strategy.training import load, one_step, snapshot, strategy
from tiny import tiny_experts

EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of two experts."""
    return tiny_experts(tmp_path_factory.mktemp("two"), num_experts=2)


def course(folder: str, root: Path, *others: Path, ep: int = 1) -> tuple[list[str], list]:
    """Stream, learn two steps, and learn the second one again from the checkpoint between them.

    The second step is also learned from the checkpoints of `others`, folders of other runs.
    Return the names of streamed weights that differ from the folder's, and the learned weights.
    """
    made = strategy(weight_sync_bucket_mb=1, ep_size=ep)
    model = load(folder)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    # A large epsilon, because rounding of tiny gradients decides the first steps otherwise.
    optimizer = made.create_optimizer(model, lr=1e-2, eps=1e-2)
    model, optimizer = made.prepare((model, optimizer))
    if made.mesh.world.size > 2 and ep == 1:
        for name in ("gate_up_proj", "down_proj"):
            assert model.get_parameter(EXPERTS + name).placements == (Shard(1),)

    streamed = {name: tensor.clone() for name, tensor in made.full_params(model)}
    wrong = [name for name in expected if not torch.equal(streamed[name], expected[name])]

    one_step(made, model, optimizer, 0)
    made.save_ckpt(model, root, "first", optimizer=optimizer)
    learned = []
    for resumed in (None, root, *others):
        if resumed is not None:
            made.load_ckpt(model, resumed, optimizer=optimizer)
        one_step(made, model, optimizer, 1)
        learned.append(snapshot(made, model))
    return wrong, learned


def test_two_experts_on_four_ranks(folder: str, tmp_path: Path) -> None:
    """They stream bit by bit, learn as on one rank, and one rank continues from the checkpoint."""
    on_four = run_ranks(4, course, folder, tmp_path / "four")
    (on_one,) = run_ranks(1, course, folder, tmp_path / "one", tmp_path / "four")
    assert [wrong for wrong, _ in [*on_four, on_one]] == [[]] * 5

    (_, (expected, *_)) = on_one
    for _, learned in [*on_four, on_one]:
        for weights in learned:
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-4)


def divided_course(ep: int, folder: str, root: Path, *others: Path) -> tuple[list[str], list]:
    return course(folder, root, *others, ep=ep)


@pytest.mark.slow
def test_checkpoints_go_to_and_fro_between_numbers_of_ranks_with_the_same_experts(
    folder: str, tmp_path: Path
) -> None:
    """An expert is on each rank, or on two of four, or all are on one."""
    on_two = run_ranks(2, divided_course, 2, folder, tmp_path / "two")
    (on_one,) = run_ranks(1, course, folder, tmp_path / "one", tmp_path / "two")
    on_four = run_ranks(4, divided_course, 2, folder, tmp_path / "four", tmp_path / "one")
    assert [wrong for wrong, _ in [*on_two, on_one, *on_four]] == [[]] * 7

    (_, (expected, *_)) = on_one
    for _, learned in [*on_two, on_one, *on_four]:
        for weights in learned:
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-4)


def test_other_dims_are_sharded_only_instead_of_much_padding() -> None:
    def dim(*shape: int, ranks: int) -> int:
        return shard_placement(nn.Parameter(torch.empty(shape, device="meta")), ranks).dim

    assert dim(128, 1536, 2048, ranks=128) == 0
    assert dim(128, 1536, 2048, ranks=256) == 1
    assert dim(128, 1536, 2048, ranks=1024) == 2
    assert dim(128, 1535, 2047, ranks=256) == 0, "FSDP2 does not pad other dims"
    assert dim(151936, 4096, ranks=1024) == 0, "0.4 % more"
    assert dim(7, ranks=4) == 0


def test_ranks_beyond_the_experts_gather_hardly_more_than_the_weights() -> None:
    config = Qwen3MoeConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=128,
        vocab_size=2048,
    )
    step_memory = pytest.importorskip("lightrft.extras.tools.step_memory")
    with step_memory.fake_group(256):
        made = step_memory.FakeRankStrategy(seed=1, args={"fsdp": True})
        made.setup_distributed()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        made._shard(model)

        gathered = real = 0
        for parameter in model.parameters():
            (shard,) = shard_slices(parameter)
            gathered += shard.pieces * shard.numel
            real += parameter.numel()

    assert gathered <= 1.05 * real
