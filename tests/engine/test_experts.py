"""A mixture of experts from a folder as released, through training's hands, into vLLM, into a
folder, and into vLLM again.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.contract import (
    Bench,
    _is_noticed,
    a_sleep_of_level_2_drops_the_weights,
    a_stream_that_raises_is_repaired,
    flipped_elements_are_named,
    reference_greedy,
)
from lightrft.config import ModelSection
from lightrft.core.batch import Batch
from lightrft.engine.base import Engine, EngineError, Request, Sampling
from lightrft.engine.model_info import published_names
from lightrft.engine.testing import a_sleep_of_level_1_keeps_the_weights, perturbed, start_engine
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.parallel.dtensor_slices import local_slices
from lightrft.models.parallel.mesh import Mesh
from lightrft.models.weight_sync.fused_layout import CopyTarget, ExpertSlice
from lightrft.models.weight_sync.names import PublishedNames
from lightrft.models.weight_sync.stream import unwrap
from lightrft.strategy import FSDPStrategy
from ranks import run_ranks
from tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from with_vllm import load_vllm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()


NamedTensors = Iterator[tuple[str, torch.Tensor]]
PROMPTS = [[65, 66, 67], [100] * 20, [7]]
GREEDY = Sampling(temperature=0, max_tokens=12)
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """48 columns of an expert are 24 on each of two ranks; vLLM fills them up to 32."""
    config = MixtralConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=5,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        max_position_embeddings=512,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        sliding_window=None,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "source")
    byte_tokenizer().save_pretrained(tmp_path / "source")

    return str(tmp_path / "source")


def course(
    folder: str, target: str
) -> tuple[dict[str, torch.Tensor], list, tuple[torch.Tensor, ...], list]:
    """Return the trained parameters, and what engines answer, on both ranks.

    One engine spans two ranks; the others, loaded from the folder, have one rank each. The trainer
    scores the answers of the first too.
    """
    made = FSDPStrategy(
        args={
            "fsdp": True,
            "pretrain": folder,
            "engine_type": "vllm",
            "engine_tp_size": 2,
            "prompt_max_len": 32,
            "generate_max_len": 16,
            "engine_kv_cache_gb": 0.05,
        }
    )
    made.setup_distributed()
    with made.init_model_context():
        actor = Actor(perturbed(load_model(ModelSection(pretrain=folder)), 3))
    actor = made.prepare(actor)
    made.setup_inference_engine(actor=actor)

    with made.engine_awake(actor) as engine:
        answers = answers_of(engine)
        plain = AutoModelForCausalLM.from_pretrained(folder)
        bench = Bench(engine, plain)
        engine.verify_dtype = torch.float32
        flipped_elements_are_named(bench, [GATE_UP, DOWN])
        assert engine._shim.weights.unknown == []

    scored = scores(actor, answers)
    trained = {name: tensor.clone() for name, tensor in made.full_params(actor)}
    made.save_model(actor, byte_tokenizer(), target)
    made.close_engine()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightrft.engine.start.published_names", with_a_stranger)
        alone = start_engine("vllm", target, Mesh("cpu").engine(1))

    again = answers_of(alone)
    with pytest.raises(
        EngineError, match=r"vllm has no parameter for 1 of .*published as model.strange.weight"
    ):
        alone.load_weights(plain.named_parameters(), 1)

    alone.close()
    return trained, answers, scored, again


def with_a_stranger(config: PretrainedConfig, **options: bool) -> PublishedNames:
    """As of a family whose folders vLLM does not know."""
    names = published_names(config, **options)
    names.renamed["model.norm.weight"] = "model.strange.weight"
    return names


def answers_of(engine: Engine) -> list[tuple[list[int], list[float]]]:
    found = engine.generate([Request(prompt) for prompt in PROMPTS], GREEDY)
    return [(samples[0].token_ids, samples[0].logprobs) for samples in found]


@torch.no_grad()
def scores(actor: Actor, answers: list[tuple[list[int], list[float]]]) -> tuple[torch.Tensor, ...]:
    """The trainer's log-probs of the same tokens, in one flat batch."""
    rows = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
    learned = [
        [False] * len(prompt) + [True] * len(tokens)
        for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)
    ]
    mask = torch.tensor(sum(learned, []))
    batch = Batch(
        lengths=torch.tensor([len(row) for row in rows]),
        input_ids=torch.tensor(sum(rows, [])),
        loss_mask=mask,
        rows=torch.arange(len(rows)),
        learned=None,
    )

    return actor(batch, 1.0)[0][mask].split([len(tokens) for tokens, _ in answers])


