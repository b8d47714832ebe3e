"""With --exact, engine and trainer compute the same bits, whatever is computed together."""

import itertools
import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightrft.config.errors import ConfigError
from lightrft.config.sections import EngineSection
from lightrft.core.batch import SharedPrefix
from lightrft.core.engine import Request
from lightrft.engine.base import Engine
from lightrft.engine.build import check_exact, exact_adapter
from lightrft.engine.requests import Sampling
from lightrft.extras.exact.attention import (
    AttentionScores,
    CachedRows,
    PagedRows,
    blockwise,
    exact_attention,
)
from lightrft.extras.exact.hf import ExactHFEngine
from lightrft.extras.exact.install import make_exact
from lightrft.extras.exact.logprobs import exact_token_logprobs
from lightrft.extras.exact.products import (
    ROW_BLOCK,
    Products,
    ProductShapes,
    _problems,
    chosen_products,
)
from lightrft.extras.tools.diagnosis import diagnose
from lightrft.models.attention.layout import Layout
from lightrft.models.logits.logprobs import token_logprobs
from lightrft.models.logits.truncation import Truncation
from ranks import run_cases
from runs import PPO, prepare, rows_of, run_here
from scripts.bench.exact import build_actor, build_engine, make_prompts, sample
from tiny import byte_tokenizer, tiny_experts, tiny_hybrid, tiny_model
from with_vllm import load_vllm

DTYPES = [torch.float32, torch.bfloat16]
WAYS = [Products(), Products(ROW_BLOCK)]


