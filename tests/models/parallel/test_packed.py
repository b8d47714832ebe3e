"""The public log-probs of packed rows equal each row's alone, for every split.

The split may be of the model and of the sequence.
"""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrft.algorithms.roles.policy import Policy
from lightrft.config import ModelSection
from lightrft.models.heads import Actor
from lightrft.models.load import load_model
from lightrft.models.parallel.sequence_parallel import SequenceParallel
from lightrft.strategy import FSDPStrategy
from models.parallel.families import family_model
from ranks import run_ranks

LENGTHS = [24, 48, 16, 40, 7]
WIDTH = 50
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return family_model(tmp_path_factory.mktemp("model"), "qwen3", tie=True)


def padded_rows() -> dict[str, Tensor]:
    """Return rows with noise as padding, which must not matter."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 256, (len(LENGTHS), WIDTH), generator=generator)
    return {"input_ids": ids, "input_lengths": torch.tensor(LENGTHS)}


def one_by_one(folder: str) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = padded_rows()
    expected = torch.zeros(len(LENGTHS), WIDTH)
    for row, (ids, length) in enumerate(zip(rows["input_ids"], LENGTHS, strict=True)):
        logp = (
            model(ids[None, :length], use_cache=False).logits[0, :-1] / TEMPERATURE
        ).log_softmax(-1)
        expected[row, 1:length] = logp.gather(1, ids[1:length, None])[:, 0].detach()
    return expected


def answers(folder: str, layouts: list[dict]) -> list[tuple[Tensor, Tensor, int]]:
    """Return, for each layout, log-probs, and log-probs of the rows in another order.

    It also counts the collectives of one call beyond the model's.
    """
    results = []
    gather = SequenceParallel.sums
    seen = []
    SequenceParallel.sums = lambda divided, *values: (
        seen.append(divided.axis.size > 1),
        gather(divided, *values),
    )[1]

    for layout in layouts:
        strategy = FSDPStrategy(args={"fsdp": True, **layout})
        strategy.setup_distributed()
        policy = Policy(
            strategy,
            strategy.prepare(Actor(load_model(ModelSection(pretrain=folder)))),
            temperature=TEMPERATURE,
        )
        found = policy.get_logprobs(padded_rows())["logprobs"]
        seen[:] = []

        other = policy.get_logprobs({name: value.flip(0) for name, value in padded_rows().items()})[
            "logprobs"
        ]
        results.append((found, other, sum(seen)))
        strategy.close()

    return results


SPLITS = {
    1: [{}],
    2: [
        {"tp_size": 2},
        {"sp_size": 2},
        {"cp_size": 2},
        {"tp_size": 2, "tp_sequence_parallel": True},
    ],
    4: [
        {"tp_size": 2, "sp_size": 2},
        {"tp_size": 2, "cp_size": 2},
        {"tp_size": 2, "cp_size": 2, "tp_sequence_parallel": True},
    ],
}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_logprobs_of_padded_rows(folder, ranks):
    expected = one_by_one(folder)
    for results in run_ranks(ranks, answers, folder, SPLITS[ranks]):
        for layout, (found, other, gathers) in zip(SPLITS[ranks], results, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            assert torch.equal(found == 0, expected == 0), "column 0 and the padding"
            torch.testing.assert_close(other, expected.flip(0), rtol=0, atol=1e-5)
            assert gathers == (1 if {"sp_size", "cp_size"} & layout.keys() else 0), (
                "once, for all rows together"
            )
