"""Compute for the clients on all ranks: gradients, optimizer steps, checkpoints and samples."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.roles.policy import Policy
from lightrft.algorithms.roles.policy_methods import EVERYTHING
from lightrft.config.sections import TrainSection
from lightrft.core.batch import micro_batches
from lightrft.engine.base import NotFiniteError
from lightrft.engine.requests import Sampling
from lightrft.extras.tinker.losses import LOSSES
from lightrft.extras.tinker.models import Models
from lightrft.extras.tinker.records import (
    TARGET_TOKENS,
    Examples,
    Outputs,
    RequestRefused,
    Sampled,
    SamplePrompt,
)
from lightrft.strategy.batching.planner import plan
from lightrft.strategy.phases import Phase

PROBED_TOKENS = 8
"""Number of tokens of a prompt that new weights must compute before the engine gets them."""
STEPS_PER_TURN = 8
"""Number of steps of the engine between two looks at new requests."""
ACTOR = "actor"
"""Name of the model in checkpoints, as train_ppo writes it."""


@dataclass(eq=False)
class TinkerWorker:
    """Does the work of requests. All ranks call every method together, with the same arguments."""

    policy: Policy
    train: TrainSection
    folder: Path
    identity: dict[str, Any]
    """What checkpoints say about the run (resume_check.py)."""
    num_snapshots: InitVar[int]
    _engine_has: Hashable = None
    """Key of the weights that the engine got last; None: the weights of --pretrain."""

    def __post_init__(self, num_snapshots: int) -> None:
        self.strategy = self.policy.strategy
        self.models = Models(self.policy, num_snapshots=num_snapshots)

    # -- models

    def create(self, name: str, replaced: list[str]) -> None:
        for former in replaced:
            self.models.drop(former)
        self.models.create(name)

    def save(self, name: str, tag: str, *, optimizer: bool) -> None:
        """Write a checkpoint of the model; without `optimizer` it has the weights alone."""
        self.models.take(name)
        self.strategy.save_ckpt(
            *self._checkpoint(tag, optimizer),
            max_num=EVERYTHING,
            max_mem=EVERYTHING,
            client_state={"identity": self.identity},
            save_latest=False,
        )

    def load(self, name: str, tag: str, *, optimizer: bool) -> None:
        """Replace the weights of the model, and the moments: without `optimizer` they begin anew."""
        self.models.models[name].problem = ""  # the load replaces whatever was broken
        model = self.models.take(name)
        self.models.changes(model)
        self._load(tag, optimizer=optimizer)
        if not optimizer:
            self.policy.optimizer.state.clear()
        model.gradients = [None] * len(model.gradients)
        self.models.check(model, f"the load of {tag}")

    def snapshot(self, name: str) -> Hashable:
        """Return the key of the model's weights as they are now, for sampling."""
        key = self.models.usable(name).key
        self.models.sampled.add(key)
        return key

    def _load(self, tag: str, *, optimizer: bool) -> None:
        self.strategy.load_ckpt(
            *self._checkpoint(tag, optimizer),
            load_module_only=not optimizer,
            check=self._check_base,
        )
        self._engine_has = ()

    def _check_base(self, path: Path, client_state: dict[str, Any]) -> None:
        """Raise RequestRefused for adapters of another base model."""
        before = client_state.get("identity", {}).get("weights")
        if self.identity["settings"]["lora_rank"] and before != self.identity["weights"]:
            raise RequestRefused(f"{path} has adapters of another model than --pretrain is now")

    def _checkpoint(self, tag: str, optimizer: bool) -> tuple[dict[str, Any], Path, str]:
        """Return what a checkpoint has of the actor, its folder and its name."""
        path = self.folder / tag
        trained = self.policy.actor, self.policy.optimizer if optimizer else None, None
        return {ACTOR: trained}, path.parent, path.name

    # -- training

    def forward_backward(
        self, name: str, examples: Examples, loss: str, config: dict[str, float], *, learn: bool
    ) -> Outputs:
        """Compute a loss, and with `learn` add the gradients to the sum of the model."""
        model = self.models.take(name)
        outputs = self._run(examples, loss, config, learn=learn)
        if learn:
            self.models.collect_gradients(model)
        return outputs

    def optim_step(self, name: str, adam: dict[str, float]) -> dict[str, float]:
        """Take a step of AdamW with these parameters on the gradients since the last step."""
        model = self.models.take(name)
        if all(gradient is None for gradient in model.gradients):
            raise RequestRefused("there are no gradients to step on: call forward_backward first")

        optimizer = self.policy.optimizer
        self.strategy.enter(Phase.TRAIN, self.policy.actor, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = adam["learning_rate"]
            group["betas"] = adam["beta1"], adam["beta2"]
            group["eps"] = adam["eps"]
            # Norms and biases never decay, as in the trainers.
            decays = group["params"][0].ndim >= 2
            group["weight_decay"] = adam["weight_decay"] if decays else 0.0

        self.models.changes(model)
        self.models.give_gradients(model)
        self.strategy.max_norm = adam["grad_clip_norm"]
        skipped = self.strategy.skipped_steps
        norm = self.strategy.optimizer_step(optimizer, self.policy.actor, name=name)
        self.models.check(model, f"a step with the learning rate {adam['learning_rate']:g}")
        metrics = {"optim/skipped": float(self.strategy.skipped_steps - skipped)}
        # JSON has no word for the norm of a step that was skipped.
        return metrics | ({"optim/grad_norm": float(norm)} if norm.isfinite() else {})

    def _run(
        self, examples: Examples, loss: str, config: dict[str, float], *, learn: bool
    ) -> Outputs:
        """Compute the loss and the log-probs of all ranks, and with `learn` the gradients."""
        data = self.strategy.mesh.data
        train = self.train
        schedule = plan(
            examples.lengths,
            num_ranks=data.size,
            minibatch_size=len(examples.lengths),
            max_tokens=train.max_tokens_per_microbatch if learn else train.most_logprob_tokens,
            batching=self.train.batching,
        )
        rows = schedule.rows(data.rank)
        batch = examples.select(rows)
        (planned,) = schedule.local(data.rank)

        actor = self.policy.actor
        optimizer = self.policy.optimizer if learn else None
        self.strategy.enter(Phase.TRAIN if learn else Phase.LOGPROB, actor, optimizer)
        actor.train(learn)
        total = torch.zeros((), device=self.strategy.device)
        logprobs = []

        with torch.set_grad_enabled(learn):
            for number, micro_batch in enumerate(
                micro_batches(batch, planned, self.strategy.to_device), 1
            ):
                targets = micro_batch.extra_columns[TARGET_TOKENS]
                values, _ = self.policy.supervised(micro_batch, targets=targets)
                losses = LOSSES[loss].compute(values, micro_batch, **config)
                # The loss is a sum: each rank has its share, and nothing is divided.
                share = torch.where(micro_batch.loss_mask, losses, 0.0).sum()
                if learn:
                    self.strategy.backward(share, actor, optimizer, last=number == len(planned))
                total += share.detach()
                logprobs.append(values.detach())

        by_row: dict[int, Tensor] = {}
        for members, values in zip(planned, logprobs, strict=True):
            if members:
                parts = values.cpu().split(batch.lengths[members].tolist())
                by_row |= zip([rows[member] for member in members], parts, strict=True)
        everywhere = {row: value for each in data.gather(by_row) for row, value in each.items()}
        # The first token of a row has no log-prob.
        ordered = [everywhere[row][1:] for row in range(len(examples.lengths))]
        return Outputs(float(self.strategy.all_reduce(total, "sum")), ordered)

    # -- sampling

    def sample(
        self, prompts: list[SamplePrompt], more: Callable[[Hashable], list[SamplePrompt]]
    ) -> Iterator[tuple[int, Sampled]]:
        """Yield (number, answer) of prompts for the same weights.

        `more` returns further prompts for these weights that have come meanwhile, and are not
        scored.
        """
        engine = self.strategy.engine
        world = self.strategy.mesh.world
        key = prompts[0].weights
        stale = self._engine_has != key or not engine.weights_valid
        scored = [prompt for prompt in prompts if prompt.scored]
        if stale or scored:
            self._prepare(key)
        if stale:
            self._check_finite(prompts[0].request.token_ids)

        # Engines score no prompts, so the trainer does, before the engine wakes.
        scores = {prompt.number: self._score(prompt.request.token_ids) for prompt in scored}
        self.strategy.announce("generate")
        with self.strategy.engine_awake(self.policy.actor if stale else None):
            self._engine_has = key
            session = self.strategy.open_generation(Sampling(seed=self.train.seed), shared=True)
            running: set[int] = set()
            numbers: dict[int, int] = {}

            while prompts or running:
                running |= {prompt.number for prompt in prompts}
                # Each engine gets the next request, whatever the ranks share in training.
                local_prompts = [each for each in prompts if each.number % world.size == world.rank]
                indices = session.add_local([each.request for each in local_prompts])
                numbers |= dict(zip(indices, (each.number for each in local_prompts), strict=True))

                ended = []
                problem = ""
                try:
                    for _ in range(STEPS_PER_TURN):
                        if session.running:
                            ended += [(numbers.pop(index), each) for index, each in session.step()]
                except NotFiniteError as error:
                    problem = str(error)
                everywhere = world.gather((ended, problem))
                for number, completions in (pair for each, _ in everywhere for pair in each):
                    running.discard(number)
                    yield number, Sampled(completions, scores.pop(number, None))

                # The engine is as it was, and other weights can have it next.
                if problems := [each for _, each in everywhere if each]:
                    with suppress(NotFiniteError):
                        session.abort()
                    raise RequestRefused(problems[0])
                prompts = more(key)
                if prompts:
                    self.strategy.announce("generate")  # the time limit begins anew

    def _prepare(self, key: Hashable) -> None:
        """Give the actor the weights of this key. A checkpoint is read once."""
        if isinstance(key, str) and not self.models.has(key):
            # The model that has the actor is set aside, or the checkpoint would replace it.
            self.models.take_key(None)
            self._load(key, optimizer=False)
            if not self.models.are_finite():
                raise RequestRefused(f"{key} has weights that are too large or no numbers")
            self.models.keep(key)
            return
        self.models.take_key(key)

    def _check_finite(self, token_ids: list[int]) -> None:
        """Raise RequestRefused if the actor computes no numbers for these tokens.

        Finite weights can overflow in the forward pass. Some engines end at such logits.
        """
        # At least two tokens, as the first has no log-prob.
        if not self._score(token_ids[:PROBED_TOKENS] + token_ids[:1])[1:].isfinite().all():
            raise RequestRefused(
                "a forward pass of these weights overflows: load earlier ones, or train with a"
                " smaller learning rate"
            )

    def _score(self, token_ids: list[int]) -> Tensor:
        """Return the log-prob of each token of a prompt under the actor: [L], NaN for the first."""
        ids = torch.tensor(token_ids)
        examples = Examples([len(ids)], ids, {TARGET_TOKENS: ids, "weights": torch.zeros(len(ids))})
        (logprobs,) = self._run(examples, "cross_entropy", {}, learn=False).logprobs
        return torch.cat([torch.tensor([torch.nan]), logprobs])
