"""Test a reward function on rows of data, before a model learns to exploit what is wrong with it.

The right answer to a row is that of a column, or the label in the form that gets the highest
reward. Wrong answers are the right ones of other rows. From these and from the prompts, responses
are made that a policy will try sooner or later.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass
from functools import cached_property, partial
from itertools import islice
from statistics import fmean, median

from lightrft.config.errors import ConfigError, DataError
from lightrft.config.sections import DataSection, RewardSection
from lightrft.config.tables import table
from lightrft.core.samples import Prompt, Sample
from lightrft.data.prompts import reward_columns
from lightrft.data.readers import BadRows, read_rows
from lightrft.data.rendering.forms import scored
from lightrft.rewards.functions import right_answers
from lightrft.rewards.runner import RewardRunner

RESPONSE_FORMS: list[str] = table("extras/tools/responses")["with_label"]
"""Forms of a response with a label."""
ODD_RESPONSES = [text * times for text, times in table("extras/tools/responses")["odd"]]
"""Responses that sampling brings sooner or later."""
AGREEMENT = 0.95
"""Share of rows where the right answer must get more than the wrong one."""
OFTEN = 0.5
"""Share of rows that a trick may win: the last option of a question is right in some of them."""
CLOSE = 1e-9


@dataclass(frozen=True)
class Finding:
    """Result of a test of a reward."""

    test: str
    evidence: str
    is_fault: bool = True
    """False for what some rewards do on purpose."""


@dataclass(frozen=True)
class Row:
    """Row of the data, with a response that is right and one that is not, if they are known."""

    prompt: Prompt
    right: str | None = None
    wrong: str | None = None


def read_prompts(section: DataSection, num_rows: int) -> list[Prompt]:
    """Return the first rows of --prompt_data as prompts without tokens.

    The text of a chat is that of all messages. Raise DataError for rows that cannot be read.
    """
    prompts = []
    bad = BadRows(skip=False, flag="data")
    for where, row in islice(read_rows(section.prompt_data, section.prompt_split, bad), num_rows):
        try:
            reading = scored(section, row)
            columns = reward_columns(section, row, reading)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error

        chat = reading.prompt if isinstance(reading.prompt, list) else []
        text = "\n".join(str(each["content"]) for each in chat) or str(reading.prompt)
        prompts.append(Prompt(len(prompts), text, [], columns, location=where))

    return prompts


@dataclass(eq=False)
class RewardTest:
    """Tests of one reward function."""

    name: InitVar[str]
    prompts: InitVar[Sequence[Prompt]]
    response_key: InitVar[str | None] = None
    """Column with a right response, for rewards that do not compare with a label."""
    slow: float = 1.0
    """Number of seconds that a response may not take."""

    def __post_init__(self, name: str, prompts: Sequence[Prompt], response_key: str | None) -> None:
        """Import the function and find right and wrong responses.

        Raise ConfigError for a function that cannot be called with the columns.
        """
        self._columns = [deepcopy(prompt.columns) for prompt in prompts]
        self.runner = RewardRunner(name, section=RewardSection(reward_workers=0))
        self.runner.check(prompts)
        self.seconds: list[float] = []
        """Time of each call, for a response."""
        self.rows = self._with_answers(prompts, response_key)

    @property
    def throughput(self) -> float:
        """Return the number of responses that are scored in a second, by the median call."""
        return 1 / max(median(self.seconds), 1e-9)

    def run(self) -> list[Finding]:
        """Return the findings of all tests, or what ended them."""
        tests: tuple[Callable[[], Iterator[Finding]], ...] = (
            self._odd_responses,
            self._same_again,
            self._order_and_batch,
            self._columns_stay,
            self._constant,
            self._labels,
            self._whitespace,
            *(partial(self._without_an_answer, *trick) for trick in TRICKS.items()),
            self._speed,
        )

        findings = []
        for test in tests:
            try:
                findings += islice(test(), 1)
            except ConfigError as error:
                findings.append(Finding("raises", f"{error}"))
                break  # the other tests would find the same
        return findings

    # -- what is scored

    def scores(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        """Return the rewards of responses to a prompt, in one call."""
        samples = [
            Sample(prompt, 0, list(text.encode(errors="replace")), [], text, "stop")
            for text in texts
        ]
        began = time.perf_counter()
        self.runner(samples)
        self.seconds.append((time.perf_counter() - began) / len(texts))
        return [sample.reward for sample in samples]

    def _with_answers(self, prompts: Sequence[Prompt], response_key: str | None) -> list[Row]:
        if response_key is not None:
            missing = [prompt for prompt in prompts if response_key not in prompt.columns]
            if missing:
                raise ConfigError(
                    f"--response_key {response_key}: {missing[0].location} has no such column"
                )
            return self._with_wrong([str(each.columns[response_key]) for each in prompts], prompts)

        labels = [prompt.columns.get("label") for prompt in prompts]
        if any(label is None for label in labels):
            return [Row(prompt) for prompt in prompts]

        answers = [right_answers(label)[0] for label in labels]
        pairs = list(zip(prompts, answers, strict=True))
        self.form = max(
            RESPONSE_FORMS,
            key=lambda form: fmean(
                self._score(each, form.format(answer)) for each, answer in pairs
            ),
        )
        return self._with_wrong([self.form.format(answer) for answer in answers], prompts)

    def _with_wrong(self, right: list[str], prompts: Sequence[Prompt]) -> list[Row]:
        """Take the next different response of another row as the wrong one."""
        rows = []
        for index, (prompt, response) in enumerate(zip(prompts, right, strict=True)):
            others = (each for each in right[index + 1 :] + right[:index] if each != response)
            rows.append(Row(prompt, response, next(others, None)))
        return rows

    @cached_property
    def _answered(self) -> list[tuple[Prompt, str, str]]:
        """Return the rows where the right response gets more than the wrong one."""
        return [
            (row.prompt, row.right, row.wrong)
            for row in self.rows
            if row.right is not None
            and row.wrong is not None
            and self._reads_the_row
            and self._score(row.prompt, row.right) > self._score(row.prompt, row.wrong)
        ]

    @cached_property
    def _reads_the_row(self) -> bool:
        """Return True if a response gets different rewards for two rows."""
        return any(
            row.right is not None
            and self._score(row.prompt, row.right) != self._score(other.prompt, row.right)
            for row, other in zip(self.rows, [*self.rows[1:], self.rows[0]], strict=True)
        )

    def _score(self, prompt: Prompt, text: str) -> float:
        return self.scores(prompt, [text])[0]

    def _responses(self, row: Row) -> list[str]:
        return [text for text in (row.right, row.wrong, "I do not know.", "7") if text is not None]

    # -- tests

    def _odd_responses(self) -> Iterator[Finding]:
        for row in self.rows[:2]:
            for text in ODD_RESPONSES:
                try:
                    self.scores(row.prompt, [text])
                except ConfigError as error:
                    yield Finding("raises", f"for the response {text[:20]!r}: {error}")

    def _same_again(self) -> Iterator[Finding]:
        for row in self.rows:
            texts = self._responses(row)
            random.seed(1)
            first = self.scores(row.prompt, texts)
            random.seed(2)
            second = self.scores(row.prompt, texts)
            if _differ(first, second):
                yield Finding(
                    "not deterministic", f"{row.prompt.location}: {first}, and again {second}"
                )

    def _order_and_batch(self) -> Iterator[Finding]:
        for row in self.rows:
            texts = self._responses(row)
            together = self.scores(row.prompt, texts)
            backwards = self.scores(row.prompt, texts[::-1])[::-1]
            if _differ(together, backwards):
                yield Finding(
                    "depends on the order",
                    f"{row.prompt.location}: {together}, and in reverse {backwards}",
                )

            alone = [self._score(row.prompt, text) for text in texts]
            if _differ(together, alone):
                yield Finding(
                    "depends on the other responses",
                    f"{row.prompt.location}: {together} together, and {alone} alone",
                    is_fault=False,
                )

    def _columns_stay(self) -> Iterator[Finding]:
        for row, before in zip(self.rows, self._columns, strict=True):
            if row.prompt.columns != before:
                yield Finding(
                    "changes the data",
                    f"{row.prompt.location}: {before} became {row.prompt.columns}",
                )

    def _constant(self) -> Iterator[Finding]:
        found = {
            score for row in self.rows for score in self.scores(row.prompt, self._responses(row))
        }
        if max(found) - min(found) <= CLOSE:
            yield Finding("constant", f"every response gets {min(found):g}")

    def _labels(self) -> Iterator[Finding]:
        rows = [row for row in self.rows if row.right is not None and row.wrong is not None]
        if not rows:
            return

        if not self._reads_the_row:
            evidence = "a response gets the same reward for every row"
            yield Finding("ignores the label", evidence, is_fault=False)
            return

        pairs = [
            (self._score(row.prompt, row.right), self._score(row.prompt, row.wrong)) for row in rows
        ]
        agreement = fmean(right > wrong for right, wrong in pairs)
        if agreement < AGREEMENT:
            found = next(index for index, (right, wrong) in enumerate(pairs) if right <= wrong)
            right, wrong = pairs[found]
            yield Finding(
                "disagrees with the labels",
                f"in {1 - agreement:.0%} of the rows; {rows[found].prompt.location}:"
                f" {rows[found].right!r:.60} gets {right:g}, and"
                f" {rows[found].wrong!r:.60} gets {wrong:g}",
            )

    def _whitespace(self) -> Iterator[Finding]:
        for prompt, right, _ in self._answered:
            plain, after, around = self.scores(prompt, [right, right + "\n", f" {right} \n\n"])
            if plain - min(after, around) > CLOSE:
                yield Finding(
                    "sensitive to white space",
                    f"{prompt.location}: {right!r:.60} gets {plain:g}, and"
                    f" {min(after, around):g} with white space around it",
                    is_fault=False,
                )

    def _without_an_answer(self, test: str, trick: "Trick") -> Iterator[Finding]:
        won = [
            (prompt, trick(prompt, right, wrong))
            for prompt, right, wrong in self._answered
            if self._score(prompt, trick(prompt, right, wrong))
            >= self._score(prompt, right) - CLOSE
        ]
        if len(won) > OFTEN * len(self._answered):
            prompt, text = won[0]
            yield Finding(
                test,
                f"in {len(won)} of {len(self._answered)} rows; {prompt.location}: {text!r:.60}"
                " gets as much as the right answer",
            )

    def _speed(self) -> Iterator[Finding]:
        if median(self.seconds) > self.slow:
            yield Finding(
                "slow",
                f"{median(self.seconds):.2g} s for a response, {max(self.seconds):.2g} s for the"
                " slowest",
            )


def _hidden(prompt: Prompt, right: str) -> str:
    """Return the right response with a longer number or word instead of the answer.

    An answer that is neither is left out.
    """
    answer = right_answers(prompt.columns["label"])[0] if "label" in prompt.columns else right
    longer = f"9{answer}1" if answer.isdigit() else f"un{answer}ness" if answer.isalpha() else ""
    return right.replace(answer, longer)


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    return any(abs(first - second) > CLOSE for first, second in zip(one, other, strict=True))


Trick = Callable[[Prompt, str, str], str]
"""(prompt, right response, wrong response) -> a response that deserves nothing."""
TRICKS: dict[str, Trick] = {
    "pays for an empty response": lambda prompt, right, wrong: "",
    "pays for the echoed prompt": lambda prompt, right, wrong: prompt.text,
    "pays for a quotation of the prompt": lambda prompt, right, wrong: (
        f'The question was: "{prompt.text}". It has the answer in it.'
    ),
    "pays for several answers": lambda prompt, right, wrong: f"{wrong}\n{right}\n{wrong}",
    "finds the answer in other words": lambda prompt, right, wrong: _hidden(prompt, right),
}
"""What the finding says -> a trick that a reward should not pay for."""
