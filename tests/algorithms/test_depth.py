"""Why: an engine with another rope scaling is wrong only deep in the context.

A mean over all tokens hides it.
"""

import torch
from transformers import AutoModelForCausalLM

from algorithms.flat import step_denominator
from lightrft.algorithms.terms import policy_objective
from lightrft.app.observe.symptoms import find_symptoms
from lightrft.config import AlgorithmSection
from lightrft.core.batch import Experience
from lightrft.core.metrics import Metrics
from tiny import tiny_model

LENGTH = 6000


class Alone:
    """An axis of one rank."""

    def gather(self, value):
        return [value]


def test_a_rope_that_changes_at_4k_is_named(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH)

    def logprobs(position_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(tokens, position_ids=position_ids[None]).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return torch.cat([torch.zeros(1), chosen])

    faulty = torch.where(positions < 4096, positions, 4096 + (positions - 4096) // 3)
    trainer, engine = logprobs(positions), logprobs(faulty)
    batch = Experience(
        lengths=torch.tensor([LENGTH, 100]),
        input_ids=torch.cat([tokens[0], tokens[0, :100]]),
        loss_mask=torch.arange(LENGTH + 100) % LENGTH > 500,
        rows=torch.arange(2),
        groups=torch.zeros(2, dtype=torch.int64),
        rewards=torch.zeros(2),
        advantages=torch.zeros(LENGTH + 100),
        engine_logprobs=torch.cat([engine, engine[:100]]),
    )
    now = torch.cat([trainer, trainer[:100]])
    objective = policy_objective(AlgorithmSection(), longest=LENGTH)
    _, report = objective(now, batch, step_denominator(batch))

    metrics = Metrics()
    names = [name for name in report if name.startswith("engine/logprob_mismatch_at_")]
    assert names == [f"engine/logprob_mismatch_at_{depth}" for depth in ("1k", "4k")]
    for name in names:
        metrics.mean(name, *report[name])
    row = metrics.reduce(Alone())
    difference = (trainer - engine).abs()
    expected = [difference[1024:4096].mean().item(), difference[4096:].mean().item()]
    assert expected[0] < 1e-5 < 1e-3 < expected[1]
    torch.testing.assert_close(torch.tensor([row[name] for name in names]), torch.tensor(expected))

    row |= {"engine/logprob_mismatch": difference[501:].mean().item(), "rollout/reward": 0.5}
    (symptom,) = find_symptoms({name: [(step, row[name]) for step in range(20)] for name in row})
    assert symptom.name == "mismatch deep in the context"
    assert "engine/logprob_mismatch_at_4k is" in symptom.evidence
