"""The policy: the actor that learns and generates, and the reference that holds it back."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase as Tokenizer

from lightrft.algorithms.roles.policy_methods import PolicyMethods
from lightrft.algorithms.roles.role import DistributedRole
from lightrft.config.sections import AlgorithmSection
from lightrft.core.batch import Batch, Rows
from lightrft.core.losses import Reported
from lightrft.core.role import LossTerm
from lightrft.models.heads import Actor, Likeliest, LocalGradients, TokenLogprobs, local_gradients
from lightrft.models.logits.truncation import ALL, Truncation
from lightrft.models.lora import adapted_layers, adapters_off
from lightrft.strategy.strategy import StrategyBase

WITHOUT_ENTROPY = TokenLogprobs(entropy=False)


class Policy(DistributedRole, PolicyMethods):
    """Log-probs, updates and samples of the actor, and log-probs of the frozen reference.

    A run calls logprobs(), reference_logprobs() and learn() with flat batches. Loops of your own
    call these methods with padded ones:

    policy.prepare_for_generation()                     # the newest weights go to the engine
    samples = policy.generate(prompts)
    policy.finish_generation()                          # the engine sleeps
    batch |= policy.get_logprobs(batch) | policy.get_reference_logprobs(batch)
    policy.train(batch, loss_fn, gbs=512)
    """

    NAME = "policy"

    def __init__(
        self,
        strategy: StrategyBase,
        actor: Actor,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        *,
        reference: Actor | None = None,
        temperature: float = 1.0,
        truncation: Truncation = ALL,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ):
        """Set up the policy.

        An actor with adapters may be its own `reference`, computed without the adapters. All
        log-probs refer to the sampling distribution: at `temperature`, over the tokens of the
        vocabulary that `truncation` leaves. `options` go to DistributedRole: average, max_tokens,
        max_logprob_tokens, batching.
        """
        super().__init__(strategy, actor, optimizer, scheduler, **options)
        if reference is actor and not adapted_layers(actor.language_model):
            raise ValueError("an actor without adapters cannot be its own reference")

        self.actor = actor
        self.reference = reference
        self.temperature = temperature
        self.truncation = truncation
        self.tokenizer = tokenizer

    @property
    def vocabulary_size(self) -> int:
        """Return the number of logits, which may be more than there are tokens."""
        return self.actor.language_model.config.get_text_config().vocab_size

    # -- log-probs

    def logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """Return log p of every learned token of a flat batch under the actor, 0 elsewhere.

        [T] float32 on the host.
        """
        return self.infer(lambda micro: self._token_logprobs(self.actor, micro), batch, rows)

    def logprobs_and_entropy(self, batch: Batch, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return logprobs(), and the entropy of the distribution at these positions: [T], [T]."""

        def ask(micro: Batch) -> Tensor:
            return torch.stack(self.actor(micro, self.temperature, self.truncation), dim=1)

        both = self.infer(ask, batch, rows)
        return both[:, 0], both[:, 1]

    def likeliest(self, batch: Batch, rows: Rows, k: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest ids in the place of each learned token of a flat batch.

        Log-probs [T, k] float32 and ids [T, k] int32 on the host, likeliest first and 0 elsewhere.
        Columns without a token, because fewer may be sampled, have log-prob -inf and id -1.
        """
        num = min(k, self.vocabulary_size)

        def ask(micro: Batch) -> Tensor:
            logprobs, ids = self.actor(micro, self.temperature, self.truncation, Likeliest(num))
            logprobs = F.pad(logprobs, (0, k - num), value=-torch.inf)
            # The columns of all micro-batches may be too much for the device. Float32 is exact for
            # ids below 2^24.
            return torch.cat([logprobs, F.pad(ids, (0, k - num)).float()], dim=1).cpu()

        logprobs, ids = self.infer(ask, batch, rows).tensor_split([k], dim=1)
        return logprobs, ids.int().masked_fill(logprobs.isneginf(), -1)

    def reference_logprobs(self, batch: Batch, rows: Rows) -> Tensor:
        """Return log p of every learned token under the reference model: [T].

        Its routers choose freely: they have other weights than the actor's.
        """
        batch = replace(batch, experts=None)
        with self._reference() as reference:
            return self.infer(
                lambda micro: self._token_logprobs(reference, micro), batch, rows, reference
            )

    def forward(self, batch: Batch, gradients: LocalGradients | None = None) -> Reported:
        """Return log-probs of learned tokens [T], 0 elsewhere; store the entropy in the batch.

        If the batch has `candidates` [T, K], the log-probs are [T, 1 + K].
        """
        targets = batch.input_ids
        if batch.candidates is not None:
            targets = torch.cat([targets[:, None], batch.candidates], dim=1)
        read = TokenLogprobs(targets=targets, gradients=gradients)
        logprobs, batch.entropy = self.actor(batch, self.temperature, self.truncation, read)
        return logprobs, {"train/entropy": batch.entropy.detach()}

    def loss(self, batch: Batch, term: LossTerm) -> Reported:
        """Return a micro-batch's share of the loss, and reports.

        The head computes its gradients in the forward pass if the objective's are known early.
        """
        gradients = local_gradients(term.objective, batch, term.denominator)
        values, report = (term.forward or self.forward)(batch, gradients)
        loss, objective_report = term.objective(values, batch, term.denominator)
        return loss, objective_report | report

    def update_reference(self, step: int, section: AlgorithmSection) -> None:
        """Move the reference after a step, on each rank for its share.

        reference <- ref_ema * reference + (1 - ref_ema) * actor after each step, or a copy of the
        actor after every `ref_refresh_steps`.
        """
        if not section.ref_refresh_steps:
            self.strategy.moving_average(self.actor, self.reference, section.ref_ema)
        elif step % section.ref_refresh_steps == 0:
            self.strategy.moving_average(self.actor, self.reference, 0.0)

    def supervised(
        self, batch: Batch, gradients: LocalGradients | None = None, targets: Tensor | None = None
    ) -> Reported:
        """Return log-probs of given answers that were not sampled, [T].

        They are at temperature 1, of all tokens, without the entropy. `targets` [T] are other
        tokens at the positions of the answers' own.
        """
        read = TokenLogprobs(entropy=False, targets=targets, gradients=gradients)
        return self.actor(batch, 1.0, ALL, read)[0], {}

    def _token_logprobs(self, model: Actor, batch: Batch) -> Tensor:
        """Compute log-probs of learned tokens, 0 elsewhere: [T]."""
        return model(batch, self.temperature, self.truncation, WITHOUT_ENTROPY)[0]

    @contextmanager
    def _reference(self) -> Iterator[Actor]:
        """Yield the reference model, ready for inference."""
        if self.reference is None:
            raise ValueError(
                "this policy has no reference model: create it with one (--init_kl_coef)"
            )
        with (
            adapters_off(self.actor.language_model)
            if self.reference is self.actor
            else nullcontext()
        ):
            yield self.reference
