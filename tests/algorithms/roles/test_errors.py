"""A batch that cannot be used gives the reason on every rank, and the role stays usable."""

import pytest
import torch

from algorithms.roles import rows
from lightrft.algorithms.objectives import sft
from lightrft.algorithms.terms import policy_objective
from lightrft.config import Config
from ranks import run_ranks

CASES = {
    "missing keys": (
        lambda batch: {"input_ids": batch["input_ids"], "advantages": batch["token_mask"]},
        "the batch lacks input_lengths, token_mask, sample_mask; it has advantages, input_ids",
    ),
    "nothing": (
        lambda batch: {},
        "the batch lacks input_ids, input_lengths, token_mask, sample_mask; it has nothing",
    ),
    "lists": (
        lambda batch: batch | {"input_lengths": [3], "mine": "text"},
        "input_lengths, mine must be a tensor",
    ),
    "flat ids": (
        lambda batch: batch | {"input_ids": torch.zeros(4)},
        "input_ids must be [B, S], not [4]",
    ),
    "shapes": (
        lambda batch: (
            batch
            | {"token_mask": torch.ones(10), "advantages": torch.ones(10), "own": torch.ones(10, 3)}
        ),
        (
            "token_mask must be [B, S] = [10, 23], not [10]; advantages must be [B, S] = [10, 23],"
            " not [10]; own must be [B, S] = [10, 23], not [10, 3]"
        ),
    ),
    "rows": (
        lambda batch: batch | {"sample_mask": torch.ones(9), "grade": torch.ones(11)},
        "sample_mask must be [B] = [10], not [9]; grade must be [B] = [10], not [11]",
    ),
    "empty row": (
        lambda batch: batch | {"input_lengths": torch.tensor([9, 4, 0, 12, 5, 20, 7, 13, 2, 10])},
        "input_lengths of row 2 is 0, not between 1 and S = 23",
    ),
    "too long for S": (
        lambda batch: batch | {"input_lengths": torch.tensor([9, 4, 1, 12, 5, 24, 7, 13, 2, 10])},
        "input_lengths of row 5 is 24, not between 1 and S = 23",
    ),
    "reserved": (
        lambda batch: batch | {"rows": torch.arange(10)},
        "rows is computed from input_lengths and the masks; rename the column",
    ),
}


def refused(folder: str):
    policy = rows.policy(rows.strategy(), folder)
    errors = {}
    for case, (spoil, _) in CASES.items():
        with pytest.raises(ValueError) as caught:
            policy.train(spoil(rows.whole()), sft)
        errors[case] = str(caught.value)

    with pytest.raises(ValueError) as caught:
        policy.get_logprobs({"ids": torch.zeros(2, 2)})
    errors["get_logprobs"] = str(caught.value)
    assert policy.train(rows.whole(), sft)["loss"].item() > 0

    return errors


def test_exact_texts(folder):
    errors = run_ranks(1, refused, folder)[0]
    assert errors.pop("get_logprobs") == "the batch lacks input_ids, input_lengths; it has ids"
    assert errors == {case: text for case, (_, text) in CASES.items()}


def one_rank_is_wrong(folder: str):
    made = rows.strategy()
    policy = rows.policy(made, folder)

    mine = rows.share(rows.whole(), made.get_rank(), 2)
    bad = [dict(mine), dict(mine), dict(mine)]
    if made.get_rank() == 1:
        del bad[0]["sample_mask"]
        bad[1]["bonus"] = torch.ones(3)
        bad[2]["input_lengths"] = mine["input_lengths"] + 20

    errors = []
    for batch in bad:
        with pytest.raises(ValueError) as caught:
            policy.train(batch, sft)
        errors.append(str(caught.value))

    return errors, policy.train(mine, sft)["loss"].item()


def test_one_rank_alone_stops_all_of_them(folder):
    (first, loss), (second, _) = run_ranks(2, one_rank_is_wrong, folder)
    assert (
        first
        == second
        == [
            (
                "batch of rank 1: the batch lacks sample_mask; it has input_ids, input_lengths,"
                " token_mask"
            ),
            "batch of rank 1: its columns are bonus, those of rank 0 none",
            "batch of rank 1: input_lengths of row 0 is 33, not between 1 and S = 23",
        ]
    )
    assert loss > 0


def too_long(folder: str):
    made = rows.strategy()
    policy = rows.policy(made, folder, max_tokens=19)
    mine = rows.share(rows.whole(), made.get_rank(), 2)
    errors = []
    for verb in (policy.get_logprobs, lambda batch: policy.train(batch, sft)):
        with pytest.raises(ValueError) as caught:
            verb(mine)
        errors.append(str(caught.value))
    return errors


def test_a_row_longer_than_the_budget(folder):
    """Row 5 on rank 0 has 20 tokens."""
    for errors in run_ranks(2, too_long, folder):
        assert all(
            "20" in error and "19" in error and "--max_tokens_per_microbatch" in error
            for error in errors
        )


def nothing_to_train(folder: str):
    policy = rows.policy(rows.strategy(), folder)
    with pytest.raises(ValueError) as caught:
        policy.train({name: value[:0] for name, value in rows.whole().items()}, sft)
    masked = rows.whole() | {"sample_mask": torch.zeros(10)}
    result = policy.train(masked, sft)

    return (
        str(caught.value),
        result["loss"].tolist(),
        result["grad_norm"].tolist(),
        result["metrics"]["tokens"],
    )


def test_no_rows_is_an_error_and_no_learned_token_is_a_loss_of_zero(folder):
    text = "the batch to train on is empty: it has no rows on any rank"
    assert run_ranks(2, nothing_to_train, folder) == [(text, [0.0], [0.0], [])] * 2


def missing_column(folder: str):
    policy = rows.policy(rows.strategy(), folder)
    with pytest.raises(ValueError) as caught:
        policy.train(rows.whole(), policy_objective(Config().algorithm))
    policy.abort_train_step()
    return str(caught.value), policy.train(rows.whole(), sft)["loss"].item() > 0


def test_a_column_that_the_loss_needs(folder):
    text = "the policy gradient needs advantages, engine_logprobs in the batch"
    assert run_ranks(2, missing_column, folder) == [(text, True)] * 2


def no_reference(folder: str):
    with pytest.raises(ValueError, match="no reference model: create it with one"):
        rows.policy(rows.strategy(), folder).get_reference_logprobs(rows.whole())


def test_a_policy_without_reference(folder):
    run_ranks(1, no_reference, folder)
