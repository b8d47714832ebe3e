"""Why: wrong rows decide what a run learns, and a row that is accused wrongly is lost."""

import json
import random

import pytest

from lightrft.extras.ledger.answers import answer_reader, labels_of
from lightrft.extras.ledger.records import Draw, RowRecord
from lightrft.extras.ledger.suspects import (
    BetaBinomial,
    dead,
    duplicates,
    forgotten,
    leaks,
    wrong_labels,
)


def draw(right: int, step: int = 1, *, answers=None, tokens: int = 800, responses: int = 8) -> Draw:
    reward = float(right)
    return Draw(step, 0, responses, right, reward, reward, tokens, 0, json.dumps(answers or {}))


def record(row: int, prompt: str, label: str, *draws: Draw) -> RowRecord:
    return RowRecord(row, f"data.jsonl:{row}", prompt, [label], list(draws or [draw(4)]))


def locations(found) -> list[str]:
    return [suspect.record.location for suspect in found]


def answered(label: str, truth: str, generator: random.Random, row: int) -> RowRecord:
    """A model that is right in a share of responses that differs by row, and else says anything."""
    rate = generator.betavariate(4, 3)
    common = str(generator.randrange(1000))  # each row has a mistake that is often made
    answers: dict[str, int] = {}
    for _ in range(16):
        wrong = common if generator.random() < 0.5 else str(generator.randrange(1000))
        answer = truth if generator.random() < rate else wrong
        answers[answer] = answers.get(answer, 0) + 1
    return record(
        row, f"question {row}", label, draw(answers.get(label, 0), answers=answers, responses=16)
    )


def test_planted_wrong_labels_are_found():
    generator = random.Random(0)
    planted = set(generator.sample(range(1000), 50))
    records = []
    for row in range(1000):
        truth = str(generator.randrange(1000))
        records.append(answered("none" if row in planted else truth, truth, generator, row))

    found = {suspect.record.row for suspect in wrong_labels(records)}
    assert len(found & planted) >= 0.8 * len(planted)
    assert len(found & planted) >= 0.8 * len(found)


def test_right_labels_are_not_accused():
    generator = random.Random(1)
    truths = [str(generator.randrange(1000)) for _ in range(500)]
    records = [answered(truth, truth, generator, row) for row, truth in enumerate(truths)]

    assert len(list(wrong_labels(records))) <= 5


def test_the_distribution_of_rates_is_recovered():
    generator = random.Random(0)
    rates = [generator.betavariate(2, 6) for _ in range(4000)]
    counts = [(sum(generator.random() < rate for _ in range(8)), 8) for rate in rates]
    fitted = BetaBinomial.fit(counts)

    assert (fitted.alpha, fitted.beta) == pytest.approx((2, 6), rel=0.1)


WORDS = "Tom buys apples at the market and gives some of them to his sister Anna every day"


@pytest.mark.parametrize(
    ("prompt", "label"),
    [
        ("What is 6 times 7? The answer is 42.", "42"),
        ("What is 6 times 7? (solution: 42)", "42"),
        ("Name the capital of France, which is Paris in the north.", "Paris"),
        (r"Compute 6 * 7. \boxed{42}", "42"),
    ],
)
def test_a_prompt_that_gives_the_answer_away_is_a_leak(prompt, label):
    others = [record(row, f"{WORDS} {row}", str(row)) for row in range(1000, 1500)]

    assert locations(leaks([record(1, prompt, label), *others])) == ["data.jsonl:1"] + locations(
        leaks(others)
    )


def test_a_longer_number_elsewhere_does_not_hide_a_leak():
    rows = [record(row, f"{WORDS}. The answer is {row}.", str(row)) for row in (4, 42)]

    assert locations(leaks(rows)) == ["data.jsonl:4", "data.jsonl:42"]


def test_a_label_is_looked_for_at_each_place_of_the_prompt():
    others = [record(row, f"{WORDS}: 3 and {row}", str(row)) for row in range(100, 140)]
    told = record(1, f"{WORDS}: 3 and 0. The answer is 3.", "3")

    assert "data.jsonl:1" in locations(leaks([told, *others]))


def test_a_number_that_many_prompts_have_is_no_leak():
    records = [record(row, f"{WORDS}: {row % 10} and 3", "3") for row in range(200)]

    assert locations(leaks(records)) == []


def test_a_row_that_is_solved_without_working_is_a_leak():
    usual = [record(row, WORDS, "x", draw(6, tokens=800)) for row in range(20)]
    quick = record(99, WORDS, "x", draw(8, tokens=80))

    assert locations(leaks([*usual, quick])) == ["data.jsonl:99"]


