"""What benchmarks share: their flags, ranks in processes of their own, turns, and peak memory."""

import argparse
import ctypes
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD: larger blocks are mappings of their own, unless the heap has a hole."""
LARGE = 2**16
LARGEST_HOLE = 2**30
"""Bytes of the smallest and the largest hole that peak_of() takes."""
PR_SET_THP_DISABLE = 41
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def parser_of(description: str | None, flags: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Return a parser with these flags: flag -> default, or a pair of the default and the help.

    A flag has the type of the default; one with a list takes several values.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, entry in flags.items():
        default, said = entry if isinstance(entry, tuple) else (entry, None)
        several = isinstance(default, list)
        parser.add_argument(
            flag,
            type=type(default[0] if several else default),
            nargs="+" if several else None,
            default=default,
            help=said,
        )

    return parser


def on_ranks(number: int, script: str, arguments: Sequence[str]) -> str:
    """Run a script on that many ranks with torchrun; return all that they print.

    The text goes to stderr, too, so that a benchmark's own lines are alone in stdout.
    """
    command = [*TORCHRUN, f"--nproc-per-node={number}", script, *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(ran.stdout, end="", file=sys.stderr)
    ran.check_returncode()
    return ran.stdout


def results_of_ranks(
    ranks: int, function: Callable[..., None], *args: Any, method: str = "fork"
) -> list[Any]:
    """Call `function(rank, store, results, *args)` in a process for each rank.

    Return what each sends, as it comes. `store` is the address of a store to meet at; `results` is
    a Connection.
    """
    context = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        processes = [
            context.Process(target=function, args=(rank, store, sending, *args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = [receiving.recv() for _ in processes]
        for process in processes:
            process.join()

    return found


def in_turn(ways: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[Any]]:
    """Call all ways `repeat` times, and return what each returned.

    Every other turn is in reversed order, so that no way always follows the same one.
    """
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for turn in range(repeat):
        for name in reversed(ways) if turn % 2 else ways:
            found[name].append(ways[name]())
    return found


def peak_of(action: Callable[[], Any]) -> int:
    """Return the bytes that this process's resident memory grew at most while `action` ran.

    What the first call imports counts too: call the action once on something small before.
    """
    system = ctypes.CDLL(None)
    system.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page would count whole at its first byte
    _occupy_heap(system)  # freed tensors leave at once, and no fragments stay
    system.malloc_trim(0)  # memory that was freed before would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is there
    before = _peak()
    action()
    return _peak() - before


def _occupy_heap(system: ctypes.CDLL) -> None:
    """Take all large holes of the heap, untouched, so that each large block is a mapping.

    A process that has done much has such holes. A block in one of them stays resident after it has
    been freed, so the peak would depend on what the process did before.
    """
    system.malloc.restype = ctypes.c_void_p
    system.malloc.argtypes = [ctypes.c_size_t]
    system.free.argtypes = [ctypes.c_void_p]
    system.mallinfo2.restype = _HeapCounts
    system.mallopt(MMAP_THRESHOLD, LARGE)

    size = LARGEST_HOLE
    while size >= LARGE:
        mappings = system.mallinfo2().hblks
        block = system.malloc(size)
        if system.mallinfo2().hblks > mappings:  # no hole is as large
            system.free(block)
            size //= 2


class _HeapCounts(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def write_measured(page: str, text: str, mark: str = "measured") -> None:
    """Write what was measured into a page of docs/, between a mark and the end mark after it."""
    path = Path(__file__).parents[2] / "docs" / page
    before, begin, rest = path.read_text().partition(f"<!-- {mark} -->\n")
    after = rest.partition("<!-- end -->")[2]
    path.write_text(f"{before}{begin}{text}\n<!-- end -->{after}")
