"""Find rows of the data that look wrong, from what the model answered to them.

Counts of right responses follow beta-binomial distributions, whose parameters come from all rows.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, sqrt
from statistics import fmean, median, pvariance
from typing import NamedTuple

from lightrft.extras.ledger.records import RowRecord

LIKELY = 0.8
"""Probability of a wrong label from which a row is a suspect."""
ENOUGH_RESPONSES = 4
LEAST_AGREEMENT = 0.25
"""Share of the responses that have to agree on another answer than the label."""
DRAWS_WITHOUT_SIGNAL = 3
"""Number of draws without any signal after which a row is dead."""
RARE_SHARE = 0.005
"""Share of prompts that may contain an answer for its presence in the own prompt to be no chance.
"""
SHORT_SHARE = 0.5
"""Share of the usual length below which a right response is shorter than the working needs."""
LONG_WORKING = 16
"""Usual number of tokens from which responses have any working."""
NEAR_SHARE = 0.8
"""Share of words (Jaccard) from which prompts with the same numbers are near-duplicates."""
FEW_TEXTS = 20
"""Number of texts up to which words that most of them have count."""
FEW_WORDS = 6
"""Prompts with fewer words are duplicates only if they are equal."""
CUE = re.compile(
    r"(?:\b(?:answer|solution|result)\W{0,3}(?:is|:|=)|####|\\boxed\{)\W{0,3}$", re.IGNORECASE
)
"""End of a text after which an answer is given away."""
A_WORD = re.compile(r"\d+(?:[.,]\d+)*|\w+")

SUSPECT_KINDS = ("wrong_label", "leak", "duplicate", "dead", "forgotten")


class Suspect(NamedTuple):
    """A row that looks wrong."""

    kind: str
    record: RowRecord
    evidence: str
    probability: float = 1.0
    """Probability that it is; 1 where the evidence is a fact."""


@dataclass(frozen=True, slots=True)
class BetaBinomial:
    """Distribution of a count whose rate differs from row to row."""

    alpha: float
    beta: float

    @classmethod
    def fit(cls, counts: Sequence[tuple[int, int]]) -> "BetaBinomial":
        """Fit (count, total) of each row by the mean and the variance of the rates."""
        rates = [count / total for count, total in counts if total]
        if len(rates) < 2:
            return cls(1.0, 1.0)
        mean = min(max(fmean(rates), 0.01), 0.99)
        size = fmean(total for _, total in counts if total)
        # The variance of the rates, less what counting adds.
        variance = max(
            (pvariance(rates) - mean * (1 - mean) / size) * size / max(size - 1, 1), 1e-4
        )
        strength = min(max(mean * (1 - mean) / variance - 1, 0.1), 100.0)
        return cls(mean * strength, (1 - mean) * strength)

    def log_probability(self, count: int, total: int) -> float:
        """Return the log-probability of a count, without the coefficient that all share."""
        counted = _log_beta(self.alpha + count, self.beta + total - count)
        return counted - _log_beta(self.alpha, self.beta)

    def posterior(self, count: int, total: int) -> tuple[float, float]:
        """Return the mean and the standard deviation of the rate of a row with this count."""
        a, b = self.alpha + count, self.beta + total - count
        mean = a / (a + b)
        return mean, sqrt(mean * (1 - mean) / (a + b + 1))


STRAY = BetaBinomial(0.3, 6.0)
"""How often a wrong label is answered: hardly ever, but some mistakes are common."""


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def suspects(records: Sequence[RowRecord], held_out: Sequence[str] = ()) -> list[Suspect]:
    """Return all suspects, the most probable of each kind first."""
    found = list(duplicates(records, held_out))
    for find in (wrong_labels, leaks, dead, forgotten):
        found += find(records)
    return sorted(
        found, key=lambda each: (SUSPECT_KINDS.index(each.kind), -each.probability, each.record.row)
    )


def solve_rates(records: Sequence[RowRecord]) -> BetaBinomial:
    """Return the distribution of the share of right responses over all rows: the prior of each."""
    return BetaBinomial.fit(
        [(record.total("right"), record.total("responses")) for record in records]
    )


# -- wrong labels


def wrong_labels(records: Sequence[RowRecord]) -> Iterator[Suspect]:
    """Yield rows whose responses agree with each other far more than with the label.

    Either the label is right, or the most frequent other answer is. What is right is answered as
    often as labels are in all rows. If it is the label, the other answer is as frequent as the most
    frequent wrong one in rows whose label was answered at all; if it is not, the label is a stray
    answer. The share of wrong labels is estimated with them (expectation maximisation).
    """
    counted = [
        (record, *counts) for record in records if (counts := _agreement(record)) is not None
    ]
    if not counted:
        return

    trusted = [each for each in counted if each[3] > 0]
    right = BetaBinomial.fit([(label, total) for *_, label, total in trusted or counted])
    wrong = BetaBinomial.fit([(other, total - label) for *_, other, label, total in trusted])
    ratios = [
        right.log_probability(other, total)
        + STRAY.log_probability(label, total - other)
        - right.log_probability(label, total)
        - wrong.log_probability(other, total - label)
        for *_, other, label, total in counted
    ]

    share = 0.02
    for _ in range(20):
        odds = log(share / (1 - share))
        probabilities = [1 / (1 + exp(-max(min(odds + ratio, 50), -50))) for ratio in ratios]
        share = min(max(fmean(probabilities), 1e-3), 0.3)

    judged = zip(counted, probabilities, strict=True)
    for (record, answer, other, label, total), probability in judged:
        if probability >= LIKELY:
            named = f"{label} say the label {', '.join(record.labels)!r:.40}"
            evidence = f"{other} of {total} responses say {answer!r:.40}, and {named}"
            yield Suspect("wrong_label", record, evidence, probability)


def _agreement(record: RowRecord) -> tuple[str, int, int, int] | None:
    """Return the most frequent answer beside the label, its count, the label's, and the total.

    None if there are too few answers to tell.
    """
    answers = sum((Counter(json.loads(draw.answers)) for draw in record.draws), Counter())
    total = answers.total()
    label = max(sum(answers[each] for each in record.labels), record.total("right"))
    others = Counter({each: count for each, count in answers.items() if each not in record.labels})
    answer, other = others.most_common(1)[0] if others else ("", 0)
    if not record.labels or other < LEAST_AGREEMENT * total or total < ENOUGH_RESPONSES:
        return None
    # What the reward takes for right may be written in several ways.
    return answer, min(other, total - label), label, total


# -- leaks


def leaks(records: Sequence[RowRecord]) -> Iterator[Suspect]:
    """Yield rows whose prompt gives the answer away, or that are solved without any working."""
    words = {record.row: set(_words(record.prompt)) for record in records}
    frequency = Counter(word for each in words.values() for word in each)
    lengths = [
        record.total("tokens") / record.total("responses")
        for record in records
        if record.total("right")
    ]
    usual = median(lengths) if lengths else 0.0

    for record in records:
        evidence = None
        for label in record.labels:
            evidence = evidence or _given_away(record.prompt, label, frequency, records)
        first = record.draws[0]
        length = first.tokens / first.responses
        at_once = first.right == first.responses >= ENOUGH_RESPONSES
        if evidence is None and at_once and usual >= LONG_WORKING and length < SHORT_SHARE * usual:
            evidence = (
                f"all {first.responses} responses were right at once, with {length:.0f} tokens"
                f" where right ones usually have {usual:.0f}"
            )
        if evidence:
            yield Suspect("leak", record, evidence)


def _given_away(
    prompt: str, label: str, frequency: Counter[str], records: Sequence[RowRecord]
) -> str | None:
    words = _words(label)
    places = [*re.finditer(rf"(?<![\w.]){re.escape(label)}(?!\w|\.\d)", prompt, re.IGNORECASE)]
    if not places or not words:
        return None
    for place in places:
        if cue := CUE.search(prompt[: place.start()]):
            said = prompt[cue.start() : place.end()]
            same = re.compile(rf"{re.escape(said)}(?!\w|\.\d)")
            # Rows with other labels have an instruction such as "Answer: yes or no", too.
            if all(label in each.labels for each in records if same.search(each.prompt)):
                return f"the prompt says {said!r}"
    others = min(frequency[word] for word in words) - 1
    if len(words) > 1 or len(label) > 1 and others < RARE_SHARE * len(records):
        return f"the prompt contains the label {label!r:.40}, and {others} other prompts do"
    return None


def _words(text: str) -> list[str]:
    return A_WORD.findall(text.casefold())


# -- duplicates


def duplicates(records: Sequence[RowRecord], held_out: Sequence[str] = ()) -> Iterator[Suspect]:
    """Yield rows whose prompt is equal or nearly equal to one with other labels, or held out."""
    texts = [record.prompt for record in records] + list(held_out)
    pairs = _pairs(texts)
    told: set[int] = set()
    both = pairs | {(second, first) for first, second in pairs}
    for index, other in sorted(both, key=lambda pair: (pair[0], -pair[1])):
        if index >= len(records) or index in told:
            continue
        record = records[index]

        kind = "equal to" if texts[index].split() == texts[other].split() else "nearly equal to"
        if other >= len(records):
            reason = f"{kind} a prompt of --eval_data: {texts[other][-80:]!r}"
        elif set(record.labels).isdisjoint(records[other].labels):
            near = records[other]
            reason = (
                f"{kind} {near.location or f'row {near.row}'}, and the labels are"
                f" {', '.join(record.labels)!r:.40} and {', '.join(near.labels)!r:.40}"
            )
        else:
            continue

        told.add(index)
        yield Suspect("duplicate", record, reason)


def _pairs(texts: Sequence[str]) -> set[tuple[int, int]]:
    """Return the pairs of texts, by index, that have the same numbers and nearly the same words."""
    from datasketch import MinHash, MinHashLSH

    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    words = [_words(text) for text in texts]
    counts = Counter(word for each in words for word in set(each))
    # An instruction that most prompts have says nothing of what they share beside it.
    common = {word for word, count in counts.items() if 2 * count > len(texts) > FEW_TEXTS}
    words = [[word for word in each if word not in common] for each in words]
    for index, each in enumerate(words):
        numbers = [word for word in each if word[0].isdigit()]
        short = each if len(each) < FEW_WORDS else []
        alike[(*numbers, "|", *short)].append(index)

    pairs = set()
    for indices in (each for each in alike.values() if len(each) > 1):
        if len(words[indices[0]]) < FEW_WORDS:
            pairs.update((indices[-1], other) for other in indices[:-1])  # held-out ones come last
            continue
        index = MinHashLSH(threshold=NEAR_SHARE - 0.2)  # so that hashing misses none
        for one in indices:
            hashed = MinHash()
            hashed.update_batch([word.encode() for word in words[one]])
            for other in index.query(hashed):
                a, b = set(words[one]), set(words[other])
                if len(a & b) >= NEAR_SHARE * len(a | b):
                    pairs.add((other, one))
            index.insert(one, hashed)
    return pairs


# -- rows that teach nothing


def dead(records: Sequence[RowRecord]) -> Iterator[Suspect]:
    """Yield rows that had no signal in any of several draws."""
    for record in records:
        draws = len(record.draws)
        if draws >= DRAWS_WITHOUT_SIGNAL and not any(draw.has_signal for draw in record.draws):
            kind = "too easy: all" if record.total("right") else "too hard: none"
            responses = f"{record.total('responses')} responses in {draws} draws"
            yield Suspect("dead", record, f"{kind} of {responses} were right")


def forgotten(records: Sequence[RowRecord]) -> Iterator[Suspect]:
    """Yield rows that were solved, and are not any more."""
    for record in records:
        last = record.draws[-1]
        best = max(record.draws, key=lambda draw: draw.right / draw.responses)
        fails = last.right == 0 and last.responses >= ENOUGH_RESPONSES
        if fails and 2 * best.right >= best.responses:
            before = f"{best.right} of {best.responses} responses were right in step {best.step}"
            now = f"none of {last.responses} in step {last.step}"
            yield Suspect("forgotten", record, f"{before}, {now}")
