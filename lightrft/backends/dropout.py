"""Random numbers of a forward pass in training, which is what dropout draws."""

from typing import Any

import torch
from torch import nn

from lightrft.parallel.collectives import Axis
from lightrft.parallel.device import seed_generators


def draw_by_data_rank(module: nn.Module, data: Axis, device: torch.device) -> None:
    """Have `module` draw other numbers on each data rank while it trains, and the same on the ranks of one replica of data.

    The seed of a forward pass comes from torch's own generator. That one goes on equally on all ranks, so that what is made
    later is initialised equally, and checkpoints hold it, so that a resumed run draws what it would have drawn.
    """
    kept: list[tuple[Any, Any]] = []
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)

    def begin(*_: Any) -> None:
        if module.training:
            seed = int(torch.randint(2**62, ())) + data.rank
            kept.append((torch.get_rng_state(), accelerator and accelerator.get_rng_state(device)))
            seed_generators(seed, device)

    def end(*_: Any) -> None:
        if kept:
            host, own = kept.pop()
            torch.set_rng_state(host)
            if accelerator:
                accelerator.set_rng_state(own, device)

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)
