"""Plug-in of torchrun: a run that a signal stops has time for a checkpoint, and no traceback.

torchrun passes Ctrl-C and SIGTERM on to the ranks, kills them after 30 seconds, and then raises. A
step may take longer, and nothing that a rank does can change that. So torchrun loads this module,
through the entry point `torchrun.handlers`. It does nothing for other programs.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable with the seconds that torchrun waits, unless --shutdown-timeout is set."""
LONG_ENOUGH = "600"
"""Seconds for the end of a step and a checkpoint. A second Ctrl-C ends the ranks at once."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install() -> Callable[[Any], NoReturn]:
    """Prepare a torchrun that starts a module of lightrft.

    Torchrun registers what this returns as a rendezvous backend.
    """
    if any(argument.startswith("lightrft.") for argument in sys.argv[1:]):
        os.environ.setdefault(SHUTDOWN_SECONDS, LONG_ENOUGH)
        sys.excepthook = partial(_end, sys.excepthook)
    return _no_backend


def _end(
    before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if kind.__name__ != "SignalException":
        before(kind, error, trace)
        return
    number = signal.Signals(error.sigval)  # type: ignore[attr-defined]
    sys.stderr.write(f"torchrun: stopped by {number.name}\n")
    raise SystemExit(128 + number)


def _no_backend(parameters: Any) -> NoReturn:
    raise ValueError(
        "lightrft is a plug-in of torchrun and no rendezvous backend: use --rdzv-backend c10d"
    )