def dense(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None
) -> Tensor:
    """Compute attention [1, S, H, D] with all scores at once, in the dtype of the inputs."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * 0.2
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])
    hidden = (distance < 0) | (distance >= (window or len(distance)))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (None, 3.0)])
def test_attention_and_its_gradients_are_right(window: int | None, softcap: float | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 150, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(1, 150, 4, 16)
    scores = AttentionScores(Products(), 0.2, window, softcap)
    output = blockwise(*tensors, torch.arange(150)[None], 150, scores)
    gradients = torch.autograd.grad(output, tensors, upstream)

    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = dense(*wide, window, softcap)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    for actual, of_dense in zip(
        gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=True
    ):
        torch.testing.assert_close(actual.double(), of_dense, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("products", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_a_token_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, window: int | None, products: Products
) -> None:
    """Whole, packed with others, behind a shared prefix, in chunks, padded, and from a cache."""
    torch.manual_seed(0)
    lengths = [150, 70, 3]
    module = torch.nn.Module()
    options = {"scaling": 0.2, "sliding_window": window}
    rows = [[torch.randn(1, h, n, 16).to(dtype) for h in (4, 2, 2)] for n in lengths]

    def attend(tensors: list[Tensor], layout: Layout | CachedRows) -> Tensor:
        return exact_attention(products, module, *tensors, None, layout=layout, **options)[0]

    device = torch.device("cpu")
    alone = [
        attend(row, Layout(torch.tensor([n]), device))[0]
        for n, row in zip(lengths, rows, strict=True)
    ]
    packed = [torch.cat(inputs, 2) for inputs in zip(*rows, strict=True)]
    together = attend(packed, Layout(torch.tensor(lengths), device))[0]
    assert torch.equal(together, torch.cat(alone))

    # The second sequence is the first one to its 100th token, which is computed once.
    kept = [torch.cat([x, x[:, :, 100:110]], 2) for x in rows[0]]
    sources = torch.cat([torch.arange(150), torch.arange(100), torch.arange(150, 160)])
    computed = torch.cat([torch.arange(150), torch.arange(250, 260)])
    shared = SharedPrefix(computed=computed, indices=sources)
    shares = attend(kept, Layout(torch.tensor([150, 110]), device, shared=shared))[0]
    assert torch.equal(shares, torch.cat([alone[0], alone[0][100:110]]))

    # Rows padded on the left; the last tokens one by one, and several at once.
    padding = torch.tensor([150 - n for n in lengths])
    padded = [
        torch.cat([F.pad(x, (0, 0, 150 - x.shape[2], 0), value=7.0) for x in inputs])
        for inputs in zip(*rows, strict=True)
    ]
    for end, num in ((150, 150), (150, 1), (149, 1), (150, 40), (131, 2)):
        dropped = 0 if window is None or num == 150 else end - num - window + 1
        query = padded[0][:, :, end - num : end]
        cached = [x[:, :, dropped:end] for x in padded[1:]]
        outputs = attend([query, *cached], CachedRows(padding, end))
        for output, whole, n in zip(outputs, alone, lengths, strict=True):
            seen = min(num, n - (150 - end))
            if seen > 0:
                seen_rows = slice(n - (150 - end) - seen, n - (150 - end))
                assert torch.equal(output[num - seen :], whole[seen_rows])

    # A cache in pages of 16 tokens, which sequences fill in turns and in chunks.
    pages = torch.randperm(30).view(3, 10)
    cache = torch.full((30, 2, 16, 32), 7.0, dtype=dtype)
    module.layer_idx = 0
    begun = [0, 0, 0]
    for ends in ([64, 0, 1], [149, 69, 2], [150, 70, 3]):
        new = [range(*inputs) for inputs in zip(begun, ends, strict=True)]
        slots = [int(pages[b, at // 16]) * 16 + at % 16 for b in range(3) for at in new[b]]
        counts = list(map(len, new))
        paged = PagedRows.of([cache], torch.tensor(slots), pages, torch.tensor(ends), counts)
        given = [
            torch.cat([x[:, :, at] for x, at in zip(inputs, new, strict=True)], 2)
            for inputs in zip(*rows, strict=True)
        ]
        output = attend(given, paged)[0]
        assert torch.equal(output, torch.cat([x[at] for x, at in zip(alone, new, strict=True)]))
        begun = ends


def rows_alone_and_together(vocabulary: int, products: Products, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(61, 24)
    weight = torch.randn(vocabulary, 24) / 5
    targets = torch.randint(0, vocabulary - 4, (61,))
    truncation = Truncation(top_k=40, top_p=0.9, banned=tuple(range(vocabulary - 3, vocabulary)))
    options = {"temperature": 0.8, "truncation": truncation}
    whole, entropy = exact_token_logprobs(products, hidden, weight, targets, **options)
    for some in (slice(0, 1), slice(3, 10), slice(20, 61), slice(60, 61), slice(5, 5)):
        alone, _ = exact_token_logprobs(products, hidden[some], weight, targets[some], **options)
        assert torch.equal(alone, whole[some])

    expected, of_plain = token_logprobs(hidden, weight, targets, **options)
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(entropy, of_plain)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_logprobs_do_not_depend_on_other_rows(threads: int) -> None:
    """A host sums rows of 37,500 logits in chunks of 6, and would divide a single one.

    It runs in a process of its own: one that has computed with two threads cannot fork others that
    do.
    """
    cases = {
        f"{vocabulary} {index}": (vocabulary, products, threads)
        for vocabulary in (300, 37_500)
        for index, products in enumerate(WAYS)
    }
    run_cases(1, rows_alone_and_together, cases)


@dataclass(frozen=True)
class Rounding(Products):
    """Products of a BLAS that rounds small ones otherwise."""

    up_to: int = 100

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = super().linear(inputs, weight, bias)
        return output * (1 + 2e-7) if len(inputs) < self.up_to else output


SHAPES = ProductShapes(
    frozenset({(48, 24)}), (96, 24), frozenset({(16, 64), (64, 16)}), torch.float32
)


def test_the_probe_finds_products_that_depend_on_the_number_of_rows() -> None:
    device = torch.device("cpu")
    assert next(_problems(Rounding(), SHAPES, device)).startswith("1 of 256 rows of 24 numbers")
    assert next(_problems(Rounding(up_to=0), SHAPES, device), "") == ""


def test_a_machine_on_which_nothing_helps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x @ weight.T + next(numbers))
    with pytest.raises(ConfigError, match="products in blocks of 32 rows differ for 1 of 256"):
        chosen_products.__wrapped__(SHAPES, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_experts, "is a matrix outside of linear layers"),
        (tiny_hybrid, "layers of type linear_attention"),
    ],
)
def test_models_with_other_layers_are_refused(make, message, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(tmp_path / "model"))
    with pytest.raises(ConfigError, match=message):
        make_exact(model, torch.float32, torch.device("cpu"))


def test_vllm_is_refused_on_a_gpu() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    section = EngineSection(engine_type="vllm", exact=True)
    with pytest.raises(ConfigError, match="--exact with --engine_type vllm needs a CPU"):
        check_exact(section, torch.device("cuda"))
    check_exact(section, torch.device("cpu"))


WINDOW = {"sliding_window": 40, "query_pre_attn_scalar": 32}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 40},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2},
}
"""Windows that drop keys from the cache, soft caps, and scales of logits."""


def make_family(family: str, folder: Path) -> str:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    options = sizes | heads | ids | {"initializer_range": 0.1} | FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    model.save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return str(folder)


def check_engine(kind: type[Engine], folder: str, dtype: torch.dtype, **section: Any) -> None:
    """Sample twice, so that an engine with a prefix cache finds the prompts in it."""
    prompts = make_prompts((5, 33, 70), 250)
    sampling = Sampling(n=2, max_tokens=20, temperature=0.8, top_k=9, seed=1)
    engine = build_engine(kind, folder, dtype, 100, **section)
    batch, of_engine = sample(engine, prompts, sampling)
    again, once_more = sample(engine, prompts, sampling)
    actor = build_actor(folder, dtype, exact=True)
    with torch.no_grad():
        logprobs, _ = actor(batch, 0.8, Truncation(top_k=9))
    assert torch.equal(logprobs[batch.loss_mask], of_engine)
    assert torch.equal(batch.input_ids, again.input_ids) and torch.equal(of_engine, once_more)

    if section:
        ((first, second),) = engine.generate([Request(prompts[2])], sampling)
        assert first.num_cached_tokens == 64, "whole blocks of the cache"
        assert second.num_cached_tokens == 69, "all but the last token, with a copy of a block"
    engine.close()


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "gemma2" else pytest.mark.slow) for name in FAMILIES],
)
def test_families(family: str, tmp_path) -> None:
    folder = make_family(family, tmp_path)
    for dtype in DTYPES:
        check_engine(ExactHFEngine, folder, dtype)


def check_vllm(folder: str, dtype: torch.dtype) -> None:
    from lightrft.extras.exact.vllm import ExactVLLMEngine

    check_engine(ExactVLLMEngine, folder, dtype, exact=True, engine_kv_cache_gb=0.02)


@pytest.mark.slow
def test_families_in_vllm(tmp_path) -> None:
    """It has weights of the folder, a cache of prefixes, and samples that share prompts."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    load_vllm()
    folders = {family: make_family(family, tmp_path / family) for family in FAMILIES}
    cases = {
        family: (folder, DTYPES[index % 2])
        for index, (family, folder) in enumerate(folders.items())
    }
    run_cases(1, check_vllm, cases)


