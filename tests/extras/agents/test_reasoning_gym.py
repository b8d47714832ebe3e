"""The environment `reasoning_gym`: a task with several attempts."""

import asyncio

import pytest

from lightrft.extras.agents.programs import environments


@pytest.mark.parametrize(
    ("attempts", "rewards"),
    [
        (["7"], [1.0]),
        (["3", "", "7"], [0.0, 0.0, 0.64]),
        (["<answer>77</answer>", "77", "7"], [0.5, 0.0, 0.14]),  # the scorer gives 77 a half
        (["6", "77", "78", "7"], [0.0, 0.4, 0.0, 0.112]),
    ],
)
def test_the_best_attempt_counts_and_later_ones_less(attempts, rewards):
    async def play():
        return [await game.step(attempt) for attempt in attempts]

    game = environments["reasoning_gym"]()
    row = {
        "prompt": "p",
        "label": "7",
        "question": "p",
        "answer": "7",
        "metadata": {"source_dataset": "count_bits"},
    }
    assert game.reset(**row, options={"min_n": 1}) is None
    observations, got, done = zip(*asyncio.run(play()), strict=True)
    assert got == pytest.approx(rewards) and done == (*[False] * (len(attempts) - 1), True)
    assert set(observations[:-1]) <= {"\nWrong.\n"}
