"""The example of A*-PO: its numbers are the paper's, and a run takes its functions."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from algorithms.flat import make_batch
from lightrft.algorithms.terms import policy_objective
from lightrft.config import AlgorithmSection
from lightrft.core.batch import Experience
from lightrft.core.losses import Denominator

EXAMPLE = Path(__file__).parents[2] / "examples" / "a2po.py"


def test_optimal_values_are_soft_maxima_of_the_samples(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLE))
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.0, 0.0], 2: [1.0]}
    rows = [
        {"row": row, "sample": sample, "reward": reward}
        for row, values in rewards.items()
        for sample, reward in enumerate(values)
    ]
    rows.append({"row": 1, "sample": "greedy", "reward": 1.0})
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "responses.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "data.jsonl").write_text('{"input": "a"}\n{"input": "b"}\n{"input": "c"}\n')
    example["main"](str(tmp_path), str(tmp_path / "data.jsonl"), str(tmp_path / "valued.jsonl"))

    written = [json.loads(line) for line in (tmp_path / "valued.jsonl").open()]
    half_right = 0.5 * math.log((2 * math.exp(2) + 2) / 4)
    assert [row["input"] for row in written] == ["a", "c"]
    assert [row["optimal_value"] for row in written] == pytest.approx([half_right, 1.0])
    assert "2 of 3 rows have an optimal value" in capsys.readouterr().out


def test_the_loss_is_the_square_of_the_paper():
    batch = make_batch([".xx", ".x.x"])
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, 7.0, -3.0], dtype=torch.float64)
    reference = torch.tensor([0.0, -1.5, -1.0, 0.0, -0.25, 9.0, -5.0], dtype=torch.float64)
    advantages = torch.tensor([0.25] * 3 + [-0.75] * 4, dtype=torch.float64)
    experience = Experience(
        lengths=batch.lengths,
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        rows=batch.rows,
        groups=torch.arange(2),
        rewards=torch.zeros(2),
        advantages=advantages,
        engine_logprobs=logprobs,
        reference_logprobs=reference,
    )
    section = AlgorithmSection(
        policy_loss=f"{EXAMPLE}:regression", loss_agg_mode="seq-mean-token-mean"
    )
    values = logprobs.clone().requires_grad_()
    denominator = Denominator(torch.tensor(4.0), torch.tensor(2.0))
    loss, report = policy_objective(section)(values, experience, denominator)

    beta = 1e-3
    gaps = [beta * (0.5 - 1.0) - 0.25, beta * (-0.25 + 2.0) + 0.75]
    assert loss.item() == pytest.approx((gaps[0] ** 2 + gaps[1] ** 2) / 2, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, values)
    expected = [0, gaps[0], gaps[0], 0, gaps[1], 0, gaps[1]]
    assert gradient.tolist() == pytest.approx([beta * gap for gap in expected], rel=1e-6)
    assert report["train/implicit_reward"][1].item() == pytest.approx(-0.5 * beta)
