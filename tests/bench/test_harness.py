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
    pairs = [(block(3 * MB), bytearray(3000)) for _ in range(40)]
    between = [small for _, small in pairs]
    del pairs

    def blocks_one_after_another():
        for step in range(40):
            block(3 * MB - step * MB // 20)

    peak = peak_of(blocks_one_after_another)
    assert len(between) == 40
    return peak


def test_the_peak_of_one_block_at_a_time_is_that_of_the_largest():
    (peak,) = run_ranks(1, peak_after_a_heap_with_holes)
    assert 2.9 * MB < peak < 3.5 * MB
