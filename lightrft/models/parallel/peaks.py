"""Peaks of accelerators, for plans and for the share that a run reaches."""

from dataclasses import dataclass


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


DEVICES = {
    "a100": Device(80e9, 312e12, 2.04e12, 300e9, 25e9),
    "h100": Device(80e9, 989e12, 3.35e12, 450e9, 50e9),
    "h200": Device(141e9, 989e12, 4.8e12, 450e9, 50e9),
    "b200": Device(180e9, 2250e12, 8.0e12, 900e9, 50e9),
    "l4": Device(24e9, 121e12, 0.3e12, 32e9, 3e9),
}
"""NVIDIA's data sheets for the SXM modules and the L4; the L4's link is PCIe 4.0.

Networks are one adapter per device as in NVIDIA's DGX systems: 200 Gbit/s with A100, 400 with later
ones; for the L4 a cloud's 100 Gbit/s for four.
"""


def known_device(name: str) -> str:
    """Return the key of DEVICES that is a word of a device's name, such as "NVIDIA H100 80GB HBM3".

    It is empty for others.
    """
    words = name.lower().replace("-", " ").split()
    return next((device for device in DEVICES if device in words), "")
