"""Open the address of a server on one rank, and let all ranks know whether that worked."""

from collections.abc import Callable
from typing import TypeVar

from lightrft.config.sections import ServerSection
from lightrft.models.parallel.collectives import Axis

T = TypeVar("T")


def listener_of_rank_0(
    listen: Callable[[str, int], T], section: ServerSection, world: Axis
) -> T | None:
    """Return what `listen` opens at the address on rank 0; None on the other ranks.

    Raise ValueError on all ranks if the address is in use.
    """
    listener = None
    problem = ""
    if world.rank == 0:
        try:
            listener = listen(section.host, section.port)
        except OSError as error:
            problem = f"--host {section.host} --port {section.port}: {error.strerror or error}"

    if problem := world.broadcast(problem):
        raise ValueError(problem)
    return listener
