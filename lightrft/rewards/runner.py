"""Set the rewards of samples: call the reward function, and check what it returns.

Fast functions are called in this process, others in worker processes (pool.py).
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

from loguru import logger

from lightrft.config.errors import USER_ERROR, ConfigError
from lightrft.config.references import JUDGE, SERVER, RewardTerm, reward_terms
from lightrft.config.sections import RewardSection
from lightrft.config.values import import_path
from lightrft.core.metrics import Metrics, Untraced
from lightrft.core.samples import Prompt, Sample
from lightrft.models.launch.heartbeat import code_position, exit_process
from lightrft.models.parallel.collectives import Axis
from lightrft.registry import OBJECTS, kept_alive
from lightrft.rewards.conventions import RewardFunction, as_number, num_rewards
from lightrft.rewards.functions import FAST_REWARDS, rewards
from lightrft.rewards.pool import CallFailed, Processes, WrongCount, failure_of, out_of_time
from lightrft.rewards.worker import Setup, location, said

MAX_REWARD = 1e18
"""Largest absolute reward.

The squares of rewards have to fit into float32, as in a group's deviation.
"""
FAILURES_IN_A_ROW = 32
"""Number of failed calls in a row that end a run: the function itself must be broken."""
LOGGED = 5
"""Number of failed calls to log in each step; others are only counted."""
MAX_QUOTED = 8
"""Number of responses that a message quotes if it is not known which of them failed."""
WORKERS = 2
"""Number of worker processes of a rank if --reward_workers is unset."""


Call = tuple[list[Sample], "Future[Any] | DeferredCall"]
"""Samples of a call of the reward function that has begun, and what returns their rewards."""


class LaterJudge(Protocol):
    """A judge that scores in addition to the function, in the engine; see engine_judge.py."""

    data: Axis
    """Ranks with different samples."""

    def ask(self, samples: Sequence[Sample]) -> None: ...

    def add(self, samples: Sequence[Sample]) -> list[tuple[Sample, str]]: ...


class ModelScores(Protocol):
    """Reward models; see models.py."""

    def __call__(self, samples: list[Sample]) -> None: ...

    def compute_early(self, samples: list[Sample]) -> None: ...


class RewardRunner:
    """Calls a reward function for the samples of each prompt, and checks what it returns.

    A call fails when the function raises, dies, takes too long or returns something that is not a
    reward. --reward_failure determines what follows: `stop` ends the run; `zero` gives 0 to the
    samples that fail; `drop` learns nothing from any sample of the call. A failed call of several
    samples is repeated for each alone, to find the samples that fail.
    """

    def __init__(
        self,
        name: str,
        model_parallel: Axis | None = None,
        section: RewardSection | None = None,
        *,
        chat: bool = False,
        fail: Callable[..., Any] | None = None,
        models: Sequence[str] = (),
    ):
        """Import the function.

        `model_parallel` has the ranks with the same samples; the first calls the function for all.
        `section` has the limits. `chat`: prompts are chats. `fail` ends all ranks
        (StrategyBase.fail), for a call that hangs in this process. `models` are the labels of
        reward models. Raises ValueError if there is no such function.
        """
        self.name = name
        self.model_parallel = model_parallel or Axis("model_parallel", 1, 0, None)
        self.section = section or RewardSection()
        self.fail = fail
        setup = Setup(name, self.section, tuple(models), chat)
        self.function = setup.function()

        self.models: ModelScores | None = None
        """Reward models that score in addition to the function. They run while the engine sleeps,
        because not all fit on the device at once. With --overlap they stay there, and compute
        scores earlier."""
        self.judge: LaterJudge | None = None
        """The judge of --judge_url engine; it scores in addition to the function."""
        self._failures = self._in_a_row = 0
        self._begun: list[Call] = []
        self.calls = self._make_calls(setup)
        """Its `trace` records the calls, and how long the rank waits for their results."""

    def _make_calls(self, setup: Setup) -> "InProcess | Processes":
        terms = reward_terms(self.name)
        workers = self.section.reward_workers
        limit = self._limit(terms)
        fast = all(term.name in FAST_REWARDS for term in terms)
        if workers is None:
            workers = 0 if fast else WORKERS

        importable = importable_terms(terms)
        if workers and importable is None:
            logger.info(
                f"--reward {self.name}: no other process can import the function, so it is called"
                " in this process, when all responses are complete; move it to its own file to"
                " call it in worker processes"
            )

        if not workers or importable is None:
            # The fast functions are our own, and do not end the process.
            around = nullcontext if fast else kept_alive
            return InProcess(self.function, limit=limit, too_late=self._end, around=around)

        calls = Processes(
            replace(setup, name=importable),
            workers=workers,
            limit=math.inf if limit is None else limit,
        )
        weakref.finalize(self, calls.close)
        return calls

    def _limit(self, terms: list[RewardTerm]) -> float | None:
        """Return the time limit of a call in seconds.

        None for servers: requests have limits of their own.
        """
        on_server = [*map(_is_on_server, terms)]
        if all(on_server):
            return None
        return 60 * (self.section.reward_minutes + any(on_server) * self.section.server_minutes)

    # -- what data must have

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if the function cannot be called with the columns of these prompts."""
        try:
            self.function.check(prompts)
        except ConfigError as error:
            raise ConfigError(f"--reward {self.name}: {error}") from error

    @property
    def requirements(self) -> str:
        """Return a text that row_problem() depends on, beside the columns."""
        return f"{self.name} {self.section.reward_key} {self.function.signatures}"

    def row_problem(self, prompt: Prompt) -> str | None:
        """Return why responses to this prompt cannot be scored.

        A required column is absent, or null.
        """
        problem = self.function.row_problem(prompt.columns)
        return f"--reward {self.name}: {problem}" if problem else None

    # -- a step

    def __call__(self, samples: list[Sample]) -> None:
        """Set the rewards of samples, in one call.

        Raises ConfigError, on all ranks of `model_parallel`, if it fails.
        """
        self.begin(samples)
        self.finish(samples)

    def begin(self, samples: list[Sample]) -> None:
        """Begin a call of the function with these samples of one prompt."""
        if self.model_parallel.rank == 0 and samples:
            self._begun.append((samples, self.calls.begin(samples)))

    def finish(self, samples: list[Sample]) -> None:
        """Wait for all calls that were begun, then run the reward models.

        All ranks call it together. `samples` are the samples of all these calls; the ranks of
        `model_parallel` pass them in the same order.
        """
        with self.calls.trace.phase("wait", idle=True):
            failure = self._failure()
        if self.model_parallel.size > 1:
            results = [
                (one.reward, one.reward_components, one.token_rewards, one.masked)
                for one in samples
            ]
            values, message = self.model_parallel.broadcast((results, failure and str(failure)))
            failure = failure or (message and ConfigError(message))
            for one, value in zip(samples, values, strict=True):
                one.reward, one.reward_components, one.token_rewards, one.masked = value

        if failure:
            raise failure

        if self.judge is not None:
            self._judge(self.judge, samples)
        if self.models is not None:
            self.models(samples)

    def ask_judge(self, samples: list[Sample]) -> None:
        """Let the judge in the engine, if there is one, read samples while the engine is awake.

        All ranks call it together.
        """
        if self.judge is not None:
            self.judge.ask(samples)

    def _judge(self, judge: LaterJudge, samples: list[Sample]) -> None:
        """Add the judge's scores, and treat responses without one as --reward_failure requires."""
        failed = judge.add(samples)
        messages = [
            self._describe(CallFailed(message, sample), [sample], name=JUDGE)
            for sample, message in failed[:LOGGED]
        ]
        all_messages = [message for share in judge.data.gather(messages) for message in share]
        if all_messages and self.section.reward_failure == "stop":
            raise ConfigError(all_messages[0])

        for message in messages:
            logger.warning(message)
        self._failures += len(failed)
        for sample, _ in failed:
            sample.masked |= self.section.reward_failure == "drop"

    def count_failures(self, name: str, metrics: Metrics) -> None:
        """Add the number of samples without a reward of their own since the last call.

        If a failure ends the run, there is nothing to count.
        """
        if self.section.reward_failure != "stop":
            metrics.sum(name, self._failures)
        self._failures = 0

    # -- results and failures of calls

    def _failure(self) -> ConfigError | None:
        """Process the results of all calls; return the error that ends the run, if there is one."""
        calls: Iterable[Call] = self._begun
        self._begun = []
        # Once the first failure ends the run, nobody should wait for calls that come before it.
        if self.section.reward_failure == "stop" and all(
            isinstance(result, Future) for _, result in calls
        ):
            calls = _as_they_end(calls)

        logged = 0
        for samples, result in calls:
            error = self._set_result(samples, result)
            if error is None:
                self._in_a_row = 0
                continue

            alone = self._failures_one_by_one(samples, error)
            messages = [self._describe(each, samples) for each in alone or [error]]
            if self.section.reward_failure == "stop":
                return ConfigError(messages[0])

            for message in messages[: LOGGED - logged]:
                logger.warning(message)
                logged += 1

            failed = samples
            if self.section.reward_failure == "zero":
                failed = [each.sample for each in alone]
            self._replace(failed)
            self._in_a_row = self._in_a_row + 1 if len(failed) == len(samples) else 0
            if self._in_a_row >= FAILURES_IN_A_ROW:
                return ConfigError(
                    f"{messages[0]}. {self._in_a_row} calls in a row have failed: the function"
                    " itself is broken"
                )

        return None

    def _set_result(
        self, samples: list[Sample], result: "Future[Any] | DeferredCall"
    ) -> CallFailed | None:
        """Set the rewards that a call returned; return the failure if there is one.

        The failure names the sample if it is known.
        """
        try:
            values = result.result()
            if num_rewards(values) != len(samples):
                hint = ""
                if isinstance(values, Mapping):
                    hint = "; to return components of a reward, return a dictionary for each sample"
                raise WrongCount(
                    f"{values!r:.200} is not a list of {len(samples)} rewards, one per sample{hint}"
                )

            for sample, value in zip(samples, values, strict=True):
                self._set(sample, value)
        except CallFailed as error:
            error.sample = error.sample or (samples[0] if len(samples) == 1 else None)
            return error
        return None

    def _set(self, sample: Sample, value: Any) -> None:
        sample.reward_components = {}
        sample.token_rewards = None
        if isinstance(value, list):
            sample.token_rewards = self._per_token(value, sample)
            sample.reward = math.fsum(reward for _, reward in sample.steps)  # exact, in any order
        elif isinstance(value, dict):
            components = {name: self._number(one, sample) for name, one in value.items()}
            sample.reward_components = components
            sample.reward = math.fsum(sample.reward_components.values())
        else:
            sample.reward = self._number(value, sample)

        self._number(sample.reward, sample)  # a sum may be out of range

    def _per_token(self, values: list[float | None], sample: Sample) -> list[float | None]:
        if len(values) != len(sample.token_ids) or all(value is None for value in values):
            expected = (
                f"a list of {len(sample.token_ids)} numbers or None, one for each token, and at"
                " least one number"
            )
            raise CallFailed(f"{values!r:.200} is not {expected}", sample)
        return [None if value is None else self._number(value, sample) for value in values]

    def _number(self, value: Any, sample: Sample) -> float:
        number = as_number(value)
        if math.isfinite(number) and abs(number) <= MAX_REWARD:
            return number
        problem = (
            f"is larger than {MAX_REWARD:g}" if math.isfinite(number) else "is not a finite number"
        )
        raise CallFailed(f"{value!r:.200} {problem}", sample)

    def _failures_one_by_one(self, samples: list[Sample], error: CallFailed) -> list[CallFailed]:
        """Call the function for each sample alone, and return as many failures as are needed.

        `zero` needs all of them, the others only the first. A server is not asked again, as it has
        already been asked repeatedly.
        """
        zero = self.section.reward_failure == "zero"
        on_server = any(map(_is_on_server, reward_terms(self.name)))
        if (
            len(samples) == 1
            or not zero
            and (error.sample or on_server or isinstance(error, WrongCount))
        ):
            return [error]

        # Each call goes to the front of the queue, so the last one comes first: they run in order.
        calls = [(sample, self.calls.begin([sample], first=True)) for sample in reversed(samples)]
        results = (self._set_result([sample], result) for sample, result in reversed(calls))
        return list(islice(filter(None, results), None if zero else 1))

    def _replace(self, failed: list[Sample]) -> None:
        """Set the rewards of samples that failed as --reward_failure requires."""
        self._failures += len(failed)
        for sample in failed:
            sample.reward = 0.0
            sample.reward_components = {}
            sample.token_rewards = None
            sample.masked |= self.section.reward_failure == "drop"

    def _describe(self, error: CallFailed, samples: list[Sample], *, name: str = "") -> str:
        prompt = (error.sample or samples[0]).prompt
        failed = [error.sample] if error.sample else samples
        texts = [f"{sample.text!r:.200}" for sample in failed]
        others = f" and {len(texts) - MAX_QUOTED} others" if len(texts) > MAX_QUOTED else ""
        responses = f"the response{'s' * (len(texts) > 1)} {', '.join(texts[:MAX_QUOTED])}{others}"
        row = prompt.location or f"row {prompt.index}"

        return (
            f"--reward {name or self.name}: {error}, for {responses} to the prompt"
            f" {prompt.text!r:.200} ({row}){error.hint}"
        )

    def _end(self, samples: list[Sample], thread: int) -> None:
        problem = out_of_time(60 * self.section.reward_minutes, code_position(thread))
        error = ConfigError(self._describe(problem, samples))
        if self.fail is not None:
            self.fail(error, code=USER_ERROR, brief=True)
        logger.error(str(error))
        exit_process(str(error), USER_ERROR)


