"""Random states of one rank: Python, numpy, torch, and the accelerator."""

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states as tensors and plain types, which can be loaded without unrestricted
    pickle.
    """
    _, keys, *rest = np.random.get_state()
    numpy = (torch.from_numpy(keys.astype(np.int64)), *rest)
    states = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)
