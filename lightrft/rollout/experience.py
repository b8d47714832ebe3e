"""Turn scored samples into experience: the plan over ranks, log-probs before the step, and
advantages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightrft.algorithms.advantage import Estimator, estimators, penalties, weighted_by_difficulty
from lightrft.algorithms.covariance import marks
from lightrft.algorithms.kl import KLCoefficient, kl_estimators
from lightrft.algorithms.options import options, resolve
from lightrft.algorithms.reduce import sequence_sums
from lightrft.algorithms.returns import distill, gae, reward_to_go, whiten
from lightrft.algorithms.selection import top_share
from lightrft.algorithms.shaping import RewardShaper
from lightrft.batching.redistribute import put_batch
from lightrft.batching.sample_store import SampleStore
from lightrft.config.sections import AlgorithmSection, TrainSection
from lightrft.observe.metrics import Metrics
from lightrft.roles.critic import Critic
from lightrft.roles.microbatch import MicroBatchIndices
from lightrft.roles.policy import Policy
from lightrft.roles.teacher import Teacher
from lightrft.rollout import filters
from lightrft.rollout.gathered_rewards import GatheredRewards, place_at_tokens
from lightrft.rollout.measure import measure_experience, measure_groups, measure_values
from lightrft.types import Expand, Expanded, Experience, Sample, token_index

OUTPUTS = ("old_logprobs", "entropy", "reference_logprobs", "values")
"""Columns of Experience that models compute from a sample alone, without the others of its step."""


@dataclass(frozen=True, slots=True)
class Early:
    """Models' outputs for samples of a step that were complete before others."""

    names: tuple[str, ...]
    """Columns of Experience, the same on all ranks."""
    parts: dict[int, tuple[Sample, list[Tensor]]]
    """id() of a sample -> the sample, so that its id stays its own, and its values in these
    columns, one for each token."""

    def set_columns(self, experience: Experience, samples: list[Sample]) -> None:
        for place, name in enumerate(self.names):
            values = [self.parts[id(sample)][1][place] for sample in samples]
            setattr(experience, name, torch.cat([torch.zeros(0), *values]))


@dataclass(frozen=True, slots=True)
class Planned:
    """This rank's part of the experience, and its micro-batches for each optimizer step:
    minibatches[k][m] are rows.
    """

    experience: Experience
    minibatches: list[MicroBatchIndices]
    store: SampleStore
    """Store with all columns of the experience, also for other programs if it is outside of this
    one."""