# -- whole runs

FEW = ["--rollout_batch_size=4", "--n_samples_per_prompt=2", "--train_batch_size=8"]
LONG = ["--exact", *FEW, "--prompt_max_len=66", "--generate_max_len=10"]
VLLM = ["--engine_type=vllm", "--engine_kv_cache_gb=0.05"]
PARTIAL = ["--over_sampling=1.5", "--partial_rollout", "--actor_learning_rate=0"]
CASES = {
    1: {
        "float32": [*LONG, "--max_steps=2", "--temperature=0.8", "--top_p=0.9"],
        "bfloat16": [*LONG, "--max_steps=4", "--bf16", "--init_kl_coef=0.01"],
        "vllm float32": [*LONG, *VLLM, "--max_steps=2", "--temperature=0.8", "--top_p=0.9"],
        "vllm bfloat16": [*LONG, *VLLM, "--max_steps=2", "--bf16", "--top_k=30", "--min_p=0.001"],
    },
    2: {
        "two data ranks": [*LONG, "--max_steps=2", "--gradient_checkpointing"],
        "partial": [*LONG, "--max_steps=4", "--bf16", *PARTIAL],
        "two updates": [*LONG, "--max_steps=2", "--max_epochs=2", "--use_engine_logprobs"],
        "vllm partial": [*LONG, *VLLM, "--max_steps=4", *PARTIAL],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_engine_and_trainer_agree_in_every_bit(world_size: int, tmp_path) -> None:
    inputs = prepare(tmp_path / "inputs")
    # Most sequences end in their second block of keys, and some in the first one.
    problems = [{"input": "abcdefgh" * 8 + "=", "label": "1"} for _ in range(24)]
    problems = [each | {"input": each["input"][2 * i :]} for i, each in enumerate(problems)]
    (tmp_path / "inputs" / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
    calls = {
        name: ("train_ppo", [*inputs, *PPO, *flags, f"--save_path={tmp_path / name}"])
        for name, flags in CASES[world_size].items()
        if "--engine_type=vllm" not in flags or find_spec("vllm")
    }
    if any(name.startswith("vllm") for name in calls):
        load_vllm()
    run_cases(world_size, run_here, calls)
    for name in calls:
        rows = rows_of(tmp_path / name)
        assert {row["engine/logprob_mismatch_max"] for row in rows} == {0.0}, name
        assert {row["train/ratio"] == 1.0 for row in rows} == {name != "two updates"}, name

    if world_size == 1:
        rows = rows_of(tmp_path / "bfloat16")
        assert len(rows) == 4 and rows[0]["train/kl"] == 0.0
        assert rows[-1]["train/kl"] > 0.01, "the weights have moved"
    for name in calls:
        resumed = any(row["rollout/off_policy_tokens"] > 0 for row in rows_of(tmp_path / name))
        assert resumed == ("partial" in name), name


def _with_a_wrong_bit(pretrain: str, engine_type: str) -> list[str]:
    """Diagnose the engine, and once more with one bit of one number changed in layer 1."""
    from lightrft.config import Config, ModelSection, StrategySection
    from lightrft.config.sections import DataSection, RolloutSection
    from lightrft.models.load import load_tokenizer
    from lightrft.strategy import get_strategy

    def change(module, inputs, output: Tensor) -> None:
        output.view(torch.int32).view(-1)[5] ^= 1

    exact_engine = exact_adapter(engine_type)
    module = import_module(exact_engine.__module__)

    class Faulty(exact_engine):
        def __init__(self, setup) -> None:
            super().__init__(setup)
            self.model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(change)

    found = []
    for engine in (exact_engine, Faulty):
        setattr(module, exact_engine.__name__, engine)
        config = Config(
            model=ModelSection(pretrain=pretrain),
            data=DataSection(prompt_max_len=128),
            strategy=StrategySection(fsdp=True),
            engine=EngineSection(engine_type=engine_type, exact=True, engine_kv_cache_gb=0.05),
            rollout=RolloutSection(generate_max_len=64),
        )
        strategy = get_strategy(config)
        strategy.setup_distributed()
        diagnosis = diagnose(config, strategy, load_tokenizer(config.model))
        found.append(diagnosis.first.name if diagnosis.first else f"{diagnosis.healthy}")
        strategy.close_engine()
    return found


@pytest.mark.slow
def test_the_doctor_names_the_layer_with_one_wrong_bit(tmp_path) -> None:
    pretrain = tiny_model(tmp_path / "model", seed=1)
    cases = {"hf": (pretrain, "hf")}
    if find_spec("vllm"):
        load_vllm()
        cases["vllm"] = (pretrain, "vllm")
    for engine_type, (found,) in run_cases(1, _with_a_wrong_bit, cases).items():
        assert found == ["True", "model.layers.1.mlp"], engine_type
