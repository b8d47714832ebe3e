"""Ten padded rows of every kind, their share on each rank, and plain torch's results.

Plain torch computes one row at a time.
"""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.algorithms.roles.critic import Critic
from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.reward_model import RewardModel
from lightrft.config import ModelSection
from lightrft.models.heads import Actor, Scorer
from lightrft.models.load import load_model, load_scorer
from lightrft.strategy import FSDPStrategy

LENGTHS = [9, 4, 17, 12, 5, 20, 7, 13, 2, 10]
PROMPT = [3, 4, 6, 2, 1, 9, 7, 5, 1, 3]
"""Tokens of each prompt. Rows 1 and 6 have an empty response."""
WIDTH = 23
SHARES = {1: [10], 2: [7, 3], 4: [4, 0, 5, 1]}
TEMPERATURE = 0.8

Padded = dict[str, Tensor]


def whole() -> Padded:
    """Return the rows of all ranks.

    Padding is noise, which must not matter; row 3 is masked altogether; some rows begin alike.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    prompts = torch.tensor(PROMPT)
    column = torch.arange(WIDTH)
    ids = torch.randint(0, 256, (len(LENGTHS), WIDTH), generator=generator)
    for row, same in ((9, 3), (5, 6), (7, 5), (6, 7)):
        ids[row, :same] = ids[2, :same]

    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": (column >= prompts[:, None]) & (column < lengths[:, None]),
        "sample_mask": torch.arange(len(LENGTHS)) != 3,
    }


def share(batch: Padded, rank: int, world_size: int) -> Padded:
    first = sum(SHARES[world_size][:rank])
    return {name: value[first : first + SHARES[world_size][rank]] for name, value in batch.items()}


def strategy(**args) -> FSDPStrategy:
    made = FSDPStrategy(seed=1, max_norm=0.5, args={"fsdp": True, **args})
    made.setup_distributed()
    return made


def policy(
    made: FSDPStrategy,
    folder: str,
    reference: str | None = None,
    kind: type[Policy] = Policy,
    **options,
) -> Policy:
    """Return a policy that learns with SGD, and a schedule of 0.5, 1, 1, ...

    SGD shows a constant factor on the gradients.
    """
    actor = Actor(load_model(ModelSection(pretrain=folder)))
    trained = prepared(made, actor)
    frozen = (
        made.prepare(Actor(load_model(ModelSection(pretrain=reference))).requires_grad_(False))
        if reference
        else None
    )
    return kind(made, *trained, reference=frozen, temperature=TEMPERATURE, **options)


def scorer(folder: str) -> Scorer:
    return Scorer(load_scorer(ModelSection(pretrain=folder)))


def critic(made: FSDPStrategy, folder: str, **options) -> Critic:
    return Critic(made, *prepared(made, scorer(folder)), **options)


def reward_model(made: FSDPStrategy, folder: str, **options) -> RewardModel:
    return RewardModel(made, *prepared(made, scorer(folder)), **options)


def prepared(made: FSDPStrategy, module: nn.Module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = made.create_scheduler(optimizer, "constant", 2, 8)
    return made.prepare((module, optimizer, scheduler))


def dense_scorer(folder: str, seed: int) -> str:
    """Write a folder with a head that is not small, for critics and reward models."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(f"{folder}/scorer{seed}")
    return f"{folder}/scorer{seed}"


def plain_model(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def plain_scorer(folder: str) -> nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def plain_logprobs(model: nn.Module, ids: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return the log-probs [n] of one row; the first token has none."""
    logits = model(ids[None], use_cache=False).logits[0, :-1] / temperature
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]])


def plain_scores(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the head's output [n] after every token of one row."""
    return model.score(model.model(ids[None], use_cache=False).last_hidden_state)[0, :, 0]


def every_row(function) -> Tensor:
    """Return `function(ids of one row)` for all rows, padded with zeros: [10, WIDTH]."""
    batch = whole()
    result = torch.zeros(len(LENGTHS), WIDTH)
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            result[row, :length] = function(batch["input_ids"][row, :length])
    return result
