"""Guard a rank of torchrun: end all processes of the rank when torchrun or the rank ends.

torchrun makes each rank the leader of a process group and ends the group by signals. It cannot do
so if it is killed itself, and it does not end the processes that a killed rank has started. The
guard is a process and not a thread of the rank, so that it can end a rank that hangs in native
code; it has its own session, so that signals to the group do not reach it. Linux only.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 0.5
"""Seconds between two checks."""
CLEANUP = 2.0
"""Seconds that the processes of a rank have to end by themselves and free shared resources."""


def main(rank: int, launcher: int) -> None:
    """Watch two processes by id, `rank` being the parent of this one; clean up if one ends."""
    while os.getppid() == rank and _parent(rank) == launcher:
        time.sleep(LOOK_SECONDS)
    if os.getppid() == rank:
        number = os.environ.get("RANK", "")
        sys.stderr.write(
            f"torchrun (pid {launcher}) ended without an error message: rank {number} (pid {rank})"
            " is killed\n"
        )
        os.kill(rank, signal.SIGKILL)

    # Whatever the rank has started is still in its process group, and gets a moment to clean up.
    deadline = time.monotonic() + CLEANUP
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(rank, 0)
            time.sleep(0.1)
        os.killpg(rank, signal.SIGKILL)


def _parent(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
