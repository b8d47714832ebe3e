"""Add a method to lightrft with two functions: A*-PO, optimal advantage regression.

Brantley et al., arXiv 2505.20686. First the reference model answers every prompt several times, and
the rewards say how much the best policy near it could earn, the optimal value of the prompt:

    lightrft evaluate --fsdp --pretrain MODEL --eval_data train.jsonl --reward exact_match \
        --eval_n_samples 8 --save_path sampled
    python examples/a2po.py sampled train.jsonl valued.jsonl

Then one response to each prompt is enough: its log-ratio to the reference is regressed on its
reward minus the optimal value, a column of the data:

    lightrft train_ppo --fsdp --pretrain MODEL --prompt_data valued.jsonl --reward exact_match \
        --advantage_estimator examples/a2po.py:optimal_advantage \
        --policy_loss examples/a2po.py:regression --measure_kl --n_samples_per_prompt 1 \
        --loss_agg_mode seq-mean-token-mean
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.core.batch import Batch
from lightrft.core.losses import sequence_sums

BETA_OF_VALUE = 0.5
"""Temperature of the optimal value, beta_1 of the paper."""
BETA = 1e-3
"""Factor of the log-ratio, beta_2 of the paper."""


def optimal_advantage(rewards: Tensor, groups: Tensor, *, optimal_value: Tensor) -> Tensor:
    """A_i = R_i - V*, of the prompt: [M], [M], [M] -> [M]."""
    return rewards - optimal_value


def regression(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, batch: Batch, reference_logprobs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(beta sum_t log(p_t / p_ref,t) - A)^2, at each token of a sequence: [T]."""
    log_ratio = torch.where(batch.loss_mask, logprobs - reference_logprobs, 0.0)
    implicit = BETA * sequence_sums(log_ratio, batch)[batch.sequence_ids]
    return (implicit - advantages).square(), {"train/implicit_reward": implicit.detach()}


regression.properties = {"per": "sequence"}


def optimal_values(responses: Path) -> dict[int, float]:
    """Return V* = beta log mean exp(R / beta) of the sampled responses to each row.

    Rows that no response solves are left out.
    """
    rewards: dict[int, list[float]] = defaultdict(list)
    for line in responses.read_text(encoding="utf-8").split("\n"):
        if line and (row := json.loads(line))["sample"] != "greedy":
            rewards[row["row"]].append(row["reward"] / BETA_OF_VALUE)

    values = {}
    for row, scaled in rewards.items():
        total = torch.tensor(scaled, dtype=torch.float64).logsumexp(0).item()
        if max(scaled) > 0:
            values[row] = BETA_OF_VALUE * (total - math.log(len(scaled)))
    return values


def main(sampled: str, data: str, written: str) -> None:
    """Write the rows of a JSONL file with the column `optimal_value`."""
    values = optimal_values(Path(sampled) / "responses.jsonl")
    rows: list[dict[str, Any]] = [json.loads(line) for line in Path(data).open(encoding="utf-8")]
    with open(written, "w", encoding="utf-8") as file:
        for number, value in sorted(values.items()):
            file.write(json.dumps(rows[number] | {"optimal_value": value}) + "\n")
    print(f"{len(values)} of {len(rows)} rows have an optimal value: {written}")


if __name__ == "__main__":
    main(*sys.argv[1:])
