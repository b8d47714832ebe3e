"""Detect a run that learns nothing, and an engine with other weights than are trained."""

import math
from collections import deque
from statistics import median

import torch
from loguru import logger

from lightrft.app.observe.curves import History
from lightrft.app.observe.symptoms import METRICS, REWARD_COMPONENT_PREFIX, find_symptoms
from lightrft.config.sections import Config
from lightrft.engine.probe import MAX_MISMATCH

MISMATCH_NAME = "engine/logprob_mismatch"
HISTORY = 16
ENOUGH = 4
"""How many of the newest steps determine a run's usual mismatch, and how many are needed for that.
"""
FAR = 10.0
"""A mismatch is far above its history if it exceeds the median by this many times the larger of
median and spread.
"""
NEVER = {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""A mean mismatch that no rounding explains, not even with other kernels.

The engine then has other weights, or another model.
"""
NO_ADVANTAGE = 1e-8
SYMPTOMS_EVERY = 10
"""Number of steps between two looks for symptoms; each symptom is told once."""
WARN_AT = (1, 2, 10, 100, 1000, 10_000)
"""Numbers of steps without a training signal that are told in a warning."""
MANY_TRUNCATED = 0.5
"""Share of responses that are cut off above which a step without a signal says so."""


class Health:
    """Checks on the metrics of each reported step.

    The metrics are the same on all ranks, and so are the findings.
    """

    def __init__(self, config: Config, dtype: torch.dtype, *, logs: bool):
        """Set up the checks.

        `dtype` is what the models compute in; warnings are logged with `logs`, on one rank.
        """
        self.config = config
        eight_bits = config.engine.rollout_quantization != "none" or config.model.fp8_training
        # They move log-probs no further than bfloat16 with other kernels does.
        self.dtype = torch.bfloat16 if eight_bits else dtype
        self.logs = logs
        self.warnings: list[str] = []
        """Warnings about the whole run, for run.json."""
        self.steps_without_signal = self.steps_with_signal = 0
        self._mismatches: deque[float] = deque(maxlen=HISTORY)
        self._history: History = {}
        self._told: set[str] = set()

    def check_step(self, number: int, row: dict[str, float]) -> bool:
        """Warn of a step without signal, and of a mismatch far above the earlier ones.

        Returns True after such a mismatch: then all weights should be verified. Raises RuntimeError
        for a mismatch above --mismatch_limit.
        """
        if "rollout/reward" in row:
            self._check_signal(number, row)
            if self.logs:
                for name, value in row.items():
                    if name in METRICS or name.startswith(REWARD_COMPONENT_PREFIX):
                        self._history.setdefault(name, []).append((number, value))
                if number % SYMPTOMS_EVERY == 0:
                    self._tell_symptoms(number)
        if MISMATCH_NAME not in row:
            return False
        mismatch = row[MISMATCH_NAME]
        return self._check_mismatch(number, mismatch, row.get(f"{MISMATCH_NAME}_max", mismatch))

    def check_end(self, number: int, *, taken: int, skipped: int) -> None:
        """Warn of symptoms up to the last step, of rewards without any signal, of skipped steps.

        Raises RuntimeError if no step was taken.
        """
        self._tell_symptoms(number)
        if self.steps_without_signal and not self.steps_with_signal:
            self._warn(
                f"none of the {self.steps_without_signal} reported steps had a training signal: all"
                " rewards were equal. Check the responses in samples.jsonl, --reward and"
                " --label_key, and --generate_max_len"
            )

        if skipped:
            self._warn(
                f"{skipped} optimizer steps were skipped, because the gradient norm was not finite"
            )

        if skipped and not taken:
            raise RuntimeError(
                f"the model was not trained: all {skipped} optimizer steps were skipped, because"
                " the gradient norm was never finite. Check the rewards and --learning_rate, and"
                " try float32 (--no_bf16)"
            )

    def _tell_symptoms(self, number: int) -> None:
        for symptom in find_symptoms(self._history):
            if symptom.name not in self._told:
                self._told.add(symptom.name)
                self._warn(f"step {number}: {symptom.name}: {symptom.evidence}; {symptom.advice}")

    def _check_signal(self, number: int, row: dict[str, float]) -> None:
        # A teacher gives a signal also where all rewards are equal, and so do two roles whose
        # rewards add up to the same.
        equal = (
            row["rollout/reward_min"] == row["rollout/reward_max"]
            and row.get("rollout/groups_without_signal", 1.0) == 1.0
            and not self.config.algorithm.distill_coef
        )
        advantages = not equal and row.get("rollout/advantage_abs", 0.0) > NO_ADVANTAGE
        if advantages or self.config.algorithm.distill_top_k:
            self.steps_with_signal += 1
            return

        self.steps_without_signal += 1
        if self.logs and self.steps_without_signal in WARN_AT:
            finding = "all rewards of each group are equal"
            if equal:
                finding = f"all rewards are {row['rollout/reward']:.4g}"
            so_far = ""
            if self.steps_without_signal > 1:
                so_far = f"; {self.steps_without_signal} steps had none so far"
            truncated = row.get("rollout/truncated", 0.0)
            cut_off = ""
            if truncated > MANY_TRUNCATED:
                cut_off = (
                    f"; {truncated:.0%} of the responses are cut off: raise --generate_max_len"
                )
            logger.warning(
                "step {}: {}, so it has no training signal{}{}", number, finding, so_far, cut_off
            )

    def _check_mismatch(self, number: int, mismatch: float, largest: float) -> bool:
        limit = self.config.train.mismatch_limit
        # Not `mismatch > limit`: NaN must fail, too.
        if limit is not None and not mismatch <= limit:
            raise RuntimeError(
                f"step {number}: the log-probs of engine and trainer differ by {mismatch:.2g} on"
                f" average, {largest:.2g} at most, more than --mismatch_limit {limit:g} allows: the"
                " engine does not sample from the weights that are trained"
            )

        usual = self._usual()
        bound = min(max(MAX_MISMATCH.get(self.dtype, 0.0), usual), self._most())
        if math.isfinite(mismatch):
            self._mismatches.append(mismatch)
        if mismatch <= bound:
            return False

        if self.logs:
            verification = "weights are not verified, because of --no_verify_weight_sync"
            if self.config.engine.verify_weight_sync:
                verification = "the next weight sync verifies every weight"
            than = "rounding explains"
            if mismatch > usual:
                than = f"the {median(self._mismatches):.2g} of the steps before"
            logger.warning(
                f"step {number}: the log-probs of engine and trainer differ by {mismatch:.2g} on"
                f" average, {largest:.2g} at most, far more than {than}; {verification}"
            )

        return True

    def _most(self) -> float:
        """Return the mismatch that is wrong whatever the steps before had.

        There is none where samples are older than the weights that are trained, and where
        --mismatch_limit is set instead.
        """
        rollout = self.config.rollout
        older = rollout.max_staleness or rollout.partial_rollout
        set_by_user = self.config.train.mismatch_limit is not None
        return math.inf if older or set_by_user else NEVER.get(self.dtype, math.inf)

    def _usual(self) -> float:
        """Return the largest mismatch that the steps before explain.

        It is infinite while there are too few.
        """
        if len(self._mismatches) < ENOUGH:
            return float("inf")
        middle = median(self._mismatches)
        spread = median(abs(value - middle) for value in self._mismatches)
        return middle + FAR * max(middle, spread)

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        if self.logs:
            logger.warning(message)