class ExperienceMaker:
    """Turns this rank's samples into the experience that this rank will train on, balanced over
    ranks.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSection,
        train: TrainSection,
        *,
        shape: RewardShaper,
        kl_coefficient: KLCoefficient,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
        first_token_apart: bool = False,
        min_tokens: int = 0,
        expand: Expand | None = None,
        num_updates: int = 1,
        branches: bool = False,
    ):
        """Set up the experience maker.

        `first_token_apart`: first tokens were sampled from another distribution than the policy's
        and are not learned. `min_tokens`: smallest length of a response. `expand`: expands prompts
        with images for the policy; without it all are text. `num_updates`: number of optimizer
        steps on the samples of a step, for compute_early(). `branches`: samples may have branches,
        which are learned in the same optimizer step.

        Raises ValueError for an estimator that needs what this run does not compute.
        """
        self.policy = policy
        self.critic = critic
        self.teacher = teacher
        self.section = algorithm
        self.train = train
        self.shape = shape
        self.kl_coefficient = kl_coefficient
        self.kl = kl_estimators[algorithm.kl_estimator]
        extra = ("lengths", "responses", "greedy_rewards")
        self.estimator: Estimator = resolve(estimators, algorithm.advantage_estimator, extra=extra)

        self.compare_penalties = (
            penalties[algorithm.advantage_estimator]
            if algorithm.advantage_estimator in penalties
            else None
        )
        self.mark = marks[algorithm.policy_loss] if algorithm.policy_loss in marks else None
        self.first_token_apart = first_token_apart
        self.expand = expand
        self.num_updates = num_updates
        self.branches = branches
        self.min_tokens = min_tokens
        self.data = policy.strategy.mesh.data
        self._early: Early | None = None
        """Outputs of samples of the current step, if compute_early() was called."""

    def __call__(self, samples: list[Sample], metrics: Metrics) -> Planned:
        if self._early is not None:
            self.compute_early(
                [sample for sample in samples if id(sample) not in self._early.parts]
            )

        rows = with_branches(samples)
        before = self.data.gather((len(samples), len(rows)))[: self.data.rank]
        first_sample, first_row = (sum(counts) for counts in zip((0, 0), *before, strict=True))

        experience = self._flatten(rows, first_row)
        if self._early is not None:
            self._early.set_columns(experience, rows)
            self._early = None

        filters.mask_sequences(experience, filters.by_length(rows, self.section))
        gathered = GatheredRewards.share(self.data, samples, first_row=first_sample)
        rewards, groups = gathered.totals()
        informative = filters.by_difficulty(rewards, groups, self.section)
        sizes = torch.tensor([len(sample.rows) for sample in samples], dtype=torch.int64)
        numbers = first_sample + torch.repeat_interleave(sizes)
        filters.mask_sequences(experience, informative[numbers])
        experience.step_rewards = place_at_tokens(
            self._compare(gathered)[gathered.local], samples, experience
        )
        if self.data.rank == 0:
            measure_groups(rewards, groups, metrics)
        store = self.policy.strategy.sample_store()
        experience, minibatches = self.policy.redistribute_flat(
            experience,
            self.train.train_batch_size,
            self.train.micro_train_batch_size,
            store=store,
            units=numbers if self.branches else None,
        )
        self._compute_outputs(
            experience,
            [members for minibatch in minibatches for members in minibatch],
            num_updates=len(minibatches) * self.train.max_epochs,
        )
        if self.section.entropy_filter:
            filters.mask_sequences(experience, filters.by_entropy(experience, self.section))
        penalty = self._diverge(experience, metrics) if self._measures_divergence else 0.0

        teacher_term = (
            self._teacher_term(experience, minibatches, metrics)
            if self.teacher is not None
            else 0.0
        )
        self._set_advantages(experience, experience.step_rewards - penalty, teacher_term)
        if self.critic is not None:
            measure_values(experience, self.data.sum, metrics)
        self._choose_tokens(experience, minibatches)
        measure_experience(experience, metrics)
        put_batch(store, experience)

        return Planned(experience, minibatches, store)

    def compute_early(self, samples: list[Sample]) -> None:
        """Compute the models' outputs before the step for some of its samples, which are complete.

        All ranks call it together, each with samples of its own, or none; until the end of the step
        in the same thread or one after another.
        """
        rows = with_branches(samples)
        counts = self.data.gather(len(rows))
        ends = list(accumulate(counts))
        owners = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
        flattened = self._flatten(rows, ends[self.data.rank] - len(rows))
        store = self.policy.strategy.sample_store()
        part, steps = self.policy.redistribute_flat(
            flattened, None, self.train.micro_train_batch_size, store=store
        )
        self._compute_outputs(part, steps[0] if steps else [], num_updates=self.num_updates)
        outputs = {name: values for name in OUTPUTS if (values := getattr(part, name)) is not None}
        store.put(part.rows, part.lengths, tokens=outputs)
        store.move(owners, list(outputs))
        columns = store.get(flattened.rows, list(outputs))
        store.clear(flattened.rows.tolist())
        parts = [columns[name].split(flattened.lengths.tolist()) for name in outputs]
        self._early = self._early or Early(tuple(outputs), {})
        self._early.parts.update(
            {id(sample): (sample, values) for sample, *values in zip(rows, *parts, strict=True)}
        )

    def _flatten(self, samples: list[Sample], first_row: int) -> Experience:
        return flatten(
            samples,
            first_row=first_row,
            expand=self.expand,
            first_token_apart=self.first_token_apart,
            min_tokens=self.min_tokens,
        )

    def _compare(self, gathered: GatheredRewards) -> Tensor:
        """Return the advantages of all ranks' rewards, which are shaped first, so that no statistic
        is that of one rank: [M].
        """
        groups = gathered.groups.long()
        rewards = self.shape(gathered.rewards, groups, gathered.finished)
        extra = {
            "lengths": gathered.lengths,
            "responses": gathered.rows,
            "greedy_rewards": gathered.greedy.float(),
        }
        advantages = self.estimator(
            rewards, groups, **options(self.estimator, self.section, **extra)
        )

        if advantages.shape != rewards.shape or not advantages.isfinite().all():
            raise ValueError(
                f"--advantage_estimator {self.section.advantage_estimator} returns"
                f" {advantages!r:.200}, but must return a finite advantage for each of the"
                f" {len(rewards)} rewards"
            )

        if self.section.difficulty_weights:
            least, most = self.section.difficulty_weights
            advantages = weighted_by_difficulty(
                advantages, gathered.solved_shares(), least=least, most=most
            )

        return advantages

    def _compute_outputs(
        self, experience: Experience, rows: MicroBatchIndices, *, num_updates: int
    ) -> None:
        """Compute the models' outputs before the step, unless the experience has them.

        With a single update the old log-probs are the policy's own, so they are not computed.
        """
        section = self.section
        needs_entropy = bool(section.entropy_filter or section.high_entropy_token_ratio)
        needs_old = (
            num_updates > 1
            or self.mark is not None
            or self.teacher is not None
            or self._measures_divergence
        )

        if needs_entropy and experience.entropy is None:
            experience.old_logprobs, experience.entropy = self.policy.logprobs_and_entropy(
                experience, rows
            )
        elif needs_old and not section.use_engine_logprobs and experience.old_logprobs is None:
            experience.old_logprobs = self.policy.logprobs(experience, rows)

        if section.use_engine_logprobs:
            experience.old_logprobs = experience.engine_logprobs
        if self.policy.reference is not None and experience.reference_logprobs is None:
            experience.reference_logprobs = self.policy.reference_logprobs(experience, rows)
        if self.critic is not None and experience.values is None:
            experience.values = self.critic.values(experience, rows)

    @property
    def _measures_divergence(self) -> bool:
        """Return True if the divergence is needed before the step: in the reward, or to adapt its
        coefficient.
        """
        return self.policy.reference is not None and (
            not self.section.use_kl_loss or self.kl_coefficient.target is not None
        )

    def _diverge(self, experience: Experience, metrics: Metrics) -> Tensor | float:
        """Adapt the coefficient; return the penalty on the advantage earned at each token: [T], or
        0 if it is in the loss.
        """
        learned = experience.loss_mask
        divergence = torch.where(
            learned, self.kl(experience.old_logprobs, experience.reference_logprobs), 0.0
        )
        local_sums = [divergence.double().sum(), learned.sum(), len(experience)]
        total, tokens, samples = self.data.sum(
            torch.tensor(local_sums, dtype=torch.float64)
        ).tolist()
        self.kl_coefficient.update(total / max(tokens, 1), int(samples))
        metrics.mean("rollout/kl", divergence, learned)
        metrics.mean("rollout/kl_coef", self.kl_coefficient.value)

        return (
            0.0
            if self.section.use_kl_loss
            else self._penalties(experience, self.kl_coefficient.value * divergence)
        )

    def _penalties(self, experience: Experience, penalty: Tensor) -> Tensor:
        """Return the penalty of each token: [T].

        For an estimator that compares responses by it, return the comparison at the last token of
        each.
        """
        if self.compare_penalties is None:
            return penalty

        tokens = experience.learned_tokens
        last = tokens.new_full((len(experience),), -1).scatter_reduce(
            0, experience.sequence_ids[tokens], tokens, "amax"
        )
        learned = last >= 0
        columns = torch.column_stack(
            [sequence_sums(penalty.double(), experience), experience.groups, learned]
        )
        parts = self.data.gather(columns)
        sums, groups, counted = torch.cat(parts).unbind(1)
        chosen_options = options(self.compare_penalties, self.section)

        compared = self.compare_penalties(sums, groups, counted.bool(), **chosen_options)
        if compared is None:
            return penalty

        first = sum(map(len, parts[: self.data.rank]))
        local = compared[first : first + len(experience)]
        return torch.zeros_like(penalty).index_put(
            (last[learned],), local[learned].to(penalty.dtype)
        )

    def _teacher_term(
        self, experience: Experience, minibatches: list[MicroBatchIndices], metrics: Metrics
    ) -> Tensor:
        """Return what the teacher adds to the advantage of each token: [T]."""
        rows = [members for minibatch in minibatches for members in minibatch]
        learned = experience.loss_mask
        gap = torch.where(
            learned, distill(experience.old_logprobs, self.teacher.logprobs(experience, rows)), 0.0
        )
        metrics.mean("rollout/teacher_kl", -gap, learned)
        return self.section.distill_coef * gap

    def _set_advantages(
        self, experience: Experience, rewards: Tensor, teacher_term: Tensor | float
    ) -> None:
        """Set the advantages: rewards from each token on plus the teacher's term, normalised over
        all ranks if configured.
        """
        section = self.section
        learned = experience.loss_mask
        if self.critic is None:
            advantages = reward_to_go(rewards, experience, gamma=section.gamma)
        else:
            advantages, returns = gae(
                rewards, experience.values, experience, gamma=section.gamma, lambd=section.lambd
            )
            experience.returns = returns.float()

        advantages = advantages + teacher_term
        if section.advantages_norm:
            advantages = whiten(advantages, learned, self.data.sum)
        if section.advantage_clip is not None:
            advantages = advantages.clamp(-section.advantage_clip, section.advantage_clip)
        experience.advantages = advantages.float()
        experience.step_rewards = None

    def _choose_tokens(self, experience: Experience, minibatches: list[MicroBatchIndices]) -> None:
        """Choose, over all ranks, the tokens of each optimizer step that count, and those that the
        loss treats differently.
        """
        total = self.data.sum
        share = self.section.high_entropy_token_ratio
        if share:
            forks = _of_steps(
                experience, minibatches, lambda part: top_share(part.entropy, share, part, total)
            )
            experience.weights = forks.float()

        if self.mark is not None:
            chosen_options = options(self.mark, self.section)
            experience.marked = _of_steps(
                experience, minibatches, lambda part: self.mark(part, total, **chosen_options)
            )

        experience.entropy = None


def _of_steps(
    experience: Experience,
    minibatches: list[MicroBatchIndices],
    choose: Callable[[Experience], Tensor],
) -> Tensor:
    """Return [T] bool: the result of `choose` on the sequences of each optimizer step."""
    chosen = torch.zeros_like(experience.loss_mask)
    for minibatch in minibatches:
        rows = [row for members in minibatch for row in members]
        chosen[token_index(experience.offsets, torch.tensor(rows, dtype=torch.int64))] = choose(
            experience.select(rows)
        )
    return chosen


def with_branches(samples: list[Sample]) -> list[Sample]:
    """Return the samples, each followed by the branches of its episode, which get its reward."""
    for sample in samples:
        for branch in sample.rows[1:]:
            branch.reward = sample.reward
            branch.masked = sample.masked
            branch.finish_reason = sample.finish_reason
    return [row for sample in samples for row in sample.rows]


def flatten(
    samples: list[Sample],
    *,
    first_row: int,
    expand: Expand | None = None,
    first_token_apart: bool = False,
    min_tokens: int = 0,
) -> Experience:
    """Concatenate samples, prompt and response each; what the model sampled is learned.

    Rows count on from `first_row`.

    `expand` is for prompts with images; without it all are text. With `first_token_apart` the first
    token after a prompt is not learned, because it was sampled from another distribution. Those of
    later turns are learned. The first `min_tokens` of a response were sampled without tokens that
    would end it.
    """
    expanded = _expand_prompts(samples, expand) if expand else None
    prompt_ids = [each.token_ids for each in expanded or (sample.prompt for sample in samples)]
    prompts = [len(ids) for ids in prompt_ids]
    lengths = [
        length + len(sample.token_ids) for length, sample in zip(prompts, samples, strict=True)
    ]
    masks = [_learned_mask(sample, first_token_apart) for sample in samples]
    learned = [
        one
        for length, mask in zip(prompts, masks, strict=True)
        for one in (*[False] * length, *mask)
    ]

    tokens = [
        token
        for ids, sample in zip(prompt_ids, samples, strict=True)
        for token in (*ids, *sample.token_ids)
    ]
    logprobs = [
        value
        for length, sample in zip(prompts, samples, strict=True)
        for value in (*[0.0] * length, *sample.logprobs)
    ]

    return Experience(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        input_ids=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.tensor(learned, dtype=torch.bool),
        rows=torch.arange(first_row, first_row + len(samples)),
        groups=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        early=_early_tokens(prompts, samples, min_tokens) if min_tokens else None,
        media=[each.features for each in expanded] if expand else None,
        tower_tokens=torch.tensor([each.tower_tokens for each in expanded]) if expand else None,
    )


def _learned_mask(sample: Sample, first_token_apart: bool) -> list[bool]:
    """Return for each token of the response whether it is learned: the model sampled it, as the
    policy would.
    """
    sampled = sample.episode.sampled if sample.episode else [True] * len(sample.token_ids)
    return [not first_token_apart, *sampled[1:]] if sampled and sampled[0] else sampled


def _early_tokens(prompts: list[int], samples: list[Sample], min_tokens: int) -> Tensor:
    """Return the first tokens of each response, after a prompt of so many tokens: [T] bool."""
    early = [
        token < min_tokens
        for length, sample in zip(prompts, samples, strict=True)
        for token in (*[min_tokens] * length, *range(len(sample.token_ids)))
    ]
    return torch.tensor(early, dtype=torch.bool)


def _expand_prompts(samples: list[Sample], expand: Expand) -> list[Expanded]:
    """Return the expanded prompt of each sample; the samples of a group share it."""
    prompts = {sample.group: sample.prompt for sample in samples}
    read = {group: expand(prompt) for group, prompt in prompts.items()}
    return [read[sample.group] for sample in samples]
