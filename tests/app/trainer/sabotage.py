"""An entrypoint with a fault: one rank fails when it announces a phase.

SABOTAGE=phase:rank:how makes that rank kill itself, raise, sleep, hang,
fill a disk or be asked to end by SIGTERM.

`how` may also be `lose`, which kills the rank and its launcher; a rank of * is any.
SABOTAGE=phase:rank:how:4 waits for the fourth time. With 3@phase:... it happens only among three
ranks; several are separated by commas.

    SABOTAGE=train:1:kill torchrun --nproc-per-node 2 tests/app/trainer/sabotage.py [flags of train_ppo]
"""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path


def spoil(how: str) -> None:
    if how in ("kill", "lose"):
        time.sleep(0.3)  # what rank 0 announces passes through itself
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "lose":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise OSError("the disk is on fire")
    elif how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "fill":
        Path("/dev/full").write_text("as on a full disk")
    elif how == "sleep":
        time.sleep(1000)
    elif how == "hang":
        beside = subprocess.Popen(["sleep", "1000"])
        # at once, as other ranks write to the same pipe
        os.write(1, f"\nhangs beside {beside.pid}\n".encode())
        ctypes.PyDLL(None).sleep(1000)  # Python's lock is kept


def main(flags: list[str] | None = None) -> None:
    faults = [fault.rpartition("@") for fault in os.environ["SABOTAGE"].split(",")]
    fault = next(
        (fault for size, _, fault in faults if size in ("", os.environ["WORLD_SIZE"])),
        "none:0:none",
    )
    phase, rank, how, *time_of = fault.split(":")
    earlier = iter(range(int(time_of[0]) - 1 if time_of else 0))
    before = ""
    mine = rank in ("*", os.environ["RANK"])
    if mine and phase == "import":
        spoil(how)

    from lightrft.app.cli import MAINS
    from lightrft.strategy import StrategyBase

    announce = StrategyBase.announce

    def spoiled(strategy: StrategyBase, name: str) -> None:
        nonlocal before
        announce(strategy, name)
        begins = name == phase and not before.startswith(f"{phase}/")
        before = name
        if mine and begins and next(earlier, None) is None:
            spoil(how)

    StrategyBase.announce = spoiled
    MAINS["train_ppo"](flags)


if __name__ == "__main__":
    main()
