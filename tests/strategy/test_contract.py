"""Every strategy passes the contract: ours, one written from nothing, one that overrides a hook, on
one rank and on several.
"""

import inspect
from pathlib import Path

import pytest

from lightrft.strategy import FSDPStrategy
from lightrft.strategy.testing import CASES, main, run_contract
from ranks import run_ranks
from strategy import user_strategies
from strategy.user_strategies import Counting, DataParallelStrategy
from strategy.zero import DeepSpeedStrategy

STRATEGIES = {
    "fsdp-2": (2, FSDPStrategy, {}),
    "replicas-2": (2, FSDPStrategy, {"dp_replicate": 0}),
    "own-2": (2, DataParallelStrategy, {}),
    "one-hook-1": (1, Counting, {}),
    "zero0-2": (2, DeepSpeedStrategy, {"zero_stage": 0}),
    "zero1-2-host": (2, DeepSpeedStrategy, {"zero_stage": 1, "adam_offload": True}),
    "zero2-1-bf16": (1, DeepSpeedStrategy, {"zero_stage": 2, "bf16": True, "tolerance": 2e-2}),
    "zero3-2": (2, DeepSpeedStrategy, {"zero_stage": 3}),
}
"""Name -> ranks, strategy, its arguments. The one with a hook of its own is FSDP2 on one rank
beside that."""
FAST = {"own-2"}


PARAMS = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES
]


@pytest.fixture(scope="module", params=PARAMS)
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Of every rank: case -> traceback. One start for all cases."""
    world_size, strategy, args = STRATEGIES[request.param]
    return run_ranks(world_size, _contract, strategy, args, timeout=400)


def _contract(strategy: type, args: dict) -> dict[str, str]:
    return run_contract(strategy, **args)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_contract(case: str, outcomes: list[dict[str, str]]) -> None:
    failures = [
        f"rank {rank}:\n{outcome[case]}" for rank, outcome in enumerate(outcomes) if outcome[case]
    ]
    assert not failures, "\n".join(failures)


def test_the_documentation_shows_these_strategies():
    """Word for word, so that what users copy is what passes; the whole one has less than a hundred
    lines.
    """
    page = Path(__file__).parents[2].joinpath("docs", "extending.md").read_text()
    shown = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    for strategy in (DataParallelStrategy, Counting):
        source = inspect.getsource(strategy)
        assert any(block.endswith(source) for block in shown)
        assert source.count("\n") < 100


@pytest.mark.slow
def test_the_contract_from_the_command_line(tmp_path):
    """Of a strategy in a file, with an argument. It fails where the strategy is wrong."""
    (tmp_path / "mine.py").write_text(inspect.getsource(user_strategies) + WRONG)
    assert run_ranks(
        1, main, [f"{tmp_path}/mine.py:DataParallelStrategy", "bf16=false", "tolerance=1.0e-4"]
    ) == [0]
    assert run_ranks(2, main, [f"{tmp_path}/mine.py:Averaging"])[0] > 5


WRONG = '''

class Averaging(DataParallelStrategy):
    """Half the sum, as if two ranks had it averaged."""

    def accumulate(self, loss, model, last):
        super().accumulate(loss / 2, model, last)
'''
