"""Repeat the step of a bundle in this process, without an engine, and compare its digests."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from lightrft.algorithms.shaping import RewardShaper
from lightrft.algorithms.terms import policy_objective
from lightrft.app.observe.sinks import Writer
from lightrft.app.run.digests import Digests, row_of
from lightrft.app.run.prepare import prepare_config
from lightrft.app.run.recorded_samples import sample_of_json
from lightrft.config.references import JUDGE, SERVER, reward_terms
from lightrft.config.sections import moves_reference
from lightrft.config.tables import table
from lightrft.core.batch import Experience
from lightrft.core.experience import flatten, numbers_of_rows
from lightrft.core.losses import Denominator, PolicyObjective, Report, Reported
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Prompt, Sample
from lightrft.core.step import StepRecord
from lightrft.extras.recorder.bundle import Bundle
from lightrft.models.load import load_tokenizer
from lightrft.strategy import get_strategy
from lightrft.strategy.backends.optim import kept_settings
from lightrft.strategy.checkpoint.manager import ITEMS_FILE, OptionalItems
from lightrft.strategy.strategy import StrategyBase

Stage = Literal["reward", "advantage", "loss", "gradient"]
STAGES: dict[Stage, tuple[str, ...]] = {
    "reward": ("prompts", "samples", "logprobs", "rewards"),
    "advantage": ("outputs", "advantages", "plan"),
    "loss": ("loss",),
    "gradient": ("gradient", "weights"),
}
"""Stage -> phases of a step that it repeats."""
ONE_PROCESS: dict[str, Any] = table("extras/recorder/one_process")
"""Settings of a replay."""


@dataclass
class SampleRecord:
    """Terms of one sample in the loss, summed or listed over optimizer steps."""

    logprobs: list[Tensor] = field(default_factory=list)
    """Log-probs of the learned tokens in each optimizer step."""
    ratios: list[Tensor] = field(default_factory=list)
    clipped: list[int] = field(default_factory=list)
    """Number of clipped tokens in each optimizer step."""
    shares: list[float] = field(default_factory=list)
    """Share of the loss of each optimizer step."""


@dataclass
class Replay:
    """A repeated step."""

    equal: dict[str, bool] = field(default_factory=dict)
    """Phase -> True if the digest is the run's."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the samples, computed anew; empty if this process cannot compute them."""
    loss: float | None = None
    samples: list[Sample] = field(default_factory=list)
    experience: Experience | None = None
    rows: list[int] = field(default_factory=list)
    """Row of each sample in the experience."""
    records: dict[int, SampleRecord] = field(default_factory=dict)
    """Number of a sample -> what happened in the loss."""


class _Observed:
    """The objective of a run, which also records the shares of some samples."""

    def __init__(self, objective: PolicyObjective, records: dict[int, SampleRecord]):
        self.objective = objective
        self.reach = objective.reach
        self.records = records

    def __call__(self, logprobs: Tensor, batch: Experience, denominator: Denominator) -> Reported:
        loss, report = self.objective(logprobs, batch, denominator)
        # It is also called on detached log-probs, for gradients that are known early.
        if logprobs.requires_grad and not logprobs.is_leaf:
            with torch.no_grad():
                self._record(logprobs.detach(), batch, denominator, report)
        return loss, report

    def _record(
        self, logprobs: Tensor, batch: Experience, denominator: Denominator, report: Report
    ) -> None:
        for index, row in enumerate(batch.rows.tolist()):
            if row not in self.records:
                continue

            of_row = batch.loss_mask & (batch.sequence_ids == index)
            alone = replace(batch, loss_mask=of_row, learned=None)
            share, _ = self.objective(logprobs, alone, denominator)
            record = self.records[row]
            sampled = logprobs if batch.candidates is None else logprobs[:, 0]
            record.logprobs.append(sampled[of_row])
            record.shares.append(share.item())
            if "train/ratio" in report:
                record.ratios.append(report["train/ratio"].detach()[of_row])
            clipped = [report[name][of_row] for name in report if name.startswith("train/clip_")]
            record.clipped.append(int(sum(each.sum() for each in clipped)))


