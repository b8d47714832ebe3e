"""Seed the random numbers that dropout draws in a forward pass."""

from typing import Any

import torch
from torch import nn

from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import seed_generators


def draw_by_data_rank(module: nn.Module, data: Axis, device: torch.device) -> None:
    """Make `module` draw different random numbers on each data rank in training.

    The ranks of a data replica draw equal ones. The seed of a forward pass comes from torch's own
    generator. It advances equally on all ranks, so modules made later are initialised equally, and
    checkpoints contain it, so a resumed run draws the same numbers.
    """
    rng_states: list[tuple[Any, Any]] = []
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)

    def begin(*_: Any) -> None:
        # Evaluation draws nothing, and must not advance the generator either.
        if module.training:
            seed = int(torch.randint(2**62, ())) + data.rank
            rng_states.append(
                (torch.get_rng_state(), accelerator and accelerator.get_rng_state(device))
            )
            seed_generators(seed, device)

    def end(*_: Any) -> None:
        if rng_states:
            host, own = rng_states.pop()
            torch.set_rng_state(host)
            if accelerator:
                accelerator.set_rng_state(own, device)

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)
