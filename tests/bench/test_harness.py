"""Why: tests hold bounds on peaks, so a peak must not depend on what the process did before."""

import torch

from ranks import run_ranks
from scripts.bench.harness import peak_of

MB = 2**20


def block(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def peak_after_a_heap_with_holes() -> int:
    for _ in range(3):
        block(31 * MB)  # glibc takes blocks of this size from the heap afterwards
    pairs = [(block(24 * MB), bytearray(3000)) for _ in range(15)]
    between = [small for _, small in pairs]
    del pairs

    def blocks_one_after_another():
        for step in range(15):
            block(24 * MB - step * MB)

    peak = peak_of(blocks_one_after_another)
    assert len(between) == 15
    return peak


def test_the_peak_of_one_block_at_a_time_is_that_of_the_largest():
    """The kernel counts pages for each CPU apart, so a peak is right to some hundred kB."""
    (peak,) = run_ranks(1, peak_after_a_heap_with_holes)
    assert 23.2 * MB < peak < 25 * MB
