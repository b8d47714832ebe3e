"""The recipes of docs/environments.md and docs/preferences.md, shortened."""

from math import isfinite

import pytest

from runs import train
from scripts.bench.recipes import ACCURACY, RECIPES, guessing

pytestmark = pytest.mark.slow


def test_a_tool_is_learned(tmp_path):
    """scripts/bench/recipes.py runs each recipe with several seeds, and four recipes more.

    test_environments.py has a game, and an agent that learns what the game learns.
    """
    figures = RECIPES["tool"](train, tmp_path, 2)
    assert {name: figure for name, figure in figures.items() if not figure.holds} == {}


def test_the_runs_of_the_chain_fit_together(tmp_path):
    """Each starts from the model of SFT, with its own file, and reports an accuracy.

    The tests of each trainer compare its steps with plain torch, and its student with the teacher.
    """

    def few_steps(command, world_size, flags, save_path):
        steps = 30 if save_path.name == "sft" else 2
        more = [f"--max_steps={steps}", "--logging_steps=1"]
        more += [f"--max_samples={steps * 128}", "--max_eval_samples=50"]
        rows = train(command, world_size, [*flags, *more], save_path)
        assert [row["step"] for row in rows] == [*range(1, steps + 1)]
        return rows

    figures = RECIPES["chain"](few_steps, tmp_path, 2)
    assert figures.keys() > ACCURACY.keys()
    assert all(isfinite(figure.value) for figure in figures.values())
    loss = figures["sft: loss of the last step"]
    assert loss.value < 3 * loss.below, "three fifths of the first one"


def test_the_agent_of_the_docs_plays(tmp_path):
    flags = [
        *guessing(tmp_path, 0),
        "--environment=",
        "--agent=scripts/agents/guess_number.py:play",
        "--max_steps=1",
    ]
    (row,) = train(
        "train_ppo",
        2,
        [*flags, "--rollout_batch_size=2", "--train_batch_size=32"],
        tmp_path / "run",
    )
    assert row["episodes/turns"] > 1 and row["episodes/failed"] == 0 < row["rollout/reward"]