def test_experts_from_a_released_folder_and_back(folder: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    results = run_ranks(2, course, folder, str(target), timeout=500)
    with (
        safe_open(Path(folder) / "model.safetensors", "pt") as before,
        safe_open(target / "model.safetensors", "pt") as after,
    ):
        assert "model.layers.1.block_sparse_moe.experts.4.w2.weight" in before.keys()  # noqa: SIM118
        assert sorted(after.keys()) == sorted(before.keys())

    loaded = AutoModelForCausalLM.from_pretrained(target)
    for trained, answers, scored, again in results:
        found = dict(loaded.named_parameters())
        assert found.keys() == trained.keys() and all(
            torch.equal(found[name], trained[name]) for name in found
        )
        for prompt, (tokens, logprobs), trainers, (tokens_again, _) in zip(
            PROMPTS, answers, scored, again, strict=True
        ):
            full = loaded.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=12,
                do_sample=False,
            )
            assert tokens == tokens_again == full[0, len(prompt) :].tolist()
            torch.testing.assert_close(torch.tensor(logprobs), trainers, rtol=0, atol=1e-5)


def divided_course(folder: str) -> tuple[list[bool], list[list[str]], str]:
    """Trainer and engine divide the experts over the same two ranks.

    Return whether the engine answers as the trainer's weights do after each sync, the weights that
    each sync has brought in shards, and what the engine says when one element is another.
    """
    made = FSDPStrategy(
        args={
            "fsdp": True,
            "pretrain": folder,
            "ep_size": 2,
            "engine_type": "vllm",
            "engine_tp_size": 2,
            "engine_args": '{"enable_expert_parallel": true}',
            "prompt_max_len": 32,
            "generate_max_len": 16,
            "engine_kv_cache_gb": 0.05,
        }
    )
    made.setup_distributed()
    actor = made.prepare(Actor(load_model(ModelSection(pretrain=folder))))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    made.setup_inference_engine(actor=actor)
    engine = made.engine
    engine.verify_dtype = torch.float32

    divided: list[list[str]] = []
    load = engine._load_weights

    def watched(named_tensors: NamedTensors) -> None:
        load(noted(named_tensors))

    def noted(named_tensors: NamedTensors) -> NamedTensors:
        divided.append([])
        for name, tensor in named_tensors:
            divided[-1] += [name] if isinstance(tensor, DTensor) else []
            yield name, tensor

    right = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_load_weights", watched)
        for seed in (1, 2, 3):
            changed = perturbed(plain, seed)
            with torch.no_grad():
                for name, parameter in unwrap(actor).named_parameters():
                    local = local_slices(parameter)
                    parameter.to_local().copy_(changed.get_parameter(name)[local])
            with made.engine_awake(actor):
                found = engine.generate([Request(prompt) for prompt in PROMPTS], GREEDY)
            answers = [samples[0].token_ids for samples in found]
            right.append(answers == reference_greedy(changed, PROMPTS, 12))

        layer = engine._shim.experts[0]
        engine.verify_round = 0  # all weights
        patch.setattr(engine, "_load_weights", lambda stream: (load(stream), spoil(layer)))
        with pytest.raises(EngineError) as error:
            made.wakeup_inference_engine()
            made.update_engine_weights(actor)

    made.close_engine()
    return right, divided, str(error.value)


def spoil(layer: torch.nn.Module) -> None:
    layer.w2_weight.data[0, 0, 0] += 1


def qwen3_mixture(folder: Path, **options: Any) -> None:
    """Write a random Qwen3 with six experts, whose sizes fill the blocks of vLLM's kernels."""
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=6,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        initializer_range=0.1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype=torch.float32,
        **options,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def test_ranks_that_divide_experts_stream_their_own(tmp_path: Path) -> None:
    """The first sync brings all experts, because their addresses are not known before."""
    qwen3_mixture(tmp_path, num_key_value_heads=2)

    names = [
        f"model.layers.{layer}.mlp.experts.{projection}"
        for layer in range(2)
        for projection in ("gate_up_proj", "down_proj")
    ]
    for right, divided, error in run_ranks(2, divided_course, str(tmp_path), timeout=400):
        assert right == [True] * 3
        assert divided == [names] * 3
        assert "model.layers.0.mlp.experts.down_proj in the engine differs" in error


