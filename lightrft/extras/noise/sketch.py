"""Sketches of gradients: a few counters whose products estimate the products of the gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

COUNTERS = 16_384
"""Counters of a sketch. A product of two gradients has an error of about sqrt(2 / COUNTERS) of the
product of their norms."""
ROWS = 64
"""Rows of counters that have signs of their own."""
SKETCHED_AT_ONCE = ROWS * COUNTERS
"""Elements that are added at once."""
STRIDE = 7919
"""Counters by which each block is moved against the one before; prime to COUNTERS."""


class Sketcher:
    """Adds gradients to sketches, with random signs that depend on nothing but a seed.

    It is the count sketch of Charikar, Chen and Farach-Colton (2002): each element is added to one
    counter with a random sign, so the dot product of two sketches has the dot product of the
    gradients as its expectation. Sketches are linear: they add up as gradients do, also over ranks.
    """

    def __init__(self, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        # of floats, because products of two types take several times as long
        signs = torch.randint(2, (ROWS, COUNTERS), generator=generator) * 2.0 - 1
        self.signs = signs.to(device)

    def add(self, counters: Tensor, gradient: Tensor, first_block: int) -> None:
        """Add a gradient of any shape to counters [COUNTERS].

        The blocks of all gradients are counted from 0; `first_block` is this one's first.
        """
        for number, block in enumerate(
            gradient.detach().flatten().split(SKETCHED_AT_ONCE), first_block
        ):
            if missing := -len(block) % COUNTERS:
                block = F.pad(block, (0, missing))
            rows = block.view(-1, COUNTERS)
            signed = (rows * self.signs[: len(rows)]).sum(0)
            # Equal places of two blocks have equal signs, so they must not share a counter.
            counters += signed.roll(number * STRIDE)


def num_blocks(num_elements: int) -> int:
    """Return the number of blocks of a gradient."""
    return -(-num_elements // SKETCHED_AT_ONCE)
