"""Choose the network interface for gloo: the one between this node and the first."""

import ipaddress
import os
import socket

import psutil
import torch.distributed as dist
from loguru import logger

from lightrft.models.parallel.gloo import INTERFACE


def master_address() -> str:
    """Return the address of MASTER_ADDR as this node resolves it; empty if it cannot."""
    try:
        return socket.getaddrinfo(os.environ["MASTER_ADDR"], 0, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return ""


def choose_interface(arrivals: dist.Store, world_size: int) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches MASTER_ADDR.

    Nothing is set if the user has set it, or if all ranks are on one node. `arrivals` has, under
    the number of each rank, the address of MASTER_ADDR as that rank's node resolves it. On the
    first node this is often a loopback address, and then the address that other nodes use is taken.
    Without one, all ranks are on one machine, and nothing is set.
    """
    if INTERFACE in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return

    address = master_address()
    if not _is_reachable(address):
        arrived = arrivals.multi_get(list(map(str, range(world_size))))
        hosts = (encoded.decode() for encoded in arrived)
        address = next(filter(_is_reachable, hosts), "")

    name = _interface_towards(address) if address else ""
    if name:
        os.environ[INTERFACE] = name
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.debug(
                f"gloo listens on the interface {name}, which reaches {address} (MASTER_ADDR)"
            )


def interface_problem() -> str:
    """Return why other nodes cannot connect to gloo on this one; empty if they can.

    They cannot if the host's name resolves to a loopback address, or to none.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""

    if INTERFACE in os.environ or _is_reachable(address):
        return ""

    return (
        f"{name} resolves to {address or 'no address'}, where other nodes cannot connect to gloo. A"
        " run over several nodes takes the interface that reaches MASTER_ADDR instead; if it finds"
        f" none, export {INTERFACE}=eth0, or the interface between the nodes according to `ip"
        " route`, on every node"
    )


def _is_reachable(address: str) -> bool:
    return bool(address) and not ipaddress.ip_address(address).is_loopback


def _interface_towards(address: str) -> str:
    """Return the name of the interface that sends packets to `address`.

    It is empty without a route or for loopback.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        try:
            probe.connect((address, 1))
        except OSError:
            return ""
        source = probe.getsockname()[0]

    if not _is_reachable(source):
        return ""

    interfaces = psutil.net_if_addrs().items()
    for name, addresses in interfaces:
        if source in [listed.address.partition("%")[0] for listed in addresses]:
            return name
    return ""