def test_near_duplicates_with_other_labels_are_found():
    one = record(1, f"{WORDS}, 5 in all. How many?", "5")
    near = record(2, f"{WORDS}, 5 in all. How many then?", "7")
    same_label = record(3, f"{WORDS}, 5 in all! How many?", "5")
    other_number = record(4, f"{WORDS}, 6 in all. How many?", "6")

    found = list(duplicates([one, near, same_label, other_number]))
    assert set(locations(found)) == {"data.jsonl:1", "data.jsonl:2", "data.jsonl:3"}
    assert "data.jsonl:4" not in locations(found)


def test_the_same_numbers_in_another_order_make_no_duplicates():
    rows = [record(1, f"{WORDS}, 3 of 5", "2"), record(2, f"{WORDS}, 5 of 3", "-2")]

    assert locations(duplicates(rows)) == []


def test_rows_that_are_held_out_too_are_found():
    rows = [record(1, f"{WORDS} 5", "5"), record(2, f"{WORDS} 6", "6")]

    (found,) = duplicates(rows, [f"{WORDS}  6"])
    assert (found.record.row, "--eval_data" in found.evidence) == (2, True)


def test_short_prompts_are_duplicates_only_if_they_are_equal():
    rows = [record(1, "27+58=", "85"), record(2, "58+27=", "85"), record(3, "27 + 58 =", "84")]

    assert locations(duplicates(rows)) == ["data.jsonl:1", "data.jsonl:3"]


def test_rows_without_any_signal_are_dead():
    hard = record(1, "a", "b", *[draw(0, step) for step in (1, 2, 3)])
    easy = record(2, "a", "b", *[draw(8, step) for step in (1, 2, 3)])
    alive = record(3, "a", "b", draw(0), draw(0), draw(1))
    young = record(4, "a", "b", draw(0), draw(0))

    found = list(dead([hard, easy, alive, young]))
    assert [(each.record.row, each.evidence[:8]) for each in found] == [
        (1, "too hard"),
        (2, "too easy"),
    ]


def test_rows_that_were_solved_once_are_forgotten():
    lost = record(1, "a", "b", draw(4, 1), draw(0, 9))
    kept = record(2, "a", "b", draw(4, 1), draw(1, 9))
    never = record(3, "a", "b", draw(3, 1), draw(0, 9))

    assert locations(forgotten([lost, kept, never])) == ["data.jsonl:1"]


@pytest.mark.parametrize(
    ("reward", "text", "answer"),
    [
        ("exact_match", " 85\n", "85"),
        ("number", "27 + 58 = 1,085.0", "1085"),
        ("gsm8k", "no number", None),
        ("math", r"so \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("math", "the answer is 42", "42"),
        ("choice", "The answer is (B)", "B"),
        ("number:0.9,length:-0.1", "5", "5"),
    ],
)
def test_answers_are_read_as_the_reward_reads_them(reward, text, answer):
    assert answer_reader(reward)(text) == answer


@pytest.mark.parametrize(
    ("reward", "label", "answers"),
    [
        ("math", r"\frac{1}{2}", [r"\frac{1}{2}"]),
        ("math", r"so \boxed{2\pi}", [r"2\pi"]),
        ("math", 0.5, ["1/2"]),
        ("gsm8k", "3 + 4 #### 7", ["7"]),
        ("exact_match", ["7", 8.5], ["7", "8.5"]),
        ("choice", "(b)", ["B"]),
        ("exact_match", {"a": 1}, []),
    ],
)
def test_labels_are_read_as_answers(reward, label, answers):
    assert labels_of(label, answer_reader(reward)) == answers


def test_a_row_that_the_reward_says_is_solved_is_not_accused():
    # the reward knows that 1/2 and 0.5 are equal, the texts do not
    others = [record(row, "q", "x", draw(6, answers={"x": 6, "y": 2})) for row in range(50)]
    equal = record(99, "q", "1/2", draw(8, answers={"0.5": 8}))

    assert locations(wrong_labels([*others, equal])) == []


def test_an_instruction_is_no_leak():
    rows = [
        record(row, f"{WORDS} {row}? Answer: yes or no", "yes no".split()[row % 2])
        for row in range(40)
    ]

    assert locations(leaks(rows)) == []


def test_a_common_instruction_makes_no_duplicates():
    system = " ".join(f"rule{number}" for number in range(100))
    topics = [f"{name} of {thing}" for name in ("capital", "river", "king") for thing in "abcdefgh"]
    rows = [record(row, f"{system} {topic}?", str(row)) for row, topic in enumerate(topics)]

    assert locations(duplicates(rows)) == []


def test_a_row_is_told_once():
    rows = [record(row, "what is this", str(row)) for row in range(30)]

    assert len(locations(duplicates(rows))) == 30


def test_a_function_of_the_user_has_no_answers():
    assert answer_reader("rewards.py:mine") is None