def replay(
    bundle: Bundle, build: ModuleType, stage: Stage = "gradient", explain: Sequence[int] = ()
) -> Replay:
    """Repeat the step of a bundle up to a stage; `explain` has the samples to record.

    `build` is the module lightrft.app.trainer.build, whose functions connect the parts of a run.
    """
    config = bundle.config
    forced = ONE_PROCESS | {"save_path": str(bundle.folder / "run"), "ckpt_path": None}
    config.update(forced)
    prepare_config("train_ppo", config)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    try:
        return _replay(bundle, strategy, build, stage, explain)
    finally:
        strategy.close()


def _replay(
    bundle: Bundle, strategy: StrategyBase, build: ModuleType, stage: Stage, explain: Sequence[int]
) -> Replay:
    columns = {int(index): each for index, each in bundle.content["columns"].items()}
    prompts = {
        row["prompt"]["index"]: Prompt(**row["prompt"], columns=columns[row["prompt"]["index"]])
        for row in bundle.samples
    }
    samples = [sample_of_json(dict(row), prompts) for row in bundle.samples]
    again = [sample_of_json(dict(row), prompts) for row in bundle.samples]
    result = Replay(samples=samples)
    result.rewards = _rewards(bundle, strategy, build, again)
    digests = Digests({}, strategy.mesh, bundle.folder, Writer())
    record = StepRecord(flatten(again), [], [], again)
    _compare(result, bundle, digests, record, "reward")
    if stage == "reward":
        return result

    # The other stages go on from the recorded rewards, so each is compared by itself.
    step = _Step(bundle, strategy, build)
    digests = Digests(step.roles, strategy.mesh, bundle.folder, Writer())
    plan = step.make_experience(samples, Metrics())
    result.experience = plan.experience
    result.rows = numbers_of_rows([[sample.group for sample in samples]], 0).tolist()
    result.records = {number: SampleRecord() for number in explain}
    by_row = {result.rows[number]: record for number, record in result.records.items()}
    losses = []
    if stage in ("loss", "gradient"):
        for learner in step.learners(by_row):
            if bundle.content["step"] >= learner.first_step:
                losses += learner.learn(plan, Metrics())
        result.loss = sum(map(float, losses)) / len(losses) if losses else None

    names = [*STAGES]
    record = StepRecord(plan.experience, plan.minibatches, losses, samples)
    _compare(result, bundle, digests, record, *names[1 : names.index(stage) + 1])
    return result


def _compare(
    result: Replay, bundle: Bundle, digests: Digests, record: StepRecord, *stages: Stage
) -> None:
    before = bundle.content["digests"]
    now = row_of(bundle.content["step"], [digests.of_rank(record)])
    for phase in chain.from_iterable(STAGES[stage] for stage in stages):
        if phase in before and phase in now:
            result.equal[phase] = before[phase] == now[phase]


def _rewards(
    bundle: Bundle, strategy: StrategyBase, build: ModuleType, samples: list[Sample]
) -> list[float]:
    """Compute the rewards anew, into the samples; return none if another program is needed."""
    config = bundle.config
    terms = reward_terms(config.reward.reward)
    if (
        config.model.reward_pretrain
        or config.model.process_reward_pretrain
        or any(term.name == JUDGE or term.name.startswith(SERVER) for term in terms)
    ):
        return []

    runner = build.build_rewards(config, strategy)
    for _, group in groupby(samples, lambda sample: sample.group):  # they come together
        runner.begin([*group])
    runner.finish(samples)
    return [sample.reward for sample in samples]


