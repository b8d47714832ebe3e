"""Supervised loss on given answers, added to the loss on samples so that the actor does not forget them (PTX, InstructGPT)."""

from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.objectives import MixedIn
from lightrft.config import TrainSection
from lightrft.data.loader import Order
from lightrft.roles.policy import Policy
from lightrft.roles.role import LossTerm
from lightrft.trainer.sft import supervised_part
from lightrft.types import Expand, Prompt


class PtxLoss:
    """Supervised batches with as many rows as each optimizer step has samples, in an order of their own; saved in checkpoints."""

    def __init__(
        self,
        policy: Policy,
        prompts: list[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        train: TrainSection,
        coefficient: float,
        expand: Expand | None = None,
        order: Order | None = None,
    ):
        """Set up the batches. `expand` is for prompts with images; without `order` the seed determines the order of the rows.

        Raises DataError if there are too few rows.
        """
        self.policy, self.prompts, self.tokenizer, self.train, self.expand = policy, prompts, tokenizer, train, expand
        Order.check(len(prompts), train.train_batch_size)
        self.order = order or Order(len(prompts), train.seed)
        self.objective = MixedIn(coefficient)
        self.taken = 0

    def next(self) -> LossTerm:
        """Return the next batch with a denominator of its own: the mean over the answer tokens of all ranks; one collective."""
        size = self.train.train_batch_size
        prompts = [self.prompts[row] for row in self.order.rows(self.taken * size, size)]
        self.taken += 1
        data = self.policy.strategy.mesh.data
        batch, rows = supervised_part(prompts, self.tokenizer, data, self.train, expand=self.expand)
        return LossTerm(batch, rows, self.objective, self.policy.denominator(batch, rows, length=1), self.policy.supervised)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]
