"""Run the ranks of a benchmark as processes of this machine."""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
