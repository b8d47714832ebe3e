"""A mixture of experts from a folder as released, through training's hands, into vLLM, into a folder, and into vLLM again."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, PretrainedConfig

from engine.contract import Bench, flipped_elements_are_named, perturbed, start
from lightrft.config import ModelSection
from lightrft.engine.base import Engine, EngineError, Request, Sampling
from lightrft.engine.expected import published_names
from lightrft.engine.names import PublishedNames
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.parallel.mesh import Mesh
from lightrft.strategy import FSDPStrategy
from lightrft.types import Batch
from ranks import run_ranks
from tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer

pytest.importorskip("vllm", reason="vllm is not installed")
pytestmark = pytest.mark.slow

PROMPTS = [[65, 66, 67], [100] * 20, [7]]
GREEDY = Sampling(temperature=0, max_tokens=12)
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """48 columns of an expert are 24 on each of two ranks, which vLLM fills up to 32."""
    config = MixtralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=48,
        num_local_experts=5, num_experts_per_tok=2, vocab_size=VOCABULARY, initializer_range=0.1, max_position_embeddings=512,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, sliding_window=None, dtype=torch.float32,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "source")
    byte_tokenizer().save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


def course(folder: str, target: str) -> tuple[dict[str, torch.Tensor], list, tuple[torch.Tensor, ...], list]:
    """On both ranks: the trained parameters, and what one engine on two ranks and, from the folder, one on each rank answer.

    The answers of the first are also scored by the trainer.
    """
    made = FSDPStrategy(args={"fsdp": True, "pretrain": folder, "engine_type": "vllm", "engine_tp_size": 2,
                              "prompt_max_len": 32, "generate_max_len": 16, "engine_kv_cache_gb": 0.125})
    made.setup_distributed()
    with made.init_model_context():
        actor = Actor(perturbed(load_model(ModelSection(pretrain=folder)), 3))
    actor = made.prepare(actor)
    made.setup_inference_engine(actor=actor)
    with made.engine_awake(actor) as engine:
        answers = answers_of(engine)
        plain = AutoModelForCausalLM.from_pretrained(folder)
        bench = Bench(engine, plain, engine.axis, made.get_rank())
        engine.proof_dtype = torch.float32
        flipped_elements_are_named(bench, [GATE_UP, DOWN])
        assert engine._shim.weights.unknown == []
    scored = scores(actor, answers)
    trained = {name: tensor.clone() for name, tensor in made.full_params(actor)}
    made.save_model(actor, byte_tokenizer(), target)
    made.close_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightrft.engine.start.published_names", with_a_stranger)
        alone = start("vllm", target, Mesh("cpu").engine(1))
    again = answers_of(alone)
    with pytest.raises(EngineError, match=r"vllm has no place for 1 of .*published as model.strange.weight"):
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
    learned = [[False] * len(prompt) + [True] * len(tokens) for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
    mask = torch.tensor(sum(learned, []))
    batch = Batch(lengths=torch.tensor([len(row) for row in rows]), input_ids=torch.tensor(sum(rows, [])), loss_mask=mask,
                  rows=torch.arange(len(rows)), learned=None)
    return actor(batch, 1.0)[0][mask].split([len(tokens) for tokens, _ in answers])


def test_experts_from_a_released_folder_and_back(folder: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    results = run_ranks(2, course, folder, str(target), timeout=500)
    with safe_open(Path(folder) / "model.safetensors", "pt") as before, safe_open(target / "model.safetensors", "pt") as after:
        assert "model.layers.1.block_sparse_moe.experts.4.w2.weight" in before.keys()  # noqa: SIM118
        assert sorted(after.keys()) == sorted(before.keys())
    loaded = AutoModelForCausalLM.from_pretrained(target)
    for trained, answers, scored, again in results:
        found = dict(loaded.named_parameters())
        assert found.keys() == trained.keys() and all(torch.equal(found[name], trained[name]) for name in found)
        for prompt, (tokens, logprobs), trainers, (tokens_again, _) in zip(PROMPTS, answers, scored, again, strict=True):
            full = loaded.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12,
                                   do_sample=False)
            assert tokens == tokens_again == full[0, len(prompt) :].tolist()
            torch.testing.assert_close(torch.tensor(logprobs), trainers, rtol=0, atol=1e-5)
