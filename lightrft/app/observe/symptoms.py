"""Find symptoms in the metrics of a run: what goes wrong, by which numbers, and the flag to change.

Each symptom compares the end of a run with its beginning, over windows that are wide enough for the
noise of single steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from lightrft.app.observe.curves import History
from lightrft.config.tables import table

SYMPTOM_STEPS = 10
"""Number of steps below which a run shows no symptom."""
COMPARED_SHARE = 5
"""The first and the last fifth of the steps are compared."""
METRICS: list[str] = table("app/observe/symptoms")["metrics"]
"""Metrics that symptoms are found in."""
REWARD_COMPONENT_PREFIX = "rollout/reward_of_"
"""Beginning of the names of metrics that are components of the reward."""
SYMPTOM_TEXTS = table("app/observe/symptoms")["texts"]
"""Symptom -> the evidence, with places for numbers, and the advice."""
Numbers = dict[str, Any] | None
"""Numbers of the evidence of a symptom; None without the symptom."""


@dataclass(frozen=True)
class Symptom:
    """Something that goes wrong in a run."""

    name: str
    evidence: str
    advice: str
    """What to change, with the flag."""


class Course:
    """The metrics of a run, by windows of steps."""

    def __init__(self, history: History):
        self.values = {
            name: [value for _, value in points if value is not None]
            for name, points in history.items()
        }
        self.num_steps = len(self.values.get("rollout/reward", ()))

    def __contains__(self, name: str) -> bool:
        return len(self.values.get(name, ())) > 1

    def first(self, name: str) -> float:
        values = self.values[name]
        return fmean(values[: self._width(values)])

    def last(self, name: str) -> float:
        values = self.values[name]
        return fmean(values[-self._width(values) :])

    def best(self, name: str) -> float:
        """Return the largest mean of neighbouring steps, as many as a window has."""
        values = self.values[name]
        width = self._width(values)
        sums = [0.0, *accumulate(values)]
        return max(
            (after - before) / width for before, after in zip(sums, sums[width:], strict=False)
        )

    def usual(self, name: str) -> float:
        return median(self.values[name])

    def spread(self, name: str) -> float:
        """Return the usual distance from the median."""
        middle = self.usual(name)
        return median(abs(value - middle) for value in self.values[name])

    @staticmethod
    def _width(values: list[float]) -> int:
        return -(-len(values) // COMPARED_SHARE)

    def components(self) -> list[str]:
        """Return the metrics of the components of the reward."""
        return [name for name in self.values if name.startswith(REWARD_COMPONENT_PREFIX)]


def find_symptoms(history: History) -> list[Symptom]:
    """Return the symptoms of a run of train_ppo; none while it is too short to tell."""
    course = Course(history)
    # An alarm has its own evidence; all others need a course.
    found = {"gamed reward": _gamed_reward(course)}
    if course.num_steps >= SYMPTOM_STEPS:
        found = {
            name: check(course, metric) if metric in course else None
            for name, (metric, check) in CHECKS.items()
        } | found
    return [
        Symptom(
            name, SYMPTOM_TEXTS[name]["evidence"].format(**numbers), SYMPTOM_TEXTS[name]["advice"]
        )
        for name, numbers in found.items()
        if numbers is not None
    ]


def _entropy_collapse(run: Course, name: str) -> Numbers:
    first, last = run.first(name), run.last(name)
    reward, best = run.last("rollout/reward"), run.best("rollout/reward")
    # A policy that has learned everything has little entropy too.
    gained = reward > run.first("rollout/reward") + 0.1 * _range(run)
    lost = reward < best - 0.1 * _range(run)
    shows = last < 0.2 * first and (lost or not gained)
    return {"first": first, "last": last, "best": best, "reward": reward} if shows else None


def _range(run: Course) -> float:
    if "rollout/reward_max" not in run:
        return 1.0
    return max(run.best("rollout/reward_max") - run.first("rollout/reward_min"), 1e-9)


def _dead_groups(run: Course, name: str) -> Numbers:
    reward = run.last("rollout/reward")
    top = run.best("rollout/reward_max") if "rollout/reward_max" in run else 1.0
    # A policy that has learned everything gets equal rewards too, the best ones.
    dead = run.first(name) > 0.8 or reward < top - 0.05 * _range(run)
    shows = dead and run.last(name) > 0.8
    return {"share": run.last(name), "reward": reward} if shows else None


def _length_drift(run: Course, name: str) -> Numbers:
    if "rollout/truncated" not in run:
        return None
    first, last = run.first(name), run.last(name)
    cut = run.last("rollout/truncated")
    shows = last > 2 * first and cut > 0.3 and cut > 2 * run.first("rollout/truncated")
    return {"first": first, "last": last, "cut": cut} if shows else None


def _truncation(run: Course, name: str) -> Numbers:
    rises = run.last("rollout/reward") > run.first("rollout/reward") + 0.05 * _range(run)
    shows = not rises and min(run.first(name), run.last(name)) > 0.5
    return {"cut": run.last(name)} if shows else None


def _clipping(run: Course, _: str) -> Numbers:
    shares = {name: run.best(name) for name in ("train/clip_low", "train/clip_high") if name in run}
    said = " and ".join(f"{name} was {share:.0%}" for name, share in shares.items())
    return {"shares": said} if sum(shares.values()) > 0.1 else None


def _growing_mismatch(run: Course, name: str) -> Numbers:
    first, last = run.first(name), run.last(name)
    return {"first": first, "last": last} if last > 5 * first and last > 1e-4 else None


def _deep_mismatch(run: Course, _: str) -> Numbers:
    names = [name for name in METRICS if name.startswith("engine/") and name in run]
    for before, after in pairwise(names):
        shallow, deep = run.last(before), run.last(after)
        if deep > 5 * shallow and deep > 1e-4:
            return {"name": after, "deep": deep, "shallow": shallow, "before": before}
    return None


def _stale_samples(run: Course, name: str) -> Numbers:
    return {"age": run.last(name)} if run.last(name) > 3 else None


def _evaluation_stays(run: Course, name: str) -> Numbers:
    rises = run.last("rollout/reward") - run.first("rollout/reward")
    change = run.last(name) - run.first(name)
    shows = rises > 0.05 * _range(run) and change < 0.1 * rises
    return {"rises": rises, "change": change} if shows else None


def _dominating_component(run: Course, _: str) -> Numbers:
    sizes = {
        name: run.spread(name) + abs(run.last(name) - run.first(name)) for name in run.components()
    }
    # A component that never changes, such as one that was solved from the start, teaches nothing.
    sizes = {name: size for name, size in sizes.items() if size > 0}
    if len(sizes) < 2:
        return None

    name = max(sizes, key=lambda each: sizes[each])
    share = sizes[name] / sum(sizes.values())
    others = ", ".join(f"{each} is {run.last(each):.3g}" for each in sizes if each != name)
    return {"share": share, "name": name, "others": others} if share > 0.95 else None


def _exploding_gradients(run: Course, name: str) -> Numbers:
    if run.last("rollout/reward") >= run.first("rollout/reward"):
        return None
    first, best = run.first(name), run.best(name)
    return {"first": first, "best": best} if best > 10 * first or run.usual(name) == 0.0 else None


def _gamed_reward(run: Course) -> Numbers:
    names = ("canary/alarm_from_step", "shadow/alarm_from_step")
    steps = [step for name in names for step in run.values.get(name, ())]
    return {"step": min(steps)} if steps else None


CHECKS: dict[str, tuple[str, Callable[[Course, str], Numbers]]] = {
    "entropy collapse": ("train/entropy", _entropy_collapse),
    "dead groups": ("rollout/groups_without_signal", _dead_groups),
    "length drift": ("rollout/response_length", _length_drift),
    "truncation": ("rollout/truncated", _truncation),
    "clipping": ("rollout/reward", _clipping),
    "growing mismatch": ("engine/logprob_mismatch", _growing_mismatch),
    "mismatch deep in the context": ("engine/logprob_mismatch", _deep_mismatch),
    "stale samples": ("rollout/staleness", _stale_samples),
    "reward without evaluation": ("eval/reward", _evaluation_stays),
    "one component of the reward dominates": ("rollout/reward", _dominating_component),
    "exploding gradients": ("train/grad_norm", _exploding_gradients),
}
"""Symptom -> the metric without which it cannot be seen, and its check."""
