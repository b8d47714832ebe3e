"""Find symptoms in the metrics of a run: what goes wrong, by which numbers, and the flag to change.

Each symptom compares the end of a run with its beginning, over windows that are wide enough for the
noise of single steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from lightrft.app.observe.curves import History

SYMPTOM_STEPS = 10
"""Number of steps below which a run shows no symptom."""
COMPARED_SHARE = 5
"""The first and the last fifth of the steps are compared."""
METRICS = tuple(
    """rollout/reward rollout/reward_min rollout/reward_max rollout/groups_without_signal
    rollout/response_length rollout/truncated rollout/staleness train/entropy train/clip_low
    train/clip_high train/grad_norm engine/logprob_mismatch eval/reward canary/alarm_from_step
    shadow/alarm_from_step""".split()
)
"""Metrics that symptoms are found in."""
GAMED = {
    "canary/alarm_from_step": "it is earned on canaries, where it cannot be earned honestly,",
    "shadow/alarm_from_step": "it has risen above --shadow_reward",
}
"""Metric of an alarm -> what it says."""
REWARD_COMPONENT_PREFIX = "rollout/reward_of_"
"""Beginning of the names of metrics that are components of the reward."""


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
        self._values = {
            name: [value for _, value in points if value is not None]
            for name, points in history.items()
        }
        self.num_steps = len(self._values.get("rollout/reward", ()))

    def __contains__(self, name: str) -> bool:
        return len(self._values.get(name, ())) > 1

    def first(self, name: str) -> float:
        values = self._values[name]
        return fmean(values[: self._width(values)])

    def last(self, name: str) -> float:
        values = self._values[name]
        return fmean(values[-self._width(values) :])

    def best(self, name: str) -> float:
        """Return the largest mean of neighbouring steps, as many as a window has."""
        values = self._values[name]
        width = self._width(values)
        sums = [0.0, *accumulate(values)]
        return max(
            (after - before) / width for before, after in zip(sums, sums[width:], strict=False)
        )

    def usual(self, name: str) -> float:
        return median(self._values[name])

    def spread(self, name: str) -> float:
        """Return the usual distance from the median."""
        middle = self.usual(name)
        return median(abs(value - middle) for value in self._values[name])

    @staticmethod
    def _width(values: list[float]) -> int:
        return -(-len(values) // COMPARED_SHARE)

    def components(self) -> list[str]:
        """Return the metrics of the components of the reward."""
        return [name for name in self._values if name.startswith(REWARD_COMPONENT_PREFIX)]


def find_symptoms(history: History) -> list[Symptom]:
    """Return the symptoms of a run of train_ppo; none while it is too short to tell."""
    course = Course(history)
    if course.num_steps < SYMPTOM_STEPS:
        return []
    return [symptom for check in CHECKS for symptom in check(course)]


def _entropy_collapse(run: Course) -> Iterator[Symptom]:
    name = "train/entropy"
    if name not in run:
        return
    first, last = run.first(name), run.last(name)
    # A policy that has learned everything has little entropy too.
    gained = run.last("rollout/reward") > run.first("rollout/reward") + 0.1 * _range(run)
    lost = run.last("rollout/reward") < run.best("rollout/reward") - 0.1 * _range(run)
    if last < 0.2 * first and (lost or not gained):
        yield Symptom(
            "entropy collapse",
            f"{name} fell from {first:.3g} to {last:.3g}, and the reward from"
            f" {run.best('rollout/reward'):.3g} at best to {run.last('rollout/reward'):.3g}",
            "lower --learning_rate, raise --eps_clip_high or --entropy_coef, or keep a reference"
            " with --init_kl_coef",
        )


def _range(run: Course) -> float:
    if "rollout/reward_max" not in run:
        return 1.0
    return max(run.best("rollout/reward_max") - run.first("rollout/reward_min"), 1e-9)


def _dead_groups(run: Course) -> Iterator[Symptom]:
    name = "rollout/groups_without_signal"
    if name not in run or run.last(name) <= 0.8:
        return
    reward = run.last("rollout/reward")
    top = run.best("rollout/reward_max") if "rollout/reward_max" in run else 1.0
    # A policy that has learned everything gets equal rewards too, the best ones.
    if run.first(name) > 0.8 or reward < top - 0.05 * _range(run):
        yield Symptom(
            "dead groups",
            f"{run.last(name):.0%} of the groups have equal rewards, {reward:.3g} on average",
            "use prompts that are neither too hard nor too easy, --dynamic_sampling, a larger"
            " --n_samples_per_prompt, or supervised training first",
        )


def _length_drift(run: Course) -> Iterator[Symptom]:
    name = "rollout/response_length"
    if name not in run or "rollout/truncated" not in run:
        return
    first, last = run.first(name), run.last(name)
    cut = run.last("rollout/truncated")
    if last > 2 * first and cut > 0.3 and cut > 2 * run.first("rollout/truncated"):
        yield Symptom(
            "length drift",
            f"{name} grew from {first:.3g} to {last:.3g} tokens, and {cut:.0%} of the responses"
            " are cut off now",
            "give long responses less reward (--overlong_buffer_len, --reward length:-0.1), or use"
            " --loss_agg_mode token-mean",
        )


def _truncation(run: Course) -> Iterator[Symptom]:
    name = "rollout/truncated"
    rises = run.last("rollout/reward") > run.first("rollout/reward") + 0.05 * _range(run)
    if name in run and not rises and min(run.first(name), run.last(name)) > 0.5:
        yield Symptom(
            "truncation",
            f"{run.last(name):.0%} of the responses are cut off, from the beginning on",
            "raise --generate_max_len, check the end tokens of the model and its chat template, or"
            " leave such responses out with --mask_truncated",
        )


def _clip_share(run: Course) -> Iterator[Symptom]:
    shares = {name: run.best(name) for name in ("train/clip_low", "train/clip_high") if name in run}
    if sum(shares.values()) > 0.1:
        yield Symptom(
            "clipping",
            " and ".join(f"{name} was {share:.0%}" for name, share in shares.items()),
            "take fewer updates from a batch (--max_epochs, a larger --train_batch_size), or lower"
            " --learning_rate",
        )


def _growing_mismatch(run: Course) -> Iterator[Symptom]:
    name = "engine/logprob_mismatch"
    if name in run and run.last(name) > 5 * run.first(name) and run.last(name) > 1e-4:
        yield Symptom(
            "growing mismatch",
            f"{name} grew from {run.first(name):.2g} to {run.last(name):.2g}",
            "verify the weights of the engine (--verify_weight_sync); with --bf16 compute the head"
            " in float32; correct with --rollout_correction tis",
        )


def _stale_samples(run: Course) -> Iterator[Symptom]:
    name = "rollout/staleness"
    if name in run and run.last(name) > 3:
        yield Symptom(
            "stale samples",
            f"tokens are {run.last(name):.2g} steps old on average",
            "lower --max_staleness, or correct with --rollout_correction tis",
        )


def _evaluation_stays(run: Course) -> Iterator[Symptom]:
    name = "eval/reward"
    if name not in run:
        return
    rises = run.last("rollout/reward") - run.first("rollout/reward")
    change = run.last(name) - run.first(name)
    if rises > 0.05 * _range(run) and change < 0.1 * rises:
        yield Symptom(
            "reward without evaluation",
            f"rollout/reward rose by {rises:.3g}, and {name} changed by {change:.3g}",
            "look at samples.jsonl: the policy may exploit the reward (lightrft test_rewards), or"
            " learn its prompts by heart",
        )


def _dominating_component(run: Course) -> Iterator[Symptom]:
    sizes = {
        name: run.spread(name) + abs(run.last(name) - run.first(name)) for name in run.components()
    }
    # A component that never changes, such as one that was solved from the start, teaches nothing.
    sizes = {name: size for name, size in sizes.items() if size > 0}
    if len(sizes) < 2:
        return

    name = max(sizes, key=lambda each: sizes[each])
    total = sum(sizes.values())
    if sizes[name] > 0.95 * total:
        others = ", ".join(f"{each} is {run.last(each):.3g}" for each in sizes if each != name)
        yield Symptom(
            "one component of the reward dominates",
            f"{sizes[name] / total:.0%} of what changes in the rewards is {name}; {others}",
            "unless the other components are solved, weigh them, in --reward (NAME:WEIGHT) or in"
            " the function that returns them, so that they vary by like amounts",
        )


def _exploding_gradients(run: Course) -> Iterator[Symptom]:
    name = "train/grad_norm"
    if name not in run or run.last("rollout/reward") >= run.first("rollout/reward"):
        return
    if run.best(name) > 10 * run.first(name) or run.usual(name) == 0.0:
        yield Symptom(
            "exploding gradients",
            f"{name} went from {run.first(name):.3g} to {run.best(name):.3g}, and the reward fell",
            "lower --learning_rate, or add --lr_warmup_ratio and --max_norm",
        )


def _gamed_reward(run: Course) -> Iterator[Symptom]:
    for name, what in GAMED.items():
        if name in run:
            yield Symptom(
                "the reward is being gamed",
                f"{what} since step {run.last(name):.0f}",
                "look at the responses in the warning of that step, mend the reward, and go on from"
                " a checkpoint before that step (--fork_from, --at)",
            )


CHECKS: tuple[Callable[[Course], Iterator[Symptom]], ...] = (
    _entropy_collapse,
    _dead_groups,
    _length_drift,
    _truncation,
    _clip_share,
    _growing_mismatch,
    _stale_samples,
    _evaluation_stays,
    _dominating_component,
    _exploding_gradients,
    _gamed_reward,
)
