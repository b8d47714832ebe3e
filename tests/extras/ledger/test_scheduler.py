"""Why: rows without a signal cost as many tokens as others, and teach nothing."""

from collections import Counter
from pathlib import Path

import pytest

from lightrft.extras.ledger.records import read_ledger
from runs import PPO, prepare, repeatable, rows_of, train

pytestmark = pytest.mark.slow

HALF = '''
def half(samples, label, **columns):
    """Odd labels are never right; to even ones every other response is."""
    return [float(int(right) % 2 == 0 and index % 2) for index, right in enumerate(label)]
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    flags = [flag for flag in prepare(folder) if not flag.startswith("--reward")]
    (folder / "half.py").write_text(HALF)
    reward = f"--reward={folder / 'half.py'}:half"
    return [
        *flags,
        *PPO,
        reward,
        "--reward_workers=0",
        "--ledger",
        "--scheduler=ledger",
        "--save_steps=6",
    ]


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train("train_ppo", 1, [*inputs, "--max_steps=12"], folder)
    return folder


def test_rows_with_a_signal_are_drawn_more_often(run):
    records, _ = read_ledger(run)
    draws = Counter()
    for record in records:
        draws[int(record.labels[0]) % 2] += len(record.draws)

    assert draws[0] > 2 * draws[1]


def test_a_step_draws_each_row_once(run):
    records, _ = read_ledger(run)
    steps = Counter((draw.step, record.row) for record in records for draw in record.draws)

    assert set(steps.values()) == {1}


def test_a_resumed_run_draws_the_same(inputs, run, tmp_path):
    train("train_ppo", 1, [*inputs, "--max_steps=6"], tmp_path)
    train("train_ppo", 1, [*inputs, "--max_steps=12", "--load_checkpoint"], tmp_path)

    assert repeatable(rows_of(tmp_path)) == repeatable(rows_of(run))


def test_two_ranks_draw_the_same(inputs, run, tmp_path):
    train("train_ppo", 2, [*inputs, "--max_steps=4"], tmp_path)

    for mine, theirs in zip(rows_of(tmp_path), rows_of(run), strict=False):
        assert mine["rollout/reward"] == pytest.approx(theirs["rollout/reward"], rel=1e-6)