# -- calls in this process


@dataclass(eq=False)
class InProcess:
    """Calls in this process, made when the results are needed.

    The function shares memory, devices and globals with the run.
    """

    function: RewardFunction
    limit: float | None
    """Longest time of a call, in seconds."""
    too_late: Callable[[list[Sample], int], None]
    """Function that ends the process. It is called in a thread, with the samples and the thread of
    a call that takes longer."""
    around: Callable[[], AbstractContextManager[None]] = kept_alive
    """Function that returns a context for each call: code of the user must not end the process."""
    trace: Untraced = field(default_factory=Untraced)

    def begin(self, samples: list[Sample], *, first: bool = False) -> "DeferredCall":
        return DeferredCall(partial(self._call, samples))

    def _call(self, samples: list[Sample]) -> Any:
        timer = threading.Timer(self.limit or 0, self.too_late, [samples, threading.get_ident()])
        timer.daemon = True
        if self.limit is not None:
            timer.start()
        try:
            with self.around():
                return self.function.judge(samples)
        except Exception as error:
            raise failure_of(f"{said(error)}{location(error)}", samples) from error
        finally:
            timer.cancel()


@dataclass(frozen=True, slots=True)
class DeferredCall:
    """A result that is computed when it is needed."""

    result: Callable[[], Any]
    """Returns the values that the function returns. Raises CallFailed if it returns none."""


# -- names of functions, and the order of results


def _as_they_end(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield calls of worker processes: those that end first, and of these the first that began."""
    waiting = {result: samples for samples, result in calls}
    while waiting:
        wait(waiting, return_when=FIRST_COMPLETED)
        for result in [result for result in waiting if result.done()]:
            yield waiting.pop(result), result


def _is_on_server(term: RewardTerm) -> bool:
    return term.name.startswith(SERVER) or term.name == JUDGE


def importable_terms(terms: list[RewardTerm]) -> str | None:
    """Return the terms with names that another process can import, else None."""
    references = []
    for term in terms:
        here = term.name.startswith(("__main__:", f"{OBJECTS.__name__}:"))
        by_path = _is_on_server(term) or (":" in term.name and not here)
        name = term.name if by_path else import_path(rewards[term.name])
        if not name or name.startswith("__main__:"):
            return None
        references.append(str(replace(term, name=name)))
    return ",".join(references)
