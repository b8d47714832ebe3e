"""Lines of the log about a step that takes long, where no live view shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from loguru import logger
from rich.console import Console as RichConsole

SECONDS_OF_SILENCE = 30.0


@contextmanager
def progress_lines(where: Callable[[], str], *, shown: bool) -> Iterator[None]:
    """Log `where()` every half minute while the enclosed code stays in one step.

    The first words of `where()`, up to a colon, name the step: a shorter step ends with a line of
    its own. Nothing is logged in a terminal, whose live view shows the phase, or if not `shown`.
    """
    if not shown or RichConsole().is_terminal:
        yield
        return

    ended = Event()

    def watch() -> None:
        step = ""
        while not ended.wait(SECONDS_OF_SILENCE):
            line = where()
            if line.partition(":")[0] == step:
                logger.info(line)
            step = line.partition(":")[0]

    thread = Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
