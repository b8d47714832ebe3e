"""Micro-batches come back in the batch's order, and an empty one has no weight."""

from dataclasses import replace

import torch

from lightrft.core.batch import Batch, Experience, infer, micro_batches
from lightrft.strategy.batching.micro_batches import find_shared_prefixes


def experience() -> Experience:
    return Experience(
        lengths=torch.tensor([2, 3, 1]),
        input_ids=torch.tensor([10, 11, 20, 21, 22, 30]),
        loss_mask=torch.tensor([False, True, False, True, True, False]),
        rows=torch.tensor([7, 8, 9]),
        groups=torch.tensor([1, 1, 2]),
        rewards=torch.tensor([0.5, 1.0, 0.0]),
        engine_logprobs=torch.zeros(6),
    )


def with_shared_prefixes(batch: Batch) -> Batch:
    return replace(batch, shared=find_shared_prefixes(batch.input_ids, batch.lengths))


def test_infer_restores_the_order_and_leaves_out_the_filler():
    seen: list[list[int]] = []

    def forward(batch: Batch) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        seen.append(batch.input_ids.tolist())
        return batch.input_ids * 2.0 + batch.position_ids

    values = infer(forward, experience(), [[2, 0], [], [1]], with_shared_prefixes)
    assert values.tolist() == [20.0, 23.0, 40.0, 43.0, 46.0, 60.0]
    assert seen == [[30, 10, 11], [0], [20, 21, 22]]


def test_rows_that_are_in_no_micro_batch_stay_zero():
    assert infer(
        lambda batch: batch.input_ids.float(), experience(), [[1]], with_shared_prefixes
    ).tolist() == [0.0, 0.0, 20.0, 21.0, 22.0, 0.0]


def test_an_empty_micro_batch_is_one_unlearned_token_with_every_column():
    (empty_microbatch,) = micro_batches(experience(), [[]], with_shared_prefixes)
    assert (
        type(empty_microbatch) is Experience
        and len(empty_microbatch) == empty_microbatch.num_tokens == 1
    )
    assert not empty_microbatch.loss_mask.any() and empty_microbatch.loss_mask.dtype == torch.bool
    assert empty_microbatch.columns("token").keys() == experience().columns("token").keys()
    assert empty_microbatch.columns("sequence").keys() == experience().columns("sequence").keys()
    assert empty_microbatch.advantages is None and empty_microbatch.old_logprobs is None


def test_a_rank_without_any_sample_still_has_its_micro_batches():
    nothing = experience().select([])
    assert [len(batch) for batch in micro_batches(nothing, [[], []], with_shared_prefixes)] == [
        1,
        1,
    ]
    assert (
        infer(
            lambda batch: batch.input_ids.float(), nothing, [[], []], with_shared_prefixes
        ).tolist()
        == []
    )


def test_the_filler_has_columns_as_wide_as_the_batch():
    """Ranks without a sequence compute as many log-probs of a token as the others."""
    batch = experience()
    batch.candidates = torch.ones(6, 3, dtype=torch.int32)
    batch.teacher_prompts = torch.ones(3, 5, dtype=torch.int32)
    (filler,) = micro_batches(batch, [[]], with_shared_prefixes)
    assert filler.candidates.shape == (1, 3) and filler.teacher_prompts.shape == (1, 5)
    assert not filler.loss_mask.any()
