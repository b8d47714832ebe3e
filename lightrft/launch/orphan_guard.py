"""A process beside each rank of torchrun: when torchrun or the rank ends, whatever kills it, nothing of the rank remains.

torchrun makes each rank the leader of a process group and ends that by signals. It cannot when it is killed itself; and what a
killed rank has started, it forgets. The guard is no thread of the rank, so a rank that hangs in native code ends too, and it
is in a session of its own, so the signals for the group leave it alone. Linux only.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

BEAT = 0.5
"""Seconds between two looks."""
CLEANUP = 2.0
"""Seconds in which the processes that a rank has started may end by themselves, and free what they share."""


def main(rank: int, launcher: int) -> None:
    """Both are process ids; `rank` is the parent of this one."""
    while os.getppid() == rank and _parent(rank) == launcher:
        time.sleep(BEAT)
    if os.getppid() == rank:
        number = os.environ.get("RANK", "")
        sys.stderr.write(f"torchrun (pid {launcher}) ended without a word: rank {number} (pid {rank}) is killed\n")
        os.kill(rank, signal.SIGKILL)
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
