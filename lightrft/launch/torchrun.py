"""Plug-in of torchrun: a run that a signal stops ends with one line and the exit code of the signal, not with a traceback.

torchrun itself passes Ctrl-C and SIGTERM on to the ranks, waits for them, and then raises. Nothing that a rank does can change
that, so this module is loaded by torchrun, through the entry point `torchrun.handlers`. It does nothing for other programs.
"""

import signal
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install() -> Callable[[Any], NoReturn]:
    """Set the hook in a torchrun that starts a module of lightrft; return what torchrun registers as a rendezvous backend."""
    if any(argument.startswith("lightrft.") for argument in sys.argv[1:]):
        sys.excepthook = partial(_end, sys.excepthook)
    return _no_backend


def _end(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if kind.__name__ != "SignalException":
        before(kind, error, trace)
        return
    number = signal.Signals(error.sigval)  # type: ignore[attr-defined]
    sys.stderr.write(f"torchrun: stopped by {number.name}\n")
    raise SystemExit(128 + number)


def _no_backend(parameters: Any) -> NoReturn:
    raise ValueError("lightrft is a plug-in of torchrun and no rendezvous backend: use --rdzv-backend c10d")
