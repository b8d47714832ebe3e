"""The embedded engine's own sampling loop, beyond the contract."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.contract import PROMPTS, reference_greedy, tampered
from flat_models import HYBRIDS, make_model
from lightrft.core.batch import Batch
from lightrft.engine.base import EngineError, Request, Sampling
from lightrft.engine.hf import HFEngine, sample_tokens
from lightrft.engine.testing import perturbed, start_engine
from lightrft.models.attention.flat import ATTENTION
from lightrft.models.heads import Actor
from lightrft.models.parallel.collectives import Axis
from tiny import tiny_model

ALONE = Axis("engine", 1, 0, None)
REQUESTS = [Request(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> HFEngine:
    return start_engine("hf", str(folder), ALONE)


def test_samples_do_not_depend_on_how_prompts_are_batched(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on when finished rows leave the batch."""
    stops = tuple(range(0, 384, 12))  # about one token in twelve ends a response
    outputs = []
    for batch_size, drop_share in ((1, 0.25), (2, 0.01), (3, 2.0), (64, 0.25)):
        monkeypatch.setattr(engine, "batch_size", batch_size)
        monkeypatch.setattr("lightrft.engine.hf.DROP_SHARE", drop_share)
        completions = engine.generate(
            REQUESTS, Sampling(n=5, max_tokens=40, seed=3, stop_token_ids=stops)
        )
        outputs.append([[sample.token_ids for sample in samples] for samples in completions])

    lengths = {len(tokens) for samples in outputs[0] for tokens in samples}
    assert len(lengths) > 5
    assert outputs[1:] == outputs[:1] * 3


def test_a_request_samples_the_same_whatever_else_runs(engine: HFEngine) -> None:
    sampling = Sampling(n=2, max_tokens=10, seed=3)
    alone = engine.generate(REQUESTS[:2], sampling)
    beside = engine.generate(REQUESTS, sampling)
    for group, other in zip(alone, beside, strict=False):
        assert [sample.token_ids for sample in group] == [sample.token_ids for sample in other]


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_sample_what_the_trainer_scores(name: str, tmp_path: Path) -> None:
    """Prompts are padded on the left, and finished rows leave, without a trace in the states."""
    make_model(name, "eager").save_pretrained(tmp_path)
    engine = start_engine("hf", str(tmp_path), ALONE)
    prompts = [list(range(7, 16)), [5], [30] * 17]
    sampling = Sampling(n=4, max_tokens=12, seed=4, stop_token_ids=tuple(range(0, 61, 12)))
    groups = engine.generate([Request(prompt) for prompt in prompts], sampling)

    answers = [
        (prompt, sample)
        for prompt, samples in zip(prompts, groups, strict=True)
        for sample in samples
    ]
    lengths = [len(prompt) + len(sample.token_ids) for prompt, sample in answers]
    learned = [[False] * len(prompt) + [True] * len(sample.token_ids) for prompt, sample in answers]
    batch = Batch(
        lengths=torch.tensor(lengths),
        input_ids=torch.tensor(sum([prompt + sample.token_ids for prompt, sample in answers], [])),
        loss_mask=torch.tensor(sum(learned, [])),
        rows=torch.arange(len(answers)),
    )

    with torch.no_grad():
        scored = Actor(make_model(name, ATTENTION))(batch, 1.0)[0][batch.loss_mask]
    sampled = torch.tensor(sum([sample.logprobs for _, sample in answers], []))
    assert len(set(lengths)) > 3
    torch.testing.assert_close(sampled, scored, rtol=1e-5, atol=1e-5)


def test_sampling_follows_the_distribution() -> None:
    """Every token comes as often as its probability says, within four standard deviations.

    One of probability zero never comes.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 40, generator=generator).mul(1.5)
    logits[0, -1] = -torch.inf
    draws = 200_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
    tokens, logprobs = sample_tokens(logits.expand(draws, -1), 0.7, uniform)
    expected = torch.softmax(logits[0] / 0.7, -1)
    frequency = torch.bincount(tokens, minlength=40) / draws
    assert ((frequency - expected).abs() <= 4 * (expected * (1 - expected) / draws).sqrt()).all()
    torch.testing.assert_close(logprobs, expected.log()[tokens], rtol=0, atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_are_tokens_of_positive_probability(uniform: float) -> None:
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 300:600] = torch.randn(300, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample_tokens(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert 300 <= tokens.item() < 600
    assert logprobs.isfinite().all()


def test_a_large_flat_vocabulary_is_reached_to_its_end() -> None:
    """In float32 the cumulative distribution would lose the tail that follows a likely token."""
    logits = torch.full((1, 200_000), -18.0)
    logits[0, 0] = 0.0
    tail = 1 - 1 / (1 + 199_999 * torch.tensor(-18.0, dtype=torch.float64).exp())
    tokens, _ = sample_tokens(
        logits.expand(3, -1), 1.0, 1 - tail * torch.tensor([0.999, 0.5, 1e-3])
    )
    assert [round(token / 1e3) for token in tokens.tolist()] == [0, 100, 200]


def test_bfloat16_weights_from_a_float32_stream(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = start_engine("hf", str(folder), ALONE, dtype=torch.bfloat16, from_stream=True)
    engine.load_weights(model.named_parameters(), version=1)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    tokens = [
        samples[0].token_ids
        for samples in engine.generate(REQUESTS, Sampling(temperature=0, max_tokens=4))
    ]
    assert tokens == reference_greedy(model.bfloat16(), max_tokens=4)


def test_sleep_of_level_2_frees_the_weights_and_keeps_the_rotary_frequencies(folder: Path) -> None:
    engine = start_engine("hf", str(folder), ALONE)
    buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    assert buffers
    engine.sleep(2)
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) == 0
    engine.wake("weights")
    assert {
        name: parameter.shape for name, parameter in engine.model.named_parameters()
    } == engine.expected
    for name, buffer in engine.model.named_buffers():
        assert torch.equal(buffer, buffers[name])


@pytest.mark.parametrize("problem", ["has shape", "in the engine differs from the weight"])
def test_wrong_weights_under_running_requests_end_the_engine(folder: Path, problem: str) -> None:
    """They are verified like others, and nothing is sampled with them."""
    engine = start_engine("hf", str(folder), ALONE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    stream = dict(perturbed(model, 3).named_parameters())
    loop = engine.open(Sampling(max_tokens=20))
    loop.add(REQUESTS[:2])
    loop.step()

    if problem == "has shape":
        stream[name] = stream[name][:-1]
        tampering = nullcontext()
    else:
        tampering = tampered(engine, lambda tensors: tensors[name].neg_())
    with tampering, pytest.raises(EngineError, match=f"{name} {problem}"):
        loop.load_weights(stream.items(), 1)
    with pytest.raises(EngineError, match="failed earlier"):
        loop.step()
    with pytest.raises(EngineError, match="failed earlier"):
        engine.load_weights(model.named_parameters(), 2)
