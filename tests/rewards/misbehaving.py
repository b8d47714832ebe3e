"""A reward function that does what the response says.

It is light, because worker processes import it.
"""

import ctypes
import os
import signal
import subprocess
import time

from lightrft.core.samples import Sample


def obey(samples: list[Sample], label: list[str], **columns) -> list:
    """Return 1 for `right`, or do as the response says."""
    return [_obeyed(sample, right) for sample, right in zip(samples, label, strict=True)]


async def obey_slowly(samples: list[Sample], label: list[str], **columns) -> list:
    return obey(samples, label)


def only_alone(samples: list[Sample], label: list[str], **columns) -> list:
    if len(samples) > 1:
        raise ValueError("one at a time")
    return obey(samples, label)


def _obeyed(sample: Sample, right: str) -> object:
    word, _, rest = sample.text.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "hang":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    elif word == "hang_in_c":
        ctypes.CDLL(None).pause()
    elif word == "raise":
        raise KeyError(rest)
    elif word == "exit":
        raise SystemExit(3)
    elif word == "die":
        os._exit(3)
    elif word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif word == "crash_once" and not os.path.exists(rest):
        open(rest, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "fill":
        return float(len(bytearray(8_000_000_000)))
    elif word == "nan":
        return float("nan")
    elif word == "child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(rest, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    elif word == "write":
        for file in range(3, 20):
            if os.path.exists(f"/proc/self/fd/{file}") and os.readlink(
                f"/proc/self/fd/{file}"
            ).startswith("socket:"):
                os.write(file, bytes.fromhex(rest))
    elif word == "drip":
        while True:
            _obeyed(Sample(sample.prompt, 0, [], [], "write 00", ""), right)
            time.sleep(0.001)
    elif word == "print":
        raise KeyError("a" * 20_000_000)
    elif word == "process":
        return float(os.getpid())
    elif word == "alarm":  # as math-verify limits its time
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return 1.0
    elif word == "modules":
        import sys

        return float("torch" in sys.modules)

    return float(sample.text == right)
