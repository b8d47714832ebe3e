"""GRPO on a toy task, in one file: which of two digits is larger?

    python examples/grpo_core.py       # less than half a minute on one core, from 10 % to 90 % right

Only `lightrft.core` is used: a torch module that returns logits, an engine that samples from a copy
of it, and a reward function. The loop at the end does what core/step.py does in every run.
"""

import copy

import torch
from torch import Tensor, nn

from lightrft.core.advantages import CompareRewards, PolicyLogprobs, RewardToGo, grpo
from lightrft.core.batch import Batch
from lightrft.core.engine import Decoding, Request, WholeRequests
from lightrft.core.experience import ExperienceMaker
from lightrft.core.losses import PolicyObjective, ppo
from lightrft.core.metrics import Metrics
from lightrft.core.policy import LogitsPolicy
from lightrft.core.rewards import CallFunction
from lightrft.core.role import Learner
from lightrft.core.rollout import NextPrompts, Rollout
from lightrft.core.sampler import Sampler
from lightrft.core.samples import Completion, Prompt, Sample
from lightrft.core.strategy import OneProcess

VOCABULARY = "0123456789>"


class Model(nn.Module):
    """One layer of attention. Sequences lie end to end, so each attends to its own tokens only."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(8, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [T, V]."""
        sequence = batch.sequence_ids
        later = torch.ones(batch.num_tokens, batch.num_tokens, dtype=torch.bool).triu(1)
        hidden = self.tokens(batch.input_ids) + self.positions(batch.position_ids)
        hidden = self.layer(hidden[None], src_mask=later | (sequence[:, None] != sequence))
        return self.head(hidden[0])


class Engine:
    """Samples one token from a copy of the model, at temperature 1. Every sample has its own seed."""

    def __init__(self, model: nn.Module):
        self.model = copy.deepcopy(model)

    def load_weights(self, weights, version: int) -> None:
        self.model.load_state_dict(dict(weights))

    def open(self, sampling: Decoding) -> WholeRequests:
        return WholeRequests(self.generate)

    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[list[Completion]]:
        """Return one token for each sample: the answers of this task have no more."""
        prompts = [request.token_ids for request in requests]
        batch = Batch(torch.tensor([*map(len, prompts)]), torch.tensor(sum(prompts, [])))
        logprobs = self.model(batch)[batch.offsets[1:] - 1].log_softmax(-1)
        pairs = zip(requests, logprobs, strict=True)
        return [[self.sample(row, seed) for seed in request.seeds] for request, row in pairs]

    def sample(self, logprobs: Tensor, seed: int) -> Completion:
        noise = torch.Generator().manual_seed(seed)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=noise))
        return Completion([token], [float(logprobs[token])], "length")


def tokens(text: str) -> list[int]:
    return [VOCABULARY.index(letter) for letter in text]


def text_of(token_ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in token_ids)


def larger(samples: list[Sample]) -> list[float]:
    return [float(sample.text == max(sample.prompt.text[:2])) for sample in samples]


def main(num_steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    prompts = [Prompt(row, f"{row:02d}>", tokens(f"{row:02d}>")) for row in range(100)]
    model = Model()
    strategy = OneProcess(Engine(model))
    policy = LogitsPolicy(strategy, model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    # A step draws 50 prompts, samples 8 answers to each, and takes one optimizer step.
    sampler = Sampler(strategy, text_of, Decoding(n=8, max_tokens=1))
    scheduler = NextPrompts(sampler, prompts, data=strategy.data, num_prompts=50)
    rollout = Rollout(scheduler, CallFunction(larger))
    stages = [PolicyLogprobs(policy), RewardToGo()]
    make_experience = ExperienceMaker(strategy, CompareRewards(grpo), stages, minibatch_size=400)
    actor = Learner("actor", policy, PolicyObjective(ppo, eps_clip_high=0.28))

    rewards = []
    for number in range(1, num_steps + 1):
        metrics = Metrics()
        with strategy.engine_awake(model):  # the engine gets the newest weights
            groups = rollout.collect(number, metrics)
        samples = rollout.score(groups)
        actor.learn(make_experience(samples, metrics), metrics)
        rewards.append(sum(sample.reward for sample in samples) / len(samples))
        norm = metrics.reduce(strategy.data)["train/grad_norm"]
        print(f"{number:4d}  reward {rewards[-1]:.2f}  gradient {norm:.3f}")
    return rewards  # the mean of each step


if __name__ == "__main__":
    main()