def direct_course(folder: str) -> tuple[list[str], list[str], list[bool]]:
    """An engine on both ranks keeps matrices as they came, as on accelerators.

    Packed experts are the exception. Return the weights that are copied to where they lie, the
    other weights, and whether the engine answers as it should.
    """
    from lightrft.engine.vllm import shim

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
            lambda layer, remove_weight: None,
        )
        for layer in ("linear.LinearBase", "vocab_parallel_embedding.VocabParallelEmbedding"):
            plain = staticmethod(torch.nn.functional.linear)
            patch.setattr(f"vllm.model_executor.layers.{layer}.cpu_linear", plain, raising=False)

        engine = start_engine("vllm", folder, Mesh("cpu").world)
        model = AutoModelForCausalLM.from_pretrained(folder)
        bench = Bench(engine, model)
        direct = list(engine._shim.weights.direct)
        right = [bench.greedy() == bench.expected]
        seen = []
        reload = shim.reload_weights

        def watched(*args: Any, weights_iterator: NamedTensors, **options: Any) -> None:
            seen.append(0)
            reload(*args, weights_iterator=counted(weights_iterator), **options)

        def counted(stream: NamedTensors) -> NamedTensors:
            for named in stream:
                seen[-1] += 1
                yield named

        patch.setattr(shim, "reload_weights", watched)
        for seed in (1, 2, 3):
            bench.load(other := perturbed(model, seed))
            right.append(bench.greedy() == reference_greedy(other))

        published = sum(len(engine.names.pieces(name)) for name in engine.expected)
        assert seen == [published, *[len(engine.expected) - len(direct)] * 2]
        patch.setattr(shim, "reload_weights", reload)

        old = perturbed(model, 4)
        for name in direct:
            _is_noticed(
                bench,
                lambda came, name=name: came.update({name: old.get_parameter(name).detach()}),
                name,
                round=5,
            )

        a_stream_that_raises_is_repaired(bench)
        a_sleep_of_level_1_keeps_the_weights(bench)
        a_sleep_of_level_2_drops_the_weights(bench)
        random_order = list(perturbed(model, 5).named_parameters())[::-1]
        engine.load_weights(random_order, 1)
        right.append(
            engine.addresses_verified and bench.greedy() == reference_greedy(perturbed(model, 5))
        )
        engine.close()

    return direct, [name for name in engine.expected if name not in direct], right


def test_weights_that_lie_as_they_came_are_copied_there(tmp_path: Path) -> None:
    """Slices of fused layers, of repeated heads and of both halves of experts are copied.

    Norms may be constant, so they go through vLLM.
    """
    qwen3_mixture(tmp_path, num_key_value_heads=1, intermediate_size=96, mlp_only_layers=[1])

    for direct, others, right in run_ranks(2, direct_course, str(tmp_path), timeout=400):
        assert all(
            "norm" in name or VOCABULARY % 128 and ("embed" in name or "lm_head" in name)
            for name in others
        ), others
        assert {"experts.gate_up_proj", "experts.down_proj"} <= {
            ".".join(name.split(".")[-2:]) for name in direct
        }
        assert (
            "model.layers.1.self_attn.k_proj.weight" in direct
            and "model.layers.1.mlp.down_proj.weight" in direct
        )
        assert right == [True] * 5


class RoutedExperts(torch.nn.Module):
    """As vLLM's on an accelerator: as they were loaded."""

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(3, 2 * 8 // ranks, 5))
        self.w2_weight = torch.nn.Parameter(torch.zeros(3, 5, 8 // ranks))
        self.quant_method = SimpleNamespace(moe_kernel=None)
        parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks, ep_rank=0, ep_size=1)
        self.moe_config = SimpleNamespace(
            num_experts=3, intermediate_size_per_partition=8 // ranks, moe_parallel_config=parallel
        )


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_experts_of_accelerators_are_copied_into_their_memory(rank: int, ranks: int) -> None:
    layer = RoutedExperts(rank, ranks)
    local = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    full = {"w13_weight": torch.randn(3, 16, 5), "w2_weight": torch.randn(3, 5, 8)}
    for attribute, tensor in full.items():
        (target,) = CopyTarget.of([ExpertSlice("experts", layer, attribute, slice(None))])
        target.copy(tensor)
    gate, up = full["w13_weight"].split(8, 1)
    assert torch.equal(layer.w13_weight, torch.cat([gate[:, local], up[:, local]], 1))
    assert torch.equal(layer.w2_weight, full["w2_weight"][..., local])
