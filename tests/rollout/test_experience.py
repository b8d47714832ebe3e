"""Why: between a reward and a gradient lie the flat layout, the advantages and the move to another rank; all by hand here.

The reference for log-probs is transformers' eager attention on each sample alone; for advantages, plain numbers.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config import AlgorithmSection, ModelSection, TrainSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.observe.metrics import Metrics
from lightrft.roles.policy import Policy
from lightrft.rollout.experience import ExperienceMaker, flatten
from lightrft.strategy import get_strategy
from lightrft.types import Prompt, Sample
from ranks import run_ranks
from tiny import tiny_model

TEMPERATURE = 0.7


def make_sample(prompt: list[int], response: list[int], group: int, reward: float) -> Sample:
    return Sample(
        prompt=Prompt(index=group, text="", token_ids=prompt),
        group=group,
        token_ids=response,
        logprobs=[-(token % 7) / 8 for token in response],
        text="",
        finish_reason="stop",
        reward=reward,
    )


def test_flatten_by_hand():
    samples = [make_sample([1, 2], [3, 4, 5], 9, 1.0), make_sample([6], [7], 9, 0.5), make_sample([8, 9], [], 4, 0.25)]
    experience = flatten(samples, first_row=10)
    assert experience.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert experience.loss_mask.tolist() == [False, False, True, True, True, False, True, False, False]
    assert experience.engine_logprobs.tolist() == [0, 0, -0.375, -0.5, -0.625, 0, 0, 0, 0]
    assert experience.lengths.tolist() == [5, 2, 2] and experience.rows.tolist() == [10, 11, 12]
    assert experience.groups.tolist() == [9, 9, 4] and experience.rewards.tolist() == [1.0, 0.5, 0.25]
    assert experience.advantages is experience.old_logprobs is experience.reference_logprobs is None


def test_no_samples_keep_every_column_and_its_type():
    nothing, something = flatten([], first_row=3), flatten([make_sample([1], [2], 0, 0.0)], first_row=0)
    for per in ("token", "sequence"):
        types = {name: value.dtype for name, value in something.columns(per).items()}
        assert {name: value.dtype for name, value in nothing.columns(per).items()} == types
    assert len(nothing) == nothing.num_tokens == 0


# group, reward, response length; group 1 lies on both ranks, group 2 teaches nothing
SAMPLES = [(0, 1.0, 3), (0, 0.0, 9), (1, 2.0, 4), (1, 6.0, 1), (1, 1.0, 7), (2, 0.1, 2), (2, 0.1, 5), (2, 0.1, 6)]
# group 0: mean 0.5, std 0.707107; group 1: 2, 6, 1 has mean 3, std 2.645751
ADVANTAGES = [0.707007, -0.707007, -0.377950, 1.133850, -0.755900, 0.0, 0.0, 0.0]


def all_samples() -> list[Sample]:
    prompts = {0: [60, 61], 1: [70], 2: [80, 81, 82]}
    return [
        make_sample(prompts[group], [(13 * place + 29 * index) % 250 for index in range(length)], group, reward)
        for place, (group, reward, length) in enumerate(SAMPLES)
    ]


def make(folder: str, held: list[int], minibatch: int, epochs: int, reference: bool) -> dict[str, Any]:
    """The experience of this rank, which holds so many of the samples as `held` says for it."""
    torch.manual_seed(0)
    strategy = get_strategy({"fsdp": True, "train_batch_size": minibatch})
    strategy.setup_distributed()
    model = ModelSection(pretrain=folder)
    actor = Actor(load_model(model))
    optimizer = strategy.create_optimizer(actor, lr=1e-3)
    actor, optimizer = strategy.prepare((actor, optimizer))
    frozen = None
    if reference:
        frozen = strategy.prepare(Actor(load_model(ModelSection(pretrain=folder + "/reference"))).requires_grad_(False))
    policy = Policy(strategy, actor, optimizer, None, reference=frozen, temperature=TEMPERATURE)
    train = TrainSection(train_batch_size=minibatch, max_epochs=epochs, max_tokens_per_microbatch=16)
    rank = strategy.mesh.data.rank
    mine = all_samples()[sum(held[:rank]) : sum(held[: rank + 1])]
    metrics = Metrics()
    planned = ExperienceMaker(policy, AlgorithmSection(), train)(mine, metrics)
    return {
        "columns": planned.experience.columns("token") | planned.experience.columns("sequence"),
        "minibatches": planned.minibatches,
        "metrics": metrics.reduce(strategy.mesh.data),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(path / "reference", seed=1)
    return tiny_model(path)


def reference_logprobs(folder: str, sample: Sample) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = torch.tensor(sample.prompt.token_ids + sample.token_ids)
    with torch.no_grad():
        logp = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    values = torch.cat([torch.zeros(1), logp[:-1].gather(-1, ids[1:, None])[:, 0]])
    values[: len(sample.prompt.token_ids)] = 0.0
    return values


def sequences(result: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    """Row -> its columns, in the rank's order."""
    columns, lengths = result["columns"], result["columns"]["lengths"].tolist()
    total = sum(lengths)
    per_token = {name: value.split(lengths) for name, value in columns.items() if len(value) == total and name != "lengths"}
    return {row: {name: parts[place] for name, parts in per_token.items()} for place, row in enumerate(columns["rows"].tolist())}


