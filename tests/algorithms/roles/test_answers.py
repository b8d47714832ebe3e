"""Models say about padded rows what plain torch says about each row alone.

Results are in the caller's order, on any ranks.
"""

from pathlib import Path

import pytest
import torch

from algorithms.roles import rows
from ranks import run_ranks

LIMITS = [
    {},
    {"mbs": 1},
    {"mbs": 2},
    {"max_tokens": 20},
    {"max_tokens": 33, "mbs": 2},
    {"max_tokens": 10, "logprobs": 21},
]
BATCHING = ["packed", "packed", "plain", "dynamic", "dynamic", "packed"]
TOP = 5


def answers(folder: str, reference_folder: str, scorer_folder: str, limits: list[dict]):
    """Return, for each limit, log-probs, reference log-probs, values and rewards of this rank's
    rows.
    """
    made = rows.strategy()
    policy = rows.policy(made, folder, reference_folder)
    critic = rows.critic(made, scorer_folder)
    judge = rows.reward_model(made, scorer_folder)

    mine = rows.share(rows.whole(), made.get_rank(), made.mesh.data.size)
    found = []
    for limit, batching in zip(limits, BATCHING, strict=False):
        mbs = limit.get("mbs")
        for role in (policy, critic, judge):
            role.max_tokens = limit.get("max_tokens", 1000)
            role.batching = batching
            role.max_logprob_tokens = limit.get("logprobs")

        found.append(
            [
                policy.get_logprobs(mine, mbs=mbs)["logprobs"],
                policy.get_reference_logprobs(mine, mbs=mbs)["reference_logprobs"],
                critic.get_values(mine, mbs=mbs)["values"],
                judge.get_rewards(mine, mbs=mbs),
            ]
        )
        again = [
            policy.get_reference_policy_logprobs(mine, mbs)["reference_logprobs"],
            judge.score(mine, mbs)["scores"],
        ]
        assert torch.equal(again[0], found[-1][1]) and torch.equal(again[1], found[-1][3])
        top = policy.get_topk_logits(mine, TOP, mbs)
        found[-1] += [top["topk_logits"], top["topk_indices"]]

    return found


def plain(folder: str, reference_folder: str, scorer_folder: str) -> list[torch.Tensor]:
    actor = rows.plain_model(folder)
    reference = rows.plain_model(reference_folder)
    scorer = rows.plain_scorer(scorer_folder)
    scores = rows.every_row(lambda ids: rows.plain_scores(scorer, ids))
    before = rows.every_row(
        lambda ids: torch.cat([torch.zeros(1), rows.plain_scores(scorer, ids)[:-1]])
    )
    last = torch.tensor(rows.LENGTHS) - 1

    return [
        rows.every_row(lambda ids: rows.plain_logprobs(actor, ids)),
        rows.every_row(lambda ids: rows.plain_logprobs(reference, ids)),
        before,
        scores[torch.arange(len(last)), last],
        *top_of_rows(actor),
    ]


