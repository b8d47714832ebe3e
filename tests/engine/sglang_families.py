"""Families of models in SGLang, compared with plain transformers.

Each has a folder, streams with verification, answers and outputs of modules.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.contract import (
    GREEDY,
    PROMPTS,
    Bench,
    flipped_elements_are_named,
    reference_greedy,
    reference_logprobs,
)
from lightrft.engine.base import Engine
from lightrft.engine.probe import Probe
from lightrft.engine.testing import perturbed, start_engine
from lightrft.models.parallel.collectives import Axis
from lightrft.models.parallel.mesh import Mesh
from tiny import BOS, EOS, PAD, VOCABULARY

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}
FAMILIES = {
    "llama": {"attention_bias": True},
    "qwen2": {},
    "mistral": {"sliding_window": None},
    "phi3": {},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 5, **EXPERTS},
    "olmoe": {"num_experts": 5, "num_key_value_heads": 4, **EXPERTS},
    "qwen3_moe": {"head_dim": 32, "num_experts": 5, "moe_intermediate_size": 40, **EXPERTS},
}
"""SGLang fills the 40 columns of Qwen3's experts up to 64."""
CUT = "qwen3_moe"
"""This one is also cut over two ranks, each of which then has 32 columns, the second 8 of them with
weights."""
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def course(folder: str) -> dict[str, list[str]]:
    """Each of two ranks runs every other family in a separate engine.

    Then both run one family in an engine of both.
    """
    mesh = Mesh("cpu")
    mine = list(FAMILIES)[mesh.world.rank :: 2]
    return {family: problems(family, folder, mesh.engine(1)) for family in mine} | {
        "cut": problems(CUT, folder, mesh.engine(2))
    }


def problems(family: str, folder: str, axis: Axis) -> list[str]:
    path = str(Path(folder, family))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = start_engine("sglang", path, axis)
    bench = Bench(engine, model)
    found = [
        f"unknown {name}" for name in engine.expected.keys() - engine._addresses.keys()
    ] + _gaps(bench, model)
    engine.verify_dtype = torch.float32
    other = perturbed(model, 3)
    bench.load(other)
    found += [f"streamed: {gap}" for gap in _gaps(bench, other)] + _differing_modules(engine, other)
    flipped_elements_are_named(bench, sorted(engine.expected.keys() & {GATE_UP, DOWN}))
    engine.close()

    return found


def hybrid(folder: str) -> list[str]:
    """Run a Qwen3.5 over two ranks, with the tests' kernels of linear attention."""
    axis = Mesh("cpu").engine(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = start_engine("sglang", folder, axis)
    bench = Bench(engine, model)
    found = [f"unknown {name}" for name in engine.expected.keys() - engine._addresses.keys()]
    found += _gaps(bench, model)
    other = perturbed(model, 3)
    bench.load(other)
    found += [f"streamed: {gap}" for gap in _gaps(bench, other)]
    others = ".layers.1.", ".layers.2."  # which are like the first one
    chosen = [name for name in engine.expected if not any(other in name for other in others)]
    flipped_elements_are_named(bench, chosen)
    engine.close()
    return found


def write(folder: Path) -> None:
    """Write each family to a folder of that name."""
    for family, settings in FAMILIES.items():
        config = AutoConfig.for_model(family, **SMALL | settings, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)


def _gaps(bench: Bench, model: PreTrainedModel) -> list[str]:
    found = []
    answers = bench.generate(PROMPTS, GREEDY)
    for prompt, (sample,), greedy in zip(PROMPTS, answers, reference_greedy(model), strict=True):
        gap = torch.tensor(sample.logprobs) - reference_logprobs(model, prompt, sample.token_ids, 0)
        if sample.token_ids != greedy or not gap.abs().max() < 1e-5:
            found.append(f"{sample.token_ids} for {greedy}, log-probs differ by {gap.tolist()}")
    return found


@torch.no_grad()
def _differing_modules(engine: Engine, model: PreTrainedModel) -> list[str]:
    tokens = PROMPTS[1]
    probe = Probe(len(tokens))
    with probe.attached(model):
        ours = probe.recorded(model(torch.tensor([tokens])).logits[0, -1])
    from lightrft.extras.tools.diagnosis import compare

    compared = compare(ours, engine.module_outputs(tokens), torch.float32)
    lost = {"model.norm", "lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0.mlp"} - {
        module.name for module in compared
    }

    return [f"no {name}" for name in lost] + [
        f"{module.name} differs: {module.relative}" for module in compared if module.differs
    ]