class _Step:
    """Models and items as they were before the step."""

    def __init__(self, bundle: Bundle, strategy: StrategyBase, build: ModuleType):
        self.build = build
        config = bundle.config
        total = bundle.content["total_steps"] or bundle.content["step"]
        tokenizer = load_tokenizer(config.model)
        config = self.config = build.build_data.with_token_ids(bundle.config, tokenizer)
        run = build.Run(config, strategy, tokenizer)
        self.policy, self.critic, teacher = build.build_ppo_roles(run, total)
        shaper = RewardShaper(config.reward, longest=config.rollout.generate_max_len)
        coefficients = build.build_coefficients(config.algorithm)
        self.kl_coefficient, self.entropy_coefficient = coefficients

        self.roles = {"critic": self.critic} if self.critic is not None else {}
        self.roles["actor"] = self.policy
        items = {
            "reward_shaper": shaper,
            "kl_coefficient": self.kl_coefficient,
            "entropy_coefficient": self.entropy_coefficient,
        }
        self._load(bundle.folder / "checkpoints", items)
        self.make_experience = build.build_experience_maker(
            run, self.policy, self.critic, teacher, shaper, *coefficients
        )

    def _load(self, folder: Path, items: dict[str, Any]) -> None:
        saved = [*folder.glob("step*")]
        if not saved:
            return  # the first step begins with --pretrain

        names = torch.load(saved[0] / ITEMS_FILE, weights_only=True)
        items = {name: items.get(name, OptionalItems({})) for name in names}
        models = {
            name: (role.module, role.optimizer, role.scheduler) for name, role in self.roles.items()
        }
        if self.policy.average is not None:
            models["ema"] = (self.policy.average, None, None)
        if moves_reference(self.config.algorithm):
            models["reference"] = (self.policy.reference, None, None)
        # The flags of the run decide about the optimizers, as when it resumes.
        with ExitStack() as settings:
            for role in self.roles.values():
                settings.enter_context(kept_settings(role.optimizer, role.scheduler))
            self.policy.strategy.load_ckpt(models, folder, saved[0].name, items=items)

    def learners(self, records: dict[int, SampleRecord]) -> list[Any]:
        """Return what learns in the step, with an objective that fills the records."""
        objective = policy_objective(
            self.config.algorithm, self.kl_coefficient, self.entropy_coefficient
        )
        return self.build.build_learners(
            self.config, self.policy, self.critic, None, None, _Observed(objective, records)
        )


def explanation(result: Replay, number: int) -> Iterator[str]:
    """Yield the path of a sample, from the reward to the loss, line by line."""
    sample = result.samples[number]
    group = [each for each in result.samples if each.group == sample.group]
    rewards = torch.tensor([each.reward for each in group], dtype=torch.float64)
    place = f"group {sample.group}, row {sample.prompt.index} of the data"
    length = f"{len(sample.token_ids)} tokens, ended by {sample.finish_reason}"
    yield f"sample {number}: {place}, {length}"
    yield f"  prompt     {sample.prompt.text!r:.200}"
    yield f"  response   {sample.text!r:.200}"
    parts = sample.reward_components.items()
    components = "".join(f", {name} {value:.6g}" for name, value in parts)
    masked = ", not learned" if sample.masked else ""
    yield f"  reward     {sample.reward:.6g}{components}{masked}"
    spread = f"mean {rewards.mean():.6g}, standard deviation {rewards.std(correction=0):.6g}"
    yield f"  group      {len(group)} rewards, {spread}"

    experience = result.experience
    if experience is None:
        return
    row = experience.select([experience.rows.tolist().index(result.rows[number])])
    learned = row.loss_mask
    yield f"  advantage  {_range(row.advantages[learned])}"
    yield f"  log-probs  engine {_range(row.engine_logprobs[learned])}"
    if row.old_logprobs is not None:
        yield f"             before the step {_range(row.old_logprobs[learned])}"

    record = result.records.get(number)
    for update, share in enumerate(record.shares if record else ()):
        ratio = f"ratio {_range(record.ratios[update])}, " if record.ratios else ""
        yield (
            f"  loss       {ratio}{record.clipped[update]} of {int(learned.sum())} tokens clipped,"
            f" share {share:.6g}"
        )


def _range(values: Tensor) -> str:
    if not len(values):
        return "of no token"
    least = values.min().item()
    most = values.max().item()
    return f"{least:.6g}" if math.isclose(least, most) else f"{least:.6g} to {most:.6g}"
