"""Every strategy passes the contract: ours, one written from nothing, one that overrides a hook, on one rank and on several."""

import pytest

from lightrft.strategy import FSDPStrategy, get_strategy
from lightrft.strategy.testing import CASES, run_contract
from ranks import run_ranks
from strategy.own_strategies import Counting, DataParallelStrategy

ZERO = type(get_strategy({}))
STRATEGIES = {
    "fsdp-1": (1, FSDPStrategy, {}),
    "fsdp-2": (2, FSDPStrategy, {}),
    "own-2": (2, DataParallelStrategy, {}),
    "one-hook-2": (2, Counting, {}),
    "zero0-2": (2, ZERO, {"zero_stage": 0}),
    "zero1-2": (2, ZERO, {"zero_stage": 1}),
    "zero2-1": (1, ZERO, {"zero_stage": 2}),
    "zero2-2": (2, ZERO, {"zero_stage": 2}),
    "zero3-2": (2, ZERO, {"zero_stage": 3}),
}
"""Name -> ranks, strategy, its arguments."""
FAST = {"fsdp-1", "own-2"}


PARAMS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]


@pytest.fixture(scope="module", params=PARAMS)
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Of every rank: case -> traceback. One start for all cases."""
    world_size, strategy, args = STRATEGIES[request.param]
    return run_ranks(world_size, _contract, strategy, args, timeout=400)


def _contract(strategy: type, args: dict) -> dict[str, str]:
    return run_contract(strategy, **args)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_contract(case: str, outcomes: list[dict[str, str]]) -> None:
    failures = [f"rank {rank}:\n{outcome[case]}" for rank, outcome in enumerate(outcomes) if outcome[case]]
    assert not failures, "\n".join(failures)
