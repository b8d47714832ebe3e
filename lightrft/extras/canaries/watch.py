"""Watch a run for a reward that is gamed: what --canaries and --shadow_reward add to it."""

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from loguru import logger

from lightrft.algorithms.rollout.rollout import JudgedRollout
from lightrft.algorithms.rollout.sampler import RunSampler
from lightrft.app.run.run import Run
from lightrft.app.run.run_folder import RunFolder, copy_records
from lightrft.app.trainer.base import TrainingData
from lightrft.app.trainer.build import build_rewards
from lightrft.app.trainer.build_data import load_rewarded
from lightrft.config.sections import Config, has_episodes
from lightrft.core.groups import Group
from lightrft.core.metrics import Metrics
from lightrft.core.samples import Sample
from lightrft.extras.canaries.canaries import Canaries
from lightrft.extras.canaries.rows import CanaryRows
from lightrft.extras.canaries.shadow import Shadow
from lightrft.extras.ledger.answers import answer_reader
from lightrft.rewards.runner import RewardRunner
from lightrft.strategy.checkpoint.manifest import checkpoints
from lightrft.strategy.strategy import StrategyBase

BEFORE_ALARM = "before_alarm"
"""Folder in a run's folder with the checkpoint from before the reward was gamed."""


@dataclass(eq=False)
class Watch:
    """The canaries and the shadow reward of a run, and what follows from an alarm."""

    canaries: Canaries | None
    shadow: Shadow | None
    config: Config
    run_folder: RunFolder
    strategy: StrategyBase

    # -- generating and scoring

    def joining(self, step: int) -> AbstractContextManager[None]:
        """Return a context that generates the canaries of a step with the other prompts."""
        return nullcontext() if self.canaries is None else self.canaries.joining(step)

    def begin(self, groups: list[Group]) -> list[Group]:
        """Begin what is computed of the groups of a step; return the canaries to score."""
        if self.shadow is not None:
            self.shadow.begin(groups)
        return [] if self.canaries is None else self.canaries.groups

    # -- measuring

    def measure(self, step: int, samples: list[Sample], version: int, metrics: Metrics) -> None:
        """Take the rewards of a step. It is a measure of a step, on all ranks."""
        warnings = [each.measure(step, metrics) for each in self.parts.values()]
        forks = self.config.watch.on_alarm == "fork"
        if forks:
            self.strategy.finish_ckpt()  # the next one removes it, perhaps before it is seen here
        if not self.strategy.is_rank_0():
            return

        for warning in chain.from_iterable(warnings):
            logger.warning("{}", warning)
        if forks:
            self._keep_checkpoint()
            if self.ends_run():
                self._offer_fork()

    def state_dict(self) -> dict[str, Any]:
        monitors = {name: each.monitor.state_dict() for name, each in self.parts.items()}
        return {"run": self.run_folder.id, "monitors": monitors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; what is newly watched begins anew, as does all in a fork.

        A fork may have another reward.
        """
        for name, each in self.parts.items():
            if state["run"] == self.run_folder.id and name in state["monitors"]:
                each.monitor.load_state_dict(state["monitors"][name])

    def ends_run(self) -> bool:
        """Return True if the step just done is the last because of an alarm."""
        alarms = [each.monitor.alarm for each in self.parts.values()]
        return self.config.watch.on_alarm != "warn" and any(alarms)

    @property
    def parts(self) -> dict[str, Canaries | Shadow]:
        both = {"canaries": self.canaries, "shadow": self.shadow}
        return {name: each for name, each in both.items() if each is not None}

    def _keep_checkpoint(self) -> None:
        """Keep the newest checkpoint from before the evidence begins to grow.

        Otherwise --max_ckpt_num would remove it before there is enough evidence for an alarm. The
        files are links, so they take no room while the checkpoint itself is there.
        """
        target = self.run_folder.path / BEFORE_ALARM / "checkpoints"
        rises_from = min(each.monitor.rises_from for each in self.parts.values())
        both = [
            path for root in (target, self.run_folder.checkpoints) for _, path in checkpoints(root)
        ]
        earlier = [path for path in both if step_of(path) < rises_from]
        newest = max(earlier, key=step_of, default=None)
        if newest is None or newest.parent == target:
            return

        unfinished = target.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(newest, unfinished / newest.name, copy_function=_link)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)

    def _offer_fork(self) -> None:
        run = self.run_folder.path
        folder = run / BEFORE_ALARM
        if not checkpoints(folder / "checkpoints"):
            logger.warning(
                "no checkpoint is from before the reward was gamed: set a smaller --save_steps"
            )
            return

        # What --fork_from reads; its checkpoints are inside.
        replace(self.config, train=replace(self.config.train, ckpt_path=None)).write(
            folder / "config.yaml"
        )
        copy_records(run, folder)
        logger.warning("to go on from before the reward was gamed: --fork_from {}", folder)


@dataclass
class WatchedRollout(JudgedRollout):
    """A rollout with canaries beside the groups of a step, and with a shadow reward."""

    watch: Watch

    def collect(self, step: int, metrics: Metrics) -> list[Group]:
        with self.watch.joining(step):
            groups = super().collect(step, metrics)
        self._further = self.watch.begin(groups)
        for group in self._further:
            self.rewards.begin(group.responses)
        self.rewards.ask_judge([sample for group in self._further for sample in group.responses])
        return groups

    def score(self, groups: list[Group]) -> list[Sample]:
        """Wait for the rewards of groups and canaries, and return the samples of the groups."""
        scored = [*groups, *self._further]
        self.rewards.finish([sample for group in scored for sample in group.responses])
        if self.watch.shadow is not None:
            self.watch.shadow.finish()
        self.scheduler.scored(groups)
        return [sample for group in groups for sample in group.samples]


def watch_of(
    run: Run, data: TrainingData, sampler: RunSampler, rewards: RewardRunner, run_folder: RunFolder
) -> Watch:
    """Build what --canaries and --shadow_reward add to a run."""
    config = run.config
    section = config.watch
    ranks = run.strategy.mesh.data
    samples = config.rollout.n_samples_per_prompt
    canaries = shadow = None
    if section.canaries:
        prompts = data.prompts
        if section.canary_data:
            rows = replace(config.data, prompt_data=section.canary_data)
            prompts = load_rewarded(replace(run, config=replace(config, data=rows)), rewards)
        answer = answer_reader(config.reward.reward)
        swaps = not section.canary_data
        canaries = Canaries(
            CanaryRows(prompts, config.train.seed, swaps=swaps, answer=answer),
            sampler,
            section,
            data=ranks,
            batch=config.rollout.rollout_batch_size,
            samples=samples,
            joins=not has_episodes(config.environment),
        )

    if section.shadow_reward:
        # A failure is no low reward, so such a sample is left out.
        failure = config.reward.reward_failure.replace("zero", "drop")
        scoring = replace(
            config.reward, reward=section.shadow_reward, reward_key=None, reward_failure=failure
        )
        stricter = build_rewards(replace(config, reward=scoring), run.strategy)
        stricter.check(data.prompts.examples)
        shadow = Shadow(stricter, section, ranks, samples)

    return Watch(canaries, shadow, config, run_folder, run.strategy)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, stepN."""
    return int(checkpoint.name.removeprefix("step"))


def _link(source: str, target: str) -> None:
    """Link a file, or copy it on a file system without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
