"""With more ranks than experts, FSDP2 shards another dim of them."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lightrft.parallel.dtensor_slices import shard_slices
from lightrft.strategy.fsdp import shard_placement
from lightrft.tools.step_memory import FakeRankStrategy, fake_group
from ranks import run_ranks
from strategy.training import load, one_step, snapshot, strategy
from tiny import tiny_experts

EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of two experts."""
    folder = Path(tiny_experts(tmp_path_factory.mktemp("two")))
    config = json.loads((folder / "config.json").read_text()) | {"num_experts": 2}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config))
    model.save_pretrained(folder)
    return str(folder)


def course(folder: str, root: Path, tag: str) -> tuple[list[str], dict[str, Tensor]]:
    """Stream, learn, and continue from the checkpoint of `tag`; save it if there is none.

    Return the names of streamed weights that differ from the folder's, and the learned weights.
    """
    made = strategy(weight_sync_bucket_mb=1)
    model = load(folder)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model, optimizer, _ = made.prepare((model, made.create_optimizer(model, lr=1e-3), None))
    if made.mesh.world.size > 2:
        for name in ("gate_up_proj", "down_proj"):
            assert model.get_parameter(EXPERTS + name).placements == (Shard(1),)

    streamed = {name: tensor.clone() for name, tensor in made.full_params(model)}
    wrong = [name for name in expected if not torch.equal(streamed[name], expected[name])]

    if (root / tag).exists():
        made.load_ckpt(model, root, tag=tag, optimizer=optimizer)
    else:
        one_step(made, model, optimizer, 0)
        made.save_ckpt(model, root, tag, optimizer=optimizer)
    one_step(made, model, optimizer, 1)
    return wrong, snapshot(made, model)


def test_two_experts_on_four_ranks(folder: str, tmp_path: Path) -> None:
    """They stream bit by bit, learn as on one rank, and their checkpoints fit any number of ranks."""
    learned = run_ranks(4, course, folder, tmp_path / "four", "a")
    continued = run_ranks(1, course, folder, tmp_path / "four", "a")
    (_, alone), *_ = run_ranks(1, course, folder, tmp_path / "one", "a")
    again = run_ranks(4, course, folder, tmp_path / "one", "a")

    for wrong, weights in [*learned, *continued, *again]:
        assert wrong == []
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=1e-3)


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
    with fake_group(256):
        made = FakeRankStrategy(seed=1, args={"fsdp": True})
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