@torch.no_grad()
def top_of_rows(actor: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and ids of the likeliest tokens after each token, [10, WIDTH, TOP].

    The padding is 0.
    """
    ids = rows.whole()["input_ids"]
    size = (len(rows.LENGTHS), rows.WIDTH, TOP)
    values = torch.zeros(size)
    indices = torch.zeros(size, dtype=torch.int64)
    for row, length in enumerate(rows.LENGTHS):
        logprobs = (actor(ids[row : row + 1, :length]).logits[0] / rows.TEMPERATURE).log_softmax(-1)
        values[row, :length], indices[row, :length] = logprobs.topk(TOP)
    return values, indices


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_is_plain_torch(folder, reference_folder, scorer_folder, world_size):
    expected = plain(folder, reference_folder, scorer_folder)
    # there is something to get wrong
    assert expected[0].abs().max() > 4 and expected[2].abs().max() > 0.5
    assert (expected[0] - expected[1]).abs().max() > 1

    per_rank = run_ranks(world_size, answers, folder, reference_folder, scorer_folder, LIMITS)
    for limit in range(len(LIMITS)):
        for kind, values in enumerate(expected):
            shares = [found[limit][kind] for found in per_rank]
            assert [len(share) for share in shares] == rows.SHARES[world_size]
            assert all(
                share.dtype == values.dtype and share.device.type == "cpu" for share in shares
            )
            torch.testing.assert_close(torch.cat(shares), values, rtol=0, atol=1e-5)


def test_the_first_column_and_the_padding_are_zero(folder, reference_folder, scorer_folder):
    found = run_ranks(2, answers, folder, reference_folder, scorer_folder, [{}])
    padding = torch.arange(rows.WIDTH) >= torch.tensor(rows.LENGTHS)[:, None]
    for kind in range(3):
        values = torch.cat([rank[0][kind] for rank in found])
        assert (values[:, 0] == 0).all() and (values[padding] == 0).all()
        assert (values[:, 1:][~padding[:, 1:]] != 0).all()


def budgets(folder: str, reference_folder: str, scorer_folder: str):
    """Return, for each budget, micro-batches of one rank, and the roles' results on the flat batch.

    The batch was dealt for training with 20 tokens.
    """
    made = rows.strategy()
    policy = rows.policy(made, folder, reference_folder, max_tokens=20)
    critic = rows.critic(made, scorer_folder)
    flat, (members,) = policy.redistribute(
        rows.share(rows.whole(), made.get_rank(), made.mesh.data.size)
    )

    found = []
    for budget in (None, 40, 1000):
        policy.max_logprob_tokens = critic.max_logprob_tokens = budget
        counts = []
        handle = critic.module.register_forward_pre_hook(
            lambda _, given, counts=counts: counts.append(given[0].num_tokens)
        )
        values = critic.values(flat, members)
        handle.remove()
        both = policy.logprobs_and_entropy(flat, members)
        found.append((counts, [*both, policy.reference_logprobs(flat, members), values]))

    return found


def test_log_probs_have_a_budget_of_their_own(folder, reference_folder, scorer_folder):
    """There are fewer passes, as many on each rank, and the numbers are the same."""
    (ours, others) = run_ranks(2, budgets, folder, reference_folder, scorer_folder)
    for (counts, values), (other_counts, _), most in zip(ours, others, (20, 40, 1000), strict=True):
        assert len(counts) == len(other_counts) and max(counts + other_counts) <= most
        assert values[0].abs().max() > 4
        for value, plain_value in zip(values, ours[0][1], strict=True):
            torch.testing.assert_close(value, plain_value, rtol=0, atol=1e-5)
    assert len(ours[0][0]) > len(ours[1][0]) > len(ours[2][0]) == 1


def top_in_layouts(folder: str):
    found = []
    for layout in ({"sp_size": 2}, {"sp_size": 2, "sp_impl": "zigzag"}, {"tp_size": 2}):
        made = rows.strategy(**layout)
        top = rows.policy(made, folder).get_top_logprobs(rows.whole(), TOP)
        found.append((top["top_logprobs"], top["top_ids"]))
        made.close()
    return found


@pytest.mark.slow
def test_the_likeliest_tokens_do_not_depend_on_the_layout(folder):
    expected = top_of_rows(rows.plain_model(folder))
    for rank in run_ranks(2, top_in_layouts, folder):
        for found in rank:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def odd_batches(folder: str, target: Path):
    made = rows.strategy()
    policy = rows.policy(made, folder)
    policy.prepare_for_lp_inference()
    policy.start_gpu_profiling(target)
    nothing = {name: value[:0] for name, value in rows.whole().items()}
    # int32, as some tokenizers make them
    as_lists = {name: value.int() for name, value in rows.whole().items()}
    first = policy.get_logprobs(as_lists)["logprobs"]
    short = {"input_ids": as_lists["input_ids"][:2, :1], "input_lengths": torch.ones(2)}

    shapes = (
        policy.get_logprobs(nothing)["logprobs"].shape,
        policy.get_topk_logits(nothing, TOP)["topk_logits"].shape,
    )
    return shapes, first, policy.get_logprobs(short)["logprobs"], policy.stop_gpu_profiling()


def test_no_rows_anywhere_and_rows_of_one_token(folder, tmp_path):
    shapes, logprobs, short, trace = run_ranks(1, odd_batches, folder, tmp_path)[0]
    assert trace.parent == tmp_path and "aten::mm" in trace.read_text()
    assert shapes == ((0, rows.WIDTH), (0, rows.WIDTH, TOP))
    assert logprobs.shape == (10, rows.WIDTH)
    assert short.tolist() == [[0.0], [0.0]]


def of_different_widths(folder: str):
    """Return results for rows of widths 5 and 9, with a multiple of 8.

    The second rank has one row more.
    """
    made = rows.strategy()
    policy = rows.policy(made, folder, width_multiple=8)
    width = (5, 9)[made.get_rank()]
    ids = torch.arange(4 * width).view(4, width)[: 1 + made.get_rank()]
    given = {"input_ids": ids, "input_lengths": torch.full((len(ids),), width - 1)}
    top = policy.get_top_logprobs(given, TOP)
    return ids, policy.get_logprobs(given)["logprobs"], top["top_logprobs"], top["top_ids"]


def test_the_width_of_results_is_agreed_by_all_ranks_and_rounded_up(folder):
    actor = rows.plain_model(folder)
    for ids, logprobs, top, top_ids in run_ranks(2, of_different_widths, folder):
        assert logprobs.shape == (len(ids), 16) and top.shape == top_ids.shape == (
            len(ids),
            16,
            TOP,
        )
        with torch.no_grad():
            expected = torch.stack([rows.plain_logprobs(actor, row[:-1]) for row in ids])
        end = expected.shape[1]
        torch.testing.assert_close(logprobs[:, :end], expected, rtol=0, atol=1e-5)
        assert (
            logprobs[:, end:].eq(0).all()
            and top[:, end:].eq(0).all()
            and top[:, : end - 1].ne(0).any(-1).all()
        )
