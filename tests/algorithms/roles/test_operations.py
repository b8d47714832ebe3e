"""Operations of a training step, compared with PyTorch's own count."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightrft.algorithms.objectives import sft
from lightrft.algorithms.roles.operations import TrainingOperations
from lightrft.config.sections import ModelSection
from lightrft.core.batch import Batch
from lightrft.core.losses import Denominator
from lightrft.models.heads import Actor, Scorer, TokenLogprobs, local_gradients
from lightrft.models.load import load_model, load_scorer
from lightrft.models.logits.truncation import ALL
from lightrft.models.lora import freeze_parameters
from lightrft.strategy.batching.micro_batches import find_shared_prefixes
from tiny import tiny_experts, tiny_model

PROMPT = 40
RESPONSES = {100: 7, 140: 9, 200: 30}
"""First token of a response -> the number of its tokens, which are consecutive numbers."""
MODELS = {
    "whole": {},
    "tied": {"tie": True},
    "frozen embeddings and layer": {
        "freeze_prefix": ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    },
    "frozen layer, trained embeddings": {"freeze_prefix": ["model.layers.0", "model.layers.1"]},
    "frozen head": {"freeze_prefix": ["lm_head"]},
    "adapters": {"lora_rank": 4},
    "adapters of the last layer": {
        "lora_rank": 4,
        "freeze_prefix": [f"model.layers.{n}." for n in range(5)],
    },
    "experts": {"experts": True},
    "scorer": {"scorer": True},
}


def batch_of(shared: bool) -> Batch:
    """Return several responses to one prompt; a shared prompt is computed once."""
    prompt = torch.arange(PROMPT)
    rows = [
        torch.cat([prompt, torch.arange(first, first + length)])
        for first, length in RESPONSES.items()
    ]
    masks = [torch.arange(len(row)) >= PROMPT for row in rows]

    lengths = torch.tensor([len(row) for row in rows])
    batch = Batch(lengths, torch.cat(rows), torch.cat(masks), torch.arange(len(rows)))
    if shared:
        batch.shared = find_shared_prefixes(batch.input_ids, lengths, None, min_saving=0.0)
        assert batch.num_computed == PROMPT + sum(RESPONSES.values())

    return batch


def grouped(rows, matrices, *_, out_shape=None, **__) -> int:
    """Count products in groups, because PyTorch does not.

    They are rows [M, K] with matrices [G, K, N], or [M, K] with [K, N] in groups of K.
    """
    return 2 * rows[-2] * rows[-1] * matrices[-1]


def added(total, rows, columns, *_, out_shape=None, **__) -> int:
    return grouped(rows, columns)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_are_computed(tmp_path, name, shared):
    options = dict(MODELS[name])
    experts = options.pop("experts", False)
    scorer = options.pop("scorer", False)
    folder = (
        tiny_experts(tmp_path)
        if experts
        else tiny_model(tmp_path, tie=options.pop("tie", False), layers=6)
    )
    section = ModelSection(pretrain=folder, **options)
    model = freeze_parameters((load_scorer if scorer else load_model)(section), section)
    role = (Scorer if scorer else Actor)(model).train()
    batch = batch_of(shared)

    denominator = Denominator(batch.loss_mask.sum().float(), torch.tensor(3.0))
    others = {torch.ops.aten._grouped_mm: grouped, torch.ops.aten.addmm_: added}
    with FlopCounterMode(display=False, custom_mapping=others) as counter:
        if scorer:
            loss = role(batch)[batch.loss_mask].sum()
        else:
            gradients = local_gradients(sft, batch, denominator)
            values, _ = role(batch, 1.0, ALL, TokenLogprobs(entropy=False, gradients=gradients))
            loss, _ = sft(values, batch, denominator)
        loss.backward()

    counts = counter.get_flop_counts()["Global"]
    products = sum(
        count for kind, count in counts.items() if "mm" in str(kind) and "bmm" not in str(kind)
    )
    operations = TrainingOperations.of(model, lambda parameter: parameter.shape)
    found = operations(batch.num_computed, len(batch.learned_tokens))
    # Keys and values of the first trained layer need no gradient of their input, which is counted.
    assert found == pytest.approx(products, rel=0.025 if options else 0.005), {
        str(kind): count for kind, count in counts.items()
    }
