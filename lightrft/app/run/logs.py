"""The log of a process: one format for the command line, for Python and for notebooks."""

import os
import sys

from loguru import logger


def set_up_logging() -> None:
    """Set one log format for all ranks; messages appear above the live display."""
    rank = os.environ.get("RANK")
    prefix = f"rank {rank} " if rank else ""
    logger.remove()
    logger.add(
        # Looked up at every message, because the live display redirects it.
        lambda line: sys.stderr.write(line),
        format="{time:HH:mm:ss} " + prefix + "<level>{level: <7}</level> {message}",
        level="INFO",
        colorize=sys.stderr.isatty(),
    )


def log_unless_set_up() -> None:
    """Set up the log unless the program that calls this package has set up its own."""
    try:
        logger.remove(0)  # loguru's own handler, as long as nobody has replaced it
    except ValueError:
        return
    set_up_logging()
