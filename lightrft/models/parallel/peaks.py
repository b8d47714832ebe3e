"""Peaks of accelerators, for plans and for the share that a run reaches."""

from dataclasses import dataclass

from lightrft.config.tables import table


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of an accelerator, according to the data sheet."""

    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 products, floating-point operations per second."""
    bandwidth: float
    """Bytes per second between memory and cores."""
    link: float
    """Bytes per second to the other devices of a node, in one direction."""
    network: float
    """Bytes per second to other nodes, in one direction: the share of one device in the node's."""


DEVICES = {name: Device(**peaks) for name, peaks in table("models/parallel/peaks").items()}


def known_device(name: str) -> str:
    """Return the key of DEVICES that is a word of a device's name, such as "NVIDIA H100 80GB HBM3".

    It is empty for others.
    """
    words = name.lower().replace("-", " ").split()
    return next((device for device in DEVICES if device in words), "")
