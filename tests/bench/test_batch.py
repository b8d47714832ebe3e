"""Why: the steps to a target are read from curves, and compared with the equation of the paper."""

import json
import math

import pytest

from scripts.bench.batch import TASKS, TRIALS, Reached, reached_at, rows_of


def test_the_target_is_reached_between_two_means_of_three_evaluations(tmp_path):
    values = [0.1, 0.2, 0.3, 0.4, 0.5]  # means 0.2, 0.3, 0.4 at steps 4, 6, 8
    rows = [
        {"step": 2 * place + 2, f"eval/avg_at_{TRIALS}": each} for place, each in enumerate(values)
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 12}])
    (tmp_path / "metrics.jsonl").write_text(text)

    assert reached_at(tmp_path, 0.35) == pytest.approx(7)
    assert reached_at(tmp_path, 0.1) == pytest.approx(2)  # from nothing at step 0
    assert math.isinf(reached_at(tmp_path, 0.45))


def test_steps_are_predicted_by_the_first_batch():
    first, other = rows_of(
        TASKS["addition"],
        [Reached(64, 1e-3, [290.0, 310.0], 192.0), Reached(192, 1e-3, [180.0], 100.0)],
    )
    assert first.endswith("| 192 | 300 (290 to 310) |  |")
    # (1 + 192 / 192) / (1 + 192 / 64) = 1/2
    assert other.endswith("| 100 | 180 (180 to 180) | 150 (+20%) |")
