"""The policy of a mixture of experts, where the run has to know what its routers choose.

That is so if the load of the experts is balanced, by a loss or by the biases of routers, and if the
choices of the engine's routers are replayed.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.objectives import Balanced
from lightrft.algorithms.roles.policy import WITHOUT_ENTROPY, Policy
from lightrft.core.batch import Batch, Routing, Rows, micro_batches
from lightrft.core.losses import Report, Reported
from lightrft.core.metrics import Metrics
from lightrft.core.role import LossTerm
from lightrft.models.balance import Balance
from lightrft.models.heads import LocalGradients
from lightrft.models.logits.truncation import ALL
from lightrft.models.routers import RouterChoices, Routers


class MixturePolicy(Policy):
    """Policy whose actor is a mixture of experts. Its routers are read in training."""

    def __init__(self, *args: Any, routers: Routers | None = None, **options: Any):
        super().__init__(*args, **options)
        self.routers = routers
        """Routers of the actor if a loss balances the load of the experts, else None."""
        self._load: Tensor | None = None
        """How many of this rank's tokens of the open step chose each expert so far, [layers, E], if
        it is measured."""
        self._load_report: Report = {}
        """Reports of the load of the experts in the newest optimizer step, if it is measured."""

    def forward(self, batch: Batch, gradients: LocalGradients | None = None) -> Reported:
        with self.routers.watch() if self.routers else nullcontext([]) as outputs:
            logprobs, report = super().forward(batch, gradients)
        if self.routers:
            batch.routing = self.routers.routing(outputs, batch, self.actor.sequence)
        if self.actor.router_choices:
            report |= self._measured_choices(self.actor.router_choices)
        return logprobs, report

    def _measured_choices(self, choices: RouterChoices) -> Report:
        """Add the load of the experts to the open step; report the choices that replay changed."""
        sequence = self.actor.sequence
        if self.left is not None and self.module.training:
            load = choices.load(sequence)
            self._load = load if self._load is None else self._load + load
        return choices.report(sequence)

    def begin(self, num_microbatches: int, *, learn: bool = True) -> None:
        super().begin(num_microbatches, learn=learn)
        self._load = None

    def finish(self) -> tuple[Tensor, Tensor]:
        """Step the optimizer, and balance the load of the experts if it was measured; see Role."""
        load = self._load
        if load is None:
            return super().finish()

        # The loads of all ranks are summed with the loss, in one collective.
        self.total = torch.cat([self.total[None], load.flatten()])
        sums, norm = super().finish()
        self._load_report = self.actor.router_choices.balance(sums[1:].view_as(load))
        return sums[0], norm

    def learn(self, terms: Sequence[LossTerm], metrics: Metrics) -> tuple[Tensor, Tensor]:
        """Take one optimizer step; see Role.

        With `routers`, a forward pass first measures the load of all the tokens of the first term.
        """
        if self.routers:
            first, *others = terms
            balance = self._balance(first.batch, first.rows)
            objective = Balanced(first.objective, balance, self.routers.coefficient)
            terms = [replace(first, objective=objective), *others]
        loss_and_norm = super().learn(terms, metrics)
        for name, value in self._load_report.items():
            (metrics.max if name.endswith("_max") else metrics.mean)(name, value)
        return loss_and_norm

    def _balance(self, batch: Batch, rows: Rows) -> Balance:
        """Compute the load of the experts over the tokens of all ranks, without dropout."""
        self.strategy.enter("logprob", self.actor)
        self.actor.eval()

        sums = []
        with torch.no_grad():
            for micro_batch in micro_batches(batch, rows, self.strategy.to_device):
                # Without a learned token the head computes nothing: only routers are of interest.
                unlearned = replace(
                    micro_batch,
                    loss_mask=torch.zeros_like(micro_batch.loss_mask),
                    learned=micro_batch.learned_tokens[:0],
                )
                with self.routers.watch() as outputs:
                    self.actor(unlearned, self.temperature, ALL, WITHOUT_ENTROPY)
                sums.append(self.routers.routing(outputs, micro_batch, self.actor.sequence))

        local_routing = Routing(
            *(sum(getattr(each, field.name) for each in sums) for field in fields(Routing))
        )
        return Balance.of(local_routing, self.strategy.mesh.data.sum)
