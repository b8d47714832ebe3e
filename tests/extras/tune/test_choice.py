"""Why: a choice between noisy runs is worth what its probability says."""

import math

import pytest

from lightrft.extras.tune.choice import beliefs


def student_t_of_two(t: float) -> float:
    """Distribution function of Student's t with two degrees of freedom, in closed form."""
    return 0.5 + t / (2 * math.sqrt(2 + t * t))


def test_the_probability_of_two_is_that_of_students_t():
    # means 0.8 and 0.7; squares 2 x 0.0002 of 2 degrees of freedom: s^2 = 0.0002; t = 0.1 / s = 7.07
    one, other = beliefs([[0.79, 0.81], [0.69, 0.71]], minimize=False)

    t = 0.1 / math.sqrt(0.0002 * (1 / 2 + 1 / 2))
    assert one.probability == pytest.approx(student_t_of_two(t), abs=0.003)
    assert one.probability + other.probability == pytest.approx(1)
    # the quantile of 95 % of t with two degrees of freedom is 2.920
    assert one.high - one.mean == pytest.approx(2.920 * math.sqrt(0.0002 / 2), rel=0.02)
    assert one.mean - one.low == pytest.approx(one.high - one.mean, rel=0.02)


def test_equal_results_are_equally_probable():
    found = beliefs([[0.5, 0.7], [0.7, 0.5], [0.6, 0.6]], minimize=False)

    assert [each.probability for each in found] == pytest.approx([1 / 3] * 3, abs=0.01)


def test_lower_can_be_better():
    one, other = beliefs([[0.79, 0.81], [0.69, 0.71]], minimize=True)

    assert one.probability < 0.02 < 0.98 < other.probability


def test_one_seed_says_nothing_about_the_noise():
    assert beliefs([[0.8], [0.7]], minimize=False) is None


def test_a_repeated_result_lends_its_noise_to_one_that_is_not():
    one, other = beliefs([[0.79, 0.81], [0.75]], minimize=False)

    assert other.high - other.low == pytest.approx(math.sqrt(2) * (one.high - one.low), rel=0.02)


def test_equal_results_of_all_seeds_say_nothing_about_the_noise():
    assert beliefs([[1.0, 1.0], [0.5, 0.5]], minimize=False) is None
