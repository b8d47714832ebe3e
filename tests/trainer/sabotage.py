"""An entrypoint with a fault: SABOTAGE=phase:rank:how makes one rank kill itself, raise, sleep or hang when it announces a phase.

    SABOTAGE=train:1:kill torchrun --nproc-per-node 2 tests/trainer/sabotage.py [flags of train_ppo]
"""

import ctypes
import os
import signal
import subprocess
import time


def spoil(how: str) -> None:
    if how == "kill":
        time.sleep(0.3)  # what rank 0 announces passes through itself
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise OSError("the disk is on fire")
    elif how == "sleep":
        time.sleep(1000)
    elif how == "hang":
        print("hangs beside", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        ctypes.PyDLL(None).sleep(1000)  # Python's lock is kept


def main(flags: list[str] | None = None) -> None:
    phase, rank, how = os.environ["SABOTAGE"].split(":")
    mine = os.environ["RANK"] == rank
    if mine and phase == "import":
        spoil(how)

    from lightrft.cli import train_ppo
    from lightrft.strategy import StrategyBase

    announce = StrategyBase.announce

    def spoiled(strategy: StrategyBase, name: str) -> None:
        announce(strategy, name)
        if mine and name == phase:
            spoil(how)

    StrategyBase.announce = spoiled
    train_ppo.main(flags)


if __name__ == "__main__":
    main()
