"""Plug-in of torchrun: a run that a signal stops has time for a checkpoint, and no traceback.

torchrun passes Ctrl-C and SIGTERM on to the ranks, kills them after 30 seconds, and then raises. A
step may take longer, and nothing that a rank does can change that. So torchrun loads this module,
through the entry point `torchrun.handlers`. It does nothing for other programs.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable with the seconds that torchrun waits, unless --shutdown-timeout is set."""
USER_ERROR = 2
LONG_ENOUGH = "600"
"""Seconds for the end of a step and a checkpoint. A second Ctrl-C ends the ranks at once."""

LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors.error_handler",
    "torch.distributed.elastic.agent.server.api",
)
"""Loggers of torchrun that repeat a failure in other words, or log while a signal ends it."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install() -> Callable[[Any], NoReturn]:
    """Prepare a torchrun that starts a module of lightrft.

    Torchrun registers what this returns as a rendezvous backend.
    """
    if any(f"{argument}.".startswith("lightrft.") for argument in sys.argv[1:]):
        os.environ.setdefault(SHUTDOWN_SECONDS, LONG_ENOUGH)
        sys.excepthook = partial(_end, sys.excepthook)
        # What failed is told by the rank, and once more in the last line.
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return _no_backend


def _end(
    before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Say in one line why torchrun ends; any other error is left to `before`."""
    if kind.__name__ == "SignalException":
        number = signal.Signals(error.sigval)  # type: ignore[attr-defined]
        sys.stderr.write(f"torchrun: stopped by {number.name}\n")
        raise SystemExit(128 + number)
    if kind.__name__ != "ChildFailedError":
        before(kind, error, trace)
        return

    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
    code = failure.exitcode
    end = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    # An error that the user can correct was told in whole by the first rank of each machine.
    told = failure.message
    told = str(told["message"] if isinstance(told, dict) else told).strip().splitlines()
    cause = f": {told[-1]}" if told and code != USER_ERROR else ""
    sys.stderr.write(f"torchrun: rank {rank} ended first, with {end}{cause}\n")
    raise SystemExit(code if code > 0 else 128 - code)


def _no_backend(parameters: Any) -> NoReturn:
    raise ValueError(
        "lightrft is a plug-in of torchrun and no rendezvous backend: use --rdzv-backend c10d"
    )