@pytest.mark.parametrize(
    "held, minibatch, epochs, reference",
    [
        ([8], 8, 1, False),
        ([8], 4, 1, True),
        ([3, 5], 8, 1, False),
        ([3, 5], 4, 1, True),
        ([4, 4], 8, 2, False),
        ([8, 0], 4, 1, True),
    ],
)
def test_experience(folder, held, minibatch, epochs, reference):
    results = run_ranks(len(held), make, folder, held, minibatch, epochs, reference)
    samples = all_samples()
    found = {row: columns for result in results for row, columns in sequences(result).items()}
    assert sorted(found) == list(range(8)) and sum(len(result["columns"]["rows"]) for result in results) == 8
    several_updates = 8 // minibatch * epochs > 1
    for row, columns in found.items():
        sample = samples[row]
        prompt, response = len(sample.prompt.token_ids), len(sample.token_ids)
        assert columns["input_ids"].tolist() == sample.prompt.token_ids + sample.token_ids
        assert columns["loss_mask"].tolist() == [False] * prompt + [True] * response
        assert columns["engine_logprobs"].tolist() == [0.0] * prompt + sample.logprobs
        assert columns["advantages"].tolist() == pytest.approx([0.0] * prompt + [ADVANTAGES[row]] * response, abs=1e-6)
        assert ("old_logprobs" in columns) == several_updates and ("reference_logprobs" in columns) == reference
        if several_updates:
            torch.testing.assert_close(columns["old_logprobs"], reference_logprobs(folder, sample), rtol=1e-5, atol=1e-5)
        if reference:
            expected = reference_logprobs(folder + "/reference", sample)
            torch.testing.assert_close(columns["reference_logprobs"], expected, rtol=1e-5, atol=1e-5)
    assert_planned(results, minibatch, [sample.length for sample in samples])
    for result in results:
        assert result["metrics"] == pytest.approx(
            {"rollout/advantage_abs": sum(map(abs, ADVANTAGES)) / 8, "rollout/groups_without_signal": 1 / 3}, abs=1e-6
        )


def assert_planned(results: list[dict[str, Any]], minibatch: int, lengths: list[int]) -> None:
    """Every optimizer step takes its own rows, in as many micro-batches on every rank, none over 16 tokens."""
    for step in range(8 // minibatch):
        of_ranks = [result["minibatches"][step] for result in results]
        assert len({len(micro_batches) for micro_batches in of_ranks}) == 1
        packed = [
            [result["columns"]["rows"][place].item() for place in places]
            for result, micro_batches in zip(results, of_ranks, strict=True)
            for places in micro_batches
        ]
        assert sorted(row for rows in packed for row in rows) == list(range(step * minibatch, (step + 1) * minibatch))
        assert all(sum(lengths[row] for row in rows) <= 16 for rows in packed)
